"""Routes by the definition against what families write, and how matrices are spread over the blocks of a cluster."""

from __future__ import annotations

import pytest
import torch

from nibble.kernels import router
from nibble.kernels.router import cuda, naive


def scores(logits: torch.Tensor, top_k: int, is_normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As Qwen's routers have it."""
    values, experts = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    return (values / values.sum(-1, keepdim=True) if is_normalized else values), experts


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 60, 4), (70, 128, 8), (0, 8, 2)])
def test_it_is_what_families_write(tokens: int, experts: int, top_k: int, is_normalized: bool) -> None:
    rng = torch.Generator().manual_seed(experts)
    x, weight = torch.randn(tokens, 40, generator=rng), torch.randn(experts, 40, generator=rng)
    bias = torch.randn(experts, generator=rng)
    logits, weights, chosen = router.route(x, weight, bias, top_k, is_normalized=is_normalized)
    expected, right = scores(torch.nn.functional.linear(x, weight, bias), top_k, is_normalized)
    assert torch.equal(chosen, right) and torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(logits, x @ weight.T + bias, atol=1e-4)


def test_a_shared_expert_is_one_more_choice() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 40, generator=rng), torch.randn(9, 40, generator=rng)
    logits, weights, chosen = router.route(x, weight, None, 3, is_normalized=True, has_shared=True)
    _, own_weights, own = router.route(x, weight[:8], None, 3, is_normalized=True)
    assert logits.shape == (5, 9) and torch.equal(chosen[:, :3], own) and (chosen[:, 3] == 8).all()
    assert torch.allclose(weights[:, :3], own_weights) and torch.equal(weights[:, 3], logits[:, 8].sigmoid())


def test_of_equal_logits_the_first_is_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0], [0.0, -0.0, 0.0, 0.0, 0.0]])
    weights, experts = naive.choose(logits, 3, True)
    assert experts.tolist() == [[1, 3, 4], [0, 1, 2]]
    assert torch.allclose(weights.sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("experts", "inputs", "shape"),
    [
        (128, 2048, cuda.Shape(1, 8, 4)),
        (32, 2880, cuda.Shape(1, 2, 6)),
        (8, 4096, cuda.Shape(1, 1, 8)),
        (256, 2048, cuda.Shape(2, 8, 8)),
        (60, 2048, cuda.Shape(1, 4, 4)),
        (256, 7168, None),
        (512, 2048, None),
    ],
)
def test_matrices_are_spread(experts: int, inputs: int, shape: cuda.Shape | None) -> None:
    found = cuda.shape_of(experts, inputs)
    assert found == shape
    if found:
        assert found.tiles * found.cluster * 16 >= experts and found.cluster <= cuda.MOST_BLOCKS
        assert found.units * cuda.UNIT * (cuda.WARPS // found.tiles) >= inputs


def test_the_kernel_is_not_asked_on_a_cpu() -> None:
    assert not cuda.serves(torch.zeros(128, 2048, dtype=torch.bfloat16), 8)
