"""Drafts change when tokens come, and never which: answers, log-probabilities, reasons and counts are those without.

A drafter that was told the answers and gets some tokens wrong makes every step accept another number of drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hybrid_invariance import QWEN3_NEXT
from test_verify_window import KINDS

from bits import preempting
from families import VOCAB, make, tiny_config
from nibble import LLM, SamplingParams
from nibble.config import Config
from nibble.engine import speculation_plan, warmup_steps
from nibble.engine.request import Completion
from nibble.errors import ConfigError
from nibble.formats import scheme
from nibble.hardware import lookup_gpu
from nibble.model_spec import HEADS
from nibble.models.hub import quiet
from pairs import rotated
from tiny import save_tiny
from toys.oracle_drafter import oracle

SCHEMES = (*scheme.fitting(*HEADS), "nvfp4+rot")
PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 3, 61, 1)
]
ANSWER = 40
GREEDY: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0.0, "logprobs": 2}
DRAWN: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 1.5, "logprobs": 1, "seed": 5}


def engine(model: Path, **options: Any) -> LLM:
    given = {"kv_format": "nvfp4", "kv_memory": "8MiB", "max_running": 8, "kv_scales": "one", **options}
    return LLM(str(model), **given)


def answers(llm: LLM, prompts: Sequence[list[int]], **params: Any) -> list[Completion]:
    outputs = llm.generate(prompts, SamplingParams(**params))
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.busy
    return [completion for output in outputs for completion in output.completions]


def told(prompts: Sequence[list[int]], completions: Sequence[Completion]) -> dict[tuple[int, ...], Any]:
    return {
        tuple(prompt): one.token_ids
        for prompt, one in zip(prompts, completions[:: len(completions) // len(prompts)], strict=True)
    }


def same(ours: Sequence[Completion], theirs: Sequence[Completion], limit: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason, one.error) == (
            other.token_ids,
            other.text,
            other.finish_reason,
            other.error,
        )
        for mine, yours in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token == yours.token
            assert abs(mine.logprob - yours.logprob) <= limit
            assert [token for token, _ in mine.top] == [token for token, _ in yours.top]


@contextmanager
def drafting(
    model: Path,
    known: Mapping[tuple[int, ...], Any],
    tokens: str = "auto",
    wrong: float = 0.3,
    rejects: bool = True,
    **options: Any,
) -> Iterator[LLM]:
    with oracle(known, wrong) as name:
        llm = engine(model, speculative=name, speculative_tokens=tokens, **options)
        yield llm
        counts = llm.engine.speculation.counts  # type: ignore[union-attr]
        assert counts.accepted > 0 or wrong == 1
        assert counts.accepted < counts.drafted or not rejects


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", SCHEMES)
def test_every_scheme(kv_format: str, tiny: Path) -> None:
    plain = engine(tiny, kv_format=kv_format)
    for params, tokens in ((GREEDY, "3"), (DRAWN, "auto")):
        expected = answers(plain, PROMPTS, **params)
        with drafting(tiny, told(PROMPTS, expected), tokens, kv_format=kv_format) as llm:
            # The second time prefixes are in the cache.
            for _ in range(2):
                found = answers(llm, PROMPTS, **params)
                same(found, expected)
                assert sum(one.accepted_drafts for one in found) > 0
                assert sum(one.rejected_drafts for one in found) > 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: save_tiny(tmp_path_factory.mktemp(kind), family, **changes)
        for kind, (family, changes, _) in KINDS.items()
    }


@pytest.mark.slow
@pytest.mark.sample(7)
@pytest.mark.parametrize(("kind", "window"), rotated([*KINDS], [0, 5, 40], 2))
def test_every_kind_of_attention_with_and_without_a_window(
    kind: str, window: int, models: dict[str, Path]
) -> None:
    options = {"kv_format": KINDS[kind][2], "kv_window": window, "kv_transforms": "auto"}
    options["kv_format"] = options["kv_format"].replace("+kmean", "")
    # Steps of other lengths change last bits of this family, without drafts too.
    limit = 1e-5 if kind == "chunks" else 0.0
    expected = answers(engine(models[kind], **options), PROMPTS, **GREEDY)
    with drafting(models[kind], told(PROMPTS, expected), **options) as llm:
        for _ in range(2):
            same(answers(llm, PROMPTS, **GREEDY), expected, limit)


@pytest.mark.parametrize("page_size", [1, 64])
def test_drafts_over_several_pages_and_a_short_window(page_size: int, tiny: Path) -> None:
    options = {"page_size": page_size, "kv_window": 3, "kv_sinks": 4}
    expected = answers(engine(tiny, **options), PROMPTS, **GREEDY)
    with drafting(tiny, told(PROMPTS, expected), "15", wrong=0.1, **options) as llm:
        same(answers(llm, PROMPTS, **GREEDY), expected)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption(prefix_cache: bool, tiny: Path) -> None:
    options = {"prefix_cache": prefix_cache}
    prompts = [PROMPTS[0], PROMPTS[2]]
    expected = answers(engine(tiny, **options), prompts, **GREEDY)
    with drafting(tiny, told(prompts, expected), wrong=0.1, **options) as llm:
        pressed = preempting(llm)
        same(answers(pressed, prompts, **GREEDY), expected)
        assert pressed.engine.scheduler.metrics.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("state_format", "prefix_cache"), [("fp32", True), ("int8", True), ("fp32", False)])
def test_recurrent_states(state_format: str, prefix_cache: bool, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3_next", **QWEN3_NEXT)
    options = {"kv_format": "nvfp4", "state_format": state_format, "prefix_cache": prefix_cache}
    plain = engine(model, **options)
    expected = answers(plain, PROMPTS, **GREEDY)
    turn = [*PROMPTS[0], *expected[0].token_ids, 7]
    hits = [plain.generate(turn, max_tokens=1).cached_tokens]
    for tokens in ("auto", "15"):
        with drafting(model, told(PROMPTS, expected), tokens, wrong=0.1, **options) as llm:
            same(answers(llm, PROMPTS, **GREEDY), expected)
            hits.append(llm.generate(turn, max_tokens=1).cached_tokens)
            same(answers(llm, PROMPTS, **GREEDY), expected)
            same(answers(preempting(llm), PROMPTS, **GREEDY), expected)
    assert len(set(hits)) == 1, "an answer's states are kept as without drafts"
    assert (hits[0] > len(PROMPTS[0])) is prefix_cache


@pytest.mark.parametrize("family", ["bamba", "jamba", "kimi_linear", "lfm2", "minimax", "nemotron_h"])
def test_families_with_states(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.update({"max_position_embeddings": 512})
    torch.manual_seed(0)
    with quiet():
        make(family, config).save_pretrained(tmp_path)
    prompts = [[token % VOCAB for token in prompt] for prompt in PROMPTS]
    expected = answers(engine(tmp_path, kv_format="fp32"), prompts, **GREEDY)
    with drafting(tmp_path, told(prompts, expected), "15", wrong=0.1, kv_format="fp32") as llm:
        for _ in range(2):
            # With so few heads, last bits of gates depend on the number of rows.
            same(answers(llm, prompts, **GREEDY), expected, 1e-3)


PARAMS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "bias": {"logit_bias": {65: 5.0, 66: -100.0}},
    "several": {"n": 3},
    "grammar": {"grammar": "regex:[a-z ]{5,60}"},
    "schema": {"grammar": 'json_schema:{"type": "array", "items": {"type": "integer"}, "minItems": 4}'},
    "three tokens": {"max_tokens": 3},
    "all scored": {"prompt_logprobs": 1},
}


BOTH = ("penalties", "several", "grammar")
"""Those that are tested with and without chance; the others with what alone they change, or with one."""


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        (name, t)
        for name in PARAMS
        for t in ((0.0, 1.2) if name in BOTH else (1.2 if name == "filters" else 0.0,))
    ],
)
def test_parameters(name: str, temperature: float, tiny: Path) -> None:
    params = {"max_tokens": ANSWER, "temperature": temperature, "logprobs": 2, "seed": 9, **PARAMS[name]}
    expected = answers(engine(tiny), PROMPTS, **params)
    # A grammar takes away drafts that it does not allow.
    with drafting(tiny, told(PROMPTS, expected), wrong=0.2, rejects=False) as llm:
        same(answers(llm, PROMPTS, **params), expected)


@pytest.mark.slow
def test_ends_inside_accepted_runs(tiny: Path) -> None:
    """Stop tokens, stop strings, bad words and lengths, wherever they fall in a run."""
    plain = engine(tiny)
    whole = answers(plain, PROMPTS, **DRAWN)
    first = whole[0]
    for place in (3, 8):
        token, text = first.token_ids[place], first.text[place : place + 2]
        for params in (
            {"stop_token_ids": (token,)},
            {"stop_token_ids": (token,), "min_tokens": place + 4},
            {"stop": (text,)},
            {"stop": (text,), "min_tokens": place + 4, "include_stop_str_in_output": True},
            {"bad_words": (text,)} if text.strip() else {},
            {"max_tokens": place},
        ):
            expected = answers(plain, PROMPTS, **{**DRAWN, **params})
            with drafting(tiny, told(PROMPTS, whole), "7", 0.15, rejects=False) as llm:
                same(answers(llm, PROMPTS, **{**DRAWN, **params}), expected)
                assert not llm.engine.scheduler.running


def test_pages_are_given_back(tiny: Path) -> None:
    """No draft counts: after each step a request holds the pages of what is stored, and of one token more at most."""
    expected = answers(engine(tiny, page_size=1), PROMPTS, **GREEDY)
    with drafting(tiny, told(PROMPTS, expected), "15", wrong=1.0, page_size=1) as llm:
        scheduler, store = llm.engine.scheduler, llm.engine.scheduler.store

        def check(*arguments: Any) -> None:
            store(*arguments)
            for lease in scheduler.manager.leases:
                assert len(lease.pages) == lease.num_stored_tokens
            scheduler.check_integrity()

        scheduler.store = check  # type: ignore[method-assign]
        same(answers(llm, PROMPTS, **GREEDY), expected)


def test_drafts_take_no_pages_of_others(tiny: Path) -> None:
    """In a pool that two requests fill, both go on as they would without drafts."""
    prompts = [PROMPTS[0], PROMPTS[2]]
    expected = answers(engine(tiny, page_size=1), prompts, **GREEDY)
    pages = sum(map(len, prompts)) + 2 * ANSWER
    with drafting(tiny, told(prompts, expected), "15", wrong=0.5, page_size=1, prefix_cache=False) as llm:
        allocator = llm.engine.scheduler.manager._allocator
        allocator.allocate(allocator.num_free - pages)
        found = llm.generate(prompts, SamplingParams(**GREEDY))
        same([output.completions[0] for output in found], expected)
        assert llm.engine.scheduler.metrics.preemptions == 0


def test_steps_before_the_last_is_read(tiny: Path) -> None:
    """As on a GPU: a step is launched before the last is read, unless somebody may draft after it."""
    expected = answers(engine(tiny), PROMPTS, **DRAWN)
    with drafting(tiny, told(PROMPTS, expected), wrong=0.6) as llm:
        llm.engine.overlap = True
        same(answers(llm, PROMPTS, **DRAWN), expected)


@pytest.mark.slow
def test_what_a_start_on_a_gpu_runs_of_drafts(tiny: Path, models: dict[str, Path]) -> None:
    """Here for its own sake: it leaves nothing behind, and answers are as before."""
    for model, kv_format in ((tiny, "nvfp4"), (models["chosen"], "nvfp4_ds_mla")):
        llm = engine(model, kv_format=kv_format, speculative="lookup")
        expected = answers(llm, PROMPTS, **GREEDY)
        llm.engine.scheduler.manager.clear()
        warmup_steps.run_drafts(llm.engine.runner, 1000, 7)
        warmup_steps.run_drafts(llm.engine.runner, 20, 7)
        same(answers(llm, PROMPTS, **GREEDY), expected)


def test_lookup(tiny: Path) -> None:
    prompts = [prompt * 3 for prompt in PROMPTS]
    expected = answers(engine(tiny), prompts, **GREEDY)
    llm = engine(tiny, speculative="lookup")
    same(answers(llm, prompts, **GREEDY), expected)
    assert llm.engine.speculation.counts.drafted > 0  # type: ignore[union-attr]


def test_a_wrong_verification_is_noticed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the draft after the last accepted one taken too, answers would differ."""
    from nibble.engine import in_flight as module

    expected = answers(engine(tiny), PROMPTS, **GREEDY)
    right = module.accepted_run

    def one_more(drafts: Sequence[int], sampled: Sequence[Any]) -> Any:
        run = right(drafts, sampled)
        return list(sampled[: len(run) + 1])

    monkeypatch.setattr(module, "accepted_run", one_more)
    with drafting(tiny, told(PROMPTS, expected)) as llm:
        found = answers(llm, PROMPTS, **GREEDY)
    assert [one.token_ids for one in found] != [one.token_ids for one in expected]


