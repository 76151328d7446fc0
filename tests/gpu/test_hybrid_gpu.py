"""Hybrid models on a GPU: logits of the unmodified model, and the same answer however steps are run.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_hybrid_gpu.py -n 6

Models are small, but for heads and states. A start takes far longer than what is asked, so each model starts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from bits import answer, differs, limited
from gpu_hybrids import ALL_EXPERTS, HYBRIDS, distance, distances, greedy, save_hybrid, worst_gap
from nibble import LLM

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # What torch and Transformers say of their own code is their business.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
DEVICE = "cuda"
WORSE, FLOOR = 1.5, 1e-3
"""How much further from float32 logits may be than another engine's or the family's own in bfloat16."""
OTHER = 0.3
"""How far logits are from those of another token, at least."""
TIE = 0.5
"""Where two tokens' logits are so many deviations apart at most, rounding may change their places. Tokens that have
nothing to do with each other are 2 to 6 apart."""
LENGTHS = (17, 40, 97, 128, 300)


@contextmanager
def engine(path: Path, device: str = DEVICE, **options: Any) -> Iterator[LLM]:
    settings = {"kv_format": "bf16", "kv_scales": "one", "kv_transforms": "none", "kv_memory": "128MiB",
                "max_running": 8, "max_context": 1024, **options}  # fmt: skip
    with LLM(str(path), device=device, **settings) as llm:
        yield llm
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def gaps(llm: LLM, ids: list[int]) -> dict[str, float]:
    """How far answers are from what whole prompts say, by how they were computed."""
    prompts, manager, runner = (
        [ids[:length] for length in LENGTHS],
        llm.engine.scheduler.manager,
        llm.engine.runner,
    )
    answers = {"alone": [greedy(llm, [prompt])[0][0] for prompt in prompts]}
    manager.clear()
    answers["in company"], _ = greedy(llm, prompts)
    answers["after a prefix hit"], cached = greedy(llm, prompts)
    assert cached[-1] >= 192, f"the longest prompt goes on from a snapshot: {cached}"
    graphs, runner.graphs = runner.graphs, None
    manager.clear()
    answers["without graphs"], _ = greedy(llm, prompts)
    runner.graphs = graphs
    return {how: worst_gap(llm, prompts, tokens) for how, tokens in answers.items()}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_family_computes_what_the_unmodified_model_does(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {family}")
    unmodified = save_hybrid(tmp_path, family, DEVICE, all_experts=True)
    with engine(tmp_path) as llm:
        assert llm.plan.states and llm.engine.runner.graphs
        off = distance(llm.logits(unmodified.ids), unmodified.logits)
        found = gaps(llm, unmodified.ids)
    print(f"{family}: off by {off:.1e}, the model's own bfloat16 by {unmodified.error:.1e}; {found}")
    assert off <= WORSE * unmodified.error + FLOOR
    assert all(gap <= TIE for gap in found.values()), found


@pytest.mark.parametrize("family", ALL_EXPERTS)
def test_prompts_of_a_family_whose_tokens_choose_experts(family: str, tmp_path: Path) -> None:
    unmodified = save_hybrid(tmp_path, family, DEVICE)
    with engine(tmp_path) as llm:
        off, own = distances(llm.logits(unmodified.ids), unmodified.logits), unmodified.token_errors_T
    (usual, others), (own_usual, own_others) = (
        (float(errors.median()), float((errors > OTHER).float().mean())) for errors in (off, own)
    )
    print(
        f"{family}: usually off by {usual:.1e}, {own_usual:.1e} its own; others {others:.1%}, {own_others:.1%}"
    )
    # A token whose router is near a tie may choose other experts, and is another token then: with random weights on a
    # CPU, in bfloat16, 1 to 4 of 300 of MiniMax, and every seventh of Qwen3-Next.
    assert usual <= 2 * own_usual + FLOOR
    assert others <= 2 * own_others + 0.05


@pytest.mark.parametrize(
    ("family", "state_format", "options"),
    [("qwen3_next", "int8", {}), ("bamba", "fp8", {"compile": False})],
)
def test_states_in_8_bits_beside_a_cache_in_4(
    family: str, state_format: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """As far from float32 as the definition on a CPU, with the same formats."""
    unmodified = save_hybrid(tmp_path, family, DEVICE, all_experts=True)
    formats = {"kv_format": "nvfp4", "state_format": state_format, "kv_window": 64}
    with engine(tmp_path, "cpu", dtype="bfloat16", **formats) as llm:
        expected = distance(llm.logits(unmodified.ids), unmodified.logits)
    with engine(tmp_path, **formats, **options) as llm:
        off = distance(llm.logits(unmodified.ids), unmodified.logits)
        found = gaps(llm, unmodified.ids)
    print(f"{family} in {state_format}: off by {off:.1e}, on a CPU by {expected:.1e}; {found}")
    assert off <= WORSE * expected + FLOOR
    assert all(gap <= TIE for gap in found.values()), found


@pytest.mark.parametrize(("family", "state_format"), [("qwen3_next", "int8"), ("bamba", "fp32")])
def test_the_same_bits_however_a_prompt_is_cut(family: str, state_format: str, tmp_path: Path) -> None:
    """With --deterministic: logits of every sampled token."""
    prompt, found = save_hybrid(tmp_path, family, DEVICE).ids, {}
    others = [prompt[at : at + 61] for at in (3, 70)]
    with engine(tmp_path, kv_format="nvfp4", state_format=state_format, deterministic=True) as llm:
        manager = llm.engine.scheduler.manager
        whole = answer(llm, [prompt])
        hits = manager.stats.states.snapshot_hits
        found["after a prefix hit"] = answer(llm, [prompt])
        assert manager.stats.states.snapshot_hits > hits
        for chunk in (7, 64):
            manager.clear()
            with limited(llm, chunk):
                found[f"in chunks of {chunk}"] = answer(llm, [prompt])
                found[f"in chunks of {chunk}, after a prefix hit"] = answer(llm, [prompt])
        manager.clear()
        found["in company"] = answer(llm, [prompt, *others])
    problems = {how: text for how, logits in found.items() if (text := differs(logits, whole))}
    assert not problems, f"{family}: {problems}"
