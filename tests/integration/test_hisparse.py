"""HiSparse: with most of the cache in host memory an engine says what it says without, and its books balance."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nibble import LLM, SamplingParams
from nibble.attention.planner import window_memory
from nibble.attention.planner.window_memory import SNAPSHOT_SHARE
from nibble.cache.hot_buffer import HotBuffers
from nibble.config import Config, OffloadSpec
from nibble.engine import step_tokens
from nibble.engine.graphs import Graphs, live
from nibble.engine.plan import plan_engine
from nibble.engine.rank import Follower
from nibble.errors import BackendError, CapacityError, ConfigError
from nibble.formats import scheme
from nibble.kernels.offload import copy_tokens
from nibble.model_spec import LATENTS
from thread_ranks import ThreadRanks, threads_as_ranks
from tiny import MLA, SPARSE, save_tiny
from toys.oracle_drafter import oracle

TEXT = "".join(map(chr, range(32, 127))) * 4
CONTEXT = 400
TOP_K = SPARSE["index_topk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with sparse attention, of layers that choose and one that shares, with its scales."""
    path = save_tiny(tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", **SPARSE)
    LLM(str(path), kv_format="fp32", kv_memory="8MiB").measure_scales([TEXT], save=path / "scales.json")
    return path


def asked_for(model: Path, **options: Any) -> dict[str, Any]:
    usual = {"kv_memory": "8MiB", "max_running": 8, "max_context": CONTEXT, "page_size": 16}
    return {"model": str(model), "kv_scales": str(model / "scales.json"), **usual, **options}


def llm(model: Path, hisparse: str = "", **options: Any) -> LLM:
    return LLM(**asked_for(model, hisparse=hisparse, **options))


def tight(model: Path, hisparse: str = "buffer=32", requests: int = 2, **options: Any) -> LLM:
    """An engine whose device has room for about so many requests of the longest kind, hot buffers aside."""
    planned = plan_engine(Config(**asked_for(model, **options)))
    layout, exact = planned.plan.layout, planned.budget.exact
    tokens = requests * CONTEXT + 8 * 80
    index = 8 * CONTEXT * (layout.bytes_per_token - layout.without_index.bytes_per_token)
    memory = tokens * layout.without_index.bytes_per_token + index
    if exact:
        memory = int((memory + exact.bytes - exact.snapshots * exact.bytes_per_page) / (1 - SNAPSHOT_SHARE))
    return llm(model, hisparse, kv_memory=str(memory), **options)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [dice.choices(range(32, 127), k=dice.randrange(220, 330)) for _ in range(count)]


def answers(engine: LLM, asked: list[list[int]], tokens: int = 40) -> list[tuple[int, ...]]:
    found = engine.generate(asked, max_tokens=tokens, ignore_eos=True)
    engine.engine.scheduler.check_integrity()
    return [output.completions[0].token_ids for output in found]


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kv_format", "window"),
    [*((name, 0) for name in scheme.fitting(*LATENTS)), ("nvfp4_ds_mla", 20), ("nvfp4", 7)],
)
def test_the_answers_are_those_without_it(
    model: Path, kv_format: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Windows of as many requests as run without: the device is to have too little for their other tokens.
    monkeypatch.setattr(window_memory, "EXACT_SHARE", 0.9)
    asked = prompts(6)
    expected = answers(llm(model, kv_format=kv_format, kv_window=window), asked)
    hot = tight(model, kv_format=kv_format, kv_window=window)
    assert answers(hot, asked) == expected
    tier = hot.engine.runner.tier
    assert tier and tier.residency.stats.spilled >= 2 and tier.residency.stats.dropped > 20
    looked = tier.lookup_counts
    assert min(looked.values()) > 100, "tokens were found in pages, in hot buffers, and on the host"
    assert answers(hot, asked) == expected, "prefixes come back from the host"
    assert tier.residency.stats.loaded > 20
    assert hot.engine.scheduler.metrics.cache.hit_tokens > 1000


@pytest.mark.slow
@pytest.mark.parametrize(("kv_format", "window"), [("bf16", 0), ("nvfp4_ds_mla", 20)])
def test_drafts_of_requests_without_a_hot_buffer(
    model: Path, kv_format: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are wrong, so pages that were reserved for them are given back while others go to the host and back."""
    monkeypatch.setattr(window_memory, "EXACT_SHARE", 0.9)
    asked, options = prompts(6), {"kv_format": kv_format, "kv_window": window}
    expected = answers(llm(model, **options), asked)
    known = {tuple(prompt): answer for prompt, answer in zip(asked, expected, strict=True)}
    with oracle(known, wrong=0.3) as drafter:
        hot = tight(model, speculative=drafter, speculative_tokens="3", **options)
        drafted: list[bool] = []
        schedule = hot.engine.scheduler.schedule

        def noted(*arguments: Any) -> Any:
            batch = schedule(*arguments)
            for item in batch.scheduled if batch else ():
                assert not (item.drafts and item.request.lease.hot_frames), "a hot buffer is for one token"
                drafted.append(bool(item.drafts))
            hot.engine.scheduler.check_integrity()
            return batch

        monkeypatch.setattr(hot.engine.scheduler, "schedule", noted)
        for _ in range(2):
            assert answers(hot, asked) == expected
        assert hot.tier and hot.tier.residency.stats.spilled >= 2 and hot.tier.residency.stats.loaded > 20
        assert drafted.count(True) > 20 < drafted.count(False)
        assert hot.engine.speculation
        counts = hot.engine.speculation.counts
        assert 20 < counts.accepted < counts.drafted - 5


def test_a_page_of_drafts_is_not_saved(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were, tokens that were taken back would come back from the host."""
    backup = HotBuffers.backup
    offered: list[tuple[int, int]] = []

    def noted(tier: HotBuffers, leases: Any, save: Any) -> None:
        all_leases = list(leases)
        offered.extend((count, lease.num_reserved_tokens) for lease, count in all_leases)
        backup(tier, all_leases, save)

    monkeypatch.setattr(HotBuffers, "backup", noted)
    asked = prompts(4)
    with oracle({tuple(prompt): (0,) * 40 for prompt in asked}, wrong=1.0) as drafter:
        answers(tight(model, kv_format="bf16", speculative=drafter, speculative_tokens="3"), asked)
    assert max(reserved - count for count, reserved in offered) == 3


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `model`, without experts, so that ranks compute the very bits of one."""
    changes = {**SPARSE, "mlp_layer_types": ["dense"] * 3}
    path = save_tiny(tmp_path_factory.mktemp("dense"), "glm_moe_dsa", **changes)
    LLM(str(path), kv_format="fp32", kv_memory="8MiB").measure_scales([TEXT], save=path / "scales.json")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "nvfp4"])
def test_each_rank_has_a_host_tier(dense_model: Path, kv_format: str) -> None:
    options: dict[str, Any] = {"kv_format": kv_format, "kv_window": 0, "deterministic": True}
    asked = prompts(6)
    expected = answers(llm(dense_model, **options), asked)
    with threads_as_ranks(), closing(tight(dense_model, tp=2, **options)) as hot:
        assert answers(hot, asked) == expected
        assert answers(hot, asked) == expected, "prefixes come back from the host"
        assert hot.tier and hot.tier.residency.stats.spilled >= 2 and hot.tier.residency.stats.loaded > 20
        (follower,) = cast(ThreadRanks, hot.engine.ranks).followers.values()
        assert follower.runner.tier and follower.runner.tier.lookup_counts == hot.tier.lookup_counts


@pytest.mark.slow
def test_a_rank_that_saves_nothing_is_noticed(dense_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "save", lambda self, copies: None)
    asked, options = prompts(6), {"kv_format": "fp8_ds_mla", "deterministic": True}
    with threads_as_ranks(), closing(tight(dense_model, tp=2, **options)) as hot:
        assert answers(hot, asked) != answers(llm(dense_model, **options), asked)


@pytest.mark.slow
def test_a_recorded_step_in_two_halves(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one half has chosen comes while the other chooses; padding may be all that a half has."""
    asked = prompts(6)
    expected = answers(llm(model, kv_format="fp8_ds_mla"), asked)
    monkeypatch.setattr(step_tokens, "MIN_SPLIT", 4)
    monkeypatch.setattr(step_tokens, "SPLIT_MULTIPLE", 2)
    hot = tight(model, kv_format="fp8_ds_mla")
    runner = hot.engine.runner
    points = [step_tokens.split_points(size, has_tier=True) for size in (2, 4, 6)]
    assert points == [(0, 2), (0, 2, 4), (0, 4, 6)]
    runner.record(Graphs((2, 4, 8), runner.device, live))
    assert answers(hot, asked) == expected
    assert hot.tier and hot.tier.residency.stats.spilled >= 2 and hot.tier.lookup_counts["misses"] > 100


def test_where_all_fits_no_tier_is_made(model: Path) -> None:
    asked = prompts(3)
    roomy = llm(model, "on", kv_format="fp8_ds_mla")
    assert roomy.tier is None and roomy.budget.host == 0 and roomy.budget.frames == roomy.budget.pages
    assert answers(roomy, asked) == answers(llm(model, kv_format="fp8_ds_mla"), asked)
    assert roomy.budget.pages >= llm(model, kv_format="fp8_ds_mla").budget.pages


def test_without_pressure_nothing_is_spilled(model: Path) -> None:
    asked = prompts(2)
    calm = tight(model, requests=3, kv_format="fp8_ds_mla")
    assert answers(calm, asked) == answers(llm(model, kv_format="fp8_ds_mla"), asked)
    assert calm.tier
    stats = calm.tier.residency.stats
    assert stats.spilled == stats.dropped == stats.loaded == 0 and calm.tier.lookup_counts["misses"] == 0
    assert stats.saved > 0, "long requests are saved ahead"


def test_requests_shorter_than_the_buffer_cost_nothing(model: Path) -> None:
    engine = tight(model, "buffer=160", kv_format="fp8_ds_mla")
    answers(engine, [prompt[:110] for prompt in prompts(4)])
    assert engine.tier and engine.tier.residency.stats.spilled == engine.tier.residency.stats.saved == 0


def test_one_request_alone_uses_the_whole_context(model: Path) -> None:
    """A device for one request of the longest kind, and hot buffers."""
    for most in (1, 2):
        engine = tight(model, "on", requests=1, kv_format="fp8_ds_mla", max_running=most)
        (found,) = answers(engine, [[*range(32, 126)] * 4 + [*range(32, 46)]], 9)
        assert len(found) == 9


@pytest.mark.slow
def test_one_layer_that_chooses(tmp_path: Path) -> None:
    one = {**SPARSE, "indexer_types": ["full", "shared", "shared"]}
    path = save_tiny(tmp_path, "glm_moe_dsa", **one)
    LLM(str(path), kv_format="fp32", kv_memory="8MiB").measure_scales([TEXT], save=path / "scales.json")
    asked = prompts(4)
    assert answers(tight(path, kv_format="bf16"), asked) == answers(llm(path, kv_format="bf16"), asked)


@pytest.mark.slow
def test_answers_that_share_a_prompt_are_spilled_together(model: Path) -> None:
    sampled: dict[str, Any] = {"max_tokens": 60, "n": 3, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    hot, plain = tight(model, kv_format="bf16", requests=1), llm(model, kv_format="bf16")
    asked = [prompts(1)[0][:240], *prompts(2, 5)]
    found, expected = (
        [[answer.token_ids for answer in output.completions] for output in engine.generate(asked, **sampled)]
        for engine in (hot, plain)
    )
    assert found == expected
    assert hot.tier and hot.tier.residency.stats.spilled >= 3


@pytest.fixture(scope="module")
def plain_answers(model: Path) -> list[tuple[int, ...]]:
    return answers(llm(model, kv_format="bf16"), prompts(6))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("where", "error"),
    [("_load", RuntimeError), ("_save", RuntimeError), ("fetch", RuntimeError), ("fetch", KeyboardInterrupt)],
)
def test_a_step_that_breaks_off_harms_no_other(
    model: Path,
    plain_answers: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
) -> None:
    """Whatever was on its way to the device, or to the host, is sent again."""
    asked, expected = prompts(6), plain_answers
    for nth in (1, 5):
        hot = tight(model, kv_format="bf16")
        answers(hot, asked)  # so that prefixes come back from the host
        count = plant(hot, monkeypatch, where, nth, error)
        found: list[list[int]] = [[] for _ in asked]
        failed = set()

        def take(i: int, piece: Any, found: Any = found, failed: Any = failed) -> None:
            found[i] += piece.token_ids
            if piece.error:
                failed.add(i)

        for i, prompt in enumerate(asked):
            hot.engine.submit(
                prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0), partial(take, i)
            )
        while hot.engine.busy:
            with suppress(KeyboardInterrupt):
                hot.engine.step()
        hot.engine.scheduler.check_integrity()
        assert count[0] > nth or nth > 1, "nothing was planted"
        assert all(tuple(found[i]) == expected[i] for i in range(6) if i not in failed), (nth, failed)
        assert error is RuntimeError or not failed
        monkeypatch.undo()
        assert answers(hot, asked) == expected, "later ones are hurt"


def plant(
    engine: LLM, patch: pytest.MonkeyPatch, where: str, nth: int, error: type[BaseException]
) -> list[int]:
    """An error in the nth copy of a kind; returns a counter of copies."""
    assert engine.tier
    inner, count = getattr(engine.tier, where), [0]

    def planted(*args: Any, **kwargs: Any) -> Any:
        count[0] += bool(len(args[0]) if where != "fetch" else len(args[1].from_M))
        if count[0] == nth:
            count[0] += 1
            raise error("planted")
        return inner(*args, **kwargs)

    patch.setattr(engine.tier, where, planted)
    return count


@pytest.mark.parametrize(
    ("kv_format", "host_format"), [("bf16", "nvfp4_ds_mla"), ("fp8_ds_mla", "nvfp4_ds_mla")]
)
def test_a_host_of_lower_precision(model: Path, kv_format: str, host_format: str) -> None:
    asked = prompts(5)
    plain = llm(model, kv_format=kv_format)
    hot = tight(model, f"buffer=32,host_format={host_format}", kv_format=kv_format)
    assert (
        hot.plan.tier
        and hot.plan.tier.layout.bytes_per_token < plain.plan.layout.without_index.bytes_per_token
    )
    expected, found = answers(plain, asked), answers(hot, asked)
    same = sum(a == b for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))
    assert same > 0.5 * 5 * 40, "the answers have little to do with each other"
    assert hot.engine.runner.tier and hot.engine.runner.tier.lookup_counts["misses"] > 100


