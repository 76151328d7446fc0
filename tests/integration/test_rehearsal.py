"""A rehearsal of a start (engine/rehearsal.py): it goes through all parts, and leaves nothing behind.

On a CPU steps compute what they compute. On a GPU kernels leave zeros, and so does attention in the second turn here: a
number out of range would be an error of the device, after which nothing can be computed.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM
from nibble.attention.layer import attention
from nibble.engine import rehearsal, warmup, warmup_steps
from nibble.engine.model_runner import ModelRunner
from nibble.errors import BackendError
from nibble.kernels import ahead
from nibble.models import hook
from tiny import MLA, QWEN3_NEXT, SPARSE, save_tiny

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads": ("qwen3", {}, {"kv_format": "nvfp4"}),
    "latents": ("deepseek_v3", MLA, {"kv_format": "nvfp4", "kv_window": 0}),
    "sparse, host tier": (
        "glm_moe_dsa", SPARSE,
        {"kv_format": "nvfp4", "hisparse": "buffer=32", "kv_memory": "700KiB"},
    ),
    "recurrent": ("qwen3_next", QWEN3_NEXT, {"kv_format": "fp8"}),
}  # fmt: skip
USUAL: dict[str, Any] = {"kv_memory": "8MiB", "max_running": 8, "max_context": 400, "page_size": 16}


def parts_of(runner: ModelRunner) -> list[Any]:
    return [
        *warmup.tests_of(runner, 8192),
        partial(warmup_steps.run_chunks, runner, 8192, 300),
        partial(warmup_steps.run_drafts, runner, 300, 7),
        partial(rehearsal.rehearse_graphs, runner, (2, 4, 8, 24), ()),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_rehearsal_goes_through_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes, options = MODELS[name]
    with LLM(str(save_tiny(tmp_path, family, **changes)), **{**USUAL, **options}) as llm:
        runner, prompt = llm.engine.runner, list(range(5, 70))
        run = runner._run
        before = llm.generate([prompt], max_tokens=8, ignore_eos=True)[0].completions[0].token_ids
        llm.engine.scheduler.manager.clear()
        parts = parts_of(runner)
        if runner.states or runner.tier:
            parts.pop(-2)  # nobody drafts for these here
        with caplog.at_level(logging.INFO, "nibble.compile"):
            rehearsal.rehearse(runner, parts)
            with monkeypatch.context() as patch:
                patch.setattr(hook, "attention", lambda *arguments: torch.zeros_like(attention(*arguments)))
                rehearsal.rehearse(runner, parts)
        assert "fails" not in caplog.text and runner._run is run and not ahead.is_rehearsal()
        again = llm.generate([prompt], max_tokens=8, ignore_eos=True)[0].completions[0].token_ids
        assert before == again


KINDS_OF_LAYERS: dict[str, tuple[int, ...]] = {
    "heads": (0,),
    "latents": (0, 1),
    "sparse, host tier": (0, 1, 2),  # the first has no experts, and the second shares an indexer
    "recurrent": (0, 1, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_alike_are_rehearsed_once(name: str, tmp_path: Path) -> None:
    family, changes, options = MODELS[name]
    if name in ("heads", "latents"):
        changes = {**changes, "num_hidden_layers": 5}
    with LLM(str(save_tiny(tmp_path, family, **changes)), **{**USUAL, **options}) as llm:
        runner, ran = llm.engine.runner, set[int]()
        (layers,) = (
            one for one in runner.model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) > 1
        )
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, i=i: ran.add(i))
        rehearsal.rehearse(runner, [partial(warmup_steps.run_prompts, runner, (9, 20))])
        assert tuple(sorted(ran)) == KINDS_OF_LAYERS[name] and len(runner.model.model.layers) == len(layers)
        ran.clear()
        llm.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)
        assert len(ran) == len(layers)


def test_a_part_that_counts_on_all_layers_has_them(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(tiny), kv_format="nvfp4", **USUAL) as llm:
        model, counts = llm.engine.runner.model.model, list[int]()

        def part() -> None:
            counts.append(len(model.layers))
            assert len(model.layers) > 1

        with caplog.at_level(logging.INFO, "nibble.compile"):
            rehearsal.rehearse(llm.engine.runner, [part])
        assert counts == [1, len(model.layers)] and "with its first layers fails" in caplog.text


def test_what_fails_is_left_out(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = list[int]()

    def fail() -> None:
        raise BackendError("no such kernel")

    with LLM(str(tiny), kv_format="nvfp4", **USUAL) as llm:
        with caplog.at_level(logging.INFO, "nibble.compile"):
            rehearsal.rehearse(llm.engine.runner, [fail, partial(done.append, 1)])
        assert done == [1] and "no such kernel" in caplog.text


def test_steps_that_fail_leave_rows_for_all_requests(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), kv_format="nvfp4", **USUAL) as llm:
        runner, most = llm.engine.runner, USUAL["max_running"]
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "compute", lambda *_: (_ for _ in ()).throw(RuntimeError("zeros")))
            rehearsal.rehearse(runner, parts_of(runner))
        outputs = llm.generate([[token] * 5 for token in range(most)], max_tokens=3, ignore_eos=True)
        assert not any(output.completions[0].error for output in outputs)


def test_a_mark_is_of_one_start(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    marks = []
    for kv_format in ("nvfp4", "nvfp4", "fp8"):
        with LLM(str(tiny), kv_format=kv_format, **USUAL) as llm:
            marks.append(rehearsal.mark_of(llm.engine.runner, llm.budget))
            facts = rehearsal.facts_of(llm.engine.runner, llm.budget, True)
    assert marks[0] == marks[1] != marks[2] and not marks[0].exists()
    # The order of a set, and where an object lies, are others in the next process.
    assert not any(text in repr(facts) for text in ("frozenset", "{", " at 0x"))
    rehearsal.leave_mark(marks[0])
    assert marks[0].exists()
    # Nothing else depends on it.
    monkeypatch.setattr("nibble.files.write_atomic", None)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError))
    rehearsal.leave_mark(marks[2])
