"""The start-up test: right kernels pass and leave no trace, wrong ones stop the start, with the route's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble import LLM, BackendError
from nibble.attention import backends
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.cache.pool import KVView
from nibble.config import Config
from nibble.engine.build import build
from nibble.engine.warmup import self_test
from nibble.formats.base import raw
from nibble.kernels.types import AttentionBatch, AttentionParams, Rope
from nibble.model_spec import Phase
from nibble.models import checkpoint
from nibble.models.linear import KERNELS
from tiny import MLA, SPARSE, save_tiny


class Wrong(TorchRef):
    """The reference, with something planted in one phase."""

    phase = Phase.DECODE
    fault = "forgets"

    def plant(self, batch: AttentionBatch, params: AttentionParams) -> tuple[AttentionBatch, AttentionParams]:
        if batch.phase is not self.phase:
            return batch, params
        if self.fault == "forgets":  # the newest token
            seq_lens = [max(1, length - 1) for length in batch.seq_lens]
            batch = AttentionBatch.from_lens(batch.phase, 0, batch.query_lens, seq_lens, batch.page_table_BN)
        elif self.fault == "pages":  # takes pages to lie side by side
            first = batch.page_table_BN[:, :1]
            beside = first + torch.arange(batch.page_table_BN.shape[1], dtype=torch.int32)
            batch = replace(batch, page_table_BN=beside.remainder(batch.page_table_BN.max() + 1).int())
        elif self.fault == "scale":
            params = replace(params, scale=params.scale * 1.1)
        elif self.fault == "window":
            params = replace(params, window=None)
        elif self.fault == "chosen":
            params = replace(params, topk_slots_TK=None)
        return batch, params

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
        return super().prepare(q_THD, view, *self.plant(batch, params))

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any
    ) -> Tensor:
        out = super().forward(q_THD, view, *self.plant(batch, params), state)
        return out.fill_(float("nan")) if batch.phase is self.phase and self.fault == "nan" else out


@pytest.fixture
def wrong() -> Iterator[type[Wrong]]:
    class Planted(Wrong):
        pass

    reference = backends.get("torch_ref")
    rows = tuple(replace(row, gathers=False) for row in reference.support)
    backends.register(replace(reference, name="toy_wrong", adapter=Planted, support=rows))
    yield Planted
    backends.unregister("toy_wrong")


OPTIONS: dict[str, Any] = {"kv_format": "nvfp4", "kv_scales": "one", "kv_memory": "1MiB", "max_running": 4}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("fault", ["forgets", "pages", "scale", "nan"])
def test_a_wrong_kernel_stops_the_start(wrong: type[Wrong], fault: str, phase: Phase, tiny: Path) -> None:
    wrong.phase, wrong.fault = phase, fault
    expected = f"backend toy_wrong attends wrongly in {phase} of nvfp4@nhd, page 16 (layer group full)"
    with pytest.raises(BackendError, match=re.escape(expected)):
        LLM(str(tiny), **OPTIONS)


def test_a_forgotten_window_stops_the_start(wrong: type[Wrong], tmp_path: Path) -> None:
    wrong.fault = "window"
    with pytest.raises(
        BackendError, match=r"toy_wrong attends wrongly in decode of .*\(layer group sliding\)"
    ):
        LLM(str(save_tiny(tmp_path, "gemma3_text", sliding_window=512)), **OPTIONS)


def test_sparse_attention_that_looks_at_all_stops_the_start(wrong: type[Wrong], tmp_path: Path) -> None:
    wrong.fault = "chosen"
    with pytest.raises(
        BackendError, match=r"toy_wrong attends wrongly in decode of nvfp4.*\(layer group sparse\)"
    ):
        LLM(str(save_tiny(tmp_path, "glm_moe_dsa", **SPARSE)), **OPTIONS)


def test_wrong_bytes_stop_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that stores values halved: reading is right then, and all phases agree with each other."""
    engine, _ = build(Config(model=str(tiny), **OPTIONS))
    runner = engine.runner
    write = runner.pool.write
    monkeypatch.setattr(
        runner.pool,
        "write",
        lambda layer, streams, *slots: write(layer, {**streams, "v": streams["v"] / 2}, *slots),
    )
    with pytest.raises(
        BackendError, match=r"torch_ref stores v wrongly in prefill of nvfp4@nhd.*--attention-backend"
    ):
        self_test(runner.plan, runner.pool, runner.backends)


def test_wrong_rotations_stop_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models leave rotary positions to the writer: one that turns keys the other way is found."""
    engine, _ = build(Config(model=str(tiny), **OPTIONS))
    runner = engine.runner
    write = runner.pool.write_with_rope

    def turned_back(
        layer: int, q: Tensor, streams: Any, slots: Tensor, exact: Any, rope: Rope, *, keeps_keys: bool
    ) -> Any:
        q, _ = write(layer, q, streams, slots, exact, rope, keeps_keys=keeps_keys)
        back = replace(rope, sin_TR=-rope.sin_TR)
        return q, write(layer, q, streams, slots, exact, back, keeps_keys=keeps_keys)[1]

    monkeypatch.setattr(runner.pool, "write_with_rope", turned_back)
    with pytest.raises(BackendError, match="torch_ref stores k wrongly in extend of nvfp4@nhd"):
        self_test(runner.plan, runner.pool, runner.backends)


def test_it_can_be_left_out(wrong: type[Wrong], tiny: Path) -> None:
    build(Config(model=str(tiny), **OPTIONS), test=False)


def test_kernels_of_packed_layers_are_tested_before_an_engine_is_ready(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(served: list[Any], most_rows: int) -> None:
        assert most_rows
        raise BackendError("17 rows are off")

    monkeypatch.setattr(
        checkpoint, "prepare_quantized", lambda model: setattr(model, KERNELS, SimpleNamespace(test=fail))
    )
    with pytest.raises(BackendError, match="17 rows are off"):
        build(Config(model=str(tiny), **OPTIONS))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("pages", [1, 3, 40])
def test_the_pool_is_left_as_it_was(family: str, pages: int, tmp_path: Path) -> None:
    """Poisoned bytes too, in every layer; whatever the pool's size."""
    path = str(save_tiny(tmp_path, family))
    size = LLM(path, kv_format="k8v4", kv_scales="one", kv_memory="1MiB").plan.layout.bytes_per_page
    config = Config(
        model=path,
        kv_format="k8v4",
        kv_scales="one",
        kv_memory=str(pages * size),
        max_context=16,
        max_running=1,
    )
    engine, made = build(config, poison=True)
    assert made.budget.pages == pages
    for view in engine.runner.pool.views.values():
        for entry in view.streams.values():
            assert all((raw(plane).view(torch.uint8) == 0xFF).all() for plane in entry.planes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n_text", "gemma2", "deepseek_v3", "glm_moe_dsa"])
def test_all_kinds_of_layers_pass(family: str, tmp_path: Path) -> None:
    """Windows, sinks, score capping, layers that read what others store, and latents."""
    shared = {"num_kv_shared_layers": 1, "num_hidden_layers": 6}
    more = {"gemma3n_text": shared, "deepseek_v3": MLA, "glm_moe_dsa": SPARSE}.get(family, {})
    LLM(str(save_tiny(tmp_path, family, **more)), **{**OPTIONS, "kv_memory": "2MiB"})
