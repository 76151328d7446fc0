"""What tests of several files of drafts begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.attention import backends
from nibble.engine.draft_policy import DraftPolicy
from tiny import save_tiny
from toys import graph_backend


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide without times: what is drafted must not depend on how fast this machine is now."""
    monkeypatch.setattr(DraftPolicy, "token_seconds", lambda self, requests: None)


@pytest.fixture
def recordable() -> Iterator[None]:
    """Attend by a backend whose steps can be recorded."""
    backend = backends.register(graph_backend.info(graph_backend.Masked))
    yield
    backends.unregister(backend.name)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that heads draft for."""
    return save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
