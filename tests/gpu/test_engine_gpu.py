"""The engine on a GPU, with the bundled model: answers do not depend on how steps are run, and no step waits for the host.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, SamplingParams
from nibble.attention import backends, layer
from nibble.engine import step_tokens
from nibble.engine.request import Delta, Output
from nibble.hardware import probe
from tiny import MLA, SPARSE, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [
    "The sea was calm that morning, and",
    "def fibonacci(n):",
    "In the beginning",
    "A king once had three daughters. The eldest",
    "Water boils at",
    "She opened the letter slowly. It said:",
    "Once upon a time there was a miller who " * 20,
    "The train left the station at noon. " * 60,
]
TOKENS = 48
TIE, QUANTISED_TIE = 0.08, 0.5
"""Where two tokens' logits are so many deviations apart at most, the rounding of 16-bit arithmetic may change their
places; it changes codes of a quantised cache, too. Tokens that have nothing to do with each other are 2 to 6 apart."""


@contextmanager
def engine(scheme: str, **options: Any) -> Iterator[LLM]:
    llm = LLM("demo", kv_format=scheme, device="cuda", kv_memory="512MiB", max_running=16, **options)
    yield llm
    del llm
    torch.compiler.reset()
    torch.cuda.empty_cache()


def greedy(llm: LLM, **params: Any) -> list[Output]:
    llm.engine.scheduler.manager.clear()
    return llm.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True, progress=False, **params)  # type: ignore[no-any-return]


def differences(llm: LLM, one: list[Output], other: list[Output]) -> list[float]:
    """Of answers that part: how far the two tokens' logits are apart where they do, in deviations."""
    found = []
    for a, b in zip(one, other, strict=True):
        x, y = a.completions[0].token_ids, b.completions[0].token_ids
        if x == y:
            continue
        at = next(i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q)
        logits_V = llm.logits([*a.prompt_token_ids, *x[:at]])[-1].float()
        found.append(float((logits_V[x[at]] - logits_V[y[at]]).abs() / logits_V.std()))
    return found


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "fp8_e4m3", "k8v4"])
def test_answers_do_not_depend_on_how_steps_are_run(scheme: str) -> None:
    with engine(scheme) as llm:
        expected = greedy(llm)
        assert [o.text for o in greedy(llm)] == [o.text for o in expected]
        llm.engine.overlap = False
        assert [o.text for o in greedy(llm)] == [o.text for o in expected], "steps that run ahead"
        llm.engine.overlap = True
        for name, options in (
            ("recorded", {"graphs": False}),
            ("compiled", {"compile": False, "graphs": False}),
        ):
            with engine(scheme, **options) as plain:
                found = differences(llm, greedy(plain), expected)
            print(
                f"{scheme}: {len(PROMPTS) - len(found)} of {len(PROMPTS)} answers equal, {name} or not; ties: {found}"
            )
            assert all(gap < (TIE if scheme == "bf16" else QUANTISED_TIE) for gap in found), (
                f"{name}: {found}"
            )
            assert name != "recorded" or len(found) <= 1


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # what packages say is their business
@pytest.mark.parametrize(
    ("scheme", "name", "asked"),
    [
        ("bf16", "flashinfer", "attention_backend"),
        ("fp8_e4m3", "flashinfer", "attention_backend"),
        ("bf16", "trtllm_mha", "decode_backend"),
        ("bf16", "flex_attention", "attention_backend"),
    ],
)
def test_vendors_kernels_answer_as_ours(scheme: str, name: str, asked: str) -> None:
    """Steps that run ahead, each planned while the one before runs; and recorded ones, where a backend can be."""
    info, arch = backends.get(name), probe().arch
    lack = backends.missing_requirement(info)
    if lack or not any(arch in (row.arch or ()) for row in info.support):
        pytest.skip(lack or f"{name} has no rows for SM{arch}")
    with engine(scheme) as llm, engine(scheme, **{asked: name}) as other:
        assert {route.backend for route in other.plan.groups[0].routes} >= {name}
        assert bool(other.engine.runner.graphs) == info.graphs
        expected, found = greedy(llm), greedy(other)
        assert [o.text for o in greedy(other)] == [o.text for o in found], "again"
        gaps = differences(llm, found, expected)
    print(f"{name} over {scheme}: {len(PROMPTS) - len(gaps)} of {len(PROMPTS)} answers equal; ties: {gaps}")
    assert all(gap < (TIE if scheme == "bf16" else QUANTISED_TIE) for gap in gaps), gaps


def test_a_prefix_or_its_cut_changes_no_answer() -> None:
    with engine("nvfp4", token_budget=64) as llm:
        expected = greedy(llm)
        warm = llm.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True, progress=False)
        assert sum(o.cached_tokens for o in warm) > 500
        found = differences(llm, warm, expected)
        with engine("nvfp4", token_budget=4096) as other:
            found += differences(llm, greedy(other), expected)
    print(f"ties: {found}")
    assert all(gap < QUANTISED_TIE for gap in found)


