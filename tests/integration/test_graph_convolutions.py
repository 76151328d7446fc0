"""Compiled hybrid models, in which convolutions are joined with the rules behind them: where, and with which answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import CONFIG_MAPPING

from gpu_hybrids import distance, greedy, save_hybrid, worst_gap
from nibble import LLM
from nibble.attention import operators
from nibble.attention.operators import Step
from nibble.kernels.recurrence import Convolution
from nibble.models import forward
from nibble.models.graph_convolutions import join_convolutions
from nibble.models.graph_passes import ReplaceOperators

FAMILY = "qwen3_5_text"
HEADS, WIDTH, TAPS = 2, 4, 3


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


def rule(x_TC: Tensor, weight: Tensor, gates_HT: Tensor, step: Step) -> Tensor:
    """A layer whose inputs and gates have strides that a compiler would not choose."""
    y_TC = operators.conv_op(step, 1, x_TC.sin().T.contiguous().T, weight, None, "silu")
    q, k, v = (part.view(-1, HEADS, WIDTH) for part in y_TC.split([HEADS * WIDTH] * 3, 1))
    gates = gates_HT.exp().T, gates_HT.sigmoid().T
    return operators.recurrence_op(step, 1, q, k, v, *gates, delta=True, unit=True) + 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
def test_inductor_gives_inputs_as_they_were_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def conv_recurrence(_: Any, layer: int, conv: Convolution, *gates: Tensor, **options: bool) -> Tensor:
        calls.append((layer, conv, gates, options))
        return torch.ones(len(conv.x_TC), HEADS, WIDTH)

    step = Step()
    monkeypatch.setattr(operators, "_context", lambda _: SimpleNamespace(recurrent=None))
    monkeypatch.setattr(operators.recurrent, "conv_recurrence", conv_recurrence)
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": ReplaceOperators(device="cpu"), "fx_graph_cache": False}
    run = torch.compile(rule, fullgraph=True, options=options)
    weight = torch.randn(3 * HEADS * WIDTH, TAPS)
    with torch.inference_mode():
        for tokens in (5, 9):
            x_TC, gates_HT = torch.randn(tokens, len(weight)), torch.randn(HEADS, tokens)
            torch._dynamo.mark_dynamic(x_TC, 0)
            torch._dynamo.mark_dynamic(gates_HT, 1)
            assert torch.equal(run(x_TC, weight, gates_HT, step), torch.full((tokens, HEADS, WIDTH), 2.0))
            layer, conv, gates, rest = calls.pop()
            assert (layer, rest) == (1, {"delta": True, "unit": True})
            assert (conv.q_at, conv.k_at, conv.v_at, conv.share) == (0, HEADS * WIDTH, 2 * HEADS * WIDTH, 1)
            assert (conv.bias_C, conv.activation) == (None, "silu") and torch.equal(conv.weight_CW, weight)
            inputs = (conv.x_TC, x_TC.sin()), (gates[0], gates_HT.exp().T), (gates[1], gates_HT.sigmoid().T)
            for found, expected in inputs:
                assert torch.allclose(found, expected) and found.stride() == (1, tokens)
    torch.compiler.reset()
