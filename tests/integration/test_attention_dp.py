"""Attention that is divided among ranks by requests: caches are kept once, and answers are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from divided import PROMPT, PROMPTS, answers, served
from families import TOLERANCE, make, tiny_config, tiny_model
from nibble import LLM, ConfigError
from nibble.cache.rank_managers import RankManagers
from nibble.engine.model_runner import ModelRunner
from nibble.kernels.append.naive import dequantize_tokens
from nibble.kernels.collectives.processes import GlooCollectives
from nibble.models.hub import quiet
from nibble.models.parallel_rows import Rows
from thread_ranks import ThreadRanks

OPTIONS: dict[str, Any] = {"kv_format": "fp32", "kv_memory": "8MiB"}
LONG, PAGE_BYTES = 40, 16 * 640
"""Tokens of long answers, and bytes of a page of deepseek_v3."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("attention")
    with quiet():
        for name in ("deepseek_v3", "gpt_oss"):
            tiny_model(name).save_pretrained(folder / name)
        # Widths of which each part fills vectors: torch computes the tail of silu() otherwise.
        wide = tiny_config("minicpm3")
        wide.intermediate_size = 256
        make("minicpm3", wide).float().save_pretrained(folder / "minicpm3")
    return {name: folder / name for name in ("deepseek_v3", "gpt_oss", "minicpm3")}


def managers_of(llm: LLM) -> RankManagers:
    manager = llm.engine.scheduler.manager
    assert isinstance(manager, RankManagers)
    return manager


def runners_of(llm: LLM) -> list[ModelRunner]:
    ranks = llm.engine.ranks
    assert isinstance(ranks, ThreadRanks)
    return [llm.engine.runner, *(ranks.followers[rank].runner for rank in range(1, ranks.size))]


def stored_bytes(runner: ModelRunner) -> list[bytes]:
    """All pages of a rank."""
    layers = {layer for layer, owner in enumerate(runner.plan.owner) if layer == owner}
    return [
        plane.contiguous().view(torch.uint8).numpy().tobytes()
        for layer in sorted(layers)
        for stream in runner.pool.view(layer).streams.values()
        for plane in stream.paged.planes_PHS
    ]


def prompt_values(runner: ModelRunner) -> list[torch.Tensor]:
    """What a rank has stored of PROMPT, which has the first pages, by layer and stream."""
    slots = torch.arange(len(PROMPT))
    views = [
        runner.pool.view(layer).streams for layer, owner in enumerate(runner.plan.owner) if layer == owner
    ]
    return [dequantize_tokens(stream.paged, slots) for view in views for stream in view.values()]


@pytest.fixture(scope="module")
def of_one(paths: dict[str, Path]) -> dict[str, tuple[torch.Tensor, list[tuple[int, ...]]]]:
    """Logits and answers of one rank."""
    found = {}
    for name, path in paths.items():
        with served(path, 1, **OPTIONS) as llm:
            found[name] = llm.logits(PROMPT), answers(llm, LONG if name == "deepseek_v3" else 10)
    return found


@pytest.mark.parametrize(("name", "more"), [("deepseek_v3", {}), ("gpt_oss", {"expert_parallel": True})])
def test_answers_are_those_of_one_rank(
    name: str, more: dict[str, Any], paths: dict[str, Path], of_one: dict[str, Any]
) -> None:
    logits_TV, expected = of_one[name][0], [tokens[:10] for tokens in of_one[name][1]]
    with served(paths[name], 2, attention_dp=True, **OPTIONS, **more) as llm:
        before = stored_bytes(runners_of(llm)[1])
        assert float((llm.logits(PROMPT) - logits_TV).abs().max()) < TOLERANCE
        # What rank 0 stores no other rank does.
        assert stored_bytes(runners_of(llm)[1]) == before
        assert answers(llm) == expected
        assert stored_bytes(runners_of(llm)[1]) != before
        parts = [one.stats for one in managers_of(llm).managers]
        assert all(part.lookup_tokens for part in parts), "a rank had no request"
        # Again, of which most is in the prefix cache.
        assert answers(llm) == expected and llm.engine.scheduler.metrics.cache.hit_tokens > 0
        llm.engine.scheduler.check_integrity()
        assert "attention (each GPU attends for requests of its own)" in str(llm.plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "gemma3n_text", "gpt2", "minimax_m2", "phi3", "qwen2_moe"])
