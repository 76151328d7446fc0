"""Model families: Nibble's logits must be those of the unmodified Transformers model, for every family it serves.

Each family is a tiny random checkpoint, served in fp32 over a paged cache, whole and in chunks of 7 tokens. The same
comparison must notice planted errors (K off by a thousandth, a window, a soft cap or sinks left out), else it would
prove nothing: greedy tokens alone would not notice the first of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nibble.transformers as nt
from families import FAMILIES, LOOPED, SCALAR_GATE, TOLERANCE, VOCAB, Family, make
from nibble import LLM
from nibble.engine.build import run_prompt
from nibble.kernels.types import AttentionParams
from nibble.models import hook, linear
from nibble.models.hub import quiet
from survey import error_in_keys
from tiny import MLA, save_model


@dataclass
class Served:
    """One family, loaded once: the unmodified model, and the same checkpoint behind an LLM."""

    name: str
    path: Path

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @cached_property
    def reference(self) -> Any:
        torch.manual_seed(0)
        model = make(self.name, self.family.config(self.name))
        model = model.float().eval()
        with quiet():
            model.save_pretrained(self.path)
        return model

    @cached_property
    def expected(self) -> Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([PROMPT]), use_cache=False).logits[0]

    @cached_property
    def llm(self) -> LLM:
        assert self.reference is not None
        return LLM(
            str(self.path), kv_format="fp32", max_context=96, max_running=4, token_budget=7, kv_memory="8MiB"
        )

    def error(self) -> float:
        """Largest difference of a logit, over all positions, in chunks of token_budget."""
        return float((self.llm.logits(PROMPT) - self.expected).abs().max())


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=generator).tolist()


PROMPT = tokens(40, seed=1)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(request.param, tmp_path_factory.mktemp(request.param))
    assert served.llm.engine  # loaded before any test plants an error
    yield served


def test_logits_are_those_of_the_unmodified_model(served: Served) -> None:
    assert served.expected.isfinite().all()
    assert served.expected.abs().max() > 0.5, "logits so small that an error would not show"
    assert served.error() < TOLERANCE


@pytest.mark.sample(20)
def test_logits_do_not_depend_on_chunks(served: Served) -> None:
    """To the last bit, on a CPU: a difference of one would flip a step of a quantised cache now and then."""
    whole, *others = (
        torch.cat(run_prompt(served.llm.engine.runner, served.llm.engine.scheduler.manager, PROMPT, chunk))
        for chunk in (len(PROMPT), 7, 1)
    )
    assert float((whole - served.expected).abs().max()) < TOLERANCE
    for found in others:
        if served.name in (*SCALAR_GATE, *LOOPED) or not linear.is_available():
            assert float((found - whole).abs().max()) < TOLERANCE
        else:
            assert torch.equal(found, whole)


def test_geometry_is_observed(served: Served) -> None:
    model_spec, family = served.llm._engine_plan.model_spec, served.family
    assert sorted({group.window for group in model_spec.groups}, key=str) == sorted(family.windows, key=str)
    assert model_spec.owner == (family.owner or tuple(range(model_spec.layers)))
    assert any(stream.heads == family.heads[0] for group in model_spec.groups for stream in group.streams)
    assert any(group.head_dim == family.heads[1] for group in model_spec.groups)
    assert any(group.softcap for group in model_spec.groups) == ("softcap" in family.asks)
    assert any(group.sinks for group in model_spec.groups) == ("sinks" in family.asks)


@pytest.mark.sample(20)
def test_a_planted_error_in_keys_is_caught(served: Served) -> None:
    with error_in_keys():
        assert served.error() > TOLERANCE


def test_what_a_layer_asks_is_not_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in served.family.asks:
        with monkeypatch.context() as patch:
            if ask == "chosen":
                patch.setattr(hook, "_topk_indices", lambda *_: None)
            else:
                patch.setattr(
                    hook, "AttentionParams", lambda *given, ask=ask: _without(AttentionParams(*given), ask)
                )
            assert served.error() > 10 * TOLERANCE, ask


def _without(spec: AttentionParams, ask: str) -> AttentionParams:
    window, softcap, sinks = spec.window, spec.softcap, spec.sinks_H
    return AttentionParams(
        spec.scale,
        None if ask == "window" else window,
        None if ask == "softcap" else softcap,
        None if ask == "sinks" else sinks,
    )


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3", "glm_moe_dsa"]
)
def test_greedy_answers_in_a_batch_are_those_of_generate(name: str, tmp_path: Path) -> None:
    served = Served(name, tmp_path)
    prompts = [tokens(count, seed) for seed, count in enumerate((5, 37, 18))]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        served.reference.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts
    ]
    found = served.llm.generate(prompts, max_tokens=16, temperature=0, ignore_eos=True)
    assert [
        prompt + list(out.completions[0].token_ids) for prompt, out in zip(prompts, found, strict=True)
    ] == expected


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3n_text",
        "gemma4_text",
        "gpt2",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "deepseek_v32",
    ],
)
def test_generate_over_a_nibble_cache_answers_as_without(name: str, tmp_path: Path) -> None:
    """Families whose layers ask for more, or share; the usual ones are in test_transformers.py."""
    model = Served(name, tmp_path).reference
    ids = torch.tensor([tokens(37, 1), [0] * 20 + tokens(17, 2)])
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    given = {"attention_mask": (ids != 0).long(), **options}
    expected = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, past_key_values=nt.NibbleCache(model, "fp32"), **given), expected)


@pytest.mark.skipif(not linear.is_available(), reason="this build of torch cannot pack weights")
@pytest.mark.parametrize("width", [64, 1024, 2048, 4096])
def test_products_do_not_depend_on_how_many_rows_there_are(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, width, generator=generator) for rows in (96, 40))
    packed = linear.pack(weight)
    whole = linear.packed_linear(x, packed, None)
    assert torch.allclose(whole, x @ weight.T, atol=1e-3)
    for rows in (1, 2, 3, 7, 8, 9, 16, 33):
        assert torch.equal(linear.packed_linear(x[:rows], packed, None), whole[:rows]), rows


@pytest.mark.skipif(not linear.is_available(), reason="this build of torch cannot pack weights")
@pytest.mark.parametrize("width", [1, 5, 8, 40, 72, 96])
@pytest.mark.parametrize("function", [torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus])
def test_gates_do_not_depend_on_how_many_rows_there_are(width: int, function: Any) -> None:
    """Activation functions compute what does not fill a vector in another way: with other last bits, and quantisation
    can make a step of those."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(width, 64, generator=generator) / 8, torch.randn(40, 64, generator=generator)
    packed = linear.pack(weight)
    whole = function(linear.packed_linear(x, packed, None))
    for rows in (1, 2, 3, 7, 8, 9, 16, 33):
        assert torch.equal(function(linear.packed_linear(x[:rows], packed, None)), whole[:rows]), rows


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    """Its checkpoints name code of their own, of which nothing is run."""
    path = save_model(tmp_path, "deepseek_v3", **MLA)
    prompt = list(range(20, 45))
    options: dict[str, Any] = {"kv_format": "fp32", "max_context": 64, "kv_memory": "2MiB"}
    expected = LLM(str(path), **options).logits(prompt)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    file.write_text(json.dumps(config))
    llm = LLM(str(path), **options)
    assert torch.equal(llm.logits(prompt), expected)
    assert [group.group.kind for group in llm.plan.groups] == ["mla"]
