"""RoPE types whose frequencies follow the batch's longest request in Transformers must not do so here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nibble import LLM
from nibble.errors import ConfigError
from nibble.models.mla import fix_rope
from tiny import save_model

ORIGINAL, LONGEST = 32, 128
HALF = 8
"""Frequencies of a head: half its 16 values."""
THETA = {"rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + i for i in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
    **THETA,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": ORIGINAL,
            "max_position_embeddings": LONGEST,
            "sliding_window": None,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA},
            "max_position_embeddings": ORIGINAL,
        },
    ),
}
PLAIN = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
SHORT = [(7 * i) % 300 + 1 for i in range(10)]
LONG = [(11 * i) % 300 + 1 for i in range(60)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = FAMILIES[request.param]
    return save_model(tmp_path_factory.mktemp(request.param), family, **{"head_dim": 16, **options})


def serve(folder: Path, max_context: int = LONGEST) -> LLM:
    return LLM(str(folder), kv_format="fp32", max_context=max_context, max_running=4, kv_memory="8MiB")


def unmodified(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def logprobs(llm: LLM, *prompts: list[int]) -> list[tuple[Any, ...]]:
    """What the first answer's tokens are, with the log-probabilities of the 3 likeliest."""
    first = llm.generate(list(prompts), max_tokens=4, logprobs=3, ignore_eos=True)[0].completions[0]
    return [(entry.token, entry.logprob, entry.top) for entry in first.logprobs]


def test_a_long_request_does_not_change_a_short_one(checkpoint: Path) -> None:
    llm = serve(checkpoint)
    assert logprobs(llm, SHORT) == logprobs(llm, SHORT, LONG)


def test_without_the_fix_it_would(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.models.checkpoint.fix_rope", lambda *_: [])
    llm = serve(checkpoint)
    alone, joined = logprobs(llm, SHORT), logprobs(llm, SHORT, LONG)
    assert abs(alone[0][1] - joined[0][1]) > 1e-3 or alone[0][0] != joined[0][0]


def test_longrope_of_short_contexts_is_that_of_short_sequences(tmp_path: Path) -> None:
    family, options = FAMILIES["longrope"]
    folder = save_model(tmp_path, family, **{"head_dim": 16, **options})
    expected = unmodified(folder, SHORT)
    assert (serve(folder, ORIGINAL).logits(SHORT) - expected).abs().max() < 1e-4
    assert (serve(folder, LONGEST).logits(SHORT) - expected).abs().max() > 1e-2


def test_long_contexts_are_those_of_sequences_as_long(checkpoint: Path) -> None:
    ids = [(13 * i) % 300 + 1 for i in range(96)]
    found = serve(checkpoint, max_context=len(ids)).logits(ids)
    assert (found - unmodified(checkpoint, ids)).abs().max() < 1e-4


def test_dynamic_serves_up_to_its_factor_and_no_further(tmp_path: Path) -> None:
    family, options = FAMILIES["dynamic"]
    folder = save_model(tmp_path, family, **options)
    assert serve(folder, 4 * ORIGINAL)._engine_plan.model_spec.max_context == 4 * ORIGINAL
    with pytest.raises(ConfigError, match=f"more than the {4 * ORIGINAL} tokens"):
        serve(folder, 4 * ORIGINAL + 1)


@pytest.mark.parametrize("name", PLAIN)
def test_other_types_are_left_alone(name: str, tmp_path: Path) -> None:
    options = {"rope_parameters": {**PLAIN[name], **THETA}, "max_position_embeddings": LONGEST}
    folder = save_model(tmp_path, "llama", **options)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    before = model.model.rotary_emb.inv_freq.clone()
    assert fix_rope(model, LONGEST) == []
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert (serve(folder).logits(LONG) - unmodified(folder, LONG)).abs().max() < 1e-4
