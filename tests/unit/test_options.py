"""The keywords that type checkers see are the fields of Config and SamplingParams, and take at least their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from nibble.config import Config, SamplingParams
from nibble.options import ConfigOptions, SamplingOptions

WIDER: dict[Any, Any] = {tuple[str, ...]: Sequence[str], tuple[int, ...]: Sequence[int]}
"""What callers may give for what is stored."""


def kinds(hint: Any) -> set[Any]:
    """The members of a union, or the type itself."""
    return set(get_args(hint)) if get_origin(hint) not in (None, tuple, Sequence, Mapping) else {hint}


@pytest.mark.parametrize(
    ("options", "kind", "without"),
    [(ConfigOptions, Config, {"model"}), (SamplingOptions, SamplingParams, set())],
)
def test_every_field_is_a_keyword(options: type, kind: type, without: set[str]) -> None:
    keywords, stored = get_type_hints(options), get_type_hints(kind)
    names = [entry.name for entry in fields(kind) if entry.name not in without]
    assert list(keywords) == names, (
        f"add the fields of {kind.__name__} to {options.__name__} in nibble/options.py"
    )
    for name in names:
        assert {WIDER.get(one, one) for one in kinds(stored[name])} <= kinds(keywords[name]), name
