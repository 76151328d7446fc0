"""Attention that is divided among ranks by requests: caches are kept once, and answers are those of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import tape
from divided import PROMPT, PROMPTS, answers, served
from families import TOLERANCE, VOCAB, make, tiny_config, tiny_model
from nibble import LLM, ConfigError
from nibble.attention import backends
from nibble.attention.planner.plan import graph_sizes as graphs_sizes
from nibble.attention.planner.verify_memory import verify_sizes
from nibble.cache.rank_managers import RankManagers
from nibble.engine import graphs, parallel_steps, warmup_steps
from nibble.engine.graphs import Graphs, live
from nibble.engine.model_runner import ModelRunner
from nibble.kernels.append.naive import dequantize_tokens
from nibble.kernels.collectives.processes import GlooCollectives
from nibble.models import linear, mla
from nibble.models.forward import compiled
from nibble.models.hub import quiet
from nibble.models.parallel_rows import Rows
from planning import PLAIN
from thread_ranks import ThreadRanks
from toys import graph_backend
from toys.oracle_drafter import oracle

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


@pytest.mark.slow
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


@pytest.fixture
def toy() -> Iterator[str]:
    """A backend whose steps a tape may hold."""
    backend = backends.register(graph_backend.info(graph_backend.Masked))
    yield backend.name
    backends.unregister(backend.name)


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    with quiet():
        tiny_model("qwen3").save_pretrained(path)
    return path


def recorded(llm: LLM, how: Any) -> list[list[Any]]:
    """Records decode steps of both ranks, and lets steps run ahead, as on GPUs; returns the sizes of each that are replayed."""
    for runner in runners_of(llm):
        graph_backend.make_recordable(runner.pool)
    first = runners_of(llm)[0]
    with mock.patch.object(graphs, "CudaGraphs", lambda: how):
        most = llm.config.max_running
        verify = verify_sizes(most, 8, 32) if llm.config.drafts else ()
        first.record(Graphs(graphs_sizes(most), first.device, how, verify))
        llm.engine.ranks.run("barrier")  # type: ignore[union-attr]
        llm.engine.ranks.here.group.barrier()  # type: ignore[union-attr]
    llm.engine.overlap = True
    return [noted(runner.graphs) for runner in runners_of(llm)]


def noted(made: Any) -> list[Any]:
    sizes, replay = list[Any](), made.replay

    def note(size: Any) -> None:
        sizes.append(size)
        replay(size)

    made.replay = note
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("how", [tape.record, live], ids=["recorded", "live"])
@pytest.mark.usefixtures("toy")
def test_recorded_steps_answer_as_one_rank(how: Any, kv_format: str, plain_path: Path) -> None:
    """All ranks replay a step of one size, whatever requests each has, and take what was sampled from the device."""
    options: dict[str, Any] = {
        **PLAIN, "kv_format": kv_format, "kv_scales": "one", "kv_memory": "8MiB", "attention_dp": True, "max_running": 6,
    }  # fmt: skip
    with served(plain_path, 2, **options) as llm:
        expected, drawn = answers(llm, LONG), sampled(llm)
    with served(plain_path, 2, **options) as llm:
        sizes = recorded(llm, how)
        assert answers(llm, LONG) == expected
        assert sizes[0] == sizes[1] and len(sizes[0]) > LONG // 2 and len(set(sizes[0])) > 1
        # One request, of which the other rank has nothing; and others, which are drawn.
        alone = llm.generate(PROMPTS[1], max_tokens=LONG, temperature=0, ignore_eos=True, progress=False)
        assert alone.completions[0].token_ids == expected[1]
        assert sampled(llm) == drawn
        llm.engine.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("how", [tape.record, live, None], ids=["recorded", "live", "plain"])
@pytest.mark.usefixtures("toy")
def test_drafts_of_all_ranks_are_verified_together(how: Any, plain_path: Path) -> None:
    """Some right and some wrong, of as many tokens as each request likes; ranks may have none, and no request."""
    options: dict[str, Any] = {
        **PLAIN, "kv_format": "fp32", "kv_scales": "one", "kv_memory": "8MiB", "max_running": 6, "token_budget": 40,
    }  # fmt: skip
    with served(plain_path, 1, **options) as llm:
        expected, drawn = answers(llm, LONG), sampled(llm)
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS[1:], expected[1:], strict=True)}
    with (
        oracle(known, 0.2, VOCAB, most=7) as name,
        served(plain_path, 2, attention_dp=True, speculative=name, **options) as llm,
    ):
        sizes = recorded(llm, how) if how else []
        assert answers(llm, LONG) == expected
        counts = llm.engine.speculation.counts  # type: ignore[union-attr]
        assert counts.accepted > 20 and counts.drafted > counts.accepted + 5
        alone = llm.generate(PROMPTS[1], max_tokens=LONG, temperature=0, ignore_eos=True, progress=False)
        assert alone.completions[0].token_ids == expected[1]
        assert sampled(llm) == drawn
        llm.engine.scheduler.check_integrity()
        if how:
            assert sizes[0] == sizes[1] and sum(isinstance(size, tuple) for size in sizes[0]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "minicpm3"])
def test_one_compiled_graph_serves_steps_of_all_sizes(
    name: str, paths: dict[str, Path], of_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    # As on GPUs: a CPU's packed products are not compiled, nor its other products of few rows.
    monkeypatch.setattr(linear, "is_available", lambda: False)
    monkeypatch.setattr(mla, "MIN_ROWS", 0)
    with served(paths[name], 2, attention_dp=True, **OPTIONS) as llm:
        for runner in runners_of(llm):
            runner._run = compiled(runner.model, "aot_eager")
        first = runners_of(llm)[0]
        warmup_steps.run_prompts(first, (warmup_steps.FIRST_STEP,), warmup_steps.managers_of(first))
        assert counters["stats"]["unique_graphs"] == 2, "one of each rank"
        expected = [tokens[:10] for tokens in of_one[name][1]]
        assert answers(llm) == expected
        assert answers(llm) == expected, "after prefix hits"
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (2, 0)


def sampled(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, progress=False)
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.slow
def test_tokens_of_another_rank_are_noticed(
    plain_path: Path, toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes its own of the tokens that rank 0 has sampled."""
    options = {**PLAIN, "kv_format": "bf16", "kv_scales": "one", "kv_memory": "8MiB", "attention_dp": True}
    with served(plain_path, 2, **options) as llm:
        expected = answers(llm)
    own = parallel_steps._sampled_at
    monkeypatch.setattr(parallel_steps, "_sampled_at", lambda *asked: [[0] * len(at) for at in own(*asked)])
    with served(plain_path, 2, **options) as llm:
        recorded(llm, live)
        assert answers(llm) != expected


@pytest.mark.slow
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


@pytest.mark.slow
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
    monkeypatch.setattr(Rows, "own", lambda _, y, x: y[: len(x)])
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
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], reason: str, paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(paths["minicpm3"]), attention_dp=True, **OPTIONS, **options)
