"""The bundled hybrid model: what it was trained for holds with states in 8 bits, beside K and V in 4."""

from __future__ import annotations

import pytest

from nibble import LLM
from nibble.evals import recall
from nibble.evals.perplexity import Perplexity, read_text, windows

TOKENS = 1000


@pytest.mark.slow
def test_states_in_8_bits_cost_nothing_that_shows() -> None:
    """Look-ups are exact, also those that go on from a context's snapshot, and perplexity is within half a percent."""
    found: list[float] = []
    for kv_format, state_format in (("bf16", "fp32"), ("bf16", "int8"), ("nvfp4", "int8")):
        options = {
            "kv_format": kv_format,
            "state_format": state_format,
            "kv_memory": "64MiB",
            "device": "cpu",
        }
        with LLM("demo-hybrid", **options) as llm:
            found.append(perplexity(llm))
            cases = recall.cases(7, 6, 600, lambda text: len(llm.tokenizer.encode(text)), per_context=3)
            assert all(recall.grade(llm, cases))
            states = llm.engine.scheduler.metrics.cache.states
            assert states and states.snapshot_hits + states.snapshot_misses > 0
    assert 5 < found[0] < 12 and all(abs(value / found[0] - 1) < 0.005 for value in found[1:])


def perplexity(llm: LLM) -> float:
    """Of the first tokens of a text that the model was not trained on."""
    ids = llm.tokenizer.encode(read_text(None, "demo-hybrid").content[: 8 * TOKENS])[:TOKENS]
    total = Perplexity()
    for window in windows(ids, TOKENS):
        total.add(llm.logits(window.ids), window)
    return total.value