def test_other_families_answer_as_one_rank(name: str, tmp_path: Path) -> None:
    with quiet():
        tiny_model(name).save_pretrained(tmp_path)
    with served(tmp_path, 1, **OPTIONS) as llm:
        logits_TV, expected = llm.logits(PROMPT), answers(llm)
    with served(tmp_path, 2, attention_dp=True, **OPTIONS) as llm:
        assert float((llm.logits(PROMPT) - logits_TV).abs().max()) < TOLERANCE
        assert answers(llm) == expected


def test_requests_that_are_preempted_answer_alike(paths: dict[str, Path], of_one: dict[str, Any]) -> None:
    options = {"kv_format": "fp32", "prefix_cache": False, "kv_memory": str(8 * PAGE_BYTES)}
    with served(paths["deepseek_v3"], 2, attention_dp=True, **options) as llm:
        assert llm.plan.layout.bytes_per_token * llm.plan.page_size == PAGE_BYTES
        assert answers(llm, LONG) == of_one["deepseek_v3"][1]
        assert llm.engine.scheduler.metrics.preemptions > 0
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    "options", [{"kv_format": "nvfp4_ds_mla", "kv_window": 0}, {"kv_format": "fp8_e4m3", "kv_window": 16}]
)
def test_quantised_latents_are_those_of_one_rank(options: dict[str, Any], paths: dict[str, Path]) -> None:
    options = {**options, "kv_scales": "one", "kv_memory": "1MiB", "deterministic": True}
    with served(paths["minicpm3"], 1, **options) as llm:
        logits_TV, stored, expected = llm.logits(PROMPT), prompt_values(llm.engine.runner), answers(llm)
    with served(paths["minicpm3"], 2, attention_dp=True, **options) as llm:
        found_TV, found = llm.logits(PROMPT), prompt_values(llm.engine.runner)
        assert torch.equal(found_TV, logits_TV) and all(map(torch.equal, found, stored))
        assert answers(llm) == expected


def test_processes_answer_as_one(paths: dict[str, Path], of_one: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_context": 128, "max_running": 4, "token_budget": 16, **OPTIONS}
    with LLM(str(paths["minicpm3"]), tp=2, attention_dp=True, **options) as llm:
        assert llm.engine.ranks and llm.engine.ranks.here
        assert isinstance(llm.engine.ranks.here.group, GlooCollectives)
        assert answers(llm) == of_one["minicpm3"][1]
        # A request that nobody waits for any more frees the pages of its rank.
        stream = llm.stream(PROMPTS[2], max_tokens=50, ignore_eos=True)
        next(stream)
        stream.close()
        llm.generate(PROMPT, max_tokens=1)
        llm.reset_prefix_cache()
        assert managers_of(llm).stats.in_use == 0


def test_rows_of_another_rank_are_noticed(
    paths: dict[str, Path], of_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "own", lambda _, y, count: y[:count])
    with served(paths["minicpm3"], 2, attention_dp=True, **OPTIONS) as llm:
        assert answers(llm) != of_one["minicpm3"][1]


def test_families_whose_mlps_are_no_modules_are_refused(tmp_path: Path) -> None:
    with quiet():
        tiny_model("opt").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its MLPs are no modules of their own"):
        LLM(str(tmp_path), tp=2, attention_dp=True, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 1}, "--attention-dp divides a model among GPUs: say how many by --tp N"),
        ({"tp": 2, "hisparse": "on"}, "--hisparse with --attention-dp is not served"),
        ({"tp": 2, "speculative": "lookup"}, "--speculative with --attention-dp is not served"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], reason: str, paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(paths["minicpm3"]), attention_dp=True, **OPTIONS, **options)
