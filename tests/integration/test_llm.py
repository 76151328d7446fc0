"""The Python interface: batches, streams, stops, seeds, n, aborts and bad input, on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, ConfigError, NibbleError, PromptTooLong, RequestError, SamplingParams
from nibble.engine.engine import NOT_A_NUMBER
from nibble.errors import PYTHON, set_caller


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(
        str(tiny), kv_format="nvfp4", kv_scales="one", kv_memory="8MiB", max_running=8, token_budget=64
    )


def idle(llm: LLM) -> None:
    """Nothing is left running, and every page is free or in the prefix cache."""
    assert not llm.engine.busy and not llm.engine.scheduler.waiting and not llm.engine.scheduler.running
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.manager.stats.in_use == 0


PROMPTS = ["def f(x):", "the quick brown fox jumps over the lazy dog", "a", "0123456789" * 12]


def test_one_prompt_or_many(llm: LLM) -> None:
    one = llm.generate(PROMPTS[0], max_tokens=6)
    many = llm.generate(PROMPTS, max_tokens=6, progress=False)
    assert one.prompt == PROMPTS[0] and [output.prompt for output in many] == PROMPTS
    assert many[0].completions[0].token_ids == one.completions[0].token_ids
    assert one.completions[0].finish_reason == "length" and len(one.completions[0].token_ids) == 6
    whole = llm.tokenizer.decode(one.completions[0].token_ids)
    assert whole.rstrip("\ufffd") == one.text.rstrip("\ufffd")
    assert llm.generate([], max_tokens=6) == []
    idle(llm)


def test_same_seed_same_answer_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.95, top_k=50, seed=11)
    alone = [llm.generate(prompt, params).completions[0].token_ids for prompt in PROMPTS]
    together = [output.completions[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert together == alone
    other = llm.generate(PROMPTS[1], SamplingParams(max_tokens=10, temperature=1.0, seed=12))
    assert other.completions[0].token_ids != alone[1]


def test_priorities(llm: LLM) -> None:
    expected = [output.text for output in llm.generate(PROMPTS, max_tokens=6)]
    several = list(range(len(PROMPTS), 0, -1))
    for priority in (5, several):
        assert [o.text for o in llm.generate(PROMPTS, max_tokens=6, priority=priority)] == expected
    orders: list[int] = []
    submit = llm.engine.scheduler.add
    llm.engine.scheduler.add = lambda request: (orders.append(request.priority), submit(request))  # type: ignore[method-assign,func-returns-value]
    try:
        llm.generate(PROMPTS, max_tokens=1, priority=several)
    finally:
        del llm.engine.scheduler.add
    assert orders == several
    for wrong in ([1], ["a"] * len(PROMPTS)):
        with pytest.raises(RequestError, match="one for each of the"):
            llm.generate(PROMPTS, max_tokens=1, priority=wrong)  # type: ignore[arg-type]
    idle(llm)


def test_n_answers_share_the_prompt(llm: LLM) -> None:
    prompt = PROMPTS[3]
    llm.engine.scheduler.manager.clear()
    output = llm.generate(prompt, max_tokens=8, temperature=1.0, seed=5, n=3)
    texts = [answer.token_ids for answer in output.completions]
    assert [answer.index for answer in output.completions] == [0, 1, 2] and len(set(texts)) == 3
    alone = llm.generate(prompt, max_tokens=8, temperature=1.0, seed=5).completions[0].token_ids
    again = llm.generate(prompt, max_tokens=8, temperature=1.0, seed=5, n=2).completions[1].token_ids
    assert texts[:2] == [alone, again]
    stats = llm.engine.scheduler.manager.stats
    assert stats.hit_tokens >= 2 * (len(prompt) // llm.plan.page_size) * llm.plan.page_size
    idle(llm)


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], max_tokens=20)
    pieces = list(llm.stream(PROMPTS[1], max_tokens=20))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.completions[0].token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"


def test_two_streams_at_once(llm: LLM) -> None:
    first, second = (llm.stream(prompt, max_tokens=9) for prompt in PROMPTS[:2])
    mixed: tuple[list[str], list[str]] = ([], [])
    for a, b in zip(first, second, strict=True):
        mixed[0].append(a.text)
        mixed[1].append(b.text)
    assert ["".join(part) for part in mixed] == [
        llm.generate(prompt, max_tokens=9).text for prompt in PROMPTS[:2]
    ]


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[3], max_tokens=500)
    next(stream)
    assert llm.engine.busy
    stream.close()
    idle(llm)


def test_stop_strings_and_tokens(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], max_tokens=24)
    ids, text = free.completions[0].token_ids, free.text
    stop = text[5:8]
    stopped = llm.generate(PROMPTS[0], max_tokens=24, stop=stop).completions[0]
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(stop)]
    by_token = llm.generate(PROMPTS[0], max_tokens=24, stop_token_ids=[ids[4]]).completions[0]
    assert by_token.finish_reason == "stop" and by_token.token_ids == ids[: ids.index(ids[4])]
    shown = "".join(piece.text for piece in llm.stream(PROMPTS[0], max_tokens=24, stop=stop))
    assert shown == stopped.text, "a stream must not show the beginning of a stop string"
    idle(llm)


def test_stops_that_stay_in_the_answer(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], max_tokens=24)
    ids, text = free.completions[0].token_ids, free.text
    stop = text[5:8]
    by_text = llm.generate(PROMPTS[0], max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert by_text.text == text[: text.index(stop) + len(stop)]
    by_token = llm.generate(PROMPTS[0], stop_token_ids=[ids[4]], include_stop_str_in_output=True)
    assert by_token.completions[0].token_ids == ids[: ids.index(ids[4]) + 1]
    assert by_token.completions[0].finish_reason == "stop"
    idle(llm)


def test_min_tokens(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], max_tokens=24)
    ids, text = free.completions[0].token_ids, free.text
    first = llm.generate(PROMPTS[0], stop_token_ids=[ids[2]], min_tokens=5, max_tokens=24).completions[0]
    assert len(first.token_ids) >= 5 and first.token_ids[:2] == ids[:2] and ids[2] not in first.token_ids[:5]
    late = llm.generate(PROMPTS[0], stop=text[0], min_tokens=6, max_tokens=24).completions[0]
    assert late.text.startswith(llm.tokenizer.decode(ids[:6])), "a stop string before it is text"
    assert llm.generate(PROMPTS[0], stop=text[0], min_tokens=24, max_tokens=24).text == text
    idle(llm)


@pytest.mark.parametrize("size", [1, 2])
def test_bad_words(llm: LLM, size: int) -> None:
    ids, tokenizer = llm.generate(PROMPTS[0], max_tokens=60).completions[0].token_ids, llm.tokenizer
    pieces = [ids[i : i + size] for i in range(3, 60)]
    # A word whose tokens stand in the answer as the tokenizer writes them.
    bad = next(
        piece for piece in pieces if tokenizer.token_sequences([tokenizer.decode(piece)])[0] == [*piece]
    )
    answer = (
        llm.generate(PROMPTS[0], max_tokens=60, bad_words=[tokenizer.decode(bad)]).completions[0].token_ids
    )
    assert bad not in [answer[i : i + size] for i in range(60)]
    before = pieces.index(bad) + 3
    assert answer[: before + size - 1] == ids[: before + size - 1], "up to there nothing is banned"


def test_a_prompt_keeps_its_end(llm: LLM) -> None:
    ids = [token % 250 + 5 for token in range(2000)]
    kept = llm.generate(ids, max_tokens=4, truncate_prompt_tokens=30)
    assert kept.prompt_token_ids == tuple(ids[-30:])
    assert kept.completions == llm.generate(ids[-30:], max_tokens=4).completions
    most = llm.generate(ids, max_tokens=4, truncate_prompt_tokens=-1)
    assert len(most.prompt_token_ids) == 1020 and len(most.completions[0].token_ids) == 4
    assert llm.generate(ids[:9], max_tokens=4, truncate_prompt_tokens=-1).prompt_token_ids == tuple(ids[:9])


def test_logprobs(llm: LLM) -> None:
    answer = llm.generate(PROMPTS[0], max_tokens=4, logprobs=3).completions[0]
    assert answer.logprobs and [entry.token for entry in answer.logprobs] == list(answer.token_ids)
    logits = llm.logits([*llm.tokenizer.encode(PROMPTS[0]), *answer.token_ids])
    expected = logits.log_softmax(-1)[len(llm.tokenizer.encode(PROMPTS[0])) - 1 :]
    for entry, row in zip(answer.logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row.max()), abs=1e-4) and entry.top[0][0] == entry.token
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_greedy_is_the_argmax_of_the_logits(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[2] * 40)
    answer = llm.generate(ids, max_tokens=5).completions[0].token_ids
    logits = llm.logits([*ids, *answer])
    assert tuple(logits.argmax(-1)[len(ids) - 1 : -1].tolist()) == answer


def test_a_prefix_cache_that_is_reset_while_requests_run(llm: LLM) -> None:
    ids = [token % 250 + 5 for token in range(200)]
    expected = llm.generate(ids, max_tokens=12).completions
    assert llm.generate(ids, max_tokens=12).cached_tokens > 0
    stream = llm.stream(ids, max_tokens=12)
    pieces = [next(stream)]
    llm.reset_prefix_cache()
    llm.engine.scheduler.check_integrity()
    assert "".join(piece.text for piece in [*pieces, *stream]) == expected[0].text
    assert llm.engine.scheduler.manager.stats.idle == 0, "what was in use when it was reset is not kept"
    assert llm.generate(ids, max_tokens=12).cached_tokens == 0
    idle(llm)


def test_who_calls_from_python_is_told_of_arguments(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_memory="2MiB", max_context=40, max_running=2)
    with pytest.raises(PromptTooLong) as refusal:
        llm.generate([1] * 50)
    flags = str(refusal.value)
    assert flags.endswith("shorten the prompt or raise --max-context")
    before = set_caller(PYTHON)
    try:
        assert str(refusal.value) == flags.replace("--max-context", "max_context=")
    finally:
        set_caller(before)
    own = LLM(str(tiny), kv_memory="2MiB", max_running=2)
    with pytest.raises(PromptTooLong, match=r"context length is 1024 tokens; shorten the prompt$"):
        own.generate([1] * 1500)


def test_context_ends_the_answer(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="2MiB", max_context=40, max_running=2)
    output = llm.generate([1] * 30, max_tokens=100, ignore_eos=True)
    assert output.completions[0].finish_reason == "length" and len(output.completions[0].token_ids) == 10


def test_a_prompt_too_long_is_refused_at_once_and_harms_nobody(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"2000 tokens .* context length is 1024"):
        llm.generate(["short", [1] * 2000], max_tokens=4)
    idle(llm)
    assert llm.generate("short", max_tokens=4).text is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must lie in"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must lie in"),
        ({"top_k": -3}, "top_k must lie in"),
        ({"max_tokens": -1}, "max_tokens must lie in"),
        ({"prompt_logprobs": 101}, "prompt_logprobs must lie in"),
        ({"min_p": "x"}, "min_p must lie in"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"stop": ""}, "stop strings must not be empty"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias values must be finite"),
        ({"logit_bias": {99999: 1.0}}, "token 99999 is out of range"),
        ({"n": 0}, "n must lie in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens, and 9 is more than 8"),
        ({"bad_words": [" "]}, "bad_words must be words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must lie in"),
    ],
)
def test_bad_sampling_values(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate("x", **options)
    assert caught.value.status == 400
    idle(llm)


def test_bad_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate("")
    with pytest.raises(RequestError, match="token 320 is out of range"):
        llm.generate([1, 320])
    with pytest.raises(RequestError, match="either sampling_params or loose"):
        llm.generate("x", SamplingParams(), top_k=3)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])
    idle(llm)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0) for count in (3, 5)]
    several = llm.generate(PROMPTS[:2], params)
    assert [len(output.completions[0].token_ids) for output in several] == [3, 5]
    alone = llm.generate(PROMPTS[1], sampling_params=params[1])
    assert alone.completions == several[1].completions
    ids = llm.tokenizer.encode(PROMPTS[1])
    by_shape = llm.generate([{"prompt": PROMPTS[1]}, {"prompt_token_ids": ids}, ids], params[1])
    assert [output.completions for output in by_shape] == [alone.completions] * 3
    assert [output.prompt for output in by_shape] == [PROMPTS[1], None, None]
    for wrong in (params[:1], [*params, *params], [params[0], None], 5, "greedy"):
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate(PROMPTS[:2], wrong)  # type: ignore[call-overload]
    idle(llm)


def test_many_conversations() -> None:
    asked = [[{"role": "user", "content": text}] for text in ("hello", "def f(x):")]
    with LLM("demo", kv_memory="32MiB") as llm:
        both = llm.chat(asked, SamplingParams(max_tokens=6, temperature=0))
        assert [output.completions for output in both] == [
            llm.chat(one, max_tokens=6).completions for one in asked
        ]


def test_the_models_defaults_and_what_wins_over_them(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 5.0, "top_k": 1}')
    options: dict[str, Any] = {"kv_memory": "2MiB", "max_running": 4}
    with LLM(str(tiny), generation_config=tmp_path, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=5.0, top_k=1)
        greedy = llm.generate(PROMPTS[0], max_tokens=8, temperature=0).text
        assert llm.generate(PROMPTS[0], max_tokens=8).text == greedy, "of one token nothing is left to draw"
        # An object is complete in itself, as in vLLM: nothing of the model's is added.
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, temperature=5.0, seed=1)).text != greedy
    with LLM(str(tiny), generation_config="none", **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_words_for_people(llm: LLM) -> None:
    assert repr(llm).startswith("<LLM ") and repr(llm).endswith("tokens of cache>") and len(repr(llm)) < 120
    printed = str(llm.plan).splitlines()
    assert printed[0] == f"{llm.config.model} (qwen3) on {llm.hardware}"
    assert any(line.startswith("pool 6.3 MiB (kv_memory)") for line in printed)
    assert any(line.startswith("exact window 1.7 MiB") for line in printed)


def test_logits_that_are_not_numbers_end_one_request_only(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="2MiB", max_running=4)
    forward, calls = llm.engine.runner.forward, 0

    def broken(batch: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = forward(batch, **options).clone()
        if calls == 3:
            logits[1] = float("nan")
        return logits

    llm.engine.runner.forward = broken  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS[:3], max_tokens=8, ignore_eos=True)
    assert (
        outputs[1].completions[0].error == NOT_A_NUMBER and outputs[1].completions[0].finish_reason == "abort"
    )
    assert [len(outputs[i].completions[0].token_ids) for i in (0, 2)] == [8, 8]
    idle(llm)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="2MiB", max_running=4)
    forward = llm.engine.runner.forward

    def broken(batch: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no luck")

    llm.engine.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(NibbleError, match="RuntimeError: no luck"):
        llm.generate(PROMPTS[0], max_tokens=8)
    llm.engine.runner.forward = forward  # type: ignore[method-assign]
    assert len(llm.generate(PROMPTS[0], max_tokens=8, ignore_eos=True).completions[0].token_ids) == 8
    idle(llm)


def test_unknown_options_are_errors(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'nvfp4'"):
        LLM(str(tiny), kv_format="nvpf4")
    with pytest.raises(ConfigError, match="unknown dtype 'int4'"):
        LLM(str(tiny), dtype="int4")
    with pytest.raises(ConfigError, match="cannot read 'lots' as a size"):
        LLM(str(tiny), kv_memory="lots")
    with pytest.raises(ConfigError, match="did you mean 'kv_format'"):
        LLM(str(tiny), kv_fromat="bf16")
    with pytest.raises(ConfigError, match="layer 7 is out of range"):
        LLM(str(tiny), kv_layers="7=bf16")


def test_a_stream_that_never_started_is_aborted_too(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], max_tokens=300)
    stream.close()
    idle(llm)
    llm.stream(PROMPTS[0], max_tokens=300)
    idle(llm)


def test_logits_checks_its_prompt_and_leaves_nothing_behind(tiny: Path) -> None:
    small = LLM(str(tiny), kv_format="bf16", kv_memory="2MiB", max_context=64, max_running=1)
    for _ in range(4):
        with pytest.raises(PromptTooLong, match="context length is 64"):
            small.logits([1] * 100)
        with pytest.raises(RequestError, match="out of range"):
            small.logits([1, 9999])
    assert len(small.logits([1] * 64)) == 64
    assert small.generate("ab", max_tokens=3).completions[0].token_ids
    idle(small)


def test_logits_waits_for_nobody_and_harms_nobody(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], max_tokens=30)
    next(stream)
    with pytest.raises(RequestError, match="open first"):
        llm.logits([1, 2, 3])
    stream.close()


def test_n_answers_with_the_largest_seed(llm: LLM) -> None:
    output = llm.generate("ab", n=2, seed=(1 << 64) - 1, temperature=1.0, max_tokens=4)
    assert len(output.completions) == 2
    idle(llm)


def test_a_failure_of_all_answers_is_raised(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="2MiB", max_running=4)

    def broken(batch: Any, **options: Any) -> torch.Tensor:
        raise TypeError("no luck")

    llm.engine.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(NibbleError, match="TypeError: no luck"):
        llm.generate(PROMPTS[:2])
    idle(llm)


def test_one_text_to_calibrate_with_is_one_text(tiny: Path) -> None:
    text = "the quick brown fox " * 10
    options = {"kv_format": "fp8_e4m3", "kv_memory": "2MiB", "max_running": 4}
    scales = [
        LLM(str(tiny), calibrate=given, **options).engine.runner.pool.view(1).streams["k"].scale
        for given in (text, [text])
    ]
    assert torch.equal(*scales)
