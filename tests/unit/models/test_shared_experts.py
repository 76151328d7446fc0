"""A shared expert that is computed with the others: the block's own answers, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from nibble.models import equivalence
from nibble.models import experts as experts_of_models
from nibble.models.routers import set_router
from nibble.models.shared_experts import join_shared_experts

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip


def block(**sizes: Any) -> Any:
    """A block whose router and experts kernels compute, as on a GPU."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_next", **{**SIZES, **sizes})
    config._experts_implementation = experts_of_models.NAME
    made: Any = Qwen3NextSparseMoeBlock(config).to(torch.bfloat16).eval()
    for weight in made.parameters():
        weight.data.normal_(std=0.2)
    set_router(made.gate, config.norm_topk_prob)
    experts_of_models._set_gate(made.experts)
    return made


@torch.inference_mode()
def answers(module: Any, tokens: int) -> Tensor:
    x = torch.randn(2, tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    y: Tensor = module(x.to(torch.bfloat16))
    return y.float()


@pytest.mark.parametrize("tokens", [1, 9, 50])
def test_it_answers_as_the_block_did(tokens: int) -> None:
    module = block()
    expected = answers(module, tokens)
    assert join_shared_experts(nn.ModuleList([module])) == 1
    assert not hasattr(module, "shared_expert") and module.experts.gate_up_proj.shape[0] == 9
    actual = answers(module, tokens)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert actual.shape == expected.shape and error.max() < 0.02
    # Without it the answer is another one.
    module.joined_router.data[-1] = 0
    assert (answers(module, tokens) - expected).norm() > 0.05 * expected.norm()


def test_the_comparison_at_load_lets_few_experts_stand_for_all() -> None:
    """It changes what the experts' module is given, of the joined block, too."""
    module = block(num_experts=4 * equivalence.EXPERTS)
    model = nn.ModuleList([module])
    own, plain = module.forward, answers(module, 9)
    with equivalence._few_experts(model):
        expected = answers(module, 9)
    assert (expected - plain).norm() > 0.1 * plain.norm()
    assert join_shared_experts(model) == 1 and module.forward != own
    with equivalence._few_experts(model):
        error = (answers(module, 9) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.02


def _other_size() -> Any:
    return block(shared_expert_intermediate_size=64)


def _other_code() -> Any:
    module = block()

    class Doubled(type(module)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            return 2 * super().forward(hidden_states)

    module.__class__ = Doubled
    return module


def _no_kernel_for_its_router() -> Any:
    module = block()
    del module.gate.is_normalized
    return module


def _no_kernel_for_its_gate() -> Any:
    module = block()
    module.experts.nibble_gate = None
    return module


@pytest.mark.parametrize(
    "make", [_other_size, _other_code, _no_kernel_for_its_router, _no_kernel_for_its_gate]
)
def test_a_block_of_another_kind_stays_as_it_is(make: Callable[[], Any]) -> None:
    module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    forward = type(module).forward
    assert join_shared_experts(nn.ModuleList([module])) == 0
    after = module.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert module.forward.__func__ is forward