def test_logits_go_through_the_host(model: Path) -> None:
    (prompt,) = prompts(1)
    exact = llm(model, kv_format="fp8_ds_mla", token_budget=64).logits(prompt)
    same = tight(model, "on", kv_format="fp8_ds_mla", token_budget=64)
    assert (same.logits(prompt) == exact).all()
    assert same.engine.runner.tier and same.engine.runner.tier.residency.stats.loaded > 10
    lossy = tight(model, "host_format=nvfp4_ds_mla", kv_format="fp8_ds_mla", token_budget=64).logits(prompt)
    assert (lossy[:64] == exact[:64]).all(), "what has not been there is as it was"
    error = float((lossy[64:] - exact[64:]).norm() / exact[64:].norm())
    assert 0.001 < error < 1


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 16))
def test_aborts_leave_no_trace(model: Path, hot_and_plain: tuple[LLM, LLM], seed: int) -> None:
    """Requests come and are aborted at random; those that end say what they say alone."""
    hot, plain = hot_and_plain
    dice = random.Random(seed)
    asked = prompts(7, seed % 3)
    streams = []
    for prompt in asked:
        streams.append(hot.stream(prompt, max_tokens=dice.randrange(4, 60), ignore_eos=True))
        for _ in range(dice.randrange(4)):
            hot.engine.step()
    for i, stream in enumerate(streams):
        if dice.random() < 0.4:
            for _ in range(dice.randrange(30)):
                hot.engine.step()
            stream.close()
            hot.engine.scheduler.check_integrity()
        elif i == 0:
            found = [token for piece in stream for token in piece.token_ids]
            expected = plain.generate(asked[i], max_tokens=len(found), ignore_eos=True)
            assert tuple(found) == expected.completions[0].token_ids
    for stream in streams:
        stream.close()
    hot.engine.scheduler.check_integrity()
    assert not hot.engine.busy


