"""Decode steps and prompts of hybrid models with experts, in bfloat16: what differs is which experts are chosen.

Kernels of decode steps round otherwise than those of prompts. That is imitated here: decode steps get noise of half a
unit in the last place at the outputs of all mixers and experts. A router that is near a tie then chooses another expert,
and with that another token; where the choices of decode steps are forced upon the prompt, nothing is left but noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from gpu_hybrids import greedy, save_hybrid, worst_gap
from nibble import LLM
from router_choices import Choices, num_flips

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
NOISE = 2.0**-8
"""Half a unit in the last place of bfloat16 at most, relative to a value."""
QUIET = 0.2
"""Deviations by which a token is below the best at most, with the same experts."""
PROMPTS = (17, 40, 97)


class Noise:
    """Noise at the outputs of mixers and experts, while it is on."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.is_on, self.random = False, torch.Generator().manual_seed(seed)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ("linear_attn", "self_attn", "mlp"):
                module.register_forward_hook(self._add)

    def _add(self, _: nn.Module, __: Any, output: Any) -> Any:
        x: Tensor = output[0] if isinstance(output, tuple) else output
        if not self.is_on:
            return output
        factor = 1 + NOISE * (2 * torch.rand(x.shape, generator=self.random) - 1)
        x = (x.float() * factor).to(x.dtype)
        return (x, *output[1:]) if isinstance(output, tuple) else x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "state_format", "seed"), [("qwen3_next", "fp8", 2), ("minimax", "fp32", 5)]
)
def test_decode_steps_differ_from_prompts_where_a_router_does(
    family: str, state_format: str, seed: int, tmp_path: Path
) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {family}")
    ids = save_hybrid(tmp_path, family, "cpu").ids
    forced_gaps, flips = [0.0], 0
    with LLM(
        str(tmp_path), device="cpu", dtype="bfloat16", kv_format="bf16", state_format=state_format,
        kv_scales="one", kv_memory="64MiB", max_context=512, prefix_cache=False,
    ) as llm:  # fmt: skip
        model = llm.engine.runner.model
        assert isinstance(model, nn.Module)
        noise, choices = Noise(model, seed), Choices(model)
        for length in PROMPTS:
            prompt = [ids[:length]]
            noise.is_on = True
            answers, _ = greedy(llm, prompt)
            noise.is_on, decoded = False, choices.take(length)
            gap = worst_gap(llm, prompt, answers)
            whole = choices.take(length + len(answers[0]))
            choices.forced = decoded
            forced_gaps.append(worst_gap(llm, prompt, answers))
            choices.forced = {}
            choices.take(length)
            differing = num_flips(decoded, whole)
            flips += differing
            assert differing or gap <= QUIET, f"{length}: {gap} below, and no expert is another one"
    assert flips, "no choice differs: the test tests nothing"
    assert max(forced_gaps) <= QUIET, f"with the same experts: {forced_gaps}"
