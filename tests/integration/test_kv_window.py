"""The exact window: a query reads tokens nearer than W in the compute dtype and all others quantised, by position alone.

The definition is computed here, dense and apart from the engine: Transformers' own model, whose attention function reads
each key and value exactly or quantised by the distance of its token.

Shape suffixes: H heads, T tokens, D values of a head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import PROMPT, check, measured
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from nibble import LLM
from nibble.engine.build import run_prompt
from nibble.kernels import near
from nibble.kernels.near import naive
from pairs import rotated
from tiny import CHUNKED, MLA, SPARSE, save_tiny

TOLERANCE = 5e-3
"""Last bits of a key may turn a rounding to 8 bits, and so move logits by more than float32 does."""
SCHEMES = ("nvfp4", "mxfp4", "fp8_e4m3", "nvfp4+kmean+rot", "k8v4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("tiny")))


def engine(model: tuple[Path, Path], kv_format: str, window: int, **options: Any) -> LLM:
    return LLM(
        str(model[0]),
        kv_format=kv_format,
        kv_scales=str(model[1]),
        kv_window=window,
        **{"kv_memory": "8MiB", "max_running": 8, **options},
    )


# ---- the definition --------------------------------------------------------------------------------------------------


def dense_logits(llm: LLM, path: Path, ids: list[int], window: int, first: int = 0) -> Tensor:
    """Logits by the definition, in which so many first tokens may be read exactly too."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        view = llm.engine.runner.pool.view(module.layer_idx)
        q_HTD, k_HTD, v_HTD = q[0].float(), k[0].float(), v[0].float()
        group, T = len(q_HTD) // len(k_HTD), k_HTD.shape[1]
        stored_k, stored_v = (stored(view, name, x) for name, x in (("k", k_HTD), ("v", v_HTD)))
        distance = torch.arange(T)[:, None] - torch.arange(T)
        sliding = options.get("sliding_window")
        near = (distance < window) | (torch.arange(T) < (0 if sliding else first))
        wide = [x.repeat_interleave(group, 0) for x in (k_HTD, stored_k, v_HTD, stored_v)]
        scores = torch.where(near, q_HTD @ wide[0].mT, q_HTD @ wide[1].mT) * scaling
        hidden = (distance < 0) | (distance >= (sliding or T))
        weights = scores.masked_fill(hidden, -torch.inf)
        sinks = options.get("s_aux")
        if sinks is not None:
            weights = torch.cat((weights, sinks.view(-1, 1, 1).expand(-1, T, 1)), -1)
        weights = weights.softmax(-1)[..., :T]
        out = (weights * near) @ wide[2] + (weights * ~near) @ wide[3]
        return out.transpose(0, 1)[None], None

    AttentionInterface.register("by_definition", attend)
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="by_definition", dtype=torch.float32
    )
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def stored(view: Any, name: str, x_HTD: Tensor) -> Tensor:
    """What a stream becomes in its format; keys without their transforms again."""
    entry, x_THD = view.streams[name], x_HTD.transpose(0, 1).contiguous()
    transforms = view.transforms if name == "k" else ()
    for transform in transforms:
        x_THD = transform.key(x_THD, view.k_mean_HD)
    y_THD = entry.format.decode(entry.format.encode(x_THD, entry.scale), entry.scale)
    for transform in reversed(transforms):
        y_THD = transform.key(y_THD, None) if transform.rotates else y_THD + view.k_mean_HD
    return y_THD.transpose(0, 1)


def difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max())


def engine_logits(llm: LLM, ids: list[int], chunk: int) -> Tensor:
    runner, manager = llm.engine.runner, llm.engine.scheduler.manager
    return torch.cat(run_prompt(runner, manager, ids, chunk))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("kv_format", "window"), rotated(SCHEMES, [1, 5, 16, 40, 200], 2))
def test_it_is_the_definition(kv_format: str, window: int, tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, kv_format, window)
    expected = dense_logits(llm, tiny[0], PROMPT, window)
    for chunk in (512, 7, 1):
        assert difference(engine_logits(llm, PROMPT, chunk), expected) < TOLERANCE, chunk