def test_decode_steps_do_not_wait_for_the_device() -> None:
    with engine("nvfp4") as llm:
        pieces: list[Delta] = []
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
        for prompt in PROMPTS[:6]:
            llm.engine.submit(llm.tokenizer.encode(prompt), params, pieces.append)
        for _ in range(8):
            llm.engine.step()
        with warnings.catch_warnings(action="ignore"):  # "does not yet detect all synchronizing operations"
            torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                torch.ones(1, device="cuda").item()
            for _ in range(16):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.engine.busy:
            llm.engine.step()
        assert sum(len(piece.token_ids) for piece in pieces) == 6 * 40
        assert not any(piece.error for piece in pieces)


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "fp8_e4m3"])
def test_the_fidelity_watch_changes_no_answer(scheme: str) -> None:
    """A sample's decode steps are computed over the graphs' buffers, and not replayed."""
    with engine(scheme) as llm:
        expected = [o.text for o in greedy(llm)]
    with engine(scheme, watch_fidelity=1.0) as llm:
        assert [o.text for o in greedy(llm)] == expected
        for prompt in PROMPTS:
            llm.generate(f"Again. {prompt}", max_tokens=8, ignore_eos=True)
        assert llm.engine.runner.graphs and llm.error_monitor
        print(f"{scheme}: {llm.error_monitor.summary}")
        assert llm.error_monitor.samples > 4 and llm.error_monitor.alerts == 0
        assert all(
            reading.error < 2 * reading.format_error + 0.03 for reading in llm.error_monitor.readings.values()
        )


LOGITS_OFF = {"deepseek_v3": (0.7, 0.1), "glm_moe_dsa": (0.85, 0.35)}
"""Small formats, bf16. A random model chooses other tokens and experts where scores are rounded otherwise: on a CPU in
bfloat16 the references are 0.74 and 0.29 off in the median, of sparse attention; of MLA in BF16 one prompt of three is
0.03 off there, 0.045 on an H200, and 0.06 compiled, with or without operators of our own.
"""


def latent_model(folder: Path, family: str) -> Path:
    """A random checkpoint of the ranks that the fast kernels know."""
    return save_tiny(folder, family, **(MLA if family == "deepseek_v3" else SPARSE))


@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # a compiler's advice, of routers in float32
@pytest.mark.parametrize("scheme", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_latents(family: str, scheme: str, tmp_path: Path) -> None:
    """MLA, and sparse attention: logits of chunks are those of the whole, and answers those of steps without graphs."""
    model = str(latent_model(tmp_path, family))
    prompts = [
        torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 90, 300)
    ]

    def llm(**options: Any) -> LLM:
        options = {"compile": family == "deepseek_v3", **options}
        return LLM(
            model,
            kv_format=scheme,
            kv_scales="one",
            device="cuda",
            kv_memory="64MiB",
            max_running=8,
            **options,
        )

    whole, exact = llm(), LLM(model, kv_format="fp32", device="cpu", kv_memory="64MiB")
    for prompt in prompts:
        found, expected = whole.logits(prompt).float().cpu(), exact.logits(prompt)
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        print(
            f"{family} {scheme}: logits off {float(error.median()):.3f}, routes {whole.plan.groups[0].routes}"
        )
        assert error.median() < LOGITS_OFF[family][scheme == "bf16"]
    answers = [llm(graphs=flag).generate(prompts, max_tokens=24, ignore_eos=True) for flag in (True, False)]
    same = [a.completions[0].token_ids == b.completions[0].token_ids for a, b in zip(*answers, strict=True)]
    print(f"{family} {scheme}: {sum(same)} of {len(same)} answers equal, recorded or not")
    assert sum(same) >= len(same) - 1


