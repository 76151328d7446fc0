"""What `auto` prefers beyond the plans of test_matrix.py: staged prompts where they pay, and who verifies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nibble.attention.backends import all_backends
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.config import Config
from nibble.errors import CapacityError
from nibble.hardware import lookup_gpu
from nibble.model_spec import ModelSpec
from planning import GEMMA2, GPT_OSS, MODELS, QWEN3_8B, memory_plan, mha, model_spec

STAGED, OWN = "fa3 (staged to bf16)", "triton (staged to bf16)"


def plan(model: ModelSpec, without: str = "", verify: bool = True, **options: Any) -> Plan:
    table = {name: info for name, info in all_backends().items() if name != without}
    return resolve(Config(model="m", **options), model, lookup_gpu("h200"), table, verify=verify)


def routes(made: Plan, group: int = 0) -> list[str]:
    return [str(route) for route in made.groups[group].routes]


def test_prompts_are_staged_where_that_was_measured_to_pay() -> None:
    assert routes(plan(GEMMA2, kv_format="nvfp4")) == [STAGED, STAGED, "cuda", "cuda"]
    assert routes(plan(GPT_OSS, kv_format="nvfp4"), 1)[:2] == ["cuda", "cuda"]
    assert routes(plan(GPT_OSS, "cuda", kv_format="nvfp4"), 1)[:2] == [STAGED, STAGED]
    assert routes(plan(QWEN3_8B, kv_format="nvfp4"))[:2] == ["cuda", "cuda"]
    assert routes(plan(QWEN3_8B, "cuda", kv_format="nvfp4"))[:2] == ["sdpa", "sdpa"]
    assert routes(plan(GEMMA2, "fa3", kv_format="nvfp4"))[:2] == [OWN, "flashinfer (staged to bf16)"]
    assert routes(plan(GPT_OSS, kv_format="nvfp4", attention_backend="triton"), 1) == ["triton"] * 4, (
        "as asked"
    )


@pytest.mark.parametrize(("stored", "first"), [("nvfp4", OWN), ("mxfp4", OWN), ("fp8_e4m3", "triton")])
def test_a_row_may_be_of_pages_that_are_staged_from_some_formats(stored: str, first: str) -> None:
    """Short windows with sinks: to decode 4 bits again for each tile of queries takes longer than to stage them."""
    assert routes(plan(GPT_OSS, "cuda", kv_format=stored), 0)[:2] == [first, "triton"]


def test_a_plan_says_that_it_stages_for_speed() -> None:
    words = "pages are staged to bf16, which fa3 reads"
    asked, unasked = plan(GEMMA2, kv_format="nvfp4", prefill_backend="fa3"), plan(GEMMA2, kv_format="nvfp4")
    faster = f"{words}, for speed: kernels that read them as they are stored take longer"
    assert any(note.endswith(words) for note in asked.notes)
    assert any(note.endswith(faster) for note in unasked.notes)


@pytest.mark.parametrize("options", [{"kv_memory": "115GiB"}, {}])
def test_nobody_stages_for_speed_where_memory_is_short(options: dict[str, Any]) -> None:
    model = GEMMA2 if options else replace(GEMMA2, weight_bytes=126 << 30)
    options = {"kv_format": "nvfp4", "kv_window": 0, **options}
    made = plan(model, **options)
    assert routes(made)[:2] == ["triton", "triton"]
    assert memory_plan(Config(model="m", **options), model, lookup_gpu("h200"), made).staging == 0


@pytest.mark.parametrize(
    ("kv_memory", "prompts"), [(None, "cuda"), ("80GiB", "cuda"), ("120GiB", "triton"), ("128GiB", "triton")]
)
def test_a_kernel_with_a_workspace_comes_last_where_that_would_take_the_rest(
    kv_memory: str | None, prompts: str
) -> None:
    options = {"kv_format": "nvfp4", "kv_window": 0, "kv_memory": kv_memory}
    assert routes(plan(QWEN3_8B, **options))[:2] == [prompts, prompts]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "deepseek-v2-lite", "gemma-2-9b"])
def test_workspaces_for_speed_leave_pages_their_room(name: str) -> None:
    """However much of the GPU weights take: what fits without a workspace fits, with nearly as many tokens."""
    staged, config = set(), Config(model="m", kv_format="nvfp4")
    for weights in range(100, 132):
        model = replace(MODELS[name], weight_bytes=weights << 30)
        faster = plan(model, kv_format="nvfp4")
        direct = plan(model, kv_format="nvfp4", prefill_backend="triton")
        try:
            tokens = memory_plan(config, model, lookup_gpu("h200"), direct).tokens
        except CapacityError:
            continue
        assert memory_plan(config, model, lookup_gpu("h200"), faster).tokens > 0.85 * tokens, weights
        staged.add(any(r.stage_to or r.row.workspace for group in faster.groups for r in group.routes))
    assert staged == {True, False}


def test_the_best_verifies_whoever_decodes() -> None:
    """Over pages of 64, which FlashMLA wants, and FA3 takes for two of 32."""
    lite = MODELS["deepseek-v2-lite"]
    made = plan(lite, kv_format="bf16")
    assert routes(made) == ["fa3", "fa3", "triton", "flashmla"] and made.page_size == 64
    assert routes(plan(lite, kv_format="bf16", decode_backend="triton"))[2:] == ["triton", "triton"]
    assert routes(plan(lite, kv_format="bf16", decode_backend="fa3"))[2:] == ["fa3", "fa3"]


def test_nobody_holds_memory_for_drafts_that_nobody_makes() -> None:
    assert routes(plan(MODELS["deepseek-v2-lite"], kv_format="bf16", verify=False))[2:] == [
        "triton",
        "triton",
    ]


@pytest.mark.parametrize(("heads", "prompts"), [(8, "sdpa"), (4, "fa3"), (1, "fa3")])
def test_few_heads_of_kv_change_who_takes_prompts(heads: int, prompts: str) -> None:
    """Where Nibble's own kernel is not there. Staged ones too."""
    group = mha()
    few = replace(group, streams=tuple(replace(s, heads=heads) for s in group.streams), q_heads=8 * heads)
    assert routes(plan(model_spec(few), "cuda", kv_format="bf16"))[0] == prompts
    assert routes(plan(model_spec(few), "cuda", kv_format="nvfp4"))[0] == (
        STAGED if prompts == "fa3" else prompts
    )


@pytest.mark.parametrize("heads", [8, 4, 1])
def test_few_heads_of_kv_change_nothing_in_our_own_kernels(heads: int) -> None:
    """They share contexts and rows of queries out, however few heads there are."""
    group = mha()
    few = replace(group, streams=tuple(replace(s, heads=heads) for s in group.streams), q_heads=8 * heads)
    assert routes(plan(model_spec(few), kv_format="nvfp4")) == ["cuda"] * 4
    assert routes(plan(model_spec(few), kv_format="bf16"))[:2] == ["cuda", "cuda"]
