"""The fidelity watch: what it reports is the error, planted faults are found, and no answer knows of it.

What an error should be is computed here once more, in NumPy and from what the model handed to attention, with nothing
of the watch, of a pool or of a backend.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_compile import unpacked

from nibble import LLM, formats
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner.memory import ERROR_MONITOR_BYTES
from nibble.config import Config, SamplingParams
from nibble.engine import build
from nibble.engine.error_monitor import MAX_BYTES, NUM_PROBES, ReferenceRows
from nibble.engine.graphs import Graphs, live
from nibble.errors import ConfigError, NibbleError
from nibble.hardware import lookup_gpu
from nibble.models import hook
from nibble.models.forward import compiled
from planning import PLAIN
from tape import record
from tiny import CHUNKED, MLA, SPARSE, save_tiny
from toys import graph_backend

pytestmark = pytest.mark.slow

TEXT = "".join(map(chr, range(32, 127))) * 4
PROMPTS = [
    torch.randint(32, 127, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (90, 3, 61, 140)
]
QUIET = {"progress": False, "ignore_eos": True}


def measured(path: Path) -> Path:
    LLM(str(path), kv_format="fp32", kv_memory="8MiB").measure_scales([TEXT], save=path / "scales.json")
    return path


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(save_tiny(tmp_path_factory.mktemp("gqa"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(save_tiny(tmp_path_factory.mktemp("mla"), "deepseek_v3", **MLA))


@pytest.fixture(scope="module")
def dsa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(save_tiny(tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", **SPARSE))


def served(path: Path, kv_format: str, rate: float = 1.0, **options: Any) -> LLM:
    usual = {"kv_scales": str(path / "scales.json"), "kv_memory": "4MiB", "max_running": 8}
    return LLM(str(path), kv_format=kv_format, watch_fidelity=rate, **{**usual, **PLAIN, **options})


def tokens(llm: LLM, prompts: list[list[int]], count: int = 10, **options: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, max_tokens=count, **QUIET, **options)
    llm.engine.scheduler.check_integrity()
    return [output.completions[0].token_ids for output in outputs]


def one_by_one(llm: LLM, count: int = 8, length: int = 50, seed: int = 0) -> dict[int, Any]:
    """Answers to so many new prompts, and what was read by then."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens(llm, [torch.randint(32, 127, (length,), generator=random).tolist()], 6)
    assert llm.error_monitor
    llm.error_monitor.numbers()
    return llm.error_monitor.readings


# What it reports


def attended(q_HD: Any, k_LGD: Any, v_LGD: Any, scale: float) -> Any:
    """By the book, head by head, in float64."""
    group = len(q_HD) // k_LGD.shape[1]
    out = []
    for head, q_D in enumerate(q_HD):
        scores = k_LGD[:, head // group] @ q_D * scale
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v_LGD[:, head // group])
    return np.array(out)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "nvfp4", "k8v4"])
