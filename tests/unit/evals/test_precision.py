"""Choosing formats by measurement, on tiny random models: what is measured, what may be chosen, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble import LLM
from nibble.attention import backends
from nibble.attention.planner.window_memory import request_bytes
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.errors import ConfigError
from nibble.evals import precision, tune_precision
from nibble.evals.perplexity import Agreement, Prediction, windows
from nibble.evals.precision import Candidate, Measurement, Search, Target, WindowOption, candidates
from nibble.evals.precision_report import Goal, Outcome
from nibble.formats import scheme as schemes
from nibble.formats import scheme_file
from nibble.hardware import lookup_gpu
from planning import PLAIN
from tiny import MLA, SPARSE, save_tiny

TEXT = "".join(
    f"def function_{i}(x, y={i * 7 % 13}):\n    return x + {i * i} * y  # {i}\n\n" for i in range(160)
)
GOAL = Goal(budget="5.5bits", tokens=96, window=64, verify_tokens=0)
ONE = {"kv_scales": "one"}


def checkpoint(folder: Path, family: str = "qwen3", **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    save_tiny(folder, family, **{"num_hidden_layers": 2, "max_position_embeddings": 512, **changes})
    (folder / "heldout.txt").write_text(TEXT)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("precision"))


@pytest.fixture(scope="module")
def config(model: str) -> Config:
    return Config(model=model, kv_scales="one", kv_window=0)


@pytest.fixture(autouse=True)
def _short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are short."""
    monkeypatch.setattr(tune_precision, "CALIBRATION_TOKENS", 64)


def target(config: Config, gpu: str | None = None) -> Target:
    plan = plan_engine(config)
    table = backends.all_backends() if gpu else backends.available_backends()
    return Target(config, plan.model_spec, lookup_gpu(gpu) if gpu else plan.hardware, table)


def of(target: Target, stream: str, name: str) -> Candidate:
    """The candidate of a name."""
    (group,) = target.model_spec.groups
    tried = [schemes.parse(name.partition("+")[0])]
    return next(x for x in candidates(group, tried) if x.stream.name == stream and x.name == name)


# Measuring


def kl(model: str, layers: str, ids: list[int], size: int) -> float:
    """KL of the engine with --kv-layers from the engine with an unquantised cache."""
    exact, other = (
        LLM(model, kv_format="fp32"),
        LLM(model, kv_format="fp32", kv_layers=layers, **ONE, **PLAIN),
    )
    agreement = Agreement()
    for window in windows(ids, size):
        reference = Prediction.of(window.predictions(exact.logits(window.ids)))
        agreement.add(window.predictions(other.logits(window.ids)), reference)
    return agreement.kl


def losses(
    config: Config, *names: str, tokens: int = 96, size: int = 64
) -> tuple[Target, list[int], dict[Any, float]]:
    """What is measured of `stream candidate`s."""
    llm = LLM(config.model, kv_format="fp32")
    here = target(replace(config, kv_format="fp32"))
    plan = plan_engine(config)
    scales = tune_precision.scales_for(llm, plan, "")
    ids = llm.tokenizer.encode(TEXT)[:tokens]
    measurement = Measurement(llm.engine.runner.model, here, scales)
    trials = [of(here, *name.split()) for name in names]
    return here, ids, measurement.losses(trials, windows(ids, size))


def test_a_loss_is_the_kl_of_serving_one_layer_so(config: Config) -> None:
    names = ("k nvfp4", "v nvfp4", "k nvfp4_amax+rot", "v fp8_e4m3")
    rules = ("nvfp4+none:", "fp32:nvfp4", "nvfp4:fp32_amax+rot", "fp32:fp8_e4m3")
    here, ids, measured = losses(config, *names)
    for name, rule in zip(names, ("nvfp4:fp32", *rules[1:]), strict=True):
        for layer in (0, 1):
            expected = kl(config.model, f"{layer}={rule}", ids, 64)
            assert expected > 1e-5
            assert measured[layer, of(here, *name.split())] == pytest.approx(expected, rel=2e-3), (
                name,
                layer,
            )


def test_what_the_text_is_cut_into_and_progress(config: Config) -> None:
    here, ids, whole = losses(config, "v nvfp4", tokens=64, size=64)
    trial = of(here, "v", "nvfp4")
    assert whole[0, trial] == pytest.approx(kl(config.model, "0=fp32:nvfp4", ids, 64), rel=2e-3)


SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 16,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
    "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8,
}  # fmt: skip
"""Layers 4 and 5 read the pages of layers 2 and 3; three in six have windows."""


@pytest.mark.slow
def test_layers_that_share_kv(tmp_path: Path) -> None:
    """Whoever reads a layer's pages reads the candidate; and no layer reads what a candidate before it has left."""
    model = checkpoint(tmp_path / "shared", "gemma3n_text", **SHARED)
    config = Config(model=model, kv_scales="one", kv_window=0)
    llm, here = LLM(model, kv_format="fp32"), target(replace(config, kv_format="fp32"))
    ids = llm.tokenizer.encode(TEXT)[:48]
    measurement = Measurement(
        llm.engine.runner.model, here, tune_precision.scales_for(llm, plan_engine(config), "")
    )
    tried = [schemes.parse("fp8_e4m3")]
    trials = [x for group in here.model_spec.groups for x in candidates(group, tried) if x.name == "fp8_e4m3"]
    measured = measurement.losses([x for x in trials if x.stream.name == "v"], windows(ids, 48))
    assert sorted(layer for layer, _ in measured) == [0, 1, 2, 3]
    for (layer, _), loss in measured.items():
        assert loss == pytest.approx(kl(model, f"{layer}=fp32:fp8_e4m3", ids, 48), rel=5e-3), layer
    goal = replace(GOAL, candidates="fp8_e4m3,nvfp4", tokens=64)
    outcome = tune_precision.tune(config, goal, tmp_path / "kv_scheme.json")
    file = scheme_file.load(outcome.path)
    assert [file.layers[layer] for layer in (4, 5)] == [file.layers[layer] for layer in (2, 3)]
    plan = plan_engine(replace(config, kv_format=outcome.path)).plan
    assert plan.layout.bytes_per_token == outcome.bytes_per_token


