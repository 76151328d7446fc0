"""The start-up test looks at the exact window: right parts pass and leave no trace, planted faults stop the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import measured

from nibble import BackendError
from nibble.attention import layer, window
from nibble.attention.planner.plan import Route
from nibble.config import Config
from nibble.engine import warmup
from nibble.engine.build import build
from nibble.engine.engine import Engine
from nibble.engine.model_runner import adapters
from nibble.engine.warmup import self_test
from nibble.formats.base import raw
from nibble.kernels import near
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase
from tiny import CHUNKED, MLA, SPARSE, save_tiny

OPTIONS: dict[str, Any] = {"kv_memory": "8MiB", "max_running": 4}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("qwen3", {}, "nvfp4+kmean+rot"),
    "sinks": ("gpt_oss", {"sliding_window": 512}, "nvfp4"),
    "caps": ("gemma2", {"sliding_window": 512, "attn_logit_softcapping": 5.0}, "mxfp4"),
    "chunks": ("llama4_text", CHUNKED, "nvfp4"),
    "shared": ("gemma3n_text", {"num_kv_shared_layers": 1, "num_hidden_layers": 6}, "nvfp4"),
    "latents": ("deepseek_v3", MLA, "nvfp4"),
    "chosen": ("glm_moe_dsa", SPARSE, "nvfp4_ds_mla"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Random models of each kind with their scales, made when they are needed first."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            family, changes, _ = KINDS[kind]
            made[kind] = measured(save_tiny(tmp_path_factory.mktemp(kind), family, **changes))
        return made[kind]

    return get


def engine_of(kind: str, models: Callable[[str], tuple[Path, Path]], tokens: int, **options: Any) -> Engine:
    path, scales = models(kind)
    given: dict[str, Any] = {"kv_format": KINDS[kind][2], "kv_scales": str(scales), **OPTIONS, **options}
    return build(Config(model=str(path), kv_window=tokens, **given), poison=True, test=False)[0]


def check(engine: Engine) -> None:
    runner = engine.runner
    self_test(runner.plan, runner.pool, runner.backends, runner.exact)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_right_parts_pass_and_leave_no_trace(kind: str, tokens: int, models: Any) -> None:
    engine = engine_of(kind, models, tokens)
    assert engine.runner.exact and engine.runner.exact.tokens == tokens
    check(engine)
    for pool, empty in (
        (engine.runner.pool, None),
        (engine.runner.exact.pool, engine.runner.exact.empty_page),
    ):
        for view in pool.views.values():
            planes = [raw(plane) for entry in view.streams.values() for plane in entry.planes]
            for plane in planes:
                untouched = plane if empty is None else plane[:empty]
                assert (untouched.contiguous().view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("kind", ["heads", "sinks", "latents", "chunks", "caps"])
def test_first_tokens_are_tested_too(kind: str, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(kind, models, 5, kv_sinks=40)
    assert engine.runner.exact and engine.runner.exact.sinks == 48
    check(engine)
    params = layer.sink_params
    monkeypatch.setattr(layer, "sink_params", lambda p, n: replace(params(p, n), scale=p.scale / 2))
    with pytest.raises(BackendError, match=r"attends with an exact window of 5 tokens .* and 16 sinks"):
        check(engine)


def other_window(monkeypatch: pytest.MonkeyPatch, phase: Phase, by: int) -> None:
    """Near tokens are more or fewer than they should be, and all others are read from pages, each once."""
    near_batch, far_batch, near_params = window.near_batch, window.far_batch, layer.near_params

    def shifted(batch: AttentionBatch, tokens: int) -> int:
        return tokens + by if batch.phase is phase else tokens

    monkeypatch.setattr(window, "near_batch", lambda b, n, *rest: near_batch(b, shifted(b, n), *rest))
    monkeypatch.setattr(window, "far_batch", lambda b, n: far_batch(b, shifted(b, n)))
    inner = layer._WindowedLayer.attend

    def attend(self: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(layer, "near_params", lambda p, n: near_params(p, shifted(self.batch, n)))
            return inner(self, *arguments)

    monkeypatch.setattr(layer._WindowedLayer, "attend", attend)


def near_off_by_one(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """The near part lacks a token that is not read from pages either."""
    inner, near_params = layer._WindowedLayer.attend, layer.near_params

    def attend(self: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            by = self.batch.phase is phase
            patch.setattr(layer, "near_params", lambda p, n: near_params(p, n - by))
            return inner(self, *arguments)

    monkeypatch.setattr(layer._WindowedLayer, "attend", attend)


def stale(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """Tokens are not written to exact pages: the prompt's, or the step's own where it reads them there."""
    lacking = Phase.PREFILL if phase is Phase.EXTEND else phase
    exact_slots, step = warmup._GroupTest._exact_slots, warmup._GroupTest._step

    def lazy(self: Any, route: Route, query_lens: tuple[int, ...]) -> None:
        with monkeypatch.context() as patch:
            if route.phase is lacking:
                patch.setattr(
                    warmup._GroupTest, "_exact_slots", lambda *given: torch.full_like(exact_slots(*given), -1)
                )
            step(self, route, query_lens)

    monkeypatch.setattr(warmup._GroupTest, "_step", lazy)


def of_another(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """Exact pages are those of the request beside."""
    near_batch = window.near_batch

    def mixed(batch: AttentionBatch, *rest: Any) -> Any:
        if batch.phase is phase and batch.exact_table_BN is not None:
            batch = replace(batch, exact_table_BN=batch.exact_table_BN.roll(1, 0))
        return near_batch(batch, *rest)

    monkeypatch.setattr(window, "near_batch", mixed)


def without_shift(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """Scores of far tokens lack the mean of keys, those of near ones have it."""
    inner, without_mean = layer._WindowedLayer.attend, near.without_mean

    def attend(self: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            forgetful = self.batch.phase is phase
            patch.setattr(
                near, "without_mean", lambda part, *rest: part if forgetful else without_mean(part, *rest)
            )
            return inner(self, *arguments)

    monkeypatch.setattr(layer._WindowedLayer, "attend", attend)


def refuses(engine: Engine, phase: Phase, tokens: int) -> None:
    expected = rf"attends with an exact window of {tokens} tokens \(by torch_ref\) wrongly in {phase} of.*--kv-window 0"
    with pytest.raises(BackendError, match=expected):
        check(engine)


LATER = [Phase.EXTEND, Phase.VERIFY, Phase.DECODE]


@pytest.mark.parametrize("phase", LATER)
@pytest.mark.parametrize("fault", [stale, of_another])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_exact_pages_stop_the_start(
    kind: str, fault: Any, phase: Phase, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of 16 tokens: a window of so few leaves far tokens in a chunk.
    engine = engine_of(kind, models, 64 if kind != "chunks" else 5)
    fault(monkeypatch, phase)
    refuses(engine, phase, engine.runner.exact.tokens)


@pytest.mark.parametrize("phase", LATER)
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("kind", ["heads", "sinks", "latents"])
def test_another_window_stops_the_start(
    kind: str, by: int, phase: Phase, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits too, where more error is allowed."""
    engine = engine_of(kind, models, 64, dtype="bfloat16")
    other_window(monkeypatch, phase, by)
    refuses(engine, phase, 64)


