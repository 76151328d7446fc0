"""nibble.transformers over hybrid models: generate() of plain Transformers with recurrent states in slots.

Tokens are the engine's and logits those of the model by itself; then what Transformers does with caches: padding,
turns, beams, drafts that are taken back, copies, and calls that fail midway.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nibble.transformers as nt
from families import tiny_model
from nibble import LLM, ConfigError, RequestError
from nibble.attention import recurrent as layers
from nibble.config import STATE_FORMATS
from nibble.hardware import lookup_gpu
from nibble.models import recurrent
from nibble.models.hub import quiet
from nibble.transformers import cache as caches
from nibble.transformers.cache import CACHE
from nibble.transformers.states import TAKE_BACK
from tiny import QWEN3_NEXT, save_tiny

PAD = 0


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [tokens(count, seed) for seed, count in enumerate((5, 41, 18))]


def padded(prompts: list[list[int]]) -> Tensor:
    longest = max(map(len, prompts))
    return torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT)


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def cache(model: Any, **options: Any) -> nt.NibbleCache:
    return nt.NibbleCache(model, **{"kv_format": "fp32", "kv_scales": "one", **options})


def generate(
    model: Any, ids: Tensor, past: nt.NibbleCache | None, count: int = 20, **options: Any
) -> list[list[int]]:
    given = {
        "max_new_tokens": count, "do_sample": False, "pad_token_id": PAD, "attention_mask": (ids != PAD).long(),
        **options,
    }  # fmt: skip
    return model.generate(ids, **{CACHE: past, **given})[:, ids.shape[1] :].tolist()


def logits(model: Any, parts: list[list[int]], past: nt.NibbleCache) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([part]), past_key_values=past).logits[0] for part in parts])


@pytest.mark.parametrize(
    ("kv_format", "state_format"), [("nvfp4", name) for name in STATE_FORMATS] + [("bf16", "int8")]
)
def test_tokens_are_those_of_the_engine(kv_format: str, state_format: str, path: Path, model: Any) -> None:
    """In one batch with padding, while the engine has no padding at all."""
    options = {"kv_format": kv_format, "kv_scales": "one", "state_format": state_format}
    with LLM(str(path), kv_window=0, max_context=96, kv_memory="4MiB", **options) as llm:
        expected = [
            list(one.completions[0].token_ids)
            for one in llm.generate(PROMPTS, max_tokens=20, ignore_eos=True)
        ]
        past = cache(model, **options)
        assert generate(model, padded(PROMPTS), past) == expected
        assert past.plan.fingerprint == llm.plan.fingerprint
    used = past._store.states
    assert used and used.num_used_slots == 3 and past.nbytes > used.nbytes > 0


@pytest.mark.parametrize(
    "family", ["qwen3_next", "kimi_linear", "bamba", "falcon_h1", "jamba", "lfm2", "minimax", "zamba2"]
)
def test_logits_are_those_of_the_model_by_itself(family: str) -> None:
    """And the model stays what it is."""
    model, prompt = tiny_model(family), tokens(70, 7)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
        own = {name: dict(vars(module)) for name, module in model.named_modules()}
        found = logits(model, [prompt[:37], prompt[37:38], prompt[38:]], cache(model))
        after = model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert float((found - expected).abs().max()) < 1e-4 and expected.abs().max() > 0.5
    assert torch.equal(after, expected)
    for name, module in model.named_modules():
        assert vars(module).keys() == own[name].keys() | ({"forward"} if module is model else set()), name


def close(found: Tensor, expected: Tensor) -> bool:
    """Linear layers are the model's own here, and round a few rows otherwise than many: by up to 3e-4 in this model."""
    return found.shape == expected.shape and float((found - expected).abs().max()) < 1e-3


@pytest.mark.slow
def test_any_cut_is_the_same(model: Any) -> None:
    prompt = tokens(70, 3)
    expected = logits(model, [prompt], cache(model))
    for size in (1, 7, 16, 33):
        parts = [prompt[i : i + size] for i in range(0, len(prompt), size)]
        assert close(logits(model, parts, cache(model)), expected), size