def test_what_cannot_be_combined(tiny: Path, tmp_path: Path, models: dict[str, Path]) -> None:
    for options, reason in (
        ({"speculative": "looup"}, "lookup"),
        ({"speculative": "lookup:there"}, "write it as lookup"),
        ({"speculative": "lookup", "speculative_tokens": 16}, "from 1 to 15"),
        ({"speculative_tokens": "4"}, "needs a drafter"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(tiny, **options)
    model_spec = engine(tiny)._engine_plan.model_spec
    for options, reason in (({"deterministic": True}, "deterministic"), ({"hisparse": "on"}, "hot buffer")):
        config = Config(model=str(tiny), speculative="lookup", **options)
        with pytest.raises(ConfigError, match=reason):
            speculation_plan.check(config, model_spec, lookup_gpu("h200"))


@pytest.mark.slow
def test_two_hundred_answers_of_as_many_seeds(tiny: Path) -> None:
    """Seed by seed the same, so that any statistic of them is."""
    params = {"max_tokens": 6, "temperature": 1.0, "n": 200, "seed": 1, "top_k": 4}
    expected = answers(engine(tiny), PROMPTS[1:2], **params)
    assert len({one.token_ids for one in expected}) > 50
    # What the first answer says, others say with the probability that each draft has.
    with drafting(tiny, told(PROMPTS[1:2], expected), wrong=0.1) as llm:
        same(answers(llm, PROMPTS[1:2], **params), expected)
