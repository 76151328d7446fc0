"""nibble.transformers: generate() of plain Transformers over a Nibble cache.

Tokens must be the engine's, for five families and more, scheme by scheme; logits over an fp32 cache those of the model
by itself. The rest is what Transformers does with caches: padding, turns, beams, drafts, copies; and what is refused.
"""

from __future__ import annotations

import gc
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import nibble.transformers as nt
from nibble import (
    LLM,
    CapacityError,
    ConfigError,
    NibbleError,
    OutOfPages,
    PromptTooLong,
    RequestError,
    ScaleError,
)
from nibble.cache.pool import PagedPool
from nibble.models.hub import quiet
from nibble.transformers.cache import CACHE
from nibble.transformers.store import FIRST_TOKENS, Row, Store
from tiny import MLA, SPARSE, save_tiny

PAD = 0
LONGEST = 37
HEADS = ("fp32", "bf16", "fp8_e4m3", "nvfp4", "mxfp4", "k8v4", "nvfp4+rot")
LATENTS = ("fp32", "bf16", "fp8_e4m3", "nvfp4")
RECORDS = ("bf16", "fp8_ds_mla", "nvfp4_ds_mla")
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, HEADS),
    "qwen3": ({}, HEADS),
    "gemma3_text": ({**WINDOWED, "tie_word_embeddings": False}, HEADS),
    "qwen3_moe": ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, HEADS),
    "gpt_oss": ({**WINDOWED, "num_local_experts": 8, "num_experts_per_tok": 2}, HEADS),
    "deepseek_v3": (MLA, LATENTS),
    "glm_moe_dsa": (SPARSE, RECORDS),
    "nemotron": ({}, ("fp32", "nvfp4")),
}


class Served:
    """One family: the model as Transformers loads it, and its checkpoint for the engine."""

    def __init__(self, family: str, path: Path) -> None:
        options, self.schemes = FAMILIES[family]
        self.path = save_tiny(path, family, **options)
        with quiet():
            self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def cache(self, scheme: str = "fp32", **options: Any) -> nt.NibbleCache:
        return nt.NibbleCache(self.model, scheme, kv_scales="one", **options)

    def generate(
        self, ids: Tensor, cache: nt.NibbleCache | None = None, count: int = 16, **options: Any
    ) -> Tensor:
        """The new tokens [B, count]."""
        given = {"max_new_tokens": count, "do_sample": False, "pad_token_id": PAD, **options}
        mask = options.pop("attention_mask", (ids != PAD).long())
        found = self.model.generate(ids, **{CACHE: cache, **given, "attention_mask": mask})
        return found[:, ids.shape[1] :]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("gemma3_text", tmp_path_factory.mktemp("gemma"))


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (count,), generator=generator).tolist()


PROMPTS = [tokens(count, seed) for seed, count in enumerate((5, LONGEST, 18))]


def padded(prompts: list[list[int]]) -> Tensor:
    longest = max(map(len, prompts))
    return torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])


@pytest.mark.slow
@pytest.mark.sample(4)
def test_tokens_are_those_of_the_engine(served: Served) -> None:
    """In one batch with padding, while the engine has no padding at all."""
    answers = set()
    for scheme in served.schemes:
        llm = LLM(
            str(served.path), kv_format=scheme, kv_scales="one", kv_window=0, max_context=64, kv_memory="2MiB"
        )
        expected = [
            list(out.completions[0].token_ids)
            for out in llm.generate(PROMPTS, max_tokens=16, ignore_eos=True)
        ]
        cache = served.cache(scheme)
        assert served.generate(padded(PROMPTS), cache).tolist() == expected, scheme
        assert cache.plan.layout.fingerprint == llm.plan.layout.fingerprint
        answers.add(str(expected))
    assert len(answers) > 1, (
        "no scheme makes a difference: this would not notice if the cache were never read"
    )


@pytest.mark.sample(4)
def test_logits_are_those_of_the_model_by_itself(served: Served) -> None:
    ids = torch.tensor([tokens(LONGEST, 7), tokens(LONGEST, 8)])
    cache = served.cache()
    with torch.no_grad():
        expected = served.model(ids, use_cache=False).logits
        found = [served.model(part, past_key_values=cache).logits for part in ids.split((20, 1, 16), 1)]
        after = served.model(ids, use_cache=False).logits
    assert float((torch.cat(found, 1) - expected).abs().max()) < 1e-4
    assert torch.equal(after, expected), "the model is not what it was"
    assert expected.abs().max() > 0.5