def test_the_error_is_that_of_an_independent_computation(
    kv_format: str, gqa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[int, list[Any]] = defaultdict(list)
    attend = hook.attention

    def spy(ctx: Any, layer: int, q_THD: Any, streams: Any, spec: Any) -> Any:
        last, count = ctx.meta.batches[-1].stop - 1, ctx.meta.batches[-1].stop
        given[layer].append((q_THD[last].double(), *(streams[x][:count].double() for x in "kv"), spec.scale))
        return attend(ctx, layer, q_THD, streams, spec)

    llm = served(gqa, kv_format, prefix_cache=False)
    # Only now: the start attends too.
    monkeypatch.setattr(hook, "attention", spy)
    tokens(llm, PROMPTS[:1], 10)
    assert llm.error_monitor and len(llm.error_monitor.numbers()) and len(llm.error_monitor.readings) == 4
    scales = json.loads((gqa / "scales.json").read_text())
    assert scales, "the right scales are in the file; the engine's pool has them too"
    for layer, reading in llm.error_monitor.readings.items():
        view, wrong, right = llm.engine.runner.pool.view(layer), 0.0, 0.0
        for look in range(NUM_PROBES):
            steps = given[layer][: look + 1]
            k, v = (torch.cat([step[i] for step in steps]).float() for i in (1, 2))
            stored = [_round_trip(view, "k", k), _round_trip(view, "v", v)]
            q, scale = steps[-1][0].numpy(), steps[-1][3]
            answer = attended(q, k.double().numpy(), v.double().numpy(), scale)
            wrong += ((attended(q, *stored, scale) - answer) ** 2).sum()
            right += (answer**2).sum()
        assert reading.error == pytest.approx((wrong / right) ** 0.5, rel=1e-3)
        assert reading.error > 0.005, "or this compares noughts"


def _round_trip(view: Any, name: str, x: torch.Tensor) -> Any:
    entry = view.streams[name]
    codec = formats.get(entry.format.name)
    return codec.decode(codec.encode(x, entry.scale), entry.scale).double().numpy()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("gemma3n_text", None),
        ("deepseek_v3", MLA),
        ("glm_moe_dsa", SPARSE),
        ("llama4_text", CHUNKED),
    ],
)
def test_nothing_is_wrong_with_a_cache_that_loses_nothing(family: str, changes: Any, tmp_path: Path) -> None:
    """So the arithmetic that others are measured by is that of the engine: windows, sinks, caps, shared KV, latents."""
    if changes is None:
        changes = {
            "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
            "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8,
        }  # fmt: skip
    path = save_tiny(tmp_path, family, **{"sliding_window": 16, **changes})
    llm = LLM(
        str(path), kv_format="fp32", kv_memory="4MiB", max_running=4, watch_fidelity=1.0, token_budget=32
    )
    found = one_by_one(llm, 3)
    assert sorted(found) == sorted({layer for group in llm.plan.groups for layer in group.layers})
    assert max(reading.error for reading in found.values()) < 1e-5
    kinds = {group.group.kind for group in llm.plan.groups}
    assert kinds == {{"deepseek_v3": "mla", "glm_moe_dsa": "dsa"}.get(family, "mha")}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "nvfp4", "nvfp4+rot", "nvfp4+kmean+rot", "mxfp4"])
def test_a_sound_cache_errs_as_its_format_does(kv_format: str, gqa: Path) -> None:
    llm = served(gqa, kv_format)
    for reading in one_by_one(llm, 12).values():
        assert 0.6 < reading.error / reading.format_error < 1.6
    assert llm.error_monitor and (llm.error_monitor.samples, llm.error_monitor.alerts) == (12, 0)


