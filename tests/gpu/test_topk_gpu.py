"""topk() and likeliest() against torch on a GPU, in CUDA graphs and in compiled models with experts.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from families import FAMILIES, make
from nibble.kernels import MMA_ROWS, linear
from nibble.kernels import topk as op
from nibble.kernels.linear import triton as narrow
from nibble.kernels.topk import naive
from nibble.kernels.topk import triton as fast
from nibble.models import forward

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_replays(compute: Callable[[], tuple[Tensor, ...]], define: Callable[[], tuple[Tensor, ...]], x: Tensor) -> None:  # fmt: skip
    """A recorded call computes what the definition does, whatever comes into its buffer."""
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for fill in ("random", "few", "nan"):
        x.copy_(torch.randn_like(x))
        if fill == "few":  # many are equal
            x.copy_(x.round())
        if fill == "nan":
            x.masked_fill_(torch.rand_like(x.float()) < 0.05, float("nan"))
        graph.replay()
        for y, right in zip(found, define(), strict=True):
            assert y.dtype == right.dtype and torch.equal(y.nan_to_num(9.0), right.nan_to_num(9.0)), fill


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((1, 128), 8), ((64, 128), 8), ((9, 32), 4), ((16, 8, 32), 2), ((7, 1000), 32), ((8192, 256), 8), ((3, 8), 4)],
)  # fmt: skip
def test_topk(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    assert_replays(lambda: op.topk(x, k), lambda: naive.topk(x, k), x)
    assert torch.equal(op.topk(x, k)[0].nan_to_num(9.0), x.topk(k)[0].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128256), (8, 151936), (5, 32003), (256, 201088), (3, 17)])
def test_likeliest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)

    def define() -> tuple[Tensor, Tensor]:
        tokens, reported = naive.likeliest(x.cpu())
        return tokens.cuda(), reported.cuda()

    assert_replays(lambda: op.likeliest(x), define, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32000), (8, 151936), (5, 32003), (3, 17)])
def test_draw_likeliest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    ids = torch.randperm(shape[1], device="cuda")
    numbers = torch.zeros(2, shape[0], dtype=torch.int64, device="cuda")
    found = numbers[0], numbers[1].view(torch.float64)
    expected = torch.zeros_like(found[0]), torch.zeros_like(found[1])

    def define() -> tuple[Tensor, Tensor]:
        naive.draw_likeliest(x, ids, *expected)
        # Sums are added in another order.
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0, equal_nan=True)
        return expected[0], found[1]

    def compute() -> tuple[Tensor, Tensor]:
        op.draw_likeliest(x, ids, *found)
        return found

    assert_replays(compute, define, x)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_compiled_models_choose_experts_by_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make(family, FAMILIES[family].config(family)).eval().requires_grad_(False).cuda()
    model.set_experts_implementation("batched_mm")
    calls = []
    compute = fast.topk
    monkeypatch.setattr(fast, "topk", lambda x, k: calls.append(len(x)) or compute(x, k))
    torch._dynamo.reset()
    options = forward.inductor_options(model)
    run = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, options=options)  # fmt: skip
    with torch.inference_mode():
        for tokens in (9, 30):
            ids = torch.randint(0, 200, (1, tokens), device="cuda")
            torch._dynamo.mark_dynamic(ids, 1)
            expected = model(input_ids=ids, use_cache=False).logits
            calls.clear()
            found = run(ids)
            assert set(calls) == {tokens}
            assert (found - expected).norm() <= 1e-3 * expected.norm()


ROUTERS = {
    "qwen3_moe": {"hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "gpt_oss": {"hidden_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
}


@pytest.mark.parametrize("family", ROUTERS)
def test_compiled_routers_multiply_and_choose_by_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router alone, so that its choice can be held against its own logits."""
    torch.manual_seed(0)
    config = FAMILIES[family].config(family)
    small = make(family, config)
    config.update(ROUTERS[family])
    kind = next(type(m) for name, m in small.named_modules() if name.endswith((".gate", ".router")))
    router = kind(config).cuda().bfloat16().requires_grad_(False)
    for weight in router.parameters():
        weight.normal_(std=0.05)
    calls = []
    for owner, name in ((fast, "topk"), (narrow, "narrow_linear")):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, f=compute, n=name: calls.append(n) or f(*args))
    monkeypatch.setattr(linear, "_fastest_of", lambda *_: linear.TRITON)
    torch._dynamo.reset()
    options = forward.inductor_options(router)
    run = torch.compile(router, fullgraph=True, options=options)
    with torch.inference_mode():
        for tokens in (40, 3, 16):
            x = torch.randn(tokens, config.hidden_size, device="cuda").bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            calls.clear()
            logits, scores, indices = run(x)
            assert calls == ([] if tokens > MMA_ROWS else ["narrow_linear"]) + ["topk"]
            expected = router(x)
            assert (logits.float() - expected[0].float()).norm() <= 0.01 * expected[0].float().norm()
            chosen = logits.gather(1, indices).float()
            assert torch.equal(chosen, naive.topk(logits.float(), indices.shape[1])[0])
            probabilities = (
                logits.float().softmax(-1).gather(1, indices) if family == "qwen3_moe" else chosen.softmax(-1)
            )
            probabilities /= probabilities.sum(-1, keepdim=True)
            assert torch.allclose(scores.float(), probabilities, rtol=0.02, atol=1e-3)
