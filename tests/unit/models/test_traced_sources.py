"""The source of what was traced, which a compiled model on disk is compared with: looked for once for each function."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import pytest
from torch._dynamo.package import SourceInfo

from nibble.models import compile_cache, forward

CODES = (
    compile_cache.load.__code__,
    compile_cache.sources.__code__,
    forward.plain.__code__,
    compile_cache.load.__code__.replace(co_filename=forward.__file__),
)
"""The last is the first one's, in another file."""


def sources(count: int) -> set[Any]:
    info = SourceInfo(inlined_sources=set())
    for code in CODES[:3] * count:
        info.add_code(code)
    return info.inlined_sources


def test_each_function_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, looked_for = sources(1), list[CodeType]()
    own = inspect.getmodule
    with compile_cache._sources_once():
        assert sources(1) == sources(2) == expected, "each has its own"
        monkeypatch.setattr(inspect, "getmodule", lambda x, *rest: looked_for.append(x) or own(x, *rest))
        assert sources(5) == expected
    assert {looked_for.count(code) for code in CODES[:3]} <= {1, 2}, "torch looks twice"
    looked_for.clear()
    assert sources(5) == expected and looked_for.count(CODES[0]) >= 5, "as before"


def test_the_same_code_of_another_file_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    added = list[CodeType]()
    monkeypatch.setattr(SourceInfo, "add_code", lambda _, code: added.append(code))
    info = SourceInfo(inlined_sources=set())
    assert CODES[3] == CODES[0]
    with compile_cache._sources_once():
        for code in CODES * 2:
            info.add_code(code)
    assert [id(code) for code in added] == [id(code) for code in CODES]


def test_a_torch_that_keeps_sources_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SourceInfo, "add_code")
    with compile_cache._sources_once():
        assert not hasattr(SourceInfo, "add_code")
