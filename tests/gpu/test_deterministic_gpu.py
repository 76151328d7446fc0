"""--deterministic on a GPU: bit by bit the same, cold or cached, in chunks, in company, preempted, recorded or not.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_deterministic_gpu.py

Kernels first, so that a failure says where it begins. Of a model that fails, the last test names the first module whose
rows differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bits import ANSWER, answer, differs, first_difference, limited, traced
from nibble import LLM
from tiny import MLA, save_tiny

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

LONG_ANSWER = 80


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = ids(330, 1)
OTHERS = [ids(n, n) for n in (3, 61, 140, 700)]
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "qwen3_moe": ("qwen3_moe", WIDE | MOE),
    "gemma3": (
        "gemma3_text",
        WIDE | {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mla": ("deepseek_v3", MLA),
    "llama-8b": (
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02, "max_position_embeddings": 2048,
        },
    ),
}  # fmt: skip
SCHEMES = {"llama": ("bf16",), "mla": ("nvfp4_ds_mla",)}
CASES = [(name, scheme) for name in MODELS for scheme in SCHEMES.get(name, ("nvfp4",))]
"""Mostly 4 bits: one last bit of K or V may be a whole step there, so that nothing hides."""


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_products(dtype: torch.dtype) -> None:
    """Alone, in batches of 2 to 8192, anywhere in them, by every tile."""
    from nibble.kernels import gpu_of
    from nibble.kernels.invariant import triton as kernels

    rows, n, k = (512, 96, 384) if dtype == torch.float32 else (8192, 1152, 4096)
    torch.manual_seed(0)
    x = torch.randn(1, rows, k, device="cuda").to(dtype)
    weight = (torch.randn(1, n, k, device="cuda") / k**0.5).to(dtype).transpose(1, 2)
    whole = kernels.bmm(x, weight, None)
    error = (whole.float() - (x.float() @ weight.float())).norm() / whole.float().norm()
    assert error < 1e-2
    tiles = kernels.all_tiles(dtype, gpu_of(x.device))
    for tile in tiles:
        assert torch.equal(kernels.bmm(x, weight, None, tile=tile), whole), (
            f"{tile} sums otherwise than {tiles[-1]}"
        )
    for count in (1, 2, 3, 7, 16, 17, 64, 65, 256, 500):
        for start in (0, 5, rows - count):
            part = kernels.bmm(x[:, start : start + count], weight, None)
            assert torch.equal(part, whole[:, start : start + count]), f"rows {start} to {start + count}"


def test_rows_of_experts() -> None:
    from nibble.kernels.invariant import triton as kernels

    torch.manual_seed(0)
    x, weight = (
        torch.randn(1000, 256, device="cuda").bfloat16(),
        torch.randn(16, 256, 384, device="cuda").bfloat16(),
    )
    experts = torch.randint(0, 16, (1000,), device="cuda").sort().values
    ends = torch.histc(experts.int(), 16, 0, 15).cumsum(0).int()
    whole = kernels.grouped_mm(x, weight, ends)
    for row in range(0, 1000, 37):
        alone = kernels.bmm(x[None, row, None], weight[None, experts[row]], None)[0, 0]
        assert torch.equal(alone, whole[row]), f"row {row} of expert {int(experts[row])}"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["bf16", "nvfp4", "fp8_e4m3"])
def test_rows_of_attention(name: str, dim: int) -> None:
    """Both tiles, and splits that one program has or many share."""
    from nibble import formats
    from nibble.kernels import gpu_of
    from nibble.kernels.attention import naive
    from nibble.kernels.attention.fixed import fixed_attention, fixed_shape_of
    from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
    from nibble.model_spec import Phase

    torch.manual_seed(0)
    length, page, group, fmt = 2500, 64, 4, formats.get(name)
    scale = torch.tensor(0.02 if fmt.needs_scale else 1.0, device="cuda")
    k, v = (
        Paged(fmt, dim, fmt.encode(torch.randn(40, 2, page, dim, device="cuda"), scale), scale) for _ in "kv"
    )
    table = torch.randperm(40, device="cuda").int()[None]
    q = torch.randn(length, 2 * group, dim, device="cuda").bfloat16()
    for window in (None, 300):
        params = AttentionParams(dim**-0.5, window)

        def attend(end: int, count: int, params: AttentionParams = params, **options: Any) -> Tensor:
            batch = AttentionBatch.from_lens(Phase.EXTEND, 0, (count,), (end,), table)
            return fixed_attention(q[end - count : end], k, v, batch, params, **options)

        whole = attend(length, length)
        batch = AttentionBatch.from_lens(Phase.EXTEND, 0, (64,), (length,), table)
        expected = naive.paged_attention(q[-64:].float(), k, v, batch, params)
        assert (whole[-64:].float() - expected).abs().max() < 0.03
        shapes = [fixed_shape_of(many, group, k, v, q.dtype, gpu_of(q.device)) for many in (False, True)]
        for shape, spread in itertools.product(shapes, (False, True)):
            found = attend(length, 100, shape=shape, spread=spread)
            assert torch.equal(found, whole[-100:]), f"{shape}, shared {spread}, window {window}"
        for end, count in ((1, 1), (1024, 1), (1025, 1), (2500, 1), (2500, 7), (1100, 90), (2050, 1030)):
            assert torch.equal(attend(end, count), whole[end - count : end]), f"{count} tokens up to {end}"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "formats_of", [("nvfp4", "nvfp4"), ("fp8_e4m3", "nvfp4"), ("fp8_e5m2", "fp8_e4m3")], ids=str
)
def test_decode_steps_in_cuda_have_the_bits_of_prompts(
    formats_of: tuple[str, str], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed lengths, one token or some that are verified, with a window and without: rows of a prompt in Triton."""
    from nibble import formats
    from nibble.kernels import gpu_of
    from nibble.kernels.attention import fixed
    from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
    from nibble.model_spec import Phase

    torch.manual_seed(1)
    monkeypatch.setattr(fixed, "SPLITS_OF_PROCESSOR", 0)
    heads, group, page, lens = 2, 4, 16, (2500, 1, 63, 64, 65, 1024, 1025, 1090, 2113, 17)
    counts = [-(-n // page) for n in lens]
    pages = iter(torch.randperm(sum(counts)).tolist())
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([next(pages) for _ in range(count)], dtype=torch.int32)
    table = table.cuda()

    def stored(name: str) -> Paged:
        fmt = formats.get(name)
        scale = torch.tensor(0.02 if fmt.needs_scale else 1.0, device="cuda")
        x = torch.randn(sum(counts), heads, page, dim, device="cuda") * torch.randn(
            1, heads, 1, dim, device="cuda"
        )
        return Paged(fmt, dim, fmt.encode(x, scale), scale)

    k, v = map(stored, formats_of)
    assert fixed._decode_kernel(k, v, gpu_of(torch.device("cuda"))), "Triton would be compared with itself"
    q = [torch.randn(n, heads * group, dim, device="cuda").bfloat16() for n in lens]
    for window in (None, 100, 1200):
        params = AttentionParams(dim**-0.5, window)
        wholes = []
        for i, n in enumerate(lens):
            batch = AttentionBatch.from_lens(Phase.EXTEND, 0, (n,), (n,), table[i : i + 1])
            many = n * group > fixed.FIXED_ROWS
            shape = fixed.fixed_shape_of(many, group, k, v, torch.bfloat16, gpu_of(table.device))
            wholes.append(fixed.fixed_attention(q[i], k, v, batch, params, shape=shape))
        for new in (1, 2, 4):
            rows = [i for i, n in enumerate(lens) if n >= new]
            phase = Phase.DECODE if new == 1 else Phase.VERIFY
            batch = AttentionBatch.from_lens(
                phase,
                0,
                (new,) * len(rows),
                [lens[i] for i in rows],
                table[torch.tensor(rows, device="cuda")],
            )
            found = fixed.fixed_attention(torch.cat([q[i][-new:] for i in rows]), k, v, batch, params)
            expected = torch.cat([wholes[i][-new:] for i in rows])
            differs = (found != expected).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert torch.equal(found, expected), f"window {window}, {new} tokens: rows {differs} of {rows}"


# ---- engines ---------------------------------------------------------------------------------------------------------


@contextmanager
def engine(path: Path, scheme: str, **options: Any) -> Iterator[LLM]:
    settings = {"kv_memory": "64MiB", "max_running": 8, "max_context": 1024, "dtype": "bfloat16", **options}
    yield LLM(str(path), kv_format=scheme, kv_scales="one", device="cuda", deterministic=True, **settings)
    torch.compiler.reset()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_the_same_bits_however_computed(name: str, scheme: str, tmp_path: Path) -> None:
    family, options = MODELS[name]
    path, found = save_tiny(tmp_path, family, **options), {}
    with engine(path, scheme) as llm:
        assert {route.backend for route in llm.plan.routes} == {"triton_invariant"}
        assert llm.engine.runner.graphs
        cold = answer(llm, [PROMPT])
        found["again, from the prefix cache"] = answer(llm, [PROMPT])
        found["in company"] = answer(llm, [PROMPT, *OTHERS])
        llm.engine.scheduler.manager.clear()
        found["cold, in company, behind others"] = answer(llm, [*OTHERS, PROMPT], target=len(OTHERS))
        for chunk in (1, 7, 64):
            llm.engine.scheduler.manager.clear()
            with limited(llm, chunk):
                found[f"in chunks of {chunk}"] = answer(llm, [PROMPT])
        # What was decoded is a prompt now, computed in one piece.
        llm.engine.scheduler.manager.clear()
        tokens = (
            llm.generate([PROMPT], max_tokens=ANSWER, ignore_eos=True, progress=False)[0]
            .completions[0]
            .token_ids
        )
        llm.engine.scheduler.manager.clear()
        again = llm.logits([*PROMPT, *tokens[:-1]])[-ANSWER:].to(cold.dtype)
        found["decoded, then computed again"] = again
        graphs, llm.engine.runner.graphs = llm.engine.runner.graphs, None
        llm.engine.scheduler.manager.clear()
        found["without graphs"] = answer(llm, [PROMPT])
        llm.engine.runner.graphs = graphs
        llm.engine.scheduler.manager.clear()
        long = answer(llm, [PROMPT], count=LONG_ANSWER)
        llm.engine.scheduler.manager.clear()
        # Both are admitted, and then one takes a page more than there are.
        with few_pages(
            llm, sum(llm.engine.scheduler.manager.pages_for(len(x)) + 1 for x in (OTHERS[3], PROMPT))
        ):
            preempted = answer(llm, [OTHERS[3], PROMPT], target=1, count=LONG_ANSWER)
            assert llm.engine.scheduler.metrics.preemptions > 0
        found["preempted"] = preempted
    expected = dict.fromkeys(found, cold) | {"preempted": long}
    problems = {case: text for case, logits in found.items() if (text := differs(logits, expected[case]))}
    assert not problems, f"{name} in {scheme}: {problems}; test_which_module_differs says where it begins"


@contextmanager
def few_pages(llm: LLM, pages: int) -> Iterator[None]:
    """Leaves so many pages to requests: a lease has the others."""
    manager, total = llm.engine.scheduler.manager, llm.engine.runner.pool.pages
    tokens = [0] * ((total - pages) * llm.plan.page_size)
    lease = manager.open(tokens, "", private=True)
    manager.reserve(lease, len(tokens))
    yield
    manager.release(lease)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "mla"])
