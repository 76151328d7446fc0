"""Recurrent states in evaluations and certificates: what rounds them is measured against exact ones, and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nibble import LLM
from nibble.config import STATE_FORMATS, Config
from nibble.engine import certificate_lookup as lookup
from nibble.engine.plan import plan_engine
from nibble.errors import ConfigError
from nibble.evals.certify import certify
from nibble.evals.report import Entry, Sizes
from nibble.evals.run import candidates_of, evaluate
from tiny import QWEN3_NEXT, save_tiny

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(40))
SMALL = Sizes(tokens=120, recall_cases=0, attention_tokens=32, yardstick="fp32")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT)
    (folder / "heldout.txt").write_text(TEXT)
    return folder


def config(model: Path, **options: str) -> Config:
    return Config(model=str(model), **{"kv_format": "fp32", "kv_scales": "one", **options})


def test_a_schemes_states_are_compared_with_exact_ones(hybrid: Path) -> None:
    """With KV as the model computes it, nothing else differs."""
    report = evaluate(config(hybrid, state_format="fp8"), ["fp32", "fp32:state_format=bf16"], SMALL)
    yardstick, fp8, bf16 = report.results
    assert [one.name for one in report.results] == ["fp32", "fp32:state_format=fp8", "fp32:state_format=bf16"]
    assert yardstick.kl == 0 < bf16.kl < fp8.kl and yardstick.perplexity != fp8.perplexity


def test_the_yardstick_has_exact_states_whatever_is_served(hybrid: Path) -> None:
    served = config(hybrid, state_format="int8")
    candidates, _ = candidates_of(served, [Entry("nvfp4"), Entry("fp32")], Entry("fp32"))
    assert [one.plan.plan.state_format for one in candidates] == ["fp32", "int8", "int8"]
    exact, _ = candidates_of(config(hybrid), [Entry("nvfp4"), Entry("fp32")], Entry("fp32"))
    assert [one.entry.name for one in exact] == ["fp32", "nvfp4"]


def test_a_model_without_states_has_no_scheme_for_them(tmp_path: Path) -> None:
    dense = save_tiny(tmp_path, num_hidden_layers=1)
    candidates, _ = candidates_of(config(dense, state_format="int8"), [Entry("nvfp4")], Entry("fp32"))
    assert [one.entry.name for one in candidates] == ["fp32", "nvfp4"]
    plan = plan_engine(config(dense, kv_format="nvfp4", state_format="int8"))
    assert lookup.subject_of(plan, None) == lookup.subject_of(
        plan_engine(config(dense, kv_format="nvfp4")), None
    )


def test_a_certificate_is_of_the_states_format(hybrid: Path) -> None:
    subjects = {
        name: lookup.subject_of(plan_engine(config(hybrid, kv_format="nvfp4", state_format=name)), None)
        for name in STATE_FORMATS
    }
    assert len({one.key for one in subjects.values()}) == len(STATE_FORMATS)
    assert "state_format" not in subjects["fp32"].options, "exact states have the certificates of before"
    said = list(subjects["fp32"].differences(subjects["int8"]))
    assert said == ["it is of state_format as usual, and here it is int8"]


def test_what_is_required_depends_on_the_states(hybrid: Path, tmp_path: Path) -> None:
    """KV alone that is not quantised needs no certificate; rounded states do, and one of other states does not count."""
    int8 = config(hybrid, state_format="int8")
    with pytest.raises(ConfigError, match=r"in fp32, and states in int8, has no certificate that counts"):
        LLM(**_options(int8), require_quality="kl=9")
    assert lookup.command_for(int8).endswith("fp32 --kv-scales=one --state-format=int8")
    written = certify(int8, replace(SMALL, attention_tokens=0))
    assert written.figures.kl > 0 and "--state-format=int8" in written.command
    with LLM(**_options(int8), require_quality="kl=9") as llm:
        assert llm.certificate == written
    with pytest.raises(ConfigError, match="it is of state_format int8, and here it is fp8"):
        LLM(**_options(config(hybrid, state_format="fp8")), require_quality="kl=9")
    with LLM(**_options(config(hybrid)), require_quality="kl=0") as llm:
        assert llm.certificate is None


def _options(of: Config) -> dict[str, str]:
    return {name: getattr(of, name) for name in ("model", "kv_format", "kv_scales", "state_format")}
