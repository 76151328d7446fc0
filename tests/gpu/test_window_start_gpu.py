"""The start-up test of the exact window on a GPU: what is served passes in 16 bits, and planted faults stop the start.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nibble import LLM, BackendError
from nibble.attention import layer, window
from nibble.kernels import near
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SERVED = [("demo", "nvfp4+kmean+rot"), ("demo", "mxfp4"), ("demo-mla", "nvfp4"), ("demo-mla", "nvfp4_ds_mla")]


def opened(model: str, kv_format: str, tokens: int) -> LLM:
    return LLM(
        model,
        device="cuda",
        kv_format=kv_format,
        kv_window=tokens,
        kv_memory="768MiB",
        compile=False,
        graphs=False,
        max_running=8,
        max_context=2048,
    )


@pytest.mark.parametrize(("model", "kv_format"), SERVED)
def test_what_is_served_passes(model: str, kv_format: str) -> None:
    for tokens in (0, 64, 96, 1000):
        with opened(model, kv_format, tokens) as llm:
            print(model, kv_format, tokens, llm.engine.startup.seconds["self-test"])


@pytest.mark.parametrize("phase", [Phase.EXTEND, Phase.DECODE])
@pytest.mark.parametrize(("model", "kv_format"), SERVED)
def test_exact_pages_of_another_request_stop_the_start(
    model: str, kv_format: str, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    near_batch, prompt_attention = window.near_batch, near.near_prompt_attention

    def mixed(batch: AttentionBatch) -> AttentionBatch:
        if batch.phase is phase and batch.exact_table_BN is not None:
            return replace(batch, exact_table_BN=batch.exact_table_BN.roll(1, 0))
        return batch

    def of_kernel(q: Any, streams: Any, k: Any, v: Any, batch: AttentionBatch, *rest: Any) -> Any:
        return prompt_attention(q, streams, k, v, mixed(batch), *rest)

    monkeypatch.setattr(window, "near_batch", lambda batch, *rest: near_batch(mixed(batch), *rest))
    monkeypatch.setattr(near, "near_prompt_attention", of_kernel)
    with pytest.raises(BackendError, match=rf"exact window of 64 tokens \(by .*\) wrongly in {phase}"):
        opened(model, kv_format, 64)


# Of sparse attention the near part is what was chosen, and has no window.
@pytest.mark.parametrize("kv_format", ["nvfp4+kmean+rot", "mxfp4"])
def test_a_token_in_neither_part_stops_the_start(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near_params = layer.near_params
    monkeypatch.setattr(layer, "near_params", lambda params, tokens: near_params(params, tokens - 1))
    with pytest.raises(BackendError, match=r"exact window of 64 tokens \(by .*\) wrongly in prefill"):
        opened("demo", kv_format, 64)
