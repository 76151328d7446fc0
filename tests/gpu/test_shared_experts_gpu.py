"""Routers with a shared expert, and blocks whose shared expert is computed with the others, on a GPU.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from nibble import LLM
from nibble.kernels import router
from nibble.kernels.router import cuda, naive
from nibble.models.experts import serve_experts
from nibble.models.routers import serve_routers
from nibble.models.shared_experts import join_shared_experts
from tiny import set_generation_config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90"
)
TOKENS = (1, 2, 8, 16, 17, 64, 65, 300)


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    ("experts", "inputs", "top_k"), [(512, 2048, 10), (128, 2048, 8), (60, 2048, 4), (600, 72, 31)]
)
def test_routers(experts: int, inputs: int, top_k: int, has_shared: bool) -> None:
    torch.manual_seed(experts)
    weight = (torch.randn(experts + has_shared, inputs, device="cuda") / inputs**0.5).bfloat16()
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        assert cuda.serves(weight, top_k)
        logits, weights, chosen = router.route(
            x, weight, None, top_k, is_normalized=True, has_shared=has_shared
        )
        expected = torch.nn.functional.linear(x, weight).float()
        assert (logits.float() - expected).norm() <= 0.01 * expected.norm(), tokens
        # By its own logits, so that no tie is another choice.
        own = logits[:, :experts].contiguous()
        own_weights, own_chosen = naive.choose(own, top_k, True)
        assert torch.equal(chosen[:, :top_k], own_chosen), tokens
        assert torch.allclose(weights[:, :top_k].float(), own_weights.float(), rtol=0.02, atol=1e-3), tokens
        if has_shared:
            assert (chosen[:, top_k] == experts).all()
            gate = logits[:, experts].float().sigmoid()
            assert torch.allclose(weights[:, top_k].float(), gate, rtol=0.01), tokens


@torch.inference_mode()
def answers(block: Any, x: Tensor) -> Tensor:
    y: Tensor = block(x[None])[0]
    return y.float()


def test_a_block_with_a_shared_expert() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_next", hidden_size=2048, num_experts=64, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block: Any = Qwen3NextSparseMoeBlock(config).cuda().bfloat16().eval().requires_grad_(False)
    for weight in block.parameters():
        weight.normal_(std=0.03)
    rows = {tokens: torch.randn(tokens, 2048, device="cuda").bfloat16() for tokens in TOKENS}
    expected = {tokens: answers(block, x) for tokens, x in rows.items()}
    model = nn.ModuleList([block])
    assert serve_experts(model) == serve_routers(model) == join_shared_experts(model) == 1
    for tokens, x in rows.items():
        actual = answers(block, x)
        error = (actual - expected[tokens]).norm(dim=-1) / expected[tokens].norm(dim=-1)
        # Where a router has a tie, a token may have another expert.
        assert error.isfinite().all() and error.median() < 0.02, f"{tokens}: {error}"


def test_a_layer_of_published_widths_is_not_refused(tmp_path: Path) -> None:
    """512 experts, of which few stand for all where a start compares layers with the family's own code."""
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=512, hidden_size=2048, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"], max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    set_generation_config(tmp_path, temperature=0.0)
    del model
    with LLM(str(tmp_path), kv_scales="one", kv_memory="64MiB", max_context=512, compile=False) as llm:
        blocks = [
            m for _, m in llm.engine.runner.model.named_modules() if isinstance(m, Qwen3NextSparseMoeBlock)
        ]
        assert len(blocks) == 2 and not any(hasattr(block, "shared_expert") for block in blocks)
        assert llm.logits(list(range(1, 90))).isfinite().all()
