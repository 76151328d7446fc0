"""Evals on a tiny random model: numbers against a hand computation, order against the coarseness of formats."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nibble import LLM
from nibble.config import Config
from nibble.engine.request import Delta
from nibble.errors import ConfigError, NibbleError, ScaleError
from nibble.evals import perplexity, run
from nibble.evals import recall as ask
from nibble.evals.perplexity import Agreement, Perplexity, Prediction, losses, windows
from nibble.evals.recall import RecallCase
from nibble.evals.report import SCHEMA, Entry, Report, Sizes, parse_entries, write_plot
from nibble.evals.run import default_entries, evaluate
from planning import DEEPSEEK_V32, QWEN3_8B
from tiny import QWEN3_NEXT, save_tiny

TEXT = "".join(
    f"def function_{i}(x, y={i * 7 % 13}):\n    return x + {i * i} * y  # {i}\n\n" for i in range(160)
)
SMALL = Sizes(
    tokens=180, window=80, recall_cases=2, recall_lengths=(256,), attention_tokens=64, yardstick="fp32"
)
NAMES = ("bf16", "fp8_e4m3", "nvfp4", "nvfp4@0=fp8_e4m3", "nvfp4+kmean+rot")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("evals"))


def checkpoint(folder: Path, **changes: Any) -> str:
    """A tiny model with a tokenizer of bytes and a held-out text."""
    save_tiny(folder, **{"num_hidden_layers": 2, "max_position_embeddings": 512, **changes})
    (folder / "heldout.txt").write_text(TEXT)
    return str(folder)


@pytest.fixture(scope="module")
def report(model: str) -> Report:
    # Its text is shorter than the window of 4-bit schemes.
    return evaluate(Config(model=model, kv_window=0), NAMES, SMALL)


# Windows and perplexity


@pytest.mark.parametrize("length", [2, 5, 6, 7, 11, 40])
@pytest.mark.parametrize(("size", "stride"), [(6, None), (6, 5), (6, 2), (6, 1), (2, 1)])
def test_every_token_but_the_first_is_scored_once(length: int, size: int, stride: int | None) -> None:
    ids = list(range(length))
    found = windows(ids, size, stride)
    assert [token for window in found for token in window.targets_S.tolist()] == ids[1:]
    assert all(window.scored < len(window.ids) <= size for window in found)


def test_a_smaller_stride_gives_more_context() -> None:
    assert [window.scored for window in windows(range(10), 4, 2)] == [3, 2, 2, 2]


def test_perplexity_is_that_of_transformers(model: str) -> None:
    llm = LLM(model, kv_format="fp32")
    ids = llm.tokenizer.encode(TEXT)[:150]
    measured, nats, count = Perplexity(), 0.0, 0
    for window in windows(ids, 64):
        measured.add(llm.logits(window.ids), window)
        nats, count = nats + _by_hand(model, window.ids, window.scored), count + window.scored
    assert count == measured.count == len(ids) - 1
    assert measured.value == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert measured.bits_per_byte(2.0) == pytest.approx(nats / count / math.log(2) / 2, rel=1e-5)


def _by_hand(model: str, ids: tuple[int, ...], scored: int) -> float:
    """The loss of the last `scored` tokens, by the unmodified model and plain arithmetic."""
    with torch.inference_mode():
        logits = (
            Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
            .eval()(torch.tensor([list(ids)]))
            .logits[0]
        )
    probabilities = logits.double().softmax(-1)
    return sum(-math.log(probabilities[at - 1, ids[at]]) for at in range(len(ids) - scored, len(ids)))


def test_losses_are_of_the_scored_tokens_only() -> None:
    (window,) = windows([0, 1, 2], 3)
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [float("nan")] * 3])
    assert losses(logits, window).tolist() == pytest.approx([math.log(1 + 2 * math.exp(-9))] * 2, rel=1e-3)


# Agreement


def test_kl_is_the_full_sum_while_all_tokens_are_remembered() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(7, 50), torch.randn(7, 50)
    wanted = torch.nn.functional.kl_div(
        other.log_softmax(-1), one.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(Prediction.of(one).kl(other), wanted, rtol=1e-4, atol=1e-6)


def test_kl_of_few_remembered_tokens_is_a_close_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    one = 4 * torch.randn(64, 300)
    other = one + 0.2 * torch.randn(64, 300)
    whole = Prediction.of(one).kl(other)
    monkeypatch.setattr(perplexity, "KEEP", 64)
    part = Prediction.of(one).kl(other)
    assert (part <= whole + 1e-6).all()
    assert part.mean() > 0.9 * whole.mean()


def test_the_same_predictions_agree_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "KEEP", 8)
    rows = torch.randn(5, 20)
    found = Agreement()
    found.add(rows, Prediction.of(rows))
    assert (found.top1, found.kl, found.kl_p99) == (1.0, 0.0, 0.0)


# Recall


def _llm_that_says(answers: dict[str, list[str]], asked: list[int]) -> LLM:
    def stream(prompt: str, max_tokens: int, temperature: float):
        assert temperature == 0, "greedy, whatever the model's own defaults are"
        asked.append(max_tokens)
        return (Delta(0, piece, (1,)) for piece in answers[prompt])

    tokenizer = SimpleNamespace(encode=list)
    return SimpleNamespace(stream=stream, tokenizer=tokenizer)  # type: ignore[return-value]


def test_recall_is_exact() -> None:
    asked: list[int] = []
    llm = _llm_that_says({"a": ["4", "2", "'\n"], "b": ["4", "3"], "c": ["4"], "d": ["42"]}, asked)
    found = ask.grade(llm, [RecallCase(prompt, "42", "dict") for prompt in "abcd"])
    assert list(found) == [True, False, False, True]
    assert asked == [2, 2, 2, 2]


# A whole evaluation


def test_the_yardstick_agrees_with_itself(report: Report) -> None:
    yardstick = report.results[0]
    assert yardstick.name == report.yardstick == "fp32"
    assert (yardstick.top1, yardstick.kl, yardstick.ratio) == (1.0, 0.0, 1.0)
    assert yardstick.attention_error == (0.0, 0.0)


def test_a_coarser_format_errs_more(report: Report) -> None:
    fp32, bf16, fp8, nvfp4, mixed, _ = report.results
    errors = [result.mean_attention_error for result in (fp32, bf16, fp8, nvfp4)]
    assert errors == sorted(errors) and len(set(errors)) == 4  # type: ignore[type-var]
    assert 0 < bf16.kl < fp8.kl < nvfp4.kl
    assert (
        fp8.attention_error[0] == mixed.attention_error[0]
        and nvfp4.attention_error[1] == mixed.attention_error[1]
    )


def test_bytes_are_those_of_the_plan(report: Report) -> None:
    found = {result.name: result.bytes_per_token for result in report.results}
    head = {
        "fp32": 256,
        "bf16": 128,
        "fp8_e4m3": 64,
        "nvfp4": 36,
        "nvfp4@0=fp8_e4m3": 50,
        "nvfp4+kmean+rot": 36,
    }
    assert found == {name: 4 * size for name, size in head.items()}  # two layers of two heads


def test_scales_are_measured_where_the_checkpoint_has_none(report: Report) -> None:
    found = {result.name: result.scales for result in report.results}
    assert found["bf16"] == "auto" and found["nvfp4"] == found["fp8_e4m3"] == "measured"


def test_an_evaluation_repeats(model: str, report: Report) -> None:
    again = evaluate(Config(model=model, kv_window=0), ["nvfp4"], SMALL).results[1]
    first = next(result for result in report.results if result.name == "nvfp4")
    assert (again.perplexity, again.kl, again.recall) == (first.perplexity, first.kl, first.recall)
    assert again.attention_error == first.attention_error


def test_report_as_json_and_markdown(report: Report) -> None:
    data = json.loads(json.dumps(report.as_dict()))
    assert data["schema"] == SCHEMA
    assert set(data) == {"schema", "model", "yardstick", "results", "skipped", "measured", "environment"}
    assert data["measured"]["scored"] == SMALL.tokens - 1 and data["measured"]["window"] == 80
    assert len(data["measured"]["text_sha256"]) == 16
    for result in data["results"]:
        assert set(result["recall"]) == {"256"} and 0 <= result["recall"]["256"] <= 1
        assert len(result["attention_error"]) == 2 and 0 <= result["top1"] <= 1
    lines = report.as_markdown().splitlines()
    assert lines[0].split("|")[1:3] == [" scheme ", " bytes/token "]
    assert [line.split("|")[1].strip() for line in lines[2 : 2 + len(report.results)]] == ["fp32", *NAMES]


def test_plot(report: Report, tmp_path: Path) -> None:
    write_plot(report, tmp_path / "one.svg")
    write_plot(report, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text.startswith("<?xml") and text == (tmp_path / "two.svg").read_text()
    with pytest.raises(ConfigError, match="cannot write the plot"):
        write_plot(report, tmp_path / "nowhere" / "one.svg")


def test_plot_without_matplotlib(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        write_plot(report, tmp_path / "plot.png")


def test_what_the_model_cannot_take_is_skipped_unless_it_was_named(tmp_path: Path) -> None:
    odd = checkpoint(tmp_path, head_dim=24, num_hidden_layers=1)
    least = Sizes(tokens=40, recall_cases=0, attention_tokens=0)
    report = evaluate(Config(model=odd), [], least)
    assert "not a multiple of 16" in report.skipped["nvfp4"]
    assert {"bf16", "fp8_e4m3"} <= {result.name for result in report.results}
    assert report.lengths == () and report.results[1].attention_error == ()
    assert "nvfp4" in report.as_markdown()
    with pytest.raises(ConfigError, match="not a multiple of 16"):
        evaluate(Config(model=odd), ["nvfp4"], least)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"window": 1000}, {}, "more than the model's context of 512"),
        ({"recall_lengths": (1024,)}, {}, "recall length 1024"),
        ({}, {"kv_scales": "/nowhere.json"}, "cannot read KV scales"),
    ],
)
def test_refused_before_anything_is_measured(model: str, changes: dict, options: dict, message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        evaluate(
            Config(model=model, **options), ["nvfp4"], Sizes(**{"tokens": 64, "yardstick": "fp32"} | changes)
        )


def test_missing_text(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the text"):
        evaluate(Config(model=model), ["bf16"], SMALL, tmp_path / "none.txt")
    bare = checkpoint(tmp_path / "bare")
    (tmp_path / "bare" / "heldout.txt").unlink()
    with pytest.raises(ConfigError, match="--text FILE"):
        evaluate(Config(model=bare), ["bf16"], SMALL)


def test_a_file_of_scales_must_suffice(model: str, tmp_path: Path) -> None:
    peer = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.01}}}}
    (tmp_path / "scales.json").write_text(json.dumps(peer))
    with pytest.raises(ScaleError, match="layer 1"):
        evaluate(Config(model=model, kv_scales=str(tmp_path / "scales.json")), ["fp8_e4m3"], SMALL)


def test_scales_are_measured_anew_if_asked(model: str) -> None:
    report = evaluate(Config(model=model, kv_scales="calibrate"), ["nvfp4"], SMALL)
    assert [result.scales for result in report.results] == ["auto", "measured"]


def test_a_yardstick_that_needs_scales_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="the yardstick nvfp4 needs KV scales itself"):
        evaluate(Config(model=model), ["bf16"], Sizes(yardstick="nvfp4"))


# Options


def test_entries() -> None:
    assert Entry.parse("nvfp4@0,-1=fp8_e4m3") == Entry("nvfp4", "0,-1=fp8_e4m3")
    assert Entry.parse("nvfp4@0,-1=fp8_e4m3").name == "nvfp4@0,-1=fp8_e4m3"
    assert parse_entries(["bf16", "nvfp4", "bf16"]) == (Entry("bf16"), Entry("nvfp4"))
    for text in ("", "@0=bf16", "nvfp4@", "nvfp4:", ":kv_scales=one"):
        with pytest.raises(ConfigError, match="write it as"):
            Entry.parse(text)


def test_options_of_one_scheme() -> None:
    entry = Entry.parse(
        "nvfp4@0,-1=fp8_e4m3:kv-scales=one,page_size=32,tuned=off,token_budget=none,decode_backend=none"
    )
    assert entry == Entry(
        "nvfp4", "0,-1=fp8_e4m3", "kv-scales=one,page_size=32,tuned=off,token_budget=none,decode_backend=none"
    )
    assert (
        entry.name
        == "nvfp4@0,-1=fp8_e4m3:kv-scales=one,page_size=32,tuned=off,token_budget=none,decode_backend=none"
    )
    pair = Entry.parse("fp8_e4m3:nvfp4@0=k8v4:page_size=32")
    assert pair == Entry("fp8_e4m3:nvfp4", "0=k8v4", "page_size=32"), "K and V in formats of their own"
    assert Entry.parse("fp8_e4m3:nvfp4") == Entry("fp8_e4m3:nvfp4")
    base = Config(model="m", kv_layers="1=bf16", page_size=16, token_budget=8, max_running=3)
    found = entry.config(base)
    assert (found.kv_format, found.kv_layers, found.kv_scales) == ("nvfp4", "0,-1=fp8_e4m3", "one")
    assert (found.page_size, found.tuned, found.token_budget, found.decode_backend) == (
        32,
        False,
        None,
        "none",
    )
    assert found.max_running == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp4:page_sizes=3", "did you mean 'page_size'"),
        ("nvfp4:page_size=big", "page_size must be an integer or None, not 'big'"),
        ("nvfp4:tuned=perhaps", "tuned must be True or False"),
        ("nvfp4:page_size=1,page-size=2", "says something twice"),
        ("nvfp4:kv_layers=0=bf16", "kv_layers is no option of a single scheme"),
        ("nvfp4:model=demo", "model is no option of a single scheme"),
    ],
)
def test_malformed_options_of_one_scheme(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Entry.parse(text)


def test_a_yardstick_has_no_options_of_other_caches() -> None:
    base = Config(model="m", kv_layers="0=fp8_e4m3", kv_memory="1GiB", hisparse="on,host_format=nvfp4_ds_mla")
    base = replace(base, state_format="int8")
    found = Entry.parse("bf16").alone(base)
    assert (
        found.state_format == "fp32"
        and Entry.parse("bf16:state_format=fp8").alone(base).state_format == "fp8"
    )
    assert (found.kv_format, found.kv_layers, found.hisparse, found.kv_memory) == ("bf16", "", "on", "1GiB")
    same = Entry.parse("bf16").alone(replace(base, hisparse="on,buffer=4096"))
    assert same.hisparse == "on,buffer=4096"


@pytest.mark.slow
def test_states_are_measured_against_exact_ones(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, family="qwen3_next", **QWEN3_NEXT)
    sizes = replace(SMALL, recall_cases=0)
    names = ("fp32:state_format=fp8", "fp32:state_format=int8")
    found = evaluate(Config(model=model, kv_window=0), names, sizes).results
    assert [result.state_format for result in found] == ["fp32", "fp8", "int8"]
    assert found[0].kl == 0 < found[2].kl < found[1].kl
    assert (
        found[0].request_bytes > found[2].request_bytes
        and found[0].bytes_per_token == found[1].bytes_per_token
    )
    # What the command says of states is of what it names, and never of the yardstick.
    other = evaluate(Config(model=model, kv_window=0, state_format="int8"), ("fp32", "nvfp4"), sizes).results
    assert [result.state_format for result in other] == ["fp32", "int8", "int8"]
    assert [result.name for result in other] == ["fp32", "fp32:state_format=int8", "nvfp4:state_format=int8"]
    assert other[1].kl == found[2].kl and other[0].perplexity == found[0].perplexity


def test_schemes_with_options_are_measured_apart(model: str) -> None:
    names = ("nvfp4", "nvfp4:kv_scales=one")
    found = evaluate(Config(model=model), names, replace(SMALL, recall_cases=0)).results[1:]
    assert [result.name for result in found] == list(names)
    assert [result.options for result in found] == ["", "kv_scales=one"]
    assert found[0].scale_version != found[1].scale_version and found[0].kl != found[1].kl


def test_questions_follow_the_seed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for, at each length, other ones for another seed."""
    asked: list[list[str]] = []

    def grade(llm: LLM, cases: list[RecallCase]) -> list[bool]:
        asked.append([case.prompt for case in cases])
        return [True] * len(cases)

    monkeypatch.setattr(ask, "grade", grade)
    for seed in (0, 11):
        sizes = replace(
            SMALL, tokens=40, recall_cases=100, recall_lengths=(192, 256), attention_tokens=0, seed=seed
        )
        (result,) = evaluate(Config(model=model), ["fp32"], sizes).results
        assert result.recall == {192: 1.0, 256: 1.0}
    assert [len(prompts) for prompts in asked] == [100] * 4
    assert not set(asked[0]) & set(asked[2]) and not set(asked[1]) & set(asked[3])


