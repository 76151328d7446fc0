"""The last layer attends for the rows whose logits are computed alone, and answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_graph_rope import joining, prepared
from test_piecewise import saved
from torch import Tensor

from nibble import LLM
from nibble.attention import layer as layers
from nibble.engine import step_tokens
from nibble.kernels.types import LogitRows
from nibble.models import forward
from tiny import save_tiny

PROMPTS = [list(range(5, n)) for n in (90, 6, 47, 30, 11)]
BUDGET = 24
"""Tokens of a step: long prompts take several, beside requests that decode."""


def answers(llm: LLM, **options: Any) -> list[tuple[tuple[int, ...], list[float]]]:
    llm.engine.scheduler.manager.clear()
    outputs = llm.generate(
        PROMPTS, max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, progress=False, **options
    )
    done = [output.completions[0] for output in outputs]
    return [(tuple(one.token_ids), [entry.logprob for entry in one.logprobs or ()]) for one in done]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the last layer attended for, each time that it did so for some alone."""
    counts, own = list[int](), layers._attend_for_logits

    def attend(ctx: Any, layer: int, logits: LogitRows, *others: Any) -> Tensor:
        assert layer == len(ctx.plan.owner) - 1
        counts.append(len(logits.rows_S))
        out = own(ctx, layer, logits, *others)
        others_are_zero = torch.ones(len(out), dtype=torch.bool).index_fill(0, logits.rows_S, False)
        assert not out[others_are_zero].any()
        return out

    monkeypatch.setattr(layers, "_attend_for_logits", attend)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "is_apart"),
    [
        ("llama", {"kv_format": "bf16"}, True),
        ("qwen3", {"kv_format": "nvfp4"}, True),
        ("qwen3", {"kv_format": "nvfp4", "kv_window": 0}, True),
        ("qwen3", {"kv_format": "nvfp4", "kv_window": 16, "kv_sinks": 16, "page_size": 16}, True),
        ("gemma3_text", {"kv_format": "fp8_e4m3"}, True),
        ("mistral", {"kv_format": "k8v4"}, True),
        ("falcon_h1", {"kv_format": "bf16"}, True),
        # Drafts have rows of their own.
        ("llama", {"kv_format": "bf16", "speculative": "lookup"}, None),
        # What is behind attention is a product for each head.
        ("deepseek_v3", {"kv_format": "bf16"}, False),
    ],
)
def test_answers(
    family: str,
    options: dict[str, Any],
    is_apart: bool | None,
    rows: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = saved(family, tmp_path)
    options = {
        "kv_memory": "8MiB",
        "kv_scales": "one",
        "max_running": 8,
        "token_budget": BUDGET,
        **options,
    }
    with LLM(str(path), **options) as llm:
        llm.engine.runner._run = forward.compiled(prepared(path), joining([]))
        expected = answers(llm)
        assert not rows
        monkeypatch.setattr(step_tokens, "LONG_PROMPTS", 8)
        found = answers(llm)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        for (_, one), (_, other) in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert is_apart is None or bool(rows) == is_apart
        if is_apart:
            # Ends of several prompts, and requests that decode beside them.
            assert {2, 3, 4} <= {*rows}
            rows.clear()
            llm.logits(PROMPTS[0])
            llm.generate([PROMPTS[0]], max_tokens=1, prompt_logprobs=1, progress=False)
            assert not rows, "logits of all tokens are asked for"
            llm.engine.scheduler.manager.clear()
            llm.generate([PROMPTS[0][1:]], max_tokens=1, progress=False)
            assert rows == [0, 0, 0, 1]


@pytest.mark.slow
def test_an_observer_sees_all_rows(rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tokens, "LONG_PROMPTS", 8)
    path, seen = save_tiny(tmp_path, "llama"), list[Tensor]()

    class Probe:
        def probe(self, _: object) -> Probe:
            return self

        def observe(self, layer: int, q: Tensor, streams: Any, params: Any, out: Tensor) -> None:
            seen.append(out)

    with LLM(str(path), kv_format="bf16", kv_memory="2MiB", max_running=8, token_budget=BUDGET) as llm:
        llm.engine.runner._run = forward.compiled(prepared(path), joining([]))
        llm.engine.runner.error_monitor = Probe()  # type: ignore[assignment]
        answers(llm)
    # Behind the last token may be rows of padding.
    assert seen and not rows and all(out[:-1].any(-1).all() for out in seen)
