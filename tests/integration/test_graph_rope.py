"""Rotary positions in graphs of compiled models: which attention's operator applies, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from nibble import LLM
from nibble.attention import operators
from nibble.attention.operators import Step, attention_op
from nibble.kernels.append.naive import apply_rope
from nibble.kernels.types import AttentionParams, Rope
from nibble.models import forward, graph_passes, hook
from nibble.models.graph_passes import ReplaceOperators
from nibble.models.graph_rope import join_rope
from nibble.models.linear import merge_linears
from nibble.models.mla import tabulate_rope
from tiny import save_tiny

PROMPTS = [list(range(5, n)) for n in (90, 6, 47)]


def joining(counts: list[int]) -> Any:
    """Return a backend of torch.compile that lets attention rotate, counts how often, and runs the graph as it is then."""

    def compile(module: fx.GraphModule, _: Any) -> Any:
        counts.append(join_rope(module.graph, "cpu"))
        ReplaceOperators(device="cpu")(module.graph)
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile, decompositions=select_decomp_table())


# ---- models ----------------------------------------------------------------------------------------------------------


def served(path: Path, counts: list[int], **options: Any) -> tuple[LLM, Any]:
    """An engine, and the forward function of its model as it is prepared for a GPU, compiled."""
    llm = LLM(str(path), kv_memory="2MiB", max_running=4, token_budget=64, **options)
    return llm, forward.compiled(prepared(path), joining(counts))


def prepared(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model with tables of positions and merged products, as on a GPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path), attn_implementation=hook.NAME, dtype=dtype, experts_implementation="batched_mm"
    )
    model = hook.adapt(model).eval().requires_grad_(False)
    tabulate_rope(model, 256)
    merge_linears(model)
    torch._dynamo.reset()
    return model


def logits_and_answers(llm: LLM) -> tuple[list[Tensor], list[Any]]:
    llm.engine.scheduler.manager.clear()
    outputs = llm.generate(PROMPTS, max_tokens=8, ignore_eos=True, progress=False, temperature=0)
    return [llm.logits(prompt) for prompt in PROMPTS], [o.completions[0].token_ids for o in outputs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
def test_inductor_hands_over_what_the_graph_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator's call it remembers how it was traced: which arguments there were, and their strides."""
    calls = list[tuple[Any, ...]]()
    options = {graph_passes.PASS_OPTION: ReplaceOperators(device="cpu"), "fx_graph_cache": False}
    monkeypatch.setattr(forward, "inductor_options", lambda _: options)
    own = operators.attention

    def attention(
        ctx: Any, layer: int, q: Tensor, streams: Any, params: Any, out: Any, rope: Any, *, logits_only: bool
    ) -> Tensor:
        assert logits_only == (layer == len(ctx.plan.owner) - 1)
        calls.append((rope, q.stride(), streams["k"].stride(), streams["v"].stride()))
        return own(ctx, layer, q, streams, params, out, rope, logits_only=logits_only)

    monkeypatch.setattr(operators, "attention", attention)
    llm, _ = served(save_tiny(tmp_path, "qwen3"), [], kv_format="bf16")
    with llm:
        expected, expected_ids = logits_and_answers(llm)
        config = llm.engine.runner.model.config
        llm.engine.runner._run = forward.compiled(prepared(tmp_path), "inductor")
        found, ids = logits_and_answers(llm)
    row = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    for rope, *strides in calls:
        assert len(rope.norms_D) == 2 and strides == [(row, config.head_dim, 1)] * 3, "nothing is copied"
    assert calls and ids == expected_ids
    assert all((x - y).norm() <= 1e-4 * y.norm() for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 16])
