"""Compiled hybrid models, in which rules are joined with what is before them: where, and with which answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CONFIG_MAPPING

from gpu_hybrids import distance, greedy, save_hybrid, worst_gap
from nibble import LLM
from nibble.attention import operators
from nibble.attention.operators import Step
from nibble.kernels.recurrence import Convolution, layer_state, naive
from nibble.model_spec import RecurrentGroup
from nibble.models import forward, graph_passes
from nibble.models.graph_convolutions import join_convolutions
from nibble.models.graph_passes import ReplaceOperators
from nibble.models.graph_projections import join_projections

FAMILY = "qwen3_5_text"
HEADS, WIDTH, TAPS = 2, 4, 3


def joining(counts: list[tuple[int, int]]) -> Any:
    """Return a backend of torch.compile that joins operators, counts them, and runs the graph as it then is."""

    def compile(module: fx.GraphModule, _: Any) -> Any:
        counts.append(tuple(join(module.graph, "cpu") for join in (join_convolutions, join_projections)))
        module.graph.lint()
        module.recompile()
        return module.forward

    return aot_autograd(fw_compiler=compile, inference_compiler=compile)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
def test_answers_are_the_same(tmp_path: Path) -> None:
    """In bfloat16, for which weights are not packed, and of a family without experts: both cannot be compiled here."""
    if FAMILY not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {FAMILY}")
    ids = save_hybrid(tmp_path, FAMILY, "cpu", 70).ids
    prompts, options = [ids, ids[:9]], {"kv_scales": "one", "kv_memory": "16MiB", "max_context": 256}
    with LLM(str(tmp_path), device="cpu", dtype="bfloat16", **options) as llm:
        expected_TV = llm.logits(ids)
        counts: list[tuple[int, int]] = []
        runner = llm.engine.runner
        assert isinstance(runner.model, nn.Module)
        plain, runner._run = runner._run, forward.compiled(runner.model, joining(counts))
        # Families round learning rates to bfloat16, and the joined operator does not, nor does inductor.
        assert distance(llm.logits(ids), expected_TV) < 3e-2
        llm.engine.scheduler.manager.clear()
        answers, _ = greedy(llm, prompts, 8)
        runner._run = plain
        assert worst_gap(llm, prompts, answers) < 0.1
        layers = sum(len(group.layers) for group in llm.plan.states)
    torch.compiler.reset()
    assert counts and set(counts) == {(layers, layers)}


def rule(x_TC: Tensor, weight: Tensor, gates_HT: Tensor, step: Step) -> Tensor:
    """A layer whose inputs and gates have strides that a compiler would not choose."""
    y_TC = operators.conv_op(step, 1, x_TC.sin().T.contiguous().T, weight, None, "silu")
    q, k, v = (part.view(-1, HEADS, WIDTH) for part in y_TC.split([HEADS * WIDTH] * 3, 1))
    gates = gates_HT.exp().T, gates_HT.sigmoid().T
    return operators.recurrence_op(step, 1, q, k, v, *gates, delta=True, unit=True) + 1


@pytest.mark.slow
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
    options = {graph_passes.PASS_OPTION: ReplaceOperators(device="cpu"), "fx_graph_cache": False}
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


def projected(x_TH: Tensor, weights: list[Tensor], gates: tuple[Tensor, Tensor], step: Step) -> Tensor:
    """A layer as Qwen3-Next has it, or with gates of products of their own."""
    product, taps, *own = weights
    y_1TW = F.linear(x_TH, product)[None]
    q, k, v, _, *last = y_1TW.unflatten(2, (HEADS, -1)).split([WIDTH] * 4 + [1] * (2 - len(own)), 3)
    b, a = (F.linear(x_TH, weight)[None] for weight in own) if own else (part[..., 0] for part in last)
    x_1TC = torch.cat([part.flatten(2) for part in (q, k, v)], 2)
    y_TC = operators.conv_op(step, 1, x_1TC.transpose(1, 2)[0].T, taps, None, "silu")
    q, k, v = (part.view(-1, HEADS, WIDTH) for part in y_TC.split([HEADS * WIDTH] * 3, 1))
    paces, offsets = gates
    log_decay = -paces.float().exp() * F.softplus(a.float() + offsets)
    return operators.recurrence_op(
        step, 1, q, k, v, log_decay[0], b.sigmoid()[0].float(), delta=True, unit=True
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
@pytest.mark.parametrize("has_own", [False, True], ids=["one product", "gates of their own"])
def test_inductor_reads_products_where_they_are(has_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(operators, "_context", lambda _: SimpleNamespace(recurrent=None))

    def projected_recurrence(states: None, layer: int, *parts: Any, delta: bool, unit: bool) -> Tensor:
        calls.append((layer, *parts))
        return torch.full((len(parts[0].x_TW), HEADS, WIDTH), float(delta and unit))

    monkeypatch.setattr(operators.recurrent, "projected_recurrence", projected_recurrence)
    channels, size = 3 * HEADS * WIDTH, 16
    group = RecurrentGroup("delta", "delta", (1,), HEADS, WIDTH, WIDTH, HEADS, False, channels, TAPS)
    state = layer_state(group, 1, "fp32", torch.float32, 0, "cpu")
    torch._dynamo.reset()
    options = {graph_passes.PASS_OPTION: ReplaceOperators(device="cpu"), "fx_graph_cache": False}
    run, step = torch.compile(projected, fullgraph=True, options=options), Step()
    widths = [HEADS, HEADS] if has_own else []
    first = HEADS * (4 * WIDTH + (0 if has_own else 2))
    product, *own = (torch.randn(n, size) for n in (first, *widths))
    weights, gates = [product, torch.randn(channels, TAPS), *own], (torch.randn(HEADS), torch.randn(HEADS))
    with torch.inference_mode():
        for tokens in (5, 9):
            x_TH = torch.randn(tokens, size)
            torch._dynamo.mark_dynamic(x_TH, 0)
            assert torch.equal(run(x_TH, weights, gates, step), torch.ones(tokens, HEADS, WIDTH))
            layer, projection, conv = calls.pop()
            assert layer == 1 and conv.activation == "silu" and torch.equal(conv.weight_CW, weights[1])
            x_TC, log_decay, beta = naive.project(projection, conv, state)
            y = F.linear(x_TH, product).unflatten(1, (HEADS, -1))
            parts = y[..., : 3 * WIDTH].unflatten(2, (3, WIDTH)).transpose(1, 2)
            b, a = (F.linear(x_TH, w) for w in own) if own else (y[..., n] for n in (-2, -1))
            assert torch.allclose(x_TC, parts.flatten(1), atol=1e-5)
            expected = -gates[0].exp() * F.softplus(a + gates[1]), b.sigmoid()
            for x, y in zip((log_decay, beta), expected, strict=True):
                assert torch.allclose(x, y, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("gate", "rate"),
    [
        (lambda a, p, o: -p.exp() * F.softplus(a + o) / 2, torch.sigmoid),
        (lambda a, p, o: -p.exp() * F.softplus(a * o), torch.sigmoid),
        (lambda a, p, o: -p.exp() * F.softplus(a.flip(0) + o), torch.sigmoid),
        (lambda a, p, o: -p.exp() * F.softplus(a + o), lambda b: 2 * b.sigmoid()),
        (lambda a, p, o: (-p.exp() * F.softplus(a + o)).clamp(min=-20), torch.sigmoid),
        (lambda a, p, o: -p.exp() * F.softplus((a + o).clamp(max=10)), torch.sigmoid),
        (lambda a, p, o: -p.exp() * F.softplus(a + o), lambda b: b.clamp(-4, 4).sigmoid()),
        (lambda a, p, o: -p.exp() * F.softplus(a.cumsum(1) + o), torch.sigmoid),
    ],
    ids=["half", "factor", "another token's", "twice", "least", "most", "bounds", "sum"],
)
def test_other_gates_stay(gate: Any, rate: Any) -> None:
    def layer(
        x_TH: Tensor, weight: Tensor, taps: Tensor, paces: Tensor, offsets: Tensor, number: Tensor
    ) -> Tensor:
        y_TW = x_TH @ weight
        x_TC, b, a = y_TW.split([3 * HEADS * WIDTH, HEADS, HEADS], 1)
        gates = gate(a, paces, offsets), rate(b)
        joined = torch.ops.nibble.conv_recurrence(
            x_TC, taps, None, "silu", [0, HEADS * WIDTH, 2 * HEADS * WIDTH, 1], *gates, number, 1, True, True, HEADS,
            WIDTH,
        )  # fmt: skip
        return joined + 1

    width = 3 * HEADS * WIDTH + 2 * HEADS
    inputs = (
        torch.randn(3, 16), torch.randn(16, width), torch.randn(3 * HEADS * WIDTH, TAPS), torch.randn(HEADS),
        torch.randn(HEADS), torch.tensor(0),
    )  # fmt: skip
    with FakeTensorMode() as fake:
        module = make_fx(layer, tracing_mode="fake")(*map(fake.from_tensor, inputs))
        assert not join_projections(module.graph, "cpu")


def test_gates_as_they_should_be_are_found() -> None:
    """What test_other_gates_stay() would miss, if nothing were ever found."""
    with pytest.raises(AssertionError):
        test_other_gates_stay(lambda a, p, o: -p.exp() * F.softplus(a + o), torch.sigmoid)
