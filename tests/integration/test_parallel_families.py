"""Families that are divided among ranks: answers are those of one rank, and planted faults are noticed.

Ranks are threads here (thread_ranks.py). With an unquantised cache logits are those of one rank within rounding,
whatever is cut into chunks, read from the prefix cache or computed again; quantised caches store nearly the same codes,
and with --deterministic the very same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from divided import OPTIONS, PROMPT, answers, served, tokens
from families import TOLERANCE, tiny_model
from nibble import LLM, ConfigError, NibbleError
from nibble.config import Config
from nibble.evals.certify import certify
from nibble.evals.report import Sizes
from nibble.kernels import collectives
from nibble.kernels.append.naive import dequantize_tokens
from nibble.models import pack, parallel, shards
from nibble.models.experts import packed_matrices
from nibble.models.hub import quiet
from nibble.models.linear import quantized_layers
from thread_ranks import ThreadRanks, threads_as_ranks
from tiny import save_model, save_tiny, save_tokenizer

# GQA with fewer KV heads than ranks, sinks with windows and experts, MLA with experts, DSA, one fused layer for queries,
# keys and values, a hybrid, and attention that cannot be divided.
CASES = {
    "llama": 4, "gpt_oss": 2, "deepseek_v3": 2, "glm_moe_dsa": 2, "phi3": 2, "qwen3_next": 2, "olmo2": 2,
}  # fmt: skip
REPLICATED = {"olmo2": "attention (a norm goes over all heads)"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("families")}


def saved(paths: dict[str, Path], name: str) -> Path:
    if name not in paths:
        paths[name] = paths[""] / name
        with quiet():
            tiny_model(name).save_pretrained(paths[name])
    return paths[name]


def compare(path: Path, name: str, *sizes: int, **options: Any) -> None:
    options = {"kv_format": "fp32", "kv_memory": "8MiB", **options}
    with served(path, 1, **options) as llm:
        logits_TV, expected = llm.logits(PROMPT), answers(llm)
    for tp in sizes:
        with served(path, tp, **options) as llm:
            spec = llm._engine_plan.model_spec
            assert spec.tp == tp and (REPLICATED.get(name, "") in spec.replicated or not REPLICATED.get(name))
            assert float((llm.logits(PROMPT) - logits_TV).abs().max()) < TOLERANCE
            assert answers(llm) == expected
            # Again, of which most is in the prefix cache.
            assert answers(llm) == expected and llm.engine.scheduler.metrics.cache.hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_one_rank(name: str, paths: dict[str, Path]) -> None:
    compare(saved(paths, name), name, CASES[name])


@pytest.mark.sample(10)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(parallel.VERIFIED))
def test_every_family_that_may_be_divided(name: str, paths: dict[str, Path]) -> None:
    # In larger chunks, which are fewer: small ones are the concern of CASES.
    compare(saved(paths, name), name, 2, 4, token_budget=24)


@pytest.mark.slow
def test_requests_that_are_preempted_answer_alike(paths: dict[str, Path]) -> None:
    options = {"kv_format": "fp32", "prefix_cache": False}
    with served(saved(paths, "llama"), 2, kv_memory="8MiB", **options) as llm:
        expected, page = answers(llm, 40), llm.plan.layout.bytes_per_token * llm.plan.page_size
    with served(saved(paths, "llama"), 2, kv_memory=str(9 * page), **options) as llm:
        assert answers(llm, 40) == expected
        assert llm.engine.scheduler.metrics.preemptions > 0


def test_families_that_nobody_compared_are_refused(tmp_path: Path) -> None:
    with quiet():
        tiny_model("granitemoe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--tp 2: granitemoe cannot be divided among GPUs yet"):
        LLM(str(tmp_path), tp=2, kv_format="fp32", **OPTIONS)


# Quantised caches

WIDE = {"intermediate_size": 256}
"""Widths of which each part fills vectors: torch computes the tail of silu() otherwise."""


def stored(llm: LLM, tp: int, heads: int) -> dict[tuple[int, str], Tensor]:
    """What all ranks store of a prompt, [T, H, D] by layer and stream."""
    ranks, runners = llm.engine.ranks, [llm.engine.runner]
    if tp > 1:
        assert isinstance(ranks, ThreadRanks)
        runners += [ranks.followers[rank].runner for rank in range(1, tp)]
    slots, found = torch.arange(96), {}
    for layer in range(len(llm.plan.owner)):
        for name in ("k", "v"):
            parts = [dequantize_tokens(r.pool.view(layer).streams[name].paged, slots) for r in runners]
            x_THD = torch.cat(parts, 1)
            # Of a head that several ranks keep, one.
            found[layer, name] = x_THD[:, :: x_THD.shape[1] // heads]
    return found


def long_prompt(llm: LLM, tp: int) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
    return llm.logits(tokens(100, 6, 320)), stored(llm, tp, 2)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("qwen"), "qwen3", **WIDE)
    save_tokenizer(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        # Means of K, and scales, are measured on all heads.
        {"kv_format": "nvfp4"},
        {"kv_format": "k8v4", "kv_scales": "one", "kv_window": 16},
    ],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_deterministic_ranks_store_and_answer_what_one_does(
    tp: int, options: dict[str, Any], qwen: Path
) -> None:
    options = {
        **options,
        "deterministic": True,
        "kv_memory": "1MiB",
        "token_budget": 64,
        "prefix_cache": False,
    }
    with served(qwen, 1, **options) as llm:
        logits_TV, expected = long_prompt(llm, 1)
    with served(qwen, tp, **options) as llm:
        found_TV, found = long_prompt(llm, tp)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert torch.equal(found_TV, logits_TV)


def test_sums_over_ranks_change_hardly_a_code(qwen: Path) -> None:
    options = {"kv_format": "nvfp4", "kv_scales": "one", "kv_memory": "1MiB", "kv_window": 0}
    with served(qwen, 1, **options) as llm:
        logits_TV, expected = long_prompt(llm, 1)
    with served(qwen, 4, **options) as llm:
        found_TV, found = long_prompt(llm, 4)
    different = torch.cat([(found[key] != expected[key]).flatten() for key in expected])
    assert float(different.float().mean()) <= 1e-3
    p, q = logits_TV.log_softmax(-1), found_TV.log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) <= 1e-3


# Quantised weights

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
IDS = list(range(3, 40))


def of_weights(name: str, tp: int, handling: str) -> Tensor:
    options = {"kv_format": "fp32", "kv_memory": "1MiB", "max_context": 64, "activations": "bf16"}
    with served(FIXTURES / name, tp, quantized_weights=handling, token_budget=64, **options) as llm:
        if handling == "packed":
            model = llm.engine.runner.model
            assert quantized_layers(model) or packed_matrices(model)
        return llm.logits(IDS)


@pytest.mark.parametrize(
    ("name", "handling"),
    [
        ("gptq_asym", "packed"),
        ("ct_nvfp4_moe", "packed"),
        ("fp8_block_moe", "packed"),
        ("awq_gemm", "unpacked"),
        ("gptoss_mxfp4", "unpacked"),
    ],
)
def test_quantised_weights_are_divided_with_their_scales(name: str, handling: str) -> None:
    assert float((of_weights(name, 2, handling) - of_weights(name, 1, handling)).abs().max()) < TOLERANCE


def test_scales_that_are_not_divided_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, own = of_weights("ct_nvfp4_moe", 1, "packed"), pack.packed_part

    def with_first_scales(matrix: Any, split: shards.Split, name: str) -> Any:
        width = sum(stop - start for start, stop in split.parts)
        return replace(
            own(matrix, split, name), scale=own(matrix, shards.Split(split.dim, ((0, width),)), name).scale
        )

    monkeypatch.setattr(pack, "packed_part", with_first_scales)
    assert float((of_weights("ct_nvfp4_moe", 2, "packed") - expected).abs().max()) > 10 * TOLERANCE


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of parts with whole groups of 128 inputs, and rows that are no whole blocks of 128."""
    shapes = {"hidden_size": 256, "intermediate_size": 768, "initializer_range": 0.05, "head_dim": 64}
    return save_tiny(tmp_path_factory.mktemp("online"), num_attention_heads=4, **shapes)