@pytest.mark.parametrize(("family", "changes"), [("deepseek_v3", MLA), ("glm_moe_dsa", SPARSE)])
def test_latents(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = checkpoint(tmp_path / family, family, num_hidden_layers=3, **changes)
    config = Config(model=model, kv_scales="one", kv_window=0)
    outcome = tune_precision.tune(
        config, replace(GOAL, candidates="nvfp4,fp8_e4m3"), tmp_path / "kv_scheme.json"
    )
    assert set(outcome.sensitivity) == {"latent"}
    assert outcome.bits <= 5.5
    layout = plan_engine(replace(config, kv_format=outcome.path)).plan.layout
    # Index keys are no part of the budget.
    assert layout.without_index.bytes_per_token == outcome.bytes_per_token
    assert LLM(model, kv_format=outcome.path, **ONE).generate("ab", max_tokens=2).completions[0].token_ids


# What may be chosen


def test_candidates_of_k_have_transforms(config: Config) -> None:
    here = target(config)
    (group,) = here.model_spec.groups
    names = [
        (x.stream.name, x.name)
        for x in candidates(group, [schemes.parse("bf16"), schemes.parse("nvfp4_amax")])
    ]
    k = ["bf16", "nvfp4_amax", "nvfp4_amax+rot", "nvfp4_amax+kmean+rot"]
    assert names == [*(("k", name) for name in k), ("v", "bf16"), ("v", "nvfp4_amax")]
    capped = replace(group, softcap=True)
    assert not any("kmean" in x.transforms for x in candidates(capped, [schemes.parse("nvfp4")]))


def test_only_what_a_kernel_reads_is_a_candidate_on_a_gpu(config: Config) -> None:
    for gpu, served in (("h200", False), (None, True)):
        there = target(config, gpu)
        for name in ("k8v4", "nvfp4", "fp8_e4m3+rot", "bf16"):
            assert there.refuses({0: schemes.parse(name)}) is None
        reason = there.refuses({0: schemes.parse("nvfp4:fp8")})
        assert (reason is None) == served
        assert served or "no kernel reads it for decode on h200" in str(reason)


def search(config: Config, gpu: str | None = None, **of_stream: dict[str, float]) -> Search:
    """A search where candidates lose in every layer what is said, and in layer 1 twice that."""
    there = target(config, gpu)
    (group,) = there.model_spec.groups
    table = {}
    for stream, by_name in of_stream.items():
        for name, loss in by_name.items():
            trial = of(there, stream, name)
            table |= {(layer, trial): loss * (layer + 1) for layer in there.owners(group)}
    return Search(there, table)


K = {"bf16": 0.0, "fp8_e4m3": 1.0, "nvfp4": 9.0, "nvfp4+kmean+rot": 6.0}
V = {"bf16": 0.0, "fp8_e4m3": 0.5, "nvfp4": 2.0}


def test_the_budget_goes_where_it_helps_most(config: Config) -> None:
    found = search(config, k=K, v=V)
    chosen = found.within_bits(5.5)
    # 11 bits for two layers: 9 for 4-bit everywhere, and 1.75 for K of layer 1, which loses most.
    assert [entry.scheme.name for entry in chosen.layers.values()] == ["nvfp4+kmean+rot", "k8v4+none"]
    assert chosen.loss == 6 + 2 + 2 * (1 + 2)
    assert chosen.bits == (2 * 4.5 + 1.75) / 2
    assert chosen.bytes_per_token * 8 == chosen.bits * found.values


def test_the_smallest_cache_within_a_loss(config: Config) -> None:
    chosen = search(config, k=K, v=V).within_kl(9.0)
    assert chosen.loss <= 9.0
    assert [entry.scheme.name for entry in chosen.layers.values()] == ["k8v4+none", "k8v4+none"]


def test_pairs_without_a_kernel_are_not_chosen(config: Config) -> None:
    """Here V matters more than K, and no kernel of the GPU reads FP8 of V beside 4-bit K."""
    wrong = {"k": {"nvfp4": 0.1, "fp8_e4m3": 0.0}, "v": {"nvfp4": 9.0, "fp8_e4m3": 0.0}}
    assert search(config, **wrong).within_bits(6.25).layers[1].scheme.name == "nvfp4:fp8_e4m3+none"
    found = search(config, "h200", **wrong)
    assert {entry.scheme.name for entry in found.within_bits(6.25).layers.values()} == {
        "nvfp4+none",
        "fp8_e4m3+none",
    }
    assert "nvfp4:fp8_e4m3+none" in found.skipped


def test_streams_of_a_layer_have_one_encoder(config: Config) -> None:
    found = search(config, k={"nvfp4": 1.0, "nvfp4_amax": 2.0}, v={"nvfp4": 2.0, "nvfp4_amax": 1.5})
    assert {entry.scheme.name for entry in found.within_bits(4.5).layers.values()} == {"nvfp4+none"}


def test_what_cannot_be_reached(config: Config) -> None:
    found = search(config, k=K, v=V)
    with pytest.raises(
        ConfigError, match=r"a budget of 4 bits is too small: .* 4.500 bits .*--budget 4.500bits"
    ):
        found.within_bits(4.0)
    with pytest.raises(
        ConfigError, match=r"too small: the best assignment of these candidates has 4\.5 nats"
    ):
        search(config, k={"fp8_e4m3": 1.0}, v={"fp8_e4m3": 0.5}).within_kl(1.0)


# The exact window

NONE = WindowOption(0, factor=2.0)
LONG = WindowOption(32, exact_bytes=1600, request=100, stored=100, factor=1.0)


def test_a_window_is_bought_with_bytes_of_pages(config: Config) -> None:
    found = search(config, k=K, v=V)
    # In bits of a token: 16 bytes of the exact pages, over the values of two layers.
    window = 8 * 16 / found.values
    at_4_bits = found.within_bits(4.5 + window, [NONE, LONG])
    assert (at_4_bits.window, at_4_bits.bits) == (LONG, 4.5)
    assert at_4_bits.loss == 3 * (6 + 2)
    # The same bytes may do more in pages.
    useless = replace(LONG, factor=1.99)
    assert found.within_bits(6.25, [NONE, useless]).window == NONE
    # Nothing is left of this budget.
    assert found.within_bits(4.5, [NONE, LONG]).window == NONE
    with pytest.raises(ConfigError, match=f"{4.5 + window:.3f} bits a value"):
        found.within_bits(4.5, [LONG])


def test_a_window_may_be_what_keeps_within_a_kl(config: Config) -> None:
    found = search(config, k=K, v=V)
    assert found.within_kl(24.0, [NONE, LONG]).window == LONG
    dear = replace(LONG, exact_bytes=10**6)
    assert found.within_kl(24.0, [NONE, dear]).window == NONE
    with pytest.raises(ConfigError, match="has 3 nats"):
        search(config, k={"fp8_e4m3": 0.5}, v={"fp8_e4m3": 0.5}).within_kl(1.0, [NONE, LONG])


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_a_windows_bytes_are_those_that_the_planner_counts(config: Config, gpu: str | None) -> None:
    """Of pages in whole, and exact pages."""
    there = replace(target(config, gpu), window=96)
    stored = {layer: schemes.parse("nvfp4") for layer in (0, 1)}
    plan = there.plan(stored)
    assert plan.window == 96
    option = WindowOption.of(plan, 300)
    expected = request_bytes(plan, 300) / 300
    assert option.spread(plan.layout.bytes_per_token) == pytest.approx(expected)
    assert option.rest(expected) == pytest.approx(plan.layout.bytes_per_token)


@pytest.fixture(scope="module")
def windowed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A search with the exact window left to it, and bits to spare for one."""
    path = tmp_path_factory.mktemp("windowed") / "kv_scheme.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_precision, "CALIBRATION_TOKENS", 64)
        goal = Goal(budget="16bits", candidates="nvfp4", tokens=512, window=512, verify_tokens=160)
        return tune_precision.tune(Config(model=model, **ONE), goal, path)


def test_a_window_is_chosen_and_written(model: str, windowed: Outcome) -> None:
    by_tokens = {entry["tokens"]: entry for entry in windowed.windows}
    # Longer ones leave too little of 512 tokens to judge by.
    assert list(by_tokens) == [0, 64, 96, 128]
    factors = [entry["factor"] for entry in windowed.windows]
    assert factors == sorted(factors, reverse=True)
    assert windowed.window == 128
    assert scheme_file.load(windowed.path).window == 128
    plan = plan_engine(Config(model=model, kv_format=windowed.path)).plan
    assert plan.window == 128
    # The model's context is shorter than --context.
    assert windowed.measured["context"] == 512
    assert windowed.bytes_with_window == request_bytes(plan, 512) / 512
    assert windowed.whole and windowed.whole.exact_window == 128
    assert windowed.whole.request_bytes == request_bytes(plan, 512)
    assert "with an exact window of 128 tokens in a request of 512" in windowed.summary()


def test_factors_are_the_kl_of_serving(model: str, windowed: Outcome) -> None:
    """Over the sum of the layers' KLs."""
    parts = sum(sum(layer.kl.values()) for layer in windowed.layers)
    for entry in windowed.windows:
        options = {"kv_format": "nvfp4", "kv_window": entry["tokens"], **ONE}
        exact, other = LLM(model, kv_format="fp32"), LLM(model, **options)
        agreement = Agreement()
        ids = exact.tokenizer.encode(TEXT)[-512:]
        for window in windows(ids, 512):
            reference = Prediction.of(window.predictions(exact.logits(window.ids)))
            agreement.add(window.predictions(other.logits(window.ids)), reference)
        assert entry["factor"] * parts == pytest.approx(agreement.kl, rel=5e-3), entry


def test_the_default_window_is_not_written(model: str, tmp_path: Path) -> None:
    goal = Goal(budget="16bits", candidates="nvfp4", tokens=256, window=256, verify_tokens=0, context=256)
    outcome = tune_precision.tune(Config(model=model, **ONE), goal, tmp_path / "kv_scheme.json")
    assert (outcome.window, scheme_file.load(outcome.path).window) == (64, None)
    assert plan_engine(Config(model=model, kv_format=outcome.path)).plan.window == 64


# One run


@pytest.fixture(scope="module")
def outcome(model: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path = tmp_path_factory.mktemp("out") / "kv_scheme.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_precision, "CALIBRATION_TOKENS", 64)
        goal = replace(GOAL, verify_tokens=128, compare=("k8v4",))
        return tune_precision.tune(
            Config(model=model, kv_window=0), goal, path, command="nibble tune-precision"
        )


def test_the_file_is_what_was_chosen(model: str, outcome: Outcome) -> None:
    file = scheme_file.load(outcome.path)
    assert [layer.scheme for layer in outcome.layers] == [
        scheme.name.replace("_sweep", "") for _, scheme in sorted(file.layers.items())
    ]
    assert file.provenance["model"] == model
    assert file.provenance["environment"]["command"] == "nibble tune-precision"
    assert file.provenance["measured"]["text"] == "heldout.txt"
    assert [entry["scheme"] for entry in file.provenance["verified"]] == ["bf16", outcome.path, "k8v4"]


def test_its_bytes_are_those_of_the_plan(model: str, outcome: Outcome) -> None:
    plan = plan_engine(Config(model=model, kv_format=outcome.path)).plan
    assert plan.layout.bytes_per_token == outcome.bytes_per_token
    values = sum(entry.stream.values for layer in plan.layout.layers for entry in layer.streams)
    assert outcome.bits == pytest.approx(8 * plan.layout.bytes_per_token / values)
    assert outcome.bits <= 5.5
    assert outcome.whole
    assert outcome.whole.bytes_per_token == outcome.bytes_per_token


def test_it_is_measured_as_a_whole(outcome: Outcome) -> None:
    assert outcome.whole
    (window,) = outcome.windows
    parts = sum(sum(layer.kl.values()) for layer in outcome.layers)
    assert outcome.predicted_kl == pytest.approx(window["factor"] * parts)
    # On other text: of the same size, no more.
    assert outcome.predicted_kl / 4 < outcome.whole.kl < 4 * outcome.predicted_kl


def test_generate_with_the_file(model: str, outcome: Outcome) -> None:
    """As with the same rules spelled out."""
    rules = ";".join(f"{layer.layer}={layer.scheme}" for layer in outcome.layers)
    answers = [
        LLM(model, **options).generate("def f", max_tokens=8).completions[0].token_ids
        for options in ({"kv_format": outcome.path}, {"kv_layers": rules})
    ]
    assert answers[0] == answers[1]


def test_auto_takes_the_file_in_the_models_folder(model: str, outcome: Outcome, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert plan_engine(Config(model=str(folder), kv_format="auto")).plan.groups[0].scheme == "bf16"
    shutil.copy(outcome.path, folder / scheme_file.FILE_NAME)
    plan = plan_engine(Config(model=str(folder), kv_format="auto")).plan
    assert plan.layout.bytes_per_token == outcome.bytes_per_token
    assert "KV formats: the checkpoint's own, by layer, of kv_scheme.json" in plan.notes
    unused = plan_engine(Config(model=str(folder)))
    assert unused.plan.groups[0].scheme == "bf16"
    assert any("--kv-format auto takes them" in note for note in unused.plan.notes)


def test_a_goal_that_does_not_hold_is_said(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision.Search, "within_kl", lambda self, most, windows: self.within_bits(4.5))
    goal = replace(GOAL, budget=None, max_kl=1e-9, verify_tokens=64, candidates="nvfp4")
    outcome = tune_precision.tune(config, goal, tmp_path / "kv_scheme.json")
    assert "more than --max-kl 1e-09" in outcome.notes[0]
    # The scale 1.0 by name comes without means.
    assert "needs a mean of K" in outcome.skipped["k in nvfp4+kmean+rot"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"candidates": "k8v4"}, "k8v4 is no format"),
        ({"candidates": "nvfp4+rot"}, "is no format"),
        ({"candidates": "nvfp5"}, "unknown KV format"),
        ({"candidates": "nvfp4_ds_mla"}, "no candidate can store k of group full"),
        ({"tokens": 10**6}, "tokens, and 1,000,064 are needed"),
    ],
)
def test_what_is_refused_at_once(config: Config, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tune_precision.tune(config, replace(GOAL, **changes), tmp_path / "kv_scheme.json")


def test_text_that_is_all_near_is_refused(config: Config, tmp_path: Path) -> None:
    for window in (None, 64):
        with pytest.raises(ConfigError, match=r"pieces of 64 tokens says little .* use at least 256"):
            tune_precision.tune(replace(config, kv_window=window), GOAL, tmp_path / "kv_scheme.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--budget 5.0bits, or --max-kl"),
        ({"budget": "5bits", "max_kl": 0.1}, "either"),
        ({"budget": "5 bytes"}, "cannot read the budget '5 bytes'"),
        ({"max_kl": 0.0}, "above 0"),
        ({"budget": "5", "tokens": 1}, "tokens must be at least 64"),
    ],
)
def test_goals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Goal(**options)


def test_figures_are_json(outcome: Outcome) -> None:
    content = json.loads(json.dumps(outcome.as_dict()))
    assert set(content["sensitivity"]) == {"k", "v"}
    assert all(len(values) == 2 for by_name in content["sensitivity"].values() for values in by_name.values())
    assert "measured" in outcome.summary()
    assert len(list(outcome.rows())) == 2
    assert [row[0] for row in outcome.verified_rows()] == ["bf16", outcome.path, "k8v4"]
