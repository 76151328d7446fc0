"""The first tokens exactly (`kv_sinks`): by position alone, against the definition of test_kv_window.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import ANSWER, OTHERS, PROMPT, answer, measured, preempting
from test_kv_window import FAMILIES, TOLERANCE, dense_logits, difference, engine, engine_logits

from nibble import LLM
from nibble.errors import ConfigError
from tiny import CHUNKED, MLA, SPARSE, save_tiny

SINKS = 16
Found = tuple[tuple[int, ...], torch.Tensor, int]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model with latents and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("latents"), "deepseek_v3", **MLA))


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [16, 48])
@pytest.mark.parametrize("kv_format", ["nvfp4", "nvfp4+kmean+rot", "fp8_e4m3"])
def test_it_is_the_definition(kv_format: str, sinks: int, tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, kv_format, 20, kv_sinks=sinks)
    assert llm.plan.sinks == sinks and llm.plan.page_size == 16
    expected = dense_logits(llm, tiny[0], PROMPT, 20, sinks)
    for chunk in (512, 64, 7, 1):
        assert difference(engine_logits(llm, PROMPT, chunk), expected) < TOLERANCE, chunk


def test_sinks_off_by_a_page_are_noticed(tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, "nvfp4", 16, kv_sinks=32)
    for other in (16, 48):
        expected = dense_logits(llm, tiny[0], PROMPT, 16, other)
        assert difference(engine_logits(llm, PROMPT, 512), expected) > 5 * TOLERANCE


def test_they_are_whole_pages(tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, "nvfp4", 16, kv_sinks=3, page_size=32)
    assert llm.plan.sinks == 32
    assert difference(engine_logits(llm, PROMPT, 7), dense_logits(llm, tiny[0], PROMPT, 16, 32)) < TOLERANCE


def test_all_exact_is_exact(tiny: tuple[Path, Path]) -> None:
    exact, llm = engine(tiny, "fp32", 0), engine(tiny, "nvfp4", 16, kv_sinks=80)
    assert difference(engine_logits(llm, PROMPT, 7), engine_logits(exact, PROMPT, 7)) < 1e-5


def test_layers_with_a_window_of_their_own_have_none(tmp_path: Path) -> None:
    model = measured(save_tiny(tmp_path, "gpt_oss", **FAMILIES["gpt_oss"]))
    llm = engine(model, "nvfp4", 8, kv_sinks=16)
    expected = dense_logits(llm, model[0], PROMPT, 8, 16)
    for chunk in (512, 7):
        assert difference(engine_logits(llm, PROMPT, chunk), expected) < TOLERANCE, chunk
    text = str(llm.plan)
    assert "the first 16 tokens in float32" in text and "because of a window of 24 tokens" in text


# ---- the same answer, however computed -------------------------------------------------------------------------------


def same_bits(found: Found, cold: Found) -> None:
    assert found[0] == cold[0]
    assert torch.equal(found[1], cold[1])


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "kv_format"),
    [("tiny", "nvfp4+kmean+rot"), ("tiny", "fp8_e4m3"), ("latents", "nvfp4_ds_mla"), ("latents", "nvfp4")],
)
@pytest.mark.parametrize("sinks", [16, 48])
def test_same_answer_however_computed(
    model: str, kv_format: str, sinks: int, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(model)

    def llm(**options: Any) -> LLM:
        return engine(checkpoint, kv_format, 10, kv_sinks=sinks, **options)

    whole = llm()
    cold = answer(whole, [PROMPT])
    hit = answer(whole, [PROMPT])
    assert (cold[2], hit[2]) == (0, 80)
    same_bits(hit, cold)
    for chunk in (1, 7, 64):
        same_bits(answer(llm(token_budget=chunk), [PROMPT]), cold)
    same_bits(answer(llm(), [PROMPT, *OTHERS]), cold)
    for pressed in (preempting(llm(prefix_cache=False)), preempting(llm())):
        same_bits(answer(pressed, [OTHERS[2], PROMPT], target=1), cold)
        assert pressed.engine.scheduler.metrics.preemptions > 0


def test_a_prefix_is_continued_with_its_sinks(tiny: tuple[Path, Path]) -> None:
    """Another end of a long beginning is computed from where they part, and sees the same sinks."""
    llm, alone = engine(tiny, "nvfp4", 10, kv_sinks=32), engine(tiny, "nvfp4", 10, kv_sinks=32)
    other = [*PROMPT[:70], *OTHERS[1][:20]]
    answer(llm, [PROMPT])
    answer(llm, [other])
    again = answer(llm, [[*other[:80], *OTHERS[2][:10]]])
    assert again[2] > 0
    same_bits(again, answer(alone, [[*other[:80], *OTHERS[2][:10]]]))


def test_sinks_that_were_evicted_are_computed_again(tiny: tuple[Path, Path]) -> None:
    llm = engine(tiny, "nvfp4", 10, kv_sinks=32)
    cold = answer(llm, [PROMPT])
    llm.engine.scheduler.manager._window.snapshots.clear()
    replayed = answer(llm, [PROMPT])
    assert replayed[2] == 0
    same_bits(replayed, cold)
    hit = answer(llm, [PROMPT])
    assert hit[2] == 80
    same_bits(hit, cold)


def test_a_wrong_sink_is_noticed(tiny: tuple[Path, Path]) -> None:
    """Copies of sinks are what a hit reads: other bytes there change the answer."""
    llm = engine(tiny, "nvfp4", 10, kv_sinks=16)
    cold = answer(llm, [PROMPT])
    manager, exact = llm.engine.scheduler.manager, llm.engine.runner.exact
    first = next(page for page in range(manager.num_tokens // 16) if manager.snapshot_of(page) is not None)
    exact.pool.view(0).streams["v"].planes[0][manager.snapshot_of(first)] += 1
    assert not torch.equal(answer(llm, [PROMPT])[1], cold[1])


def test_without_sinks_nothing_changes(tiny: tuple[Path, Path]) -> None:
    with_zero, without = engine(tiny, "nvfp4", 10, kv_sinks=0), engine(tiny, "nvfp4", 10)
    assert with_zero.plan.fingerprint == without.plan.fingerprint
    assert engine(tiny, "nvfp4", 10, kv_sinks=1).plan.fingerprint != without.plan.fingerprint
    same_bits(answer(with_zero, [PROMPT]), answer(without, [PROMPT]))
    assert len(answer(without, [PROMPT])[0]) == ANSWER


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_window_comes_with_them(tiny: tuple[Path, Path]) -> None:
    llm = LLM(str(tiny[0]), kv_format="fp8_e4m3", kv_scales=str(tiny[1]), kv_sinks=4, kv_memory="8MiB")
    assert (llm.plan.window, llm.plan.sinks) == (64, 16)
    exact = LLM(str(tiny[0]), kv_format="fp32", kv_sinks=4, kv_memory="8MiB")
    assert (exact.plan.window, exact.plan.sinks) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_window": 0, "kv_sinks": 4}, "kv_sinks needs an exact window; leave kv_window out"),
        ({"kv_sinks": -1}, r"kv_sinks must lie in \[0, 1024\], not -1"),
        ({"kv_sinks": 1025}, r"kv_sinks must lie in \[0, 1024\], not 1025"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int], message: str, tiny: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny[0]), kv_format="nvfp4", **options)


@pytest.mark.parametrize(
    ("family", "options", "kv_format", "message"),
    [
        ("glm_moe_dsa", SPARSE, "nvfp4_ds_mla", "choose the tokens that they read"),
        (
            "mistral",
            {"sliding_window": 24},
            "nvfp4",
            "all layers of this model have a sliding window or chunks",
        ),
    ],
)
def test_models_without_first_tokens_are_refused(
    family: str, options: dict[str, Any], kv_format: str, message: str, tmp_path: Path
) -> None:
    path = save_tiny(tmp_path, family, **options)
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), kv_format=kv_format, kv_sinks=4)


def test_chunks_have_none(tmp_path: Path) -> None:
    model = measured(save_tiny(tmp_path, "llama4_text", **CHUNKED))
    cold = answer(engine(model, "nvfp4", 10, kv_sinks=16), [PROMPT])
    # A family whose last bits vary with the chunks (models/varying.py).
    found = answer(engine(model, "nvfp4", 10, kv_sinks=16, token_budget=7), [PROMPT])
    assert found[0] == cold[0] and difference(found[1], cold[1]) < TOLERANCE