def test_fewer_bits_are_told_from_more(gqa: Path) -> None:
    def mean(kv_format: str) -> float:
        return float(np.mean([reading.error for reading in one_by_one(served(gqa, kv_format), 4).values()]))

    errors = [mean(kv_format) for kv_format in ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4")]
    assert errors == sorted(errors) and errors[-1] > 50 * errors[1] > 50 * errors[0]


# Planted faults


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "nibble.fidelity"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize(("stream", "times"), [("k", 0.02), ("k", 1e8), ("v", 0.02)])
def test_a_wrong_scale_is_found(
    kv_format: str, stream: str, times: float, gqa: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = one_by_one(served(gqa, kv_format))
    scales = json.loads((gqa / "scales.json").read_text())
    _multiply(scales, stream, times, layer=3)
    wrong = tmp_path / "scales.json"
    wrong.write_text(json.dumps(scales))
    caplog.clear()
    llm = served(gqa, kv_format, kv_scales=str(wrong))
    found = one_by_one(llm)
    assert found[3].error > 2 * sound[3].error and found[3].is_over
    assert not any(reading.is_over for layer, reading in found.items() if layer != 3)
    assert (
        llm.error_monitor
        and llm.error_monitor.alerts == 1
        and llm.error_monitor.numbers()["fidelity_alert"] == 1
    )
    (told,) = warnings(caplog)
    assert "layer 3" in told and "--kv-scales" in told


def _multiply(scales: Any, stream: str, times: float, layer: int) -> None:
    """Changes a scale in nibble's own file, which keeps largest magnitudes."""
    amax = scales["layers"][str(layer)]["amax"]
    amax[stream] *= times


def test_damaged_pages_are_found_once_an_episode(gqa: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = served(gqa, "nvfp4", prefix_cache=False)
    sound = one_by_one(llm)
    assert llm.error_monitor and not warnings(caplog)
    for episode in (1, 2):
        for seed in range(3):
            _answer_over_damage(llm, seed)
        llm.error_monitor.numbers()
        assert max(reading.error / reading.limit for reading in llm.error_monitor.readings.values()) > 1
        assert llm.error_monitor.alerts == episode
        one_by_one(llm, 30, seed=episode)
        assert llm.error_monitor.numbers()["fidelity_alert"] == 0
    told = warnings(caplog)
    assert len(told) == 4 and ["allowed" in line for line in told] == [True, False, True, False]
    assert sound


def _answer_over_damage(llm: LLM, seed: int) -> None:
    """A request whose stored keys are overwritten once its prompt is computed."""
    pieces: list[Any] = []
    prompt = torch.randint(32, 127, (60,), generator=torch.Generator().manual_seed(900 + seed)).tolist()
    ticket = llm.engine.submit(
        prompt, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0), pieces.append
    )
    llm.engine.step()
    lease = ticket[0].lease
    assert lease
    for view in llm.engine.runner.pool.views.values():
        for page in lease.pages:
            view.streams["k"].planes[0][page] ^= 0x77
    while llm.engine.busy:
        llm.engine.step()


@pytest.mark.parametrize("kind", ["gqa", "mla", "dsa"])
def test_a_wrong_kernel_is_found(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = served(request.getfixturevalue(kind), "fp8_e4m3")
    assert not any(reading.is_over for reading in one_by_one(llm).values())
    attend = TorchRef.forward
    monkeypatch.setattr(TorchRef, "forward", lambda *given: attend(*given).roll(1, dims=1))
    assert all(reading.is_over for reading in one_by_one(llm, seed=1).values())
    assert llm.error_monitor and llm.error_monitor.alerts == 1


def test_a_limit_may_be_given(gqa: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = served(gqa, "nvfp4", fidelity_alert=0.001)
    assert {reading.limit for reading in one_by_one(llm, 2).values()} == {0.001}
    (told,) = warnings(caplog)
    assert "another --kv-format" in told
    assert llm.error_monitor and llm.error_monitor.alerts == 1
    assert not any(r.is_over for r in one_by_one(served(gqa, "nvfp4", fidelity_alert=0.9)).values())


def test_what_is_no_number_is_over_any_limit(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = served(gqa, "fp8_e4m3", fidelity_alert=9e9)
    attend = TorchRef.forward
    monkeypatch.setattr(TorchRef, "forward", lambda *given: attend(*given) * float("nan"))
    with pytest.raises(NibbleError, match="not finite"):
        tokens(llm, PROMPTS[:1], 3)
    assert llm.error_monitor and llm.error_monitor.numbers()["fidelity_alert"] == 1
    assert llm.error_monitor.readings[0].error == float("inf")
    monkeypatch.undo()
    one_by_one(llm)
    assert llm.error_monitor.numbers()["fidelity_alert"] == 0, "and is forgotten"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watch_fidelity": 1.5}, "from 0 to 1, not 1.5"),
        ({"watch_fidelity": float("nan")}, "from 0 to 1"),
        ({"watch_fidelity": "often"}, "must be a number, not 'often'"),
        ({"fidelity_alert": 0.1}, "needs watch_fidelity"),
        ({"fidelity_alert": -1.0, "watch_fidelity": 0.1}, "above 0"),
        ({"fidelity_alert": True, "watch_fidelity": 0.1}, "a number or None, not True"),
    ],
)
def test_what_cannot_be_watched_for(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(model="demo", **options)


# Answers and books


@pytest.mark.sample(4)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("kind", ["gqa", "mla", "dsa"])
def test_answers_are_those_without_it(kind: str, kv_format: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    expected = tokens(served(path, kv_format, 0.0), PROMPTS, logprobs=2)
    sampled = tokens(served(path, kv_format, 0.0), PROMPTS, temperature=1.0, seed=3)
    for options in ({}, {"token_budget": 7}, {"token_budget": 64, "max_running": 2}):
        llm = served(path, kv_format, **options)
        assert tokens(llm, PROMPTS, logprobs=2) == expected
        assert tokens(served(path, kv_format, **options), PROMPTS, temperature=1.0, seed=3) == sampled
        assert llm.error_monitor and llm.error_monitor.numbers()["fidelity_samples"] >= 1
        assert not llm.error_monitor.numbers()["fidelity_alert"]


def test_logits_are_the_same_to_the_last_bit(gqa: Path) -> None:
    def logits(rate: float) -> list[Any]:
        llm, seen = served(gqa, "nvfp4", rate), list[Any]()
        forward = llm.engine.runner.forward
        llm.engine.runner.forward = lambda batch: seen.append(forward(batch)) or seen[-1]  # type: ignore[method-assign]
        tokens(llm, PROMPTS)
        return seen

    pairs = list(zip(logits(0.0), logits(1.0), strict=True))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)


def test_without_a_rate_there_is_nothing(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room, no watch, and no step that anybody looks at."""

    def no(*_: Any, **__: Any) -> None:
        pytest.fail("a watch was made")

    monkeypatch.setattr(build, "ReferenceRows", no)
    monkeypatch.setattr(build, "ErrorMonitor", no)
    llm, seen = served(gqa, "nvfp4", 0.0), list[Any]()
    attend = hook.attention
    monkeypatch.setattr(
        hook, "attention", lambda ctx, *given: seen.append(ctx.observer) or attend(ctx, *given)
    )
    tokens(llm, PROMPTS)
    assert llm.error_monitor is None and llm.engine.runner.error_monitor is None
    assert len(seen) > 50 and set(seen) == {None}


def test_a_share_is_drawn_and_one_at_a_time(gqa: Path) -> None:
    llm = served(gqa, "nvfp4", 0.25, seed=5)
    one_by_one(llm, 40, length=20)
    assert llm.error_monitor and 4 <= llm.error_monitor.samples <= 18
    crowd = served(gqa, "nvfp4")
    tokens(crowd, PROMPTS)
    found = crowd.error_monitor
    assert found and (found.numbers()["fidelity_samples"], found.skipped["busy"]) == (1, 3)


def test_room_is_bounded_and_all_layers_have_their_turn(gqa: Path) -> None:
    llm = served(gqa, "nvfp4")
    assert llm.error_monitor
    rows = llm.error_monitor.rows
    assert rows.turn(0) == (0, 1, 2, 3) and rows.turn(1) == (4, 5, 0, 1)
    assert rows.tokens == 1024 and rows._memory.nbytes == 4 * 1024 * 128 * 4
    large = ReferenceRows(llm.plan, 1 << 20, torch.device("cpu"))
    assert large.tokens == 4096
    assert large._memory.nbytes <= MAX_BYTES


def test_a_gpu_has_the_room_planned() -> None:
    def runtime(rate: float) -> int:
        made = build.plan_engine(
            Config(model="demo", kv_format="nvfp4", watch_fidelity=rate), lookup_gpu("H100")
        )
        return made.budget.runtime

    assert runtime(0.1) - runtime(0.0) == ERROR_MONITOR_BYTES > 3 * MAX_BYTES


def test_cached_and_long_requests_are_left_out(gqa: Path) -> None:
    llm = served(gqa, "nvfp4", max_context=160)
    for _ in range(2):
        tokens(llm, PROMPTS[3:], 12)
    assert llm.error_monitor
    assert llm.error_monitor.numbers()["fidelity_samples"] == 1 and llm.error_monitor.skipped["cached"] == 1
    tokens(llm, [PROMPTS[3][::-1] + PROMPTS[1] + PROMPTS[0][:14]], 2)
    assert llm.error_monitor.skipped["long"] == 1
    assert "1 cached" not in llm.error_monitor.summary and "requests compared: 1" in llm.error_monitor.summary


def test_a_request_that_finds_pages_on_its_way_is_left_out(gqa: Path) -> None:
    """Two of the same prompt, whose second one skips what the first has stored by then."""
    llm = served(gqa, "nvfp4", token_budget=48)
    assert len(set(tokens(llm, [PROMPTS[3], PROMPTS[3]]))) == 1
    assert llm.error_monitor
    counts = llm.error_monitor.numbers()
    assert counts["fidelity_samples"] + sum(llm.error_monitor.skipped.values()) == 2
    assert max(reading.error / reading.format_error for reading in llm.error_monitor.readings.values()) < 2


def test_books_balance_after_aborts(gqa: Path) -> None:
    llm = served(gqa, "nvfp4", token_budget=32)
    assert llm.error_monitor
    for steps in (1, 2, 6):  # in its prompt, in its prompt, and in its answer
        ticket = llm.engine.submit(
            PROMPTS[3][steps:], SamplingParams(max_tokens=50, temperature=0), lambda _: None
        )
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort(ticket)
        llm.error_monitor.numbers()
        assert llm.error_monitor._sample is None
    assert llm.error_monitor.skipped["ended"] == 2 and llm.error_monitor.samples == 1
    tokens(llm, PROMPTS[:1])
    assert llm.error_monitor.numbers()["fidelity_samples"] == 2
    assert all(reading.error / reading.format_error < 2 for reading in llm.error_monitor.readings.values())


def test_preempted_requests_are_compared_right(gqa: Path) -> None:
    page = served(gqa, "nvfp4", 0.0).plan
    options = {"max_context": 200, "max_running": 4, "token_budget": 24, "kv_format": "nvfp4"}
    memory = -(-220 // page.page_size) * page.layout.bytes_per_page
    for prefix_cache in (False, True):
        llm = served(gqa, **options, kv_memory=str(memory), prefix_cache=prefix_cache)
        asked = [PROMPTS[2], PROMPTS[0], PROMPTS[3][:50]]
        assert tokens(llm, asked, 40) == tokens(served(gqa, "nvfp4", 0.0), asked, 40)
        one_by_one(llm, 4)
        assert llm.engine.scheduler.metrics.preemptions > 0
        assert llm.error_monitor and llm.error_monitor.samples >= 1 and llm.error_monitor.alerts == 0
        assert llm.error_monitor._sample is None


def test_a_sample_survives_its_preemption(gqa: Path) -> None:
    """Its rows are computed again, or were kept before: either way they are those of its tokens."""
    llm = served(gqa, "nvfp4", prefix_cache=False)
    ticket = llm.engine.submit(
        PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True, temperature=0), lambda _: None
    )
    other = llm.engine.submit(
        PROMPTS[1], SamplingParams(max_tokens=9, ignore_eos=True, temperature=0), lambda _: None
    )
    llm.engine.step()
    llm.engine.scheduler._preempt(ticket[0])
    while llm.engine.busy:
        llm.engine.step()
    assert llm.error_monitor and other and ticket[0].num_preemptions == 1
    assert llm.error_monitor.numbers()["fidelity_samples"] == 1 and llm.error_monitor.skipped["busy"] == 1
    assert all(
        0.4 < reading.error / reading.format_error < 2 for reading in llm.error_monitor.readings.values()
    )


def test_a_fault_of_the_watch_harms_no_request(
    gqa: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(served(gqa, "nvfp4", 0.0), PROMPTS)
    llm = served(gqa, "nvfp4")

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for a copy")

    monkeypatch.setattr(ReferenceRows, "compare", fails)
    assert tokens(llm, PROMPTS) == expected
    assert llm.error_monitor and llm.error_monitor.numbers()["fidelity_skipped_failed"] >= 1
    assert (
        llm.error_monitor.samples == llm.error_monitor.alerts == 0
        and "this sample is lost" in warnings(caplog)[0]
    )


def test_a_step_that_fails_leaves_no_false_alert(gqa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = served(gqa, "nvfp4")

    def fails(*_: Any) -> None:
        raise RuntimeError("a kernel died")

    with monkeypatch.context() as broken:
        broken.setattr(TorchRef, "forward", fails)
        output = llm.engine.submit(PROMPTS[0], SamplingParams(max_tokens=4, temperature=0), lambda _: None)
        llm.engine.step()
    assert output[0].is_finished and llm.error_monitor
    assert llm.error_monitor.numbers()["fidelity_alerts"] == llm.error_monitor.samples == 0
    assert llm.error_monitor.skipped["failed"] == 1


# Compiled models, recorded steps, a host tier


@pytest.mark.parametrize("how", [record, live], ids=["recorded", "live"])
def test_decode_steps_of_a_sample_are_not_replayed(how: Any, tiny: Path) -> None:
    """What a graph holds no Python sees: those steps are computed over the graph's buffers, all others replayed."""
    backend = backends_register()
    try:
        options = {"kv_format": "nvfp4", "kv_scales": "one", "kv_memory": "2MiB", "max_running": 6, **PLAIN}

        def make(rate: float) -> LLM:
            llm = LLM(str(tiny), **options, watch_fidelity=rate)
            graph_backend.make_recordable(llm.engine.runner.pool)
            runner = llm.engine.runner
            runner.record(Graphs((2, 4, 8), runner.device, how))
            llm.engine.overlap = True
            return llm

        expected = tokens(make(0.0), PROMPTS, 20)
        llm = make(1.0)
        graphs, replays = llm.engine.runner.graphs, list[int]()
        assert graphs
        replay = graphs.replay
        graphs.replay = lambda size: replays.append(size) or replay(size)  # type: ignore[method-assign]
        assert tokens(llm, PROMPTS, 20) == expected
        assert llm.error_monitor and llm.error_monitor.numbers()["fidelity_samples"] == 1
        assert llm.error_monitor.alerts == 0 and len(replays) == 19 - (NUM_PROBES - 1)
    finally:
        backend()


def backends_register() -> Any:
    from nibble.attention import backends

    name = backends.register(graph_backend.info(graph_backend.Masked)).name
    return lambda: backends.unregister(name)


def test_compiled_models_are_watched(gqa: Path) -> None:
    torch._dynamo.reset()
    llm = served(gqa, "nvfp4")
    llm.engine.runner._run = compiled(unpacked(llm), "aot_eager")
    found = one_by_one(llm, 3)
    assert len(found) == 6 and all(
        0.4 < reading.error / reading.format_error < 2 for reading in found.values()
    )


def test_a_host_tier_is_watched(dsa: Path) -> None:
    """Frames for two requests: latents come back from the host in a smaller format."""
    layout = served(dsa, "fp8_e4m3", 0.0, page_size=16).plan.layout
    index = 8 * 400 * (layout.bytes_per_token - layout.without_index.bytes_per_token)
    memory = str((2 * 400 + 8 * 80) * layout.without_index.bytes_per_token + index)
    options = {"hisparse": "buffer=32", "kv_memory": memory, "page_size": 16, "max_context": 400}
    random = torch.Generator().manual_seed(3)
    asked = [torch.randint(32, 127, (250 + 9 * i,), generator=random).tolist() for i in range(6)]
    llm = served(dsa, "fp8_e4m3", **options)
    assert tokens(llm, asked, 30) == tokens(served(dsa, "fp8_e4m3", 0.0, max_context=400), asked, 30)
    assert llm.tier and llm.tier.residency.stats.spilled > 0
    assert (
        llm.error_monitor
        and llm.error_monitor.numbers()["fidelity_samples"] >= 1
        and llm.error_monitor.alerts == 0
    )