@pytest.mark.parametrize(("name", "handling"), [("nvfp4", "packed"), ("fp8", "unpacked")])
def test_a_matrix_is_quantised_before_it_is_divided(
    name: str, handling: str, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_format": "fp32", "kv_memory": "1MiB", "weights": name, "quantized_weights": handling}
    logits = []
    for tp in (1, 2):
        with served(online, tp, **options) as llm:
            assert bool(quantized_layers(llm.engine.runner.model)) == (handling == "packed")
            logits.append(llm.logits(IDS))
    assert float((logits[1] - logits[0]).abs().max()) < TOLERANCE
    if (name, handling) != ("nvfp4", "packed"):
        return

    def part_first(read: Any, split: shards.Split, parts: Any, maker: Any) -> Any:
        # By the scales of the part, as it would be were it divided before.
        part = shards.PartOfWhole(parts.stored["weight"], split)
        return read(replace(parts, stored={"weight": part}), maker)

    monkeypatch.setattr(pack, "part_of", part_first)
    with served(online, 2, **options) as llm:
        assert float((llm.logits(IDS) - logits[0]).abs().max()) > 10 * TOLERANCE


@pytest.mark.slow
def test_experts_are_quantised_before_they_are_divided(tmp_path: Path, paths: dict[str, Path]) -> None:
    """Of a checkpoint that has them one by one; where they lie in one tensor they are not packed."""
    shapes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 128}
    one_by_one = save_model(tmp_path / "moe", "qwen3_moe", initializer_range=0.05, **shapes)
    options = {"kv_format": "fp32", "kv_memory": "1MiB", "weights": "nvfp4", "quantized_weights": "packed"}
    logits = []
    for tp in (1, 2):
        with served(one_by_one, tp, **options) as llm:
            assert packed_matrices(llm.engine.runner.model)
            logits.append(llm.logits(IDS))
    assert float((logits[1] - logits[0]).abs().max()) < TOLERANCE
    together = saved(paths, "gpt_oss")
    with (
        pytest.raises(NibbleError, match="experts that lie in one tensor are not divided"),
        served(together, 2, **options),
    ):
        pass
    options |= {"quantized_weights": "unpacked"}
    with served(together, 1, **options) as llm:
        expected_TV = llm.logits(IDS)
    with served(together, 2, **options) as llm:
        assert float((llm.logits(IDS) - expected_TV).abs().max()) < TOLERANCE


