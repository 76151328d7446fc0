"""Draft tokens with an exact window: a step over several tokens of a request gives the rows of decode steps, bit by bit.

Drafts that are taken back leave nothing behind, in pages or in exact copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import measured
from torch import Tensor

from nibble import LLM
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.model_spec import Phase
from tiny import CHUNKED, MLA, SPARSE, save_tiny

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("qwen3", {}, "nvfp4+kmean+rot"),
    "sinks": ("gpt_oss", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2}, "mxfp4"),
    "caps": ("gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0, "head_dim": 32}, "nvfp4"),
    "chunks": ("llama4_text", CHUNKED, "nvfp4"),
    "latents": ("deepseek_v3", MLA, "nvfp4"),
    "chosen": ("glm_moe_dsa", SPARSE, "nvfp4_ds_mla"),
}
TEXTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (78, 21, 140)
]
WRONG = 255
ANSWER = 12
"""Tokens that are computed after the prompts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Path]]]:
    made: dict[str, tuple[Path, Path]] = {}
    for kind, (family, changes, _) in KINDS.items():
        made[kind] = measured(save_tiny(tmp_path_factory.mktemp(kind), family, **changes))
    yield made


class Writers:
    """Requests whose tokens are known beforehand, beside an engine."""

    def __init__(self, models: dict[str, tuple[Path, Path]], kind: str, window: int, **options: Any) -> None:
        path, scales = models[kind]
        given = {"kv_memory": "8MiB", "max_running": 8, **options}
        llm = LLM(str(path), kv_format=KINDS[kind][2], kv_scales=str(scales), kv_window=window, **given)
        self.runner, self.manager = llm.engine.runner, llm.engine.scheduler.manager
        self.requests = [Request(str(i), text) for i, text in enumerate(TEXTS)]
        self.logits: list[list[Tensor]] = [[] for _ in TEXTS]
        for request in self.requests:
            request.lease = self.manager.open(request.token_ids, "")
        self.step([len(text) - ANSWER for text in TEXTS], [0] * len(TEXTS))
        self.logits = [[] for _ in TEXTS]

    def step(self, counts: Sequence[int], wrong: Sequence[int], phase: Phase = Phase.PREFILL) -> None:
        """A step of so many tokens of each request, the last of which are `wrong` drafts and taken back."""
        chunks = []
        for request, text, count, bad in zip(self.requests, TEXTS, counts, wrong, strict=True):
            start = request.num_stored_tokens
            request.token_ids[:] = text[: start + count - bad] + [WRONG] * bad
            if count:
                drafts = count - 1 if phase is Phase.VERIFY else 0
                self.manager.reserve(request.lease, start + count, drafts)
                chunks.append(ScheduledRequest(request, start, count, phase, True))
        rows = iter(self.runner.forward(Batch.from_scheduled(chunks), every=True))
        for request, logits, count, bad in zip(self.requests, self.logits, counts, wrong, strict=True):
            logits.extend([next(rows) for _ in range(count)][: count - bad])
            self.manager.commit(request.lease, request.token_ids, len(request.token_ids) - bad)
        self.manager.check_integrity()

    @property
    def left(self) -> list[int]:
        return [
            len(text) - request.num_stored_tokens for text, request in zip(TEXTS, self.requests, strict=True)
        ]


def decoded(writers: Writers) -> list[Tensor]:
    while any(writers.left):
        writers.step([min(left, 1) for left in writers.left], [0] * len(TEXTS), Phase.DECODE)
    return [torch.stack(rows) for rows in writers.logits]


def verified(writers: Writers, drafts: int) -> list[Tensor]:
    """Each request keeps another part of its drafts, and steps differ in length."""
    number = 0
    while any(writers.left):
        right = [min(1 + (number + i) % (drafts + 1), left) for i, left in enumerate(writers.left)]
        wrong = [drafts - i % 2 + 1 - count if count else 0 for i, count in enumerate(right)]
        wrong = [max(bad, 0) for bad in wrong]
        writers.step([good + bad for good, bad in zip(right, wrong, strict=True)], wrong, Phase.VERIFY)
        number += 1
    return [torch.stack(rows) for rows in writers.logits]


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_give_the_rows_of_decode_steps(kind: str, window: int, models: Any) -> None:
    expected = decoded(Writers(models, kind, window))
    for drafts in (1, 4):
        found = verified(Writers(models, kind, window), drafts)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            # Steps of other lengths change last bits of this family, without a window too.
            limit = 1e-5 if kind == "chunks" else 0
            assert (ours - theirs).abs().max() <= limit


@pytest.mark.parametrize("page_size", [1, 64])
def test_drafts_reach_beyond_a_page_and_the_window(page_size: int, models: Any) -> None:
    """More drafts than the window has tokens: whatever part is taken back, the newest that stay are exact."""
    options = {"page_size": page_size}
    expected = decoded(Writers(models, "heads", 3, **options))
    found = verified(Writers(models, "heads", 3, **options), 7)
    assert all(map(torch.equal, found, expected))


def test_copies_that_lack_drafts_are_noticed(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were drafts taken for tokens that stay, only the newest of them would have exact copies."""
    expected = decoded(Writers(models, "heads", 3, page_size=1))
    writers = Writers(models, "heads", 3, page_size=1)
    reserve = writers.manager.reserve
    monkeypatch.setattr(writers.manager, "reserve", lambda lease, upto, num_drafts=0: reserve(lease, upto))
    monkeypatch.setattr(writers.manager, "check_integrity", lambda: None)
    found = verified(writers, 7)
    assert not all(map(torch.equal, found, expected))
