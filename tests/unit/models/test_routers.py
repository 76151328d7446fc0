"""Routers that kernels compute are found by what they do; others stay the family's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES, make
from nibble.kernels import router
from nibble.models import routers

NORMALIZED = {
    "qwen3_moe": True, "gpt_oss": True, "mixtral": True, "olmoe": False, "qwen2_moe": False, "deepseek_v3": None,
    "glm4_moe": None, "llama4_text": None,
}  # fmt: skip
"""None: their routers compute something else."""


def routers_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


@pytest.mark.parametrize("name", [name for name in NORMALIZED if name in FAMILIES])
def test_what_families_routers_do_is_observed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make(name, FAMILIES[name].config(name)).eval()
    found = routers_of(model)
    assert found
    monkeypatch.setattr(router.cuda, "serves", lambda weight, top_k: True)
    assert {routers.normalization_of(module) for module in found} == {NORMALIZED[name]}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "olmoe"])
def test_a_model_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make(name, FAMILIES[name].config(name)).eval()
    ids = torch.randint(0, 500, (1, 9))
    calls = []
    route = router.route
    monkeypatch.setattr(router, "route", lambda *args, **options: calls.append(1) or route(*args, **options))
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        assert routers.serve_routers(model) == 0, "there are no kernels on a CPU"
        monkeypatch.setattr(router.cuda, "serves", lambda weight, top_k: True)
        assert routers.serve_routers(model) == len(routers_of(model)) > 0
        monkeypatch.undo()
        monkeypatch.setattr(
            router, "route", lambda *args, **options: calls.append(1) or route(*args, **options)
        )
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)
    assert len(calls) == len(routers_of(model))


class Scaled(nn.Module):
    """Of the right form, but its weights are others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(8, 16)), 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = router.route(x, self.weight, None, self.top_k, is_normalized=True)
        return logits, 2.5 * weights, experts


def test_other_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.cuda, "serves", lambda weight, top_k: True)
    assert routers.normalization_of(Scaled()) is None
    assert routers.normalization_of(nn.Linear(16, 8)) is None