@pytest.mark.parametrize("start", [14, 15, 16, 31, 33])
def test_drafts_are_taken_back(start: int, model: Any) -> None:
    """As many as a call may take back, across blocks and within, all of them or some."""
    prompt = tokens(70, 4)
    expected = logits(model, [prompt], cache(model))
    for count, kept in ((TAKE_BACK, 0), (TAKE_BACK, 9), (3, 1), (2, 2)):
        past, end = cache(model), start + kept
        logits(model, [prompt[:start], prompt[start:end] + [9] * (count - kept)], past)
        past.crop(end)
        assert close(logits(model, [prompt[end:-1], prompt[-1:]], past), expected[end:]), (count, kept)


def test_what_states_have_gone_past_is_not_cut(model: Any) -> None:
    prompt, past = tokens(70, 4), cache(model)
    expected = logits(model, [prompt], cache(model))
    logits(model, [prompt[:40]], past)
    least = 40 - TAKE_BACK
    with pytest.raises(RequestError, match=f"cut to {least - 1} tokens: .* here as far as {least}; reset"):
        past.crop(least - 1)
    assert past.columns == 40, "a refused crop has changed something"
    past.crop(least)
    assert close(logits(model, [prompt[least:]], past), expected[least:])
    past.reset()
    assert past._store.states and past._store.states.num_used_slots == 0
    assert close(logits(model, [prompt], past), expected)


def test_drafts_of_generate_are_refused_by_transformers(model: Any) -> None:
    """Whatever the cache. Callers of the model itself may draft, and crop what is not accepted."""
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, torch.tensor(PROMPTS[:1]), cache(model), prompt_lookup_num_tokens=4)


def test_beams_copies_and_repeats_share_their_past(model: Any) -> None:
    ids = torch.tensor(PROMPTS[1:2])
    beams = {"num_beams": 3, "num_return_sequences": 2}
    with torch.no_grad():
        assert generate(model, ids, cache(model), **beams) == generate(model, ids, None, **beams)
    past = cache(model)
    logits(model, PROMPTS[1:2], past)
    states = past._store.states
    assert states and states.num_used_slots == 1
    copy = deepcopy(past)
    copy.batch_repeat_interleave(3)
    assert states.num_used_slots == 1, "what is the same is stored once"
    with torch.no_grad():
        rows = model(torch.tensor([[1], [2], [3]]), past_key_values=copy).logits[:, 0]
        for token, row in zip((1, 2, 3), rows, strict=True):
            alone = deepcopy(past)
            assert close(model(torch.tensor([[token]]), past_key_values=alone).logits[0, 0], row)
    assert states.num_used_slots >= 4


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("start", [15, 16, 30])
def test_a_call_that_fails_midway_leaves_no_trace(
    start: int, count: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(start + count, 6)
    expected = logits(model, [prompt], cache(model))
    past = cache(model)
    logits(model, [prompt[: start - 1], prompt[start - 1 : start]], past)
    whole = layers.recurrence

    def fail(states: Any, layer: int, *args: Any, **kwargs: Any) -> Tensor:
        if layer == 3:
            raise RuntimeError("out of luck")
        return whole(states, layer, *args, **kwargs)

    used = past._store.states.num_used_slots
    with monkeypatch.context() as patch:
        patch.setattr(layers, "recurrence", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            logits(model, [[7] * count], past)
    assert past.columns == start and past._store.states.num_used_slots == used
    assert close(logits(model, [prompt[start:]], past), expected[start:])


def test_a_wrong_state_is_noticed(model: Any) -> None:
    """The comparisons above can fail."""
    prompt, past = tokens(70, 8), cache(model)
    expected = logits(model, [prompt], cache(model))
    logits(model, [prompt[:48]], past)
    past.crop(32)
    for state in past._store.states._layers.values():
        state.planes[0].mul_(1.1)
    assert not close(logits(model, [prompt[32:]], past), expected[32:])


def test_a_layer_that_computes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced is compared with the family's own code, as when an engine loads it."""
    model = tiny_model("bamba")
    scan = recurrent.FUNCTIONS["mamba2_chunk_scan"]
    monkeypatch.setitem(
        recurrent.FUNCTIONS, "mamba2_chunk_scan", lambda *args, **kwargs: scan(*args, **kwargs).roll(1, 1)
    )
    with pytest.raises(ConfigError, match="is not what the family's own code computes"):
        cache(model)


def test_what_is_not_there_yet_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="state_interval is an option of Nibble's engine"):
        cache(model, state_interval=16)
    monkeypatch.setattr(caches, "probe", lambda _: lookup_gpu("h200"))
    with pytest.raises(ConfigError, match=r"a NibbleCache has those on CPUs alone; nibble\.LLM"):
        cache(model)
