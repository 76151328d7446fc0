"""Experts that are divided among ranks by number: answers are those of one rank, and planted faults are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from divided import PROMPT, answers, served
from families import TOLERANCE, tiny_model
from nibble import LLM, ConfigError
from nibble.models import parallel_experts
from nibble.models.experts import packed_matrices
from nibble.models.hub import quiet
from nibble.models.parallel_experts import OwnExperts
from nibble.models.shards import Shard

CASES = {"qwen3_moe": 2, "deepseek_v3": 4, "gpt_oss": 2, "mixtral": 2}
"""Experts one by one in the checkpoint, shared ones beside them, biases and one tensor of all, other names."""
OPTIONS: dict[str, Any] = {"kv_format": "fp32", "kv_memory": "8MiB"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    with quiet():
        for name in CASES:
            tiny_model(name).save_pretrained(folder / name)
    return {name: folder / name for name in CASES}


@pytest.fixture(scope="module")
def of_one(paths: dict[str, Path]) -> dict[str, tuple[Tensor, list[tuple[int, ...]]]]:
    """Logits and answers of one rank."""
    found = {}
    for name, path in paths.items():
        with served(path, 1, **OPTIONS) as llm:
            found[name] = llm.logits(PROMPT), answers(llm, 4)
    return found


def experts_of(llm: LLM) -> list[Any]:
    return [module for module in llm.engine.runner.model.modules() if hasattr(module, "first_expert")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_one_rank(name: str, paths: dict[str, Path], of_one: dict[str, Any]) -> None:
    logits_TV, expected = of_one[name]
    with served(paths[name], CASES[name], expert_parallel=True, **OPTIONS) as llm:
        modules = experts_of(llm)
        whole = tiny_model(name).config
        count = getattr(whole, "n_routed_experts", None) or whole.num_local_experts
        assert modules and {one.num_experts for one in modules} == {count // CASES[name]}
        assert float((llm.logits(PROMPT) - logits_TV).abs().max()) < TOLERANCE
        assert answers(llm, 4) == expected
        assert "each GPU has an equal number of whole experts" in str(llm.plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "jamba", "nemotron_h", "qwen3_5_moe_text"])
def test_other_families_answer_as_one_rank(name: str, tmp_path: Path) -> None:
    with quiet():
        tiny_model(name).save_pretrained(tmp_path)
    with served(tmp_path, 1, **OPTIONS) as llm:
        logits_TV = llm.logits(PROMPT)
    with served(tmp_path, 2, expert_parallel=True, **OPTIONS) as llm:
        assert experts_of(llm)
        assert float((llm.logits(PROMPT) - logits_TV).abs().max()) < TOLERANCE


# Quantised weights

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"


@pytest.mark.parametrize(
    ("name", "handling"),
    [("ct_nvfp4_moe", "packed"), ("gptoss_mxfp4", "packed"), ("gptoss_mxfp4", "unpacked")],
)
def test_quantised_experts_are_divided(name: str, handling: str) -> None:
    options = {"kv_format": "fp32", "kv_memory": "1MiB", "activations": "bf16", "token_budget": 64}
    found = dict[bool, Tensor]()
    for divided in (False, True):
        size, more = (2, {"expert_parallel": True}) if divided else (1, {})
        with served(FIXTURES / name, size, quantized_weights=handling, **options, **more) as llm:
            found[divided] = llm.logits(list(range(3, 40)))
            if divided and handling == "packed":
                assert {one.codes.shape[0] for one in packed_matrices(llm.engine.runner.model)} == {2}
    assert float((found[True] - found[False]).abs().max()) < TOLERANCE


# Planted faults


def error(paths: dict[str, Path], of_one: dict[str, Any], name: str = "mixtral") -> float:
    with served(paths[name], 2, expert_parallel=True, **OPTIONS) as llm:
        return float((llm.logits(PROMPT) - of_one[name][0]).abs().max())


def test_experts_that_two_ranks_hold_are_noticed(
    paths: dict[str, Path], of_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_rank_0(self: OwnExperts, whole: Any, part: Any, shard: Shard) -> None:
        own(self, whole, part, Shard(0, shard.size))

    own = OwnExperts.__init__
    monkeypatch.setattr(OwnExperts, "__init__", of_rank_0)
    assert error(paths, of_one) > 10 * TOLERANCE


def test_an_expert_that_no_rank_computes_is_noticed(
    paths: dict[str, Path], of_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = parallel_experts._own_forward

    def without_the_first(forward: Any) -> Any:
        def run(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return own(forward)(self, x, chosen, torch.where(chosen == 0, 0.0, weights))

        return run

    monkeypatch.setattr(parallel_experts, "_own_forward", without_the_first)
    assert error(paths, of_one) > 10 * TOLERANCE


# Refusals


def test_what_cannot_be_divided_is_refused_before_weights_load(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"--expert-parallel divides a model among GPUs: say how many by --tp N"
    ):
        LLM(str(paths["mixtral"]), expert_parallel=True, **OPTIONS)
    with pytest.raises(ConfigError, match="3 experts cannot be divided evenly among 2 GPUs"):
        LLM(str(FIXTURES / "fp8_block_moe"), tp=2, expert_parallel=True, **OPTIONS)
    with quiet():
        tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="llama has no experts that"):
        LLM(str(tmp_path), tp=2, expert_parallel=True, **OPTIONS)
