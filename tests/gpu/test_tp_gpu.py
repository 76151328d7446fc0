"""A model that is divided among two GPUs: answers of one GPU, and an end with a reason where a rank is killed.

Skipped where there are no two GPUs, or they are not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_tp_gpu.py
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from gpu_answers import divergence, near_share
from nibble import LLM, NibbleError
from nibble.errors import RankError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPT = "The sea was calm that morning, and the boats lay still. " * 8
PROMPTS = [PROMPT[: 40 * i] for i in range(1, 9)]
KL = 1e-3


def served(tp: int, scheme: str, **options: object) -> LLM:
    return LLM("demo", kv_format=scheme, tp=tp, device="cuda", kv_memory="256MiB", max_running=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention_dp", [False, True])
@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
def test_answers_of_two_gpus_are_those_of_one(scheme: str, attention_dp: bool) -> None:
    with served(1, scheme) as llm:
        expected_TV = llm.logits(PROMPT)
    with served(2, scheme, attention_dp=attention_dp) as llm:
        assert divergence(expected_TV, llm.logits(PROMPT)) < KL
        # Over recorded steps, whose sums are in the graphs of both ranks.
        assert llm.engine.runner.graphs is not None
        assert near_share(llm, [llm.tokenizer.encode(text) for text in PROMPTS], 32) > 0.97


def test_a_killed_rank_ends_the_engine_with_the_reason() -> None:
    with served(2, "bf16") as llm:
        ranks = llm.engine.ranks
        assert ranks is not None
        stream = llm.stream(PROMPT, max_tokens=400, ignore_eos=True)
        next(stream)
        os.kill(ranks.pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(NibbleError, match="rank 1 of 2 was killed by signal 9"):
            for _ in stream:
                pass
        assert time.monotonic() - began < 20
        with pytest.raises(RankError):
            llm.generate("again", max_tokens=1)