def test_which_module_differs(name: str, tmp_path: Path) -> None:
    """As written, not compiled: a prompt in one piece, and its last tokens over the pages of the rest."""
    family, options = MODELS[name]
    scheme = SCHEMES.get(name, ("nvfp4",))[0]
    with engine(save_tiny(tmp_path, family, **options), scheme, compile=False, graphs=False) as llm:
        model, runner = llm.engine.runner.model, llm.engine.runner
        traces: dict[int, list[Any]] = {}
        for chunk in (len(PROMPT), 30):
            llm.engine.scheduler.manager.clear()
            steps: list[Any] = []
            run: Callable[..., Tensor] = runner._run  # type: ignore[assignment]

            def spy(*arguments: Any, run: Any = run, steps: list[Any] = steps) -> Tensor:
                with traced(model) as trace:
                    logits: Tensor = run(*arguments)
                steps.append((arguments[0].shape[1], trace))
                return logits

            runner._run = spy
            with limited(llm, chunk):
                answer(llm, [PROMPT])
            runner._run = run
            traces[chunk] = steps
        whole = traces[len(PROMPT)][0][1]
        for i in range(len(PROMPT) // 30):
            rows = slice(30 * i, 30 * (i + 1))
            assert not (text := first_difference(whole, traces[30][i][1], rows, slice(0, 30))), (
                f"rows {rows}: {text}"
            )


@pytest.mark.parametrize(
    "params", [{"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8, "top_k": 40}], ids=str
)
def test_samples_and_their_log_probabilities(params: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama", **WIDE)
    with engine(path, "nvfp4") as llm:

        def sampled(prompts: list[list[int]]) -> Any:
            outputs = llm.generate(
                prompts, max_tokens=24, ignore_eos=True, seed=5, logprobs=3, progress=False, **params
            )
            return outputs[0].completions[0]

        alone, together = sampled([PROMPT]), sampled([PROMPT, *OTHERS])
        assert alone.token_ids == together.token_ids
        assert alone.logprobs == together.logprobs
