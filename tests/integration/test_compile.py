"""Compiled models, on a CPU: captured whole, once for all lengths, each engine by itself. Code is not generated here."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from nibble import LLM, ConfigError
from nibble.attention import backends
from nibble.engine.graphs import Graphs, live
from nibble.hardware import cache_folder
from nibble.models.compile_cache import CACHE_VARIABLE, TRITON_VARIABLE
from nibble.models.forward import compiled, plain
from tiny import save_tiny
from toys import graph_backend

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3", "gemma3_text", "gpt_oss", "olmo3", "nemotron")
PROMPTS = [list(range(5, n)) for n in (30, 6, 47)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


def served(path: Path, run: Any = None, **options: Any) -> LLM:
    """An engine whose model is not packed for the CPU, as on a GPU, run as `run` says."""
    llm = LLM(str(path), kv_format="bf16", kv_memory="2MiB", max_running=4, token_budget=64, **options)
    runner = llm.engine.runner
    runner._run = (run or plain)(unpacked(llm))
    return llm


def unpacked(llm: LLM) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from nibble.models import hook

    model = AutoModelForCausalLM.from_pretrained(
        llm.config.model,
        attn_implementation=hook.NAME,
        dtype=torch.float32,
        experts_implementation="batched_mm",
    )
    return hook.adapt(model).eval().requires_grad_(False)


def without_code(model: nn.Module) -> Any:
    return compiled(model, "aot_eager")


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, max_tokens=8, ignore_eos=True, progress=False)
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_serves_all_lengths(family: str, tmp_path: Path) -> None:
    path = save_tiny(tmp_path, family)
    expected = answers(served(path))
    llm = served(path, without_code)
    assert answers(llm) == expected
    assert answers(llm) == expected, "after prefix hits"
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)


def test_the_same_code_serves_steps_over_buffers(tiny: Path) -> None:
    """What decode steps are recorded from must not look like other tensors to the compiler."""
    backend = backends.register(graph_backend.info(graph_backend.Masked))
    try:
        llm = served(tiny, without_code)
        expected = answers(llm)
        runner = llm.engine.runner
        graph_backend.make_recordable(runner.pool)
        runner.record(Graphs((2, 4), runner.device, live))
        assert answers(llm) == expected
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        backends.unregister(backend.name)


def test_a_backend_that_compiles_or_maps_by_itself_runs_inside(tiny: Path) -> None:
    """FlexAttention does both, in a compiled model's first call too, which torch may want to watch."""
    asked = {"attention_backend": "flex_attention"}
    assert answers(served(tiny, without_code, **asked)) == answers(served(tiny, **asked))


def test_two_engines_do_not_meet(tiny: Path) -> None:
    """Both compiled, step by step in turns: each finds its own step by a number that only its code holds."""
    expected = answers(served(tiny))
    one, other = served(tiny, without_code), served(tiny, without_code)
    streams = [
        llm.stream(prompt, max_tokens=8, ignore_eos=True)
        for llm, prompt in ((one, PROMPTS[0]), (other, PROMPTS[2]))
    ]
    steps = [[piece.token_ids for piece in pieces] for pieces in zip(*streams, strict=True)]
    found = [tuple(token for ids in column for token in ids) for column in zip(*steps, strict=True)]
    assert found == [expected[0], expected[2]]


class Stubborn(nn.Module):
    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        torch._dynamo.graph_break()
        return input_ids


def compile_stubborn() -> None:
    ids = torch.zeros(1, 24, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"torch.compile cannot compile this model .*--no-compile"):
        compiled(Stubborn(), "eager")(ids, ids, torch.arange(2), None)  # type: ignore[arg-type]


def test_what_cannot_be_compiled_says_so() -> None:
    compile_stubborn()


def test_compiled_code_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, default_cache_dir())  # as importing torch._dynamo leaves it
    monkeypatch.delenv(TRITON_VARIABLE, raising=False)
    monkeypatch.setenv("NIBBLE_CACHE", "/somewhere/else")
    compile_stubborn()
    assert os.environ[CACHE_VARIABLE] == "/somewhere/else/inductor"
    assert os.environ[TRITON_VARIABLE] == "/somewhere/else/triton"
    monkeypatch.delenv("NIBBLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_folder()) == "/somewhere/nibble"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "nibble"


class Logits(NamedTuple):
    logits: Tensor


def test_no_garbage_is_collected_while_it_compiles() -> None:
    enabled = list[bool]()

    class Model(nn.Module):
        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return Logits(input_ids[None] * 2.0)

    def backend(graph: Any, _: Any) -> Any:
        enabled.append(gc.isenabled())
        return graph

    ids = torch.arange(24)[None]
    run = compiled(Model(), backend)
    for _ in range(2):
        assert torch.equal(run(ids, ids, torch.arange(2), None), ids * 2.0)  # type: ignore[arg-type]
    assert enabled == [False] and gc.isenabled()
