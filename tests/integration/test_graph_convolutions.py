"""Compiled hybrid models, in which convolutions are joined with the rules behind them: where, and with which answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import CONFIG_MAPPING

from gpu_hybrids import distance, greedy, save_hybrid, worst_gap
from nibble import LLM
from nibble.models import forward
from nibble.models.graph_convolutions import join_convolutions

FAMILY = "qwen3_5_text"


def joining(counts: list[int]) -> Any:
    """Return a backend of torch.compile that joins convolutions, and runs the graph as it then is."""

    def compile(module: fx.GraphModule, _: Any) -> Any:
        counts.append(join_convolutions(module.graph, "cpu"))
        module.graph.lint()
        module.recompile()
        return module.forward

    return aot_autograd(fw_compiler=compile, inference_compiler=compile)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
def test_answers_are_the_same(tmp_path: Path) -> None:
    """In bfloat16, for which weights are not packed, and of a family without experts: both cannot be compiled here."""
    if FAMILY not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {FAMILY}")
    ids = save_hybrid(tmp_path, FAMILY, "cpu", 70).ids
    prompts, options = [ids, ids[:9]], {"kv_scales": "one", "kv_memory": "16MiB", "max_context": 256}
    with LLM(str(tmp_path), device="cpu", dtype="bfloat16", **options) as llm:
        expected_TV = llm.logits(ids)
        counts: list[int] = []
        runner = llm.engine.runner
        assert isinstance(runner.model, nn.Module)
        plain, runner._run = runner._run, forward.compiled(runner.model, joining(counts))
        assert distance(llm.logits(ids), expected_TV) < 1e-2
        llm.engine.scheduler.manager.clear()
        answers, _ = greedy(llm, prompts, 8)
        runner._run = plain
        assert worst_gap(llm, prompts, answers) < 0.1
        layers = sum(len(group.layers) for group in llm.plan.states)
    torch.compiler.reset()
    assert counts and set(counts) == {layers}
