"""What is done to models on a GPU, tried on a CPU: linear layers merged, rope looked up. Logits stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, make
from nibble.models.linear import MergedLinear, linears_by_input, merge_linears
from nibble.models.mla import RopeTable, fix_rope, tabulate_rope

IDS = torch.randint(1, 300, (1, 40), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat((torch.arange(25), torch.arange(15)))[None]
"""Two requests side by side."""
CONTEXT = 64


def model_of(family: str, **changes: Any) -> Any:
    """A random model of a family of families.py."""
    config = FAMILIES[family].config(family)
    config.update(changes)
    torch.manual_seed(0)
    model = make(family, config)
    fix_rope(model, CONTEXT)
    return model.eval().requires_grad_(False)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same(family: str) -> None:
    model = model_of(family)
    expected = logits(model)
    tabulate_rope(model, CONTEXT)
    merge_linears(model)
    assert (logits(model) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_usual_family_is_merged_and_tabulated() -> None:
    model = model_of("qwen3")
    size = sum(p.nbytes for p in model.parameters())
    assert [names for names in linears_by_input(model.config) if "layers.1." in names[0]] == [
        tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
    ]
    assert merge_linears(model) == 4 * 5
    assert tabulate_rope(model, CONTEXT) == ["model.rotary_emb"]
    assert isinstance(model.model.rotary_emb, RopeTable)
    assert sum(p.nbytes for p in model.parameters()) == size
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_layers_of_two_kinds_have_two_tables() -> None:
    model = model_of("gemma3_text")
    assert tabulate_rope(model, CONTEXT) == ["model.rotary_emb"]
    assert set(model.model.rotary_emb.names) == {"full_attention", "sliding_attention"}


def test_tables_that_would_be_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.models.mla.LARGEST_TABLES", 1000)
    model = model_of("qwen3")
    assert tabulate_rope(model, CONTEXT) == []
    assert not isinstance(model.model.rotary_emb, RopeTable)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 1)])
def test_the_first_that_is_called_computes_for_all(order: tuple[int, ...]) -> None:
    """In any order, and right even where one is left out: another input is another product."""
    model = model_of("qwen3")
    layer = model.model.layers[0].self_attn
    parts: list[Callable[[torch.Tensor], torch.Tensor]] = [layer.q_proj, layer.k_proj, layer.v_proj]
    inputs = [torch.randn(1, 5, model.config.hidden_size) for _ in range(3)]
    expected = [[part(x) for part in parts] for x in inputs]
    merge_linears(model)
    merged = [layer.q_proj, layer.k_proj, layer.v_proj]
    assert all(type(part) is MergedLinear for part in merged)
    for x, right in zip(inputs, expected, strict=True):
        for i in order:
            assert torch.allclose(merged[i](x), right[i], atol=1e-5)