@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
@pytest.mark.parametrize(
    ("scheme", "setting"),
    [
        ("bf16", "on"),
        ("fp8_ds_mla", "on"),
        ("nvfp4_ds_mla", "on"),
        ("fp8_ds_mla", "host_format=nvfp4_ds_mla"),
    ],
)
def test_hisparse(scheme: str, setting: str) -> None:
    """With most of the cache in pinned host memory, answers are those without: recorded steps, pages that come and go."""
    context, most = 2048, 8
    text = (Path(__file__).parents[2] / "models" / "demo" / "heldout.txt").read_text()
    options: dict[str, Any] = {
        "max_context": context,
        "max_running": most,
        "device": "cuda",
        "kv_format": scheme,
        "kv_window": 0,  # there is no room for snapshots, without which no prefix comes back
    }
    plain = LLM("demo-mla", kv_memory="256MiB", **options)
    prompts = [plain.tokenizer.encode(text[9000 * i :][:9000])[: 1300 + 40 * i] for i in range(12)]
    layout = plain.plan.layout
    index = layout.bytes_per_token - layout.without_index.bytes_per_token
    memory = (2 * context + most * 512) * layout.without_index.bytes_per_token + most * context * index
    hot = LLM("demo-mla", kv_memory=str(memory), hisparse=setting, **options)
    assert hot.engine.runner.graphs, hot.engine.startup.notes
    answers = []
    for llm in (plain, hot, hot):  # the second time prefixes come back from the host
        outputs = llm.generate(prompts, max_tokens=100, ignore_eos=True, progress=False)
        answers.append([output.completions[0].token_ids for output in outputs])
        llm.engine.scheduler.check_integrity()
    tier = hot.engine.runner.tier
    assert tier
    stats, looked = tier.residency.stats, tier.lookup_counts
    same = [sum(a == b for a, b in zip(answers[0], found, strict=True)) for found in answers[1:]]
    tokens = sum(a == b for x, y in zip(*answers[:2], strict=True) for a, b in zip(x, y, strict=True))
    print(f"{scheme} {setting}: {same} of 12 answers equal, {tokens} of 1200 tokens; {stats} {looked}")
    assert stats.spilled > 8 and stats.loaded > 50 and min(looked.values()) > 1000
    assert min(same) >= 10 if setting == "on" else tokens > 400


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.0, "logit_bias": {7: 100.0}},
    ],
    ids=str,
)
def test_sampling(sampled: LLM, params: dict[str, Any]) -> None:
    one, two = (greedy(sampled, seed=11, logprobs=3, **params) for _ in range(2))
    other = greedy(sampled, seed=12, logprobs=3, **params)
    assert [o.text for o in one] == [o.text for o in two]
    assert "logit_bias" in params or [o.text for o in one] != [o.text for o in other]
    output = one[0].completions[0]
    logits_TV = sampled.logits([*one[0].prompt_token_ids, *output.token_ids])[
        len(one[0].prompt_token_ids) - 1 : -1
    ]
    expected_TV = logits_TV.float().log_softmax(-1).cpu()
    assert output.logprobs is not None and len(output.logprobs) == TOKENS
    for i, entry in enumerate(output.logprobs):
        assert entry.token == output.token_ids[i] and len(entry.top) == 3
        assert math.isclose(entry.logprob, float(expected_TV[i, entry.token]), abs_tol=0.15)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        if "top_k" in params:
            assert float((expected_TV[i] > expected_TV[i, entry.token] + 0.15).sum()) < params["top_k"]
    if "logit_bias" in params:
        assert set(output.token_ids) == {7}


@pytest.fixture(scope="module")
def sampled() -> Iterator[LLM]:
    with engine("bf16") as llm:
        yield llm


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
def test_log_probabilities_of_prompts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes, in steps that run ahead and are cut: those of logits that are computed one prompt at a time."""
    monkeypatch.setattr("nibble.engine.build.STEP_LOGITS", 1 << 18)
    with engine(scheme) as llm:
        outputs = greedy(llm, prompt_logprobs=3)
        for output in outputs:
            assert output.prompt_logprobs and len(output.completions[0].token_ids) == TOKENS
            ids = list(output.prompt_token_ids)
            rows = llm.logits(ids)[:-1].float().log_softmax(-1)
            expected = rows.gather(-1, torch.tensor(ids[1:], device=rows.device)[:, None])[:, 0]
            found = torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry])
            # Rounding in 16 bits, and where prompts are cut, move single logits.
            assert float((found - expected.cpu()).abs().mean()) < (0.02 if scheme == "bf16" else 0.1)
        alone = llm.generate(PROMPTS, max_tokens=0, prompt_logprobs=0, progress=False)
        assert all(output.completions[0].finish_reason == "length" for output in alone)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("bf16", {}),
        ("nvfp4", {"kv_window": 0}),
        ("nvfp4", {"kv_sinks": 16}),
        ("fp8_e4m3", {"graphs": False}),
    ],
)
def test_the_last_layer_attends_for_rows_with_logits_alone(
    scheme: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those of all rows, whichever kernels attend."""
    counts, own = list[int](), layer._attend_for_logits

    def attend(ctx: Any, number: int, logits: Any, *others: Any) -> torch.Tensor:
        counts.append(len(logits.rows_S))
        return own(ctx, number, logits, *others)

    monkeypatch.setattr(layer, "_attend_for_logits", attend)
    with engine(scheme, token_budget=256, **options) as llm:
        expected = greedy(llm)
        assert not counts
        monkeypatch.setattr(step_tokens, "LONG_PROMPTS", 8)
        found = greedy(llm)
        assert counts and min(counts) < max(counts)
        bound = TIE if scheme == "bf16" else QUANTISED_TIE
        assert all(gap < bound for gap in differences(llm, found, expected))