def test_a_batch_with_padding_answers_as_each_alone(gemma: Served) -> None:
    cache = gemma.cache("nvfp4")
    found = gemma.generate(
        padded(PROMPTS), cache, prefill_chunk_size=16
    )  # a row has nothing in the first chunk
    assert cache.tokens == sum(map(len, PROMPTS)) + 3 * 15, "padding was stored, or tokens were not"
    for prompt, answer in zip(PROMPTS, found, strict=True):
        cache.reset()
        assert torch.equal(gemma.generate(torch.tensor([prompt]), cache)[0], answer)


def test_turns_continue_where_the_cache_ends(gemma: Served) -> None:
    cache, ids = gemma.cache("nvfp4"), padded(PROMPTS)
    for turn in range(2):
        ids = torch.cat((ids, gemma.generate(ids, cache)), 1)
        ids = torch.cat((ids, torch.tensor([tokens(6, 10 + turn)] * 3)), 1)
        stored = cache.tokens
    found = gemma.generate(ids, cache)
    assert cache.tokens == stored + 3 * (16 + 6), "what was stored has been computed anew"
    assert torch.equal(found, gemma.generate(ids, gemma.cache("nvfp4")))


def test_beams_are_those_of_transformers_and_share_their_past(gemma: Served) -> None:
    ids, options = padded(PROMPTS), {"num_beams": 4, "num_return_sequences": 2, "count": 24}
    cache = gemma.cache("fp32")
    assert torch.equal(gemma.generate(ids, cache, **options), gemma.generate(ids, **options))
    unshared = sum(-(-row.num_stored_tokens // cache.plan.page_size) for row in cache._rows)
    assert cache.batch_size == 12
    assert cache._store.num_used_pages < unshared
    cache.reset()
    assert cache._store.num_used_pages == 0 and cache.batch_size == -1


def test_drafts_do_not_change_the_answer(gemma: Served) -> None:
    """Assisted decoding: several tokens at once over what is stored, and some of them cropped again."""
    ids = torch.tensor([tokens(6, 3) * 4])
    plain, drafted = gemma.cache(), gemma.cache()
    expected = gemma.generate(ids, plain, count=32)
    assert torch.equal(gemma.generate(ids, drafted, count=32, prompt_lookup_num_tokens=4), expected)
    assert drafted.tokens == plain.tokens == drafted.columns


def test_crop_forgets_columns(gemma: Served) -> None:
    cache, ids = gemma.cache("nvfp4"), padded(PROMPTS)
    first = gemma.generate(ids, cache)
    for amount in (-cache.columns + 20, 20):  # to remove, and to keep
        cache.crop(amount)
        assert cache.get_seq_length() == 20 and cache.tokens == 5 + 20 + 18 - (LONGEST - 20) * 2 + 12
        assert torch.equal(gemma.generate(ids, cache), first)
    cache.crop(0)
    assert cache.columns == LONGEST + 15


def test_a_copy_shares_its_past_and_nothing_else(gemma: Served) -> None:
    prefix, ids = gemma.cache("nvfp4"), torch.tensor([tokens(20, 1)])
    with torch.no_grad():
        gemma.model(ids, past_key_values=prefix)
    held = prefix._store.num_used_pages
    for seed in range(2):
        longer = torch.cat((ids, torch.tensor([tokens(5, seed)])), 1)
        copied = deepcopy(prefix)
        assert prefix._store.num_used_pages == held
        assert torch.equal(gemma.generate(longer, copied), gemma.generate(longer, gemma.cache("nvfp4")))
        assert prefix.tokens == 20 and copied.tokens == 40
        del copied
        gc.collect()
        assert prefix._store.num_used_pages == held


def test_the_store_keeps_rows_apart(gemma: Served) -> None:
    """Random forks, cuts and writes; every row reads back what it wrote, and all pages are accounted for."""
    layout = gemma.cache().plan.layout
    store, generator = (
        Store(layout, gemma.cache().scales, torch.device("cpu")),
        torch.Generator().manual_seed(0),
    )
    rows: list[Row] = [Row()]
    written: list[list[int]] = [[]]
    for step in range(300):
        which = int(torch.randint(len(rows), (1,), generator=generator))
        action = int(torch.randint(4, (1,), generator=generator))
        if action == 0 and len(rows) < 8:
            rows.append(store.fork(rows[which]))
            written.append(list(written[which]))
        elif action == 1:
            keep = int(torch.randint(len(written[which]) + 1, (1,), generator=generator))
            store.cut(rows[which], keep)
            written[which] = written[which][:keep]
        else:
            counts = [1 + (step + i) % 9 for i in range(len(rows))]
            store.reserve(rows, counts)
            for row, values, count in zip(rows, written, counts, strict=True):
                fresh = [1000 * step + 10 * len(values) + i for i in range(count)]
                at = torch.arange(row.num_stored_tokens, row.num_stored_tokens + count)
                slots = (
                    torch.tensor(row.pages)[at // layout.page_size] * layout.page_size + at % layout.page_size
                )
                x = torch.tensor(fresh, dtype=torch.float32)[:, None, None].expand(-1, 2, 32)
                store.pool.write(0, {"k": x, "v": x}, slots)
                values.extend(fresh)
                row.num_stored_tokens += count
        holders = [sum(page in row.pages for row in rows) for page in range(store.pages.num_pages)]
        store.pages.check_integrity(holders)
    for row, values in zip(rows, written, strict=True):
        found = store.pool.view(0).streams["k"].gather_reference(torch.tensor([row.pages], dtype=torch.int32))
        assert found[0, : len(values), 0, 0].tolist() == values
    assert store.pages.num_pages * layout.page_size > FIRST_TOKENS, "it never grew"


def test_a_cache_grows_or_says_that_it_is_full(gemma: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.transformers.store.FIRST_TOKENS", 16)
    growing, ids = gemma.cache("nvfp4"), padded(PROMPTS)
    before, expected = growing.nbytes, gemma.generate(ids, gemma.cache("nvfp4", kv_memory="4MiB"))
    assert torch.equal(gemma.generate(ids, growing), expected)
    assert growing.nbytes > 2 * before and "growing" in repr(growing)
    size = growing.plan.layout.bytes_per_page
    small = gemma.cache("nvfp4", kv_memory=7 * size)
    with pytest.raises(OutOfPages, match=r"the cache is full.*kv_memory"):
        gemma.generate(ids, small)
    assert small.nbytes == 7 * size
    small.reset()
    assert torch.equal(gemma.generate(ids[1:2], small)[0], expected[1])
    with pytest.raises(CapacityError, match="no page"):
        gemma.cache("nvfp4", kv_memory=1)


def test_a_call_that_fails_leaves_no_trace(gemma: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = gemma.cache("nvfp4"), padded(PROMPTS)
    expected = gemma.generate(ids, gemma.cache("nvfp4"))
    before = dict(vars(gemma.model.model.layers[0].self_attn))
    with monkeypatch.context() as patch:
        patch.setattr(PagedPool, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gemma.generate(ids, cache)
    assert cache._store.num_used_pages == 0 and cache.columns == 0
    assert gemma.model.config._attn_implementation == "sdpa"
    assert vars(gemma.model.model.layers[0].self_attn).keys() == before.keys()
    assert torch.equal(gemma.generate(ids, cache), expected)


def test_the_model_stays_what_it_is(tmp_path: Path) -> None:
    """MLA and an indexer are lent other parts for the time of a call; none of it is a weight, or goes into a copy."""
    for family in ("deepseek_v3", "glm_moe_dsa"):
        served = Served(family, tmp_path / family)
        names, ids = list(served.model.state_dict()), torch.tensor([PROMPTS[1]])
        cache = served.cache()
        expected = served.generate(ids, cache)
        other = deepcopy(served.model)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1.1)
        assert list(served.model.state_dict()) == list(other.state_dict()) == names
        with pytest.raises(ConfigError, match=r"made for another (Deepseek|Glm)"):
            other.generate(ids, **{CACHE: cache}, max_new_tokens=2)
        changed = other.generate(
            ids,
            **{CACHE: nt.NibbleCache(other, "fp32")},
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=PAD,
        )
        plain = other.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=PAD)
        assert torch.equal(changed, plain), "the copy computes with weights of the original"
        cache.reset()
        assert torch.equal(served.generate(ids, cache), expected)


def test_scales_are_found_measured_or_missed(gemma: Served) -> None:
    assert nt.NibbleCache(gemma.model, "nvfp4").scales.source == "measured on 1,024 tokens"
    nameless = deepcopy(gemma.model)
    nameless.name_or_path = ""  # as of a model that comes from no checkpoint
    with pytest.raises(ScaleError, match="needs a KV scale"):
        nt.NibbleCache(nameless, "nvfp4")
    text = "the quick brown fox jumps over the lazy dog; " * 4
    llm = LLM(
        str(gemma.path), kv_format="nvfp4", calibrate=[text], kv_window=0, max_context=256, kv_memory="2MiB"
    )
    expected = list(llm.generate(PROMPTS[1], max_tokens=16, ignore_eos=True).completions[0].token_ids)
    for given in (text, llm.tokenizer.encode(text)):
        cache = nt.NibbleCache(gemma.model, "nvfp4", calibrate=[given])
        assert "measured" in cache.scales.source
        assert gemma.generate(torch.tensor([PROMPTS[1]]), cache)[0].tolist() == expected
    with pytest.raises(ScaleError, match="a list of texts"):
        nt.NibbleCache(gemma.model, "nvfp4", calibrate=text)
    with pytest.raises(ScaleError, match="at least"):
        nt.NibbleCache(gemma.model, "nvfp4", calibrate=[[1, 2, 3]])


def test_a_bfloat16_model_is_planned_in_bfloat16(gemma: Served) -> None:
    model = deepcopy(gemma.model).to(torch.bfloat16)
    cache = nt.NibbleCache(model, "fp8_e4m3", kv_scales="one")
    assert cache.plan.dtype == "bfloat16"
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        found, expected = model(ids, past_key_values=cache).logits, gemma.model(ids).logits
    assert found.dtype == torch.bfloat16
    assert float((found[0, -1].float() - expected[0, -1]).norm() / expected[0, -1].norm()) < 0.5


def test_logits_are_those_that_were_asked_for(gemma: Served) -> None:
    ids, mask = padded(PROMPTS), (padded(PROMPTS) != PAD).long()
    with torch.no_grad():
        every = gemma.model(ids, attention_mask=mask, past_key_values=gemma.cache(), return_dict=False)[0]
        for keep in (1, 3, torch.tensor([30, 36])):
            found = gemma.model(
                ids, attention_mask=mask, past_key_values=gemma.cache(), logits_to_keep=keep
            ).logits
            columns = keep if isinstance(keep, Tensor) else slice(-keep, None)
            assert torch.allclose(found, every[:, columns], atol=1e-5)
    assert every.shape == (3, LONGEST, 320)
    assert not every[mask == 0].any() and every[mask == 1].any(1).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "right padding": ({"attention_mask": torch.tensor([[1] * 7 + [0], [1] * 8])}, "pad on the left"),
    "nothing but padding": ({"attention_mask": torch.zeros(2, 8)}, "nothing to compute"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(2, 1, 8, 8)}, "attention_mask must be"),
    "a mask of too few columns": ({"attention_mask": torch.ones(2, 7)}, "attention_mask must be"),
    "positions of three axes": ({"position_ids": torch.zeros(3, 2, 8)}, "position_ids"),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 8, 64)}, "inputs_embeds"),
    "weights": ({"output_attentions": True}, "output_attentions"),
    "states": ({"output_hidden_states": True}, "output_hidden_states"),
    "a loss": ({"labels": torch.zeros(2, 8)}, "labels"),
    "no cache": ({"use_cache": False}, "contradicts"),
    "no tokens": ({"input_ids": torch.zeros(2, 0)}, "no new tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_right_is_refused(gemma: Served, name: str) -> None:
    given, message = REFUSED[name]
    cache = gemma.cache()
    with pytest.raises(RequestError, match=message), torch.no_grad():
        gemma.model(**{"input_ids": torch.ones(2, 8, dtype=torch.int64), **given}, past_key_values=cache)
    assert cache.columns == 0


def test_what_contradicts_the_cache_is_refused(gemma: Served) -> None:
    cache, ids = gemma.cache(max_context=64), padded(PROMPTS)
    gemma.generate(ids, cache, count=4)
    held = cache._store.num_used_pages
    more = torch.cat((ids, torch.ones(3, 8, dtype=torch.int64)), 1)
    with pytest.raises(RequestError, match="holds 3 rows"):
        gemma.generate(more[:2], cache)
    with pytest.raises(RequestError, match="says otherwise"):
        gemma.generate(more, cache, attention_mask=torch.ones_like(more))
    with pytest.raises(PromptTooLong, match="made for 64"):
        gemma.generate(more, cache, count=40)
    cache.crop(40)
    with pytest.raises(NibbleError, match="pickled"):
        pickle.dumps(cache)
    with pytest.raises(ValueError, match="cache_implementation"):  # Transformers' own
        gemma.generate(more, cache, cache_implementation="static")
    gemma.model.train()
    with pytest.raises(ConfigError, match=r"model\.eval"):
        gemma.generate(more, cache)
    gemma.model.eval()
    assert cache._store.num_used_pages >= held
    with pytest.raises(RequestError, match="holds 3 rows"):
        gemma.generate(more[:1], cache)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2
    assert gemma.generate(more[[1, 1]], cache, count=2).shape == (2, 2)


def test_there_is_no_exact_window(gemma: Served, tmp_path: Path) -> None:
    """An option is refused, and a scheme file's is left aside: no part of the plan is about it."""
    with pytest.raises(ConfigError, match="kv_window is an option of Nibble's engine"):
        nt.NibbleCache(gemma.model, kv_window=64)
    layer = {name: {"format": "nvfp4"} for name in "kv"}
    layers = {str(i): layer for i in range(gemma.model.config.num_hidden_layers)}
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"schema": "nibble-kv-scheme-1", "layers": layers, "kv_window": 8}))
    cache = nt.NibbleCache(gemma.model, str(path), kv_scales="one")
    assert not cache.plan.window and not cache.plan.groups[0].near_routes
    ids = torch.randint(1, 256, (1, 20))
    assert gemma.generate(ids, cache, count=3).shape == (1, 3)


