"""A smaller model that drafts: the same answers, its pages given back and counted in the memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_hybrid_invariance import QWEN3_NEXT
from test_speculative import ANSWER, DRAWN, GREEDY, PARAMS, PROMPTS, answers, same
from test_speculative import engine as small_engine

from bits import preempting
from nibble import LLM, SamplingParams
from nibble.engine.speculation_plan import room
from nibble.errors import CapacityError, ConfigError
from tiny import save_model, save_tiny

pytestmark = pytest.mark.usefixtures("untimed")


def engine(model: Path, **options: Any) -> LLM:
    """With room for the exact window beside a model that drafts."""
    return small_engine(model, **{"kv_memory": "32MiB", **options})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other weights and fewer layers: what it says has little to do with the answer."""
    return save_tiny(tmp_path_factory.mktemp("small"), seed=4, num_hidden_layers=1)


def rates(llm: LLM) -> tuple[int, int]:
    counts = llm.engine.speculation.counts  # type: ignore[union-attr]
    return counts.accepted, counts.drafted


def draft_of(llm: LLM) -> Any:
    return llm.engine.speculation.drafter  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_a_model_drafts_for_itself(kv_format: str, params: dict[str, Any], tiny: Path) -> None:
    """By the same random numbers it draws the very tokens, where its cache is exact as the other's."""
    expected = answers(engine(tiny, kv_format="fp32"), PROMPTS, **params)
    llm = engine(tiny, kv_format="fp32", speculative=f"draft:{tiny},kv_format=fp32")
    for _ in range(2):
        same(answers(llm, PROMPTS, **params), expected)
    accepted, drafted = rates(llm)
    assert accepted == drafted > 0
    other = engine(tiny, kv_format=kv_format, speculative=f"draft:{tiny},kv_format={kv_format}")
    same(answers(other, PROMPTS, **params), answers(engine(tiny, kv_format=kv_format), PROMPTS, **params))
    accepted, drafted = rates(other)
    assert accepted > 0.2 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["auto", "5"])
def test_another_model_drafts(tokens: str, tiny: Path, small: Path) -> None:
    llm = engine(tiny, speculative=f"draft:{small}", speculative_tokens=tokens)
    plain = engine(tiny)
    for params in (GREEDY, DRAWN, {**DRAWN, **PARAMS["grammar"]}, {**DRAWN, **PARAMS["several"]}):
        same(answers(llm, PROMPTS, **params), answers(plain, PROMPTS, **params))
    accepted, drafted = rates(llm)
    assert 0 < accepted < drafted
    manager = draft_of(llm).manager
    manager.check_integrity()
    answers(llm, PROMPTS[:1], **GREEDY)
    assert len(manager.leases) <= 1, "pages of requests that have ended are free"


@pytest.mark.slow
def test_prompts_longer_than_a_step_and_preemption(tiny: Path, small: Path) -> None:
    prompts = [PROMPTS[0], PROMPTS[2]]
    expected = answers(engine(tiny), prompts, **GREEDY)
    for path in (tiny, small):
        llm = preempting(engine(tiny, speculative=f"draft:{path}", token_budget=16))
        same(answers(llm, prompts, **GREEDY), expected)
        assert rates(llm)[1] > 0
        draft_of(llm).manager.check_integrity()


def test_too_few_pages_for_drafts_are_no_matter(tiny: Path) -> None:
    expected = answers(engine(tiny), PROMPTS, **GREEDY)
    llm = engine(tiny, speculative=f"draft:{tiny}")
    allocator = draft_of(llm).manager._allocator
    allocator.allocate(allocator.num_free - 3)
    same(answers(llm, PROMPTS, **GREEDY), expected)


def test_longer_than_the_small_models_context(tiny: Path, tmp_path: Path) -> None:
    short = save_tiny(tmp_path, seed=4, max_position_embeddings=96)
    expected = answers(engine(tiny), PROMPTS, **GREEDY)
    llm = engine(tiny, speculative=f"draft:{short}")
    same(answers(llm, PROMPTS, **GREEDY), expected)


def test_memory_is_shared(tiny: Path, small: Path) -> None:
    alone = engine(tiny, kv_format="fp8_e4m3", kv_memory="4MiB").budget
    llm = engine(tiny, kv_format="fp8_e4m3", kv_memory="4MiB", speculative=f"draft:{small}")
    runner = draft_of(llm).runner
    main, draft = llm.budget, runner.pool
    assert main.pages < alone.pages
    assert abs(main.tokens - draft.pages * runner.plan.page_size) < 0.1 * main.tokens, (
        "room for the same tokens"
    )
    used = room(main) + draft.pages * runner.plan.layout.bytes_per_page
    assert 0.95 * (4 << 20) < used <= 4 << 20
    with pytest.raises(CapacityError):
        engine(tiny, speculative=f"draft:{small}", kv_memory="100KiB")


def test_what_cannot_draft(tiny: Path, tmp_path: Path) -> None:
    hybrid = save_tiny(tmp_path / "hybrid", "qwen3_next", **QWEN3_NEXT)
    with pytest.raises(ConfigError, match="recurrent state"):
        engine(tiny, speculative=f"draft:{hybrid}")
    wide = save_tiny(tmp_path / "wide", vocab_size=5000)
    with pytest.raises(ConfigError, match="5000 tokens, and not 320"):
        engine(tiny, speculative=f"draft:{wide}")
    from tiny import save_tokenizer

    foreign = save_tokenizer(save_model(tmp_path / "foreign"), symbols=100)
    with pytest.raises(ConfigError, match="tokenizers differ"):
        engine(tiny, speculative=f"draft:{foreign}")
    with pytest.raises(ConfigError, match="write it as draft:PATH"):
        engine(tiny, speculative="draft")


def test_closed_with_the_engine(tiny: Path, small: Path) -> None:
    llm = engine(tiny, speculative=f"draft:{small}")
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=ANSWER))
    llm.close()
    assert llm.is_closed