def test_observers_see_rotated_queries_and_keys(window: int, tmp_path: Path) -> None:
    path, seen = save_tiny(tmp_path, "qwen3"), list[tuple[Tensor, Tensor]]()

    def observe(layer: int, q: Tensor, streams: Any, params: Any, out: Tensor) -> None:
        seen.append((q.clone(), streams["k"].clone()))

    llm, run = served(path, [], kv_format="bf16" if not window else "mxfp4", kv_window=window)
    with llm:
        runner = llm.engine.runner
        runner.error_monitor = SimpleNamespace(probe=lambda _: SimpleNamespace(observe=observe))
        for function in (forward.plain(prepared(path)), run):
            runner._run = function
            llm.engine.scheduler.manager.clear()
            llm.generate([PROMPTS[0]], max_tokens=3, ignore_eos=True, progress=False, temperature=0)
    half = len(seen) // 2
    assert half >= 6
    for (q, k), (other_q, other_k) in zip(seen[:half], seen[half:], strict=True):
        torch.testing.assert_close(other_q, q, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(other_k, k, rtol=1e-3, atol=2e-3)


CASES = [
    ("llama", {"kv_format": "bf16"}),
    ("qwen3", {"kv_format": "bf16"}),
    ("qwen3_moe", {"kv_format": "nvfp4+kmean+rot", "kv_scales": "calibrate"}),
    ("nemotron", {"kv_format": "fp8_e4m3", "kv_scales": "one"}),
    ("phi3", {"kv_format": "bf16"}),
    ("mistral", {"kv_format": "mxfp4", "kv_window": 16}),
    ("gpt_oss", {"kv_format": "bf16"}),
    ("gemma3_text", {"kv_format": "bf16"}),
]
"""Families with heads rotated whole and in part, normed and not, and caches with exact pages and without."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), CASES)
def test_results_are_the_same(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    counts = list[int]()
    llm, run = served(save_tiny(tmp_path, family), counts, **options)
    with llm:
        expected, expected_ids = logits_and_answers(llm)
        llm.engine.runner._run = run
        found, ids = logits_and_answers(llm)
        layers = llm.engine.runner.model.config.num_hidden_layers
    assert counts == [layers]
    for logits, others in zip(found, expected, strict=True):
        # A key whose last bits differ, as they do from processor to processor, may be stored as the next code.
        assert (logits - others).norm() <= (2e-4 if options["kv_format"] == "bf16" else 2e-2) * others.norm()
    assert ids == expected_ids or options["kv_format"] != "bf16"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "glm4_moe", "gemma3_text"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler
def test_families_in_16_bits(family: str, tmp_path: Path) -> None:
    """As on a GPU: positions are rotated, and sums and norms are one operator, two for each layer."""
    graphs = list[fx.Graph]()

    def compile(module: fx.GraphModule, _: Any) -> Any:
        ReplaceOperators(device="cpu")(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    path = save_tiny(tmp_path, family)
    llm = LLM(str(path), kv_format="bf16", dtype="bfloat16", kv_memory="2MiB", max_running=4, token_budget=64)
    with llm:
        model = prepared(path, torch.bfloat16)
        results = list[Tensor]()
        backend = aot_autograd(fw_compiler=compile, decompositions=select_decomp_table())
        for function in (forward.plain(model), forward.compiled(model, backend)):
            llm.engine.runner._run = function
            llm.engine.scheduler.manager.clear()
            results.append(llm.logits(PROMPTS[0]).float())
        layers = llm.engine.runner.model.config.num_hidden_layers
    calls = [node for node in graphs[0].nodes if node.op == "call_function"]
    assert sum("nibble.add_norm" in str(node.target) for node in calls) == 2 * layers
    attending = [node for node in calls if "nibble.attention" in str(node.target)]
    assert len(attending) == layers and all(len(node.args[12]) >= 2 for node in attending)
    # Routers of random models choose by last bits.
    assert (results[1] - results[0]).norm() <= (
        0.05 if family in ("llama", "qwen3", "gemma3_text") else 0.5
    ) * results[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo3", "glm4"])
def test_other_families_rotate_themselves(family: str, tmp_path: Path) -> None:
    """A norm over all heads, and neighbours that turn."""
    counts = list[int]()
    llm, run = served(save_tiny(tmp_path, family), counts, kv_format="bf16")
    with llm:
        expected, expected_ids = logits_and_answers(llm)
        llm.engine.runner._run = run
        found, ids = logits_and_answers(llm)
    assert counts == [0] and ids == expected_ids
    assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(found, expected, strict=True))


# ---- formulas --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, PART, HIDDEN = 4, 2, 8, 4, 16
RNG = torch.Generator().manual_seed(0)
WEIGHT = torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, generator=RNG)
NORM = torch.randn(DIM, generator=RNG)
SPLIT = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + halves(x) * sin


def normed(x: Tensor) -> Tensor:
    return NORM * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((plain(x[..., :PART], cos, sin), x[..., PART:]), -1)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + sin * low), -1)


def by_slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((cos * low - high * sin, low * sin + high * cos), -1)


def layer(turn_q: Turn, turn_k: Turn, x: Tensor, step: Step) -> Tensor:
    """One layer's attention; heads come to turn() as [1, H, T, D]."""
    parts = F.linear(x, WEIGHT).split(SPLIT, -1)
    q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
    width = PART if partly in (turn_q, turn_k) else DIM
    angles = x[..., : width // 2].repeat(1, 1, 1 if {by_halves, by_slices} & {turn_q, turn_k} else 2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k = turn_q(q, cos, sin), turn_k(k, cos, sin)
    q_THD, streams = q[0].transpose(0, 1), {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
    return attention_op(step, 0, q_THD, streams, DIM, AttentionParams(1.0)) + 1


def operands(
    turn_q: Turn, turn_k: Turn, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """How often attention rotates, and queries and keys as it then has them beside what they should be."""
    seen: list[tuple[Tensor, Tensor]] = []

    def attention(
        _: Any, layer: int, q: Tensor, streams: Any, params: Any, out: Any, rope: Rope | None, **__: Any
    ) -> Tensor:
        k = streams["k"]
        if rope:
            q, k = apply_rope(q, rope, rope.q_norm_D), apply_rope(k, rope, rope.k_norm_D)
        seen.append((q, k))
        return torch.ones(len(q), HEADS, DIM)

    monkeypatch.setattr(operators, "_context_of", lambda _: SimpleNamespace())
    monkeypatch.setattr(operators, "attention", attention)
    torch._dynamo.reset()
    counts, step = list[int](), Step()
    run = torch.compile(layer, backend=joining(counts), fullgraph=True)
    found = list[tuple[Tensor, Tensor]]()
    for tokens in (5, 9):
        x = torch.randn(1, tokens, HIDDEN, generator=RNG)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.no_grad():
            run(turn_q, turn_k, x, step)
            layer(turn_q, turn_k, x, step)
        (q, k), (expected_q, expected_k) = seen
        found += [(q, expected_q), (k, expected_k)]
        seen.clear()
    (count,) = counts
    return count, found


def with_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return plain(normed(x.transpose(1, 2)).transpose(1, 2), cos, sin)


@pytest.mark.parametrize(
    "turn", [plain, with_norm, partly, by_halves, by_slices, lambda x, cos, sin: sin * halves(x) + cos * x]
)
def test_a_formula_is_known(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    count, found = operands(turn, turn, monkeypatch)
    assert count == 1
    for x, expected in found:
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)


def with_others(x: Tensor, step: Step, turn: Turn, use: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """A layer whose rotated queries and keys [1, H, T, D] go through use() to attention."""
    parts = F.linear(x, WEIGHT).split(SPLIT, -1)
    q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
    angles = x[..., : DIM // 2].repeat(1, 1, 2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    (q, k), more = use(turn(q, cos, sin), turn(k, cos, sin))
    streams = {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
    out = attention_op(step, 0, q[0].transpose(0, 1), streams, q.shape[-1], AttentionParams(1.0))
    return out.sum() + sum(y.sum() for y in more)


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (lambda q, k: ((q, k), []), 1),
        # Others want what is rotated, as layers do that share keys.
        (lambda q, k: ((q, k), [k.cos()]), 0),
        (lambda q, k: ((q, k), [q[0].cos()]), 0),
        # Views that cut heads or put them together.
        (lambda q, k: ((q[..., :4], k[..., :4]), []), 0),
        (lambda q, k: ((q.unflatten(-1, (2, 4)).transpose(1, 2).flatten(2, 3)[:, :, :4, :], k), []), 0),
        (lambda q, k: ((q[:, :2], k), []), 0),
        (lambda q, k: ((q[:, :, 1:], k[:, :, 1:]), []), 0),
    ],
)
def test_whole_heads_that_nobody_else_wants(
    use: Callable[[Tensor, Tensor], Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(_: Any, layer: int, q: Tensor, streams: Any, *rest: Any, **__: Any) -> Tensor:
        return torch.ones(len(q), q.shape[1], q.shape[2])

    monkeypatch.setattr(operators, "_context_of", lambda _: SimpleNamespace())
    monkeypatch.setattr(operators, "attention", attention)
    torch._dynamo.reset()
    counts, x = list[int](), torch.randn(1, 5, HIDDEN, generator=RNG)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.compile(with_others, backend=joining(counts), fullgraph=True)(x, Step(), plain, use)
    assert counts == [count]


@pytest.mark.parametrize(
    ("turn_q", "turn_k"),
    [
        # The other way round.
        (plain, lambda x, cos, sin: x * cos - halves(x) * sin),
        (plain, lambda x, cos, sin: x * cos + halves(-x) * sin),
        # Halves in their order, and neighbours.
        (plain, lambda x, cos, sin: x * cos + torch.cat((-x[..., :4], x[..., 4:]), -1) * sin),
        (
            plain,
            lambda x, cos, sin: x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin,
        ),
        # Halves whose signs, places or numbers are other ones.
        (
            by_halves,
            lambda x, cos, sin: torch.cat((x[..., :4] * cos + x[..., 4:] * sin, x[..., 4:] * cos), -1),
        ),
        (by_halves, lambda x, cos, sin: by_halves(x.flip(-1), cos, sin)),
        (by_halves, lambda x, cos, sin: by_halves(x, sin, cos)),
        (by_halves, lambda x, cos, sin: torch.cat(by_halves(x, cos, sin).chunk(2, -1)[::-1], -1)),
        (
            by_halves,
            lambda x, cos, sin: by_halves(x[..., :6], cos[..., :3], sin[..., :3]).repeat(1, 1, 1, 2)[..., :8],
        ),
        # By other numbers.
        (plain, lambda x, cos, sin: plain(x, sin, cos)),
        (plain, lambda x, cos, sin: plain(x, cos * 1.5, sin * 1.5)),
        # One of both.
        (plain, lambda x, cos, sin: x),
        (plain, with_norm),
        (partly, lambda x, cos, sin: torch.cat((x[..., :PART], plain(x[..., PART:], cos, sin)), -1)),
        # Other norms, and what comes behind the rotation.
        (with_norm, lambda x, cos, sin: plain(F.normalize(x, dim=-1), cos, sin)),
        (with_norm, lambda x, cos, sin: normed(plain(x, cos, sin).transpose(1, 2)).transpose(1, 2)),
        (plain, lambda x, cos, sin: plain(x, cos, sin) * 2),
        # No product.
        (lambda x, cos, sin: plain(x.sin(), cos, sin), plain),
    ],
)
def test_other_formulas_stay(turn_q: Turn, turn_k: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    count, found = operands(turn_q, turn_k, monkeypatch)
    assert count == 0
    for x, expected in found:
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