def test_models_that_cannot_be_judged_are_refused(gemma: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option of Nibble's engine"):
        nt.NibbleCache(gemma.model, hisparse="on")
    with pytest.raises(ConfigError, match="kv_fromat"):
        nt.NibbleCache(gemma.model, kv_fromat="nvfp4")
    with pytest.raises(ConfigError, match="that generates"):
        nt.NibbleCache(torch.nn.Linear(2, 2))
    own = type("Own", (type(gemma.model),), {})(gemma.model.config)
    with pytest.raises(ConfigError, match=r"is a Own.*a Gemma3ForCausalLM"):
        nt.NibbleCache(own)
    with pytest.raises(ConfigError, match="float64"):
        nt.NibbleCache(deepcopy(gemma.model).double())
    with pytest.raises(ConfigError, match="one device"):
        model = deepcopy(gemma.model)
        model.model.norm.to("meta")
        nt.NibbleCache(model)
    compiled = deepcopy(gemma.model)
    compiled.compile()
    with pytest.raises(ConfigError, match="compiled"):
        nt.NibbleCache(compiled)
    config = transformers.AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=64)
    with pytest.raises(ConfigError, match="cannot be served"):
        nt.NibbleCache(AutoModelForCausalLM.from_config(config))


def test_a_model_that_chose_its_attention_at_loading_is_refused(gemma: Served) -> None:
    model = deepcopy(gemma.model)
    layer = model.model.layers[1].self_attn
    layer.config = deepcopy(layer.config)
    cache = nt.NibbleCache(model, "fp32")
    layer.config = type("Config", (), {**vars(layer.config), "_attn_implementation": "sdpa"})()
    with pytest.raises(ConfigError, match=r"1 layers.*chose theirs"), torch.no_grad():
        model(torch.tensor([PROMPTS[0]]), past_key_values=cache)


def test_threads_take_turns(gemma: Served) -> None:
    """A model is lent Nibble's attention for one call at a time; each cache keeps its own books."""
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    expected = [gemma.generate(prompt, gemma.cache("nvfp4")) for prompt in ids]
    caches = [gemma.cache("nvfp4") for _ in ids]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(gemma.generate, ids, caches))
    assert all(map(torch.equal, found, expected))
