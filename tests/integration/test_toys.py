"""Adding a format or a backend is adding one file: a toy of each, found by name, planned, and served by the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble import LLM, formats
from nibble.attention import backends
from nibble.formats import scheme
from nibble.model_spec import Phase
from toys import int8_format, loop_backend

PROMPT = list(b"def add(a, b):\n    return a + b\n")


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    fmt, backend = formats.register(int8_format.FORMATS[0]), backends.register(loop_backend.BACKEND)
    yield
    formats.unregister(fmt.name)
    backends.unregister(backend.name)


def test_the_toys_are_chosen_and_give_the_reference_answer(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="toy_int8", kv_memory="4MiB", max_running=8)
    group = llm.plan.groups[0]
    assert {route.backend for route in group.routes} == {"toy_loop"}
    assert (llm.plan.page_size, llm.plan.layout.packing) == (32, "hnd"), (
        "storage follows the backend that was chosen"
    )
    assert llm.plan.layout.bytes_per_token == 3 * 2 * 2 * (32 + 4)
    before = loop_backend.calls
    toy = llm.generate(PROMPT, max_tokens=12, ignore_eos=True)
    assert loop_backend.calls - before == 3 * 12

    reference = LLM(
        str(tiny), kv_format="toy_int8", kv_memory="4MiB", max_running=8, attention_backend="torch_ref"
    )
    assert reference.plan.route(0, Phase.DECODE).backend == "torch_ref"
    assert (
        toy.completions[0].token_ids
        == reference.generate(PROMPT, max_tokens=12, ignore_eos=True).completions[0].token_ids
    )


def test_the_toys_appear_wherever_names_are_listed() -> None:
    assert "toy_int8" in scheme.names() and scheme.parse("toy_int8+rot").transforms == ("rot",)
    assert "toy_loop" in backends.all_backends()
