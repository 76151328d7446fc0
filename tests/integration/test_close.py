"""close() gives everything back, also with what a notebook keeps: streams, errors, the engine itself."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, NibbleError

OPTIONS: dict[str, Any] = {"kv_memory": "2MiB", "max_running": 4}
OPENS = 20


def live_tensors() -> tuple[int, int]:
    """How many tensors live, and the bytes of their memory."""
    gc.collect()
    tensors = [
        one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta
    ]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return len(tensors), sum(storages.values())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def used(folder: Path, **options: Any) -> tuple[LLM, list[weakref.ref[Any]]]:
    """A closed LLM that has answered, with references to what must be gone."""
    with LLM(str(folder), **OPTIONS, **options) as llm:
        assert llm.generate(["ab", "cd"], max_tokens=3, logprobs=1, progress=False)[1].text
        runner = llm.engine.runner
        parts = [weakref.ref(one) for one in (runner.model, runner.pool, runner.tables, llm.engine)]
    return llm, parts


@pytest.mark.slow
def test_twenty_opens_and_closes_do_not_grow(tiny: Path) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"kv_format": "nvfp4", "kv_scales": "one", "watch_fidelity": 1.0},
    )
    for options in kinds:  # what is made once in a process
        used(tiny, **options)
    before, memory = live_tensors(), resident_bytes()
    for i in range(OPENS):
        _, parts = used(tiny, **kinds[i % 2])
        assert all(part() is None for part in parts), f"open {i} left something behind"
    # What tests before this one left in caches may have gone meanwhile.
    assert all(now <= then for now, then in zip(live_tensors(), before, strict=True))
    # Each has a pool of 2 MiB and weights of 0.5 MiB.
    assert resident_bytes() - memory < OPENS * (1 << 20)


def test_what_a_notebook_keeps_holds_no_memory(tiny: Path) -> None:
    llm = LLM(str(tiny), **OPTIONS)
    engine, stream, runner = llm.engine, llm.stream("ab", max_tokens=50), llm.engine.runner
    next(stream)
    model, pool = weakref.ref(runner.model), weakref.ref(runner.pool)
    with pytest.raises(NibbleError) as error:
        llm.generate("x" * 5000, max_tokens=1)
    llm.close()
    assert model() is None and pool() is None
    with pytest.raises(NibbleError, match="the LLM was closed before this answer ended"):
        next(stream)
    stream.close()
    assert engine is not None and error.value and list(stream) == []


def test_later_use_says_that_it_is_closed(tiny: Path) -> None:
    llm, _ = used(tiny)
    llm.close()  # twice does no harm
    for use in (
        lambda: llm.generate("ab"),
        lambda: llm.stream("ab"),
        lambda: llm.logits("ab"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.get_default_sampling_params,
        lambda: llm.tokenizer,
        lambda: llm.startup,
    ):
        with pytest.raises(NibbleError, match=r"this LLM is closed; make a new one: LLM\("):
            use()
    # What was decided is still there to be read.
    assert llm.plan.page_size and llm.budget.tokens and llm.is_closed and repr(llm).endswith(", closed>")


def test_an_error_in_the_block_closes_too(tiny: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM(str(tiny), **OPTIONS) as llm:
        raise ZeroDivisionError
    assert llm.is_closed


def test_a_start_that_fails_is_deleted_without_noise(tiny: Path, recwarn: pytest.WarningsRecorder) -> None:
    for options in ({"kv_format": "nope"}, {"no_such_option": 1}, {"calibrate": [1]}):
        with pytest.raises(NibbleError):
            LLM(str(tiny), **options)  # type: ignore[arg-type]
    gc.collect()  # pytest makes an error of what __del__ raises
    assert not recwarn.list