@pytest.fixture(scope="module")
def hot_and_plain(model: Path) -> tuple[LLM, LLM]:
    return tight(model, kv_format="nvfp4_ds_mla"), llm(model, kv_format="nvfp4_ds_mla")


def test_a_model_that_looks_at_all_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    for path in (tiny, save_tiny(tmp_path, "deepseek_v3", **MLA)):
        with pytest.raises(ConfigError, match=r"sparse attention \(DSA\) in all layers: layers 0-2 .* leave"):
            LLM(str(path), hisparse="on")


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        (
            "buffer=16",
            ConfigError,
            f"16 tokens is too small: each query looks at {TOP_K}.* buffer={2 * TOP_K}",
        ),
        ("buffer=many", ConfigError, "must be a number of tokens, not 'many'"),
        ("bufer=64", ConfigError, "did you mean 'buffer'"),
        ("host_format=mxfp4_", ConfigError, "the host can store latent 1x160 in .*fp8_ds_mla"),
        ("host_format=index_fp8", ConfigError, "the host can store latent"),
        ("host_memory=900TiB", CapacityError, "host_memory=900TiB does not fit"),
        ("buffer=64,buffer=32", ConfigError, "says something twice"),
        ("buffer", ConfigError, "buffer has no value"),
    ],
)
def test_settings_that_cannot_work(model: Path, setting: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm(model, setting, kv_format="fp8_ds_mla")


def test_a_device_that_is_too_small_is_refused(model: Path) -> None:
    with pytest.raises(CapacityError, match=r"one request of 400 tokens does not fit with --hisparse"):
        llm(model, "on", kv_format="fp8_ds_mla", kv_memory="100KiB")


def test_copies_that_are_wrong_stop_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HotBuffers, "round_trip", one_way)
    for setting in ("on", "host_format=nvfp4_ds_mla"):
        with pytest.raises(BackendError, match="comes back from the host's"):
            tight(model, setting, kv_format="fp8_ds_mla")


def one_way(self: Any, layer: int, source: int, target: int) -> None:
    device, _ = self.stores[layer]
    slots = [self._slots(torch.tensor([number])) for number in (source, target)]
    copy_tokens(device, slots[0].flip(0), device, slots[1])


def test_settings_are_put_together_with_commas(model: Path) -> None:
    assert OffloadSpec.parse("on, buffer = 64") == OffloadSpec(buffer=64)
    assert OffloadSpec.parse("off") is None
    small = tight(model, "host_memory=1MiB", kv_format="fp8_ds_mla")
    assert small.budget.host <= 1 << 20


def test_pages_are_not_staged(model: Path) -> None:
    plan = llm(model, "on", kv_format="fp8_ds_mla").plan
    assert all(route.stage_to is None for group in plan.groups for route in group.routes)