@pytest.mark.parametrize(("kv_format", "window"), rotated(["nvfp4+kmean+rot", "nvfp4"], [16, 1, 40]))
def test_kernels_for_near_tokens_are_given_what_they_ask(
    kv_format: str, window: int, tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their definitions stand in for them. Rows of a prompt that see no far token are left out of its far part."""
    firsts: set[int] = set()

    def attend(q_THD: Tensor, *rest: Any) -> Tensor:
        far = rest[-1]
        firsts.add(-1 if far is None else len(q_THD) - len(far.values_THD))
        return naive.near_prompt_attention(q_THD, *rest)

    llm = engine(tiny, kv_format, window)
    monkeypatch.setattr(near, "serves", lambda *_: True)
    monkeypatch.setattr(near, "near_prompt_attention", attend)
    monkeypatch.setattr(near, "near_attention", naive.near_attention)
    expected = dense_logits(llm, tiny[0], PROMPT, window)
    for chunk in (512, 7, 1):
        assert difference(engine_logits(llm, PROMPT, chunk), expected) < TOLERANCE, chunk
    assert {0, window} <= firsts


@pytest.mark.parametrize("page_size", [1, 48, 128])
def test_pages_of_any_size(page_size: int, tiny: tuple[Path, Path]) -> None:
    ids = (PROMPT * 5)[:400]
    llm = engine(tiny, "nvfp4", 20, page_size=page_size)
    expected = dense_logits(llm, tiny[0], ids, 20)
    for chunk in (150, 7):
        assert difference(engine_logits(llm, ids, chunk), expected) < TOLERANCE, chunk
    assert difference(torch.cat([engine_logits(llm, ids, 512)]), expected) < TOLERANCE


def test_a_window_off_by_one_is_noticed(tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, "nvfp4", 16)
    for other in (15, 17):
        expected = dense_logits(llm, tiny[0], PROMPT, other)
        assert difference(engine_logits(llm, PROMPT, 512), expected) > 20 * TOLERANCE


def test_all_near_is_exact(tiny: tuple[Path, Path]) -> None:
    exact = engine(tiny, "fp32", 0)
    llm = engine(tiny, "nvfp4", 128)
    assert difference(engine_logits(llm, PROMPT, 7), engine_logits(exact, PROMPT, 7)) < 1e-5


# windows, caps, sinks, shared KV, chunks
FAMILIES = {
    "gemma2": {
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
        "head_dim": 32,
    },
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
}


@pytest.mark.parametrize("window", [8, 40])
@pytest.mark.parametrize("family", ["gpt_oss"])
def test_windows_and_sinks_of_the_model(family: str, window: int, tmp_path: Path) -> None:
    model = measured(save_tiny(tmp_path, family, **FAMILIES[family]))
    llm = engine(model, "nvfp4", window)
    expected = dense_logits(llm, model[0], PROMPT, window)
    for chunk in (512, 7):
        assert difference(engine_logits(llm, PROMPT, chunk), expected) < TOLERANCE, chunk


# ---- the same answer, however computed -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kv_format", "window"), rotated(SCHEMES, [5, 16, 40]))
def test_same_answer_however_computed(kv_format: str, window: int, tiny: tuple[Path, Path]) -> None:
    check(kv_format, *tiny, kv_window=window)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "options", "kv_format"),
    [
        ("deepseek_v3", MLA, "nvfp4"),
        ("deepseek_v3", MLA, "nvfp4_ds_mla"),
        ("glm_moe_dsa", SPARSE, "nvfp4_ds_mla"),
        ("gemma2", FAMILIES["gemma2"], "nvfp4"),
        ("gpt_oss", FAMILIES["gpt_oss"], "mxfp4"),
        ("llama4_text", CHUNKED, "nvfp4"),
    ],
)
def test_same_answer_of_other_kinds(
    family: str, options: dict[str, Any], kv_format: str, tmp_path: Path
) -> None:
    check(kv_format, *measured(save_tiny(tmp_path, family, **options)), kv_window=10)