def test_questions_that_share_a_context() -> None:
    """Each is about another entry, in a text of its own that fits the length; the last context may have fewer."""
    found = ask.cases(3, 10, 300, len, per_context=4)
    assert len({case.prompt for case in found}) == 10
    for first in (0, 4, 8):
        group = found[first : first + 4]
        context = _common([case.prompt for case in group])
        assert len({case.kind for case in group}) == 1 and len(context) > 60
        for case in group:
            assert case.answer in context and len(case.prompt + case.answer) <= 300
            # No question stands between the context and another one.
            assert len(case.prompt) - len(context) < 60
    assert [case.kind for case in found[::4]] == list(ask.KINDS[:3])


def _common(texts: list[str]) -> str:
    """The longest text that all begin with."""
    size = next(i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    return texts[0][:size]


@pytest.mark.parametrize("window", [0, 16])
def test_a_shared_context_changes_no_answer(model: str, window: int) -> None:
    """Greedy answers from the prefix cache are those of a context that is computed for each question."""
    llms = {
        shared: LLM(model, kv_format="nvfp4", kv_window=window, prefix_cache=shared, page_size=16)
        for shared in (False, True)
    }
    prompts = [
        case.prompt for case in ask.cases(5, 8, 400, lambda text: len(llms[True].tokenizer.encode(text)), 4)
    ]
    outputs = {shared: llm.generate(prompts, max_tokens=6, temperature=0) for shared, llm in llms.items()}
    assert [output.text for output in outputs[True]] == [output.text for output in outputs[False]]
    assert sum(output.cached_tokens for output in outputs[True]) > 1000
    assert not any(output.cached_tokens for output in outputs[False])


@pytest.mark.parametrize("kv_memory", ["1MiB", "16MiB"])
def test_what_is_measured_is_what_is_planned(
    model: str, kv_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines have no prefix cache here, with which a default window may not fit."""
    windows: list[int] = []

    def spy(**options: Any) -> LLM:
        llm = LLM(**options)
        windows.append(llm.plan.window)
        return llm

    monkeypatch.setattr(run, "LLM", spy)
    found = evaluate(
        Config(model=model, kv_memory=kv_memory, max_context=80), ["nvfp4"], replace(SMALL, recall_cases=0)
    )
    assert windows == [result.exact_window for result in found.results]
    assert bool(windows[-1]) == (kv_memory == "16MiB")


def test_skipped_tokens_are_not_scored(model: str) -> None:
    whole, later = (perplexity.split_text(TEXT, 20, list, "".join, skip).scored for skip in (0, 7))
    assert whole[7:] == later[:13] and len(later) == 20
    with pytest.raises(ConfigError, match=r"of which 100,000 are skipped"):
        perplexity.split_text(TEXT, 20, list, "".join, 100_000)


@pytest.mark.slow
def test_schemes_at_the_same_time_measure_the_same(model: str, report: Report) -> None:
    """Each in a process of its own; what is measured so far is saved after each, in the order of the schemes."""
    saved: list[Report] = []
    names = ("nvfp4", "fp8_e4m3")
    found = evaluate(Config(model=model, kv_window=0), names, SMALL, jobs=2, save=saved.append)
    expected = {result.name: result for result in report.results}
    for result in found.results:
        assert (result.kl, result.recall) == (expected[result.name].kl, expected[result.name].recall)
    assert [result.name for result in found.results] == ["fp32", *names]
    assert [len(each.results) for each in saved] == [1, 2, 3] and saved[-1] == found
    assert found.results[0].request_bytes > found.results[1].request_bytes > 0


def test_default_entries_leave_out_formats_for_tests() -> None:
    names = [entry.name for entry in default_entries(QWEN3_8B)]
    assert names[0] == "bf16" and {"nvfp4", "k8v4", "nvfp4+rot:kv_window=0"} <= set(names)
    assert not {"fp32", "fp16"} & set(names)
    sparse = [entry.name for entry in default_entries(DEEPSEEK_V32)]
    assert sparse[0] == "bf16" and {"fp8_ds_mla", "nvfp4_ds_mla", "fp4_mx16"} <= set(sparse)
    assert "nvfp4_ds_mla:kv_window=64" in sparse
    assert not {"k8v4", "nvfp4+rot:kv_window=0", "fp32"} & set(sparse)


def test_sizes() -> None:
    assert Sizes().lengths(4096) == (1024, 2048, 4096)
    too_small = ({"tokens": 1}, {"stride": 0}, {"recall_cases": -1}, {"recall_per_context": 0}, {"skip": -1})
    for wrong in (*too_small, {"window": 8, "stride": 8}):
        with pytest.raises(ConfigError):
            Sizes(**wrong)