# What else goes over all ranks


def test_a_smaller_model_drafts(paths: dict[str, Path]) -> None:
    path, options = saved(paths, "llama"), {"kv_format": "fp32", "kv_memory": "8MiB"}
    with served(path, 1, **options) as llm:
        expected = answers(llm)
    with served(path, 2, speculative=f"draft:{path},kv_format=fp32", **options) as llm:
        assert answers(llm) == expected
        assert llm.speculation and llm.speculation.counts.accepted > 0


TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(40))
SMALL = Sizes(
    tokens=120, recall_cases=1, recall_lengths=(256,), attention_tokens=32, yardstick="fp32", seed=3
)


@pytest.mark.slow
def test_certificates_of_one_gpu_and_of_two(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=512)
    (path / "heldout.txt").write_text(TEXT)
    common: dict[str, Any] = {"kv_format": "nvfp4", "kv_memory": "4MiB"}
    with threads_as_ranks():
        # Scales are measured on all ranks, here and at the start.
        of_two = certify(Config(model=str(path), tp=2, **common), SMALL)
        bound = f"kl={of_two.figures.kl}"
        with LLM(str(path), tp=2, require_quality=bound, **common) as llm:
            assert llm.certificate == of_two
        of_one = certify(Config(model=str(path), kv_scales="one", **common), SMALL)
        with LLM(str(path), tp=2, kv_scales="one", require_quality="kl=1", **common) as llm:
            assert llm.certificate == of_one
        again = certify(Config(model=str(path), kv_scales="one", tp=2, **common), SMALL)
    assert again.figures.attention_error == pytest.approx(of_one.figures.attention_error, rel=1e-3)
    assert again.figures.bytes_per_token == of_one.figures.bytes_per_token
    assert again.subject == of_one.subject and "--tp=2" in again.command


# Planted faults


def error(paths: dict[str, Path], name: str = "llama", tp: int = 2) -> float:
    with served(saved(paths, name), 1, kv_format="fp32", kv_memory="8MiB") as llm:
        expected_TV = llm.logits(PROMPT)
    with served(saved(paths, name), tp, kv_format="fp32", kv_memory="8MiB") as llm:
        return float((llm.logits(PROMPT) - expected_TV).abs().max())


def test_a_shard_of_another_rank_is_noticed(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own = shards.Shard.part

    def swapped(self: shards.Shard, whole: int, part: int) -> tuple[int, int]:
        # Columns of gate and up alone, so that each rank has a consistent part of the wrong one.
        if whole == 96 and self.size == 2:
            return own(shards.Shard(0, 2), whole, part)
        return own(self, whole, part)

    monkeypatch.setattr(shards.Shard, "part", swapped)
    assert error(paths) > 10 * TOLERANCE


def test_a_sum_that_is_left_out_is_noticed(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1 << 30))
    own = collectives.all_reduce

    def without_one(x: Tensor, group: int) -> Tensor:
        y = own(x, group)
        return x if next(calls) in (2, 3) else y

    monkeypatch.setattr(collectives, "all_reduce", without_one)
    assert error(paths) > 10 * TOLERANCE


def test_means_of_other_heads_are_noticed(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nibble.engine import build

    own = build.kv_scales.part
    options = {
        "kv_format": "nvfp4",
        "kv_window": 0,
        "kv_memory": "1MiB",
        "token_budget": 64,
        "deterministic": True,
    }
    with served(qwen, 1, **options) as llm:
        _, expected = long_prompt(llm, 1)

    def of_rank_0(scales: Any, layout: Any, kv_heads: Any, _: int, size: int) -> Any:
        return own(scales, layout, kv_heads, 0, size)

    monkeypatch.setattr(build.kv_scales, "part", of_rank_0)
    with served(qwen, 2, **options) as llm:
        _, found = long_prompt(llm, 2)
    assert any(not torch.equal(found[key], expected[key]) for key in expected)