@pytest.mark.parametrize("phase", [Phase.PREFILL, *LATER])
@pytest.mark.parametrize("kind", ["heads", "caps", "latents"])
def test_a_token_in_neither_part_stops_the_start(
    kind: str, phase: Phase, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(kind, models, 64)
    near_off_by_one(monkeypatch, phase)
    refuses(engine, phase, 64)


@pytest.mark.parametrize("phase", [Phase.PREFILL, *LATER])
def test_a_merge_without_the_mean_stops_the_start(
    phase: Phase, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("heads", models, 64)
    without_shift(monkeypatch, phase)
    refuses(engine, phase, 64)


def test_a_start_looks_at_the_window(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scales = models("heads")
    of_another(monkeypatch, Phase.DECODE)
    config = Config(model=str(path), kv_format="nvfp4", kv_scales=str(scales), kv_window=64, **OPTIONS)
    with pytest.raises(BackendError, match="the start-up test failed"):
        build(config)


def test_backends_of_near_tokens_alone_are_made(models: Any) -> None:
    plan = engine_of("heads", models, 64).runner.plan
    near = tuple(replace(route, backend="sdpa") for route in plan.groups[0].near_routes)
    only_near = replace(plan, groups=(replace(plan.groups[0], near_routes=near),))
    assert set(adapters(only_near)) == {"torch_ref", "sdpa"}
