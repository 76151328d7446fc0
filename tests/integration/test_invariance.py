"""The same answer, however it is computed: cut into chunks, after a prefix hit, after preemption, in company.

Attention sees what is stored, so with fp32 compute greedy tokens are equal and logits agree to 1e-5, in every scheme.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import preempting
from nibble import LLM
from nibble.engine.request import Batch
from nibble.formats import scheme
from nibble.model_spec import HEADS, LATENTS
from planning import PLAIN
from tiny import MLA, SPARSE, save_tiny

SCHEMES = (*scheme.fitting(*HEADS), "nvfp4+rot", "nvfp4+kmean+rot", "k8v4+kmean")
PROMPT = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(1)).tolist()
OTHERS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 61, 140)
]
ANSWER = 12


@pytest.fixture(scope="module")
def scales(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    text = "".join(map(chr, range(32, 127))) * 4
    LLM(str(tiny), kv_format="fp32", kv_memory="8MiB").measure_scales([text], save=path)
    return path


@contextmanager
def recorded(llm: LLM) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Logits of every sampled token, by request id, in order."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    forward = llm.engine.runner.forward

    def spy(batch: Batch, **options: Any) -> torch.Tensor:
        logits = forward(batch, **options)
        sampling = [work.request.id for work in batch.scheduled if work.samples_token]
        for name, row in zip(sampling, logits, strict=False):
            seen[name].append(row.clone())
        return logits

    llm.engine.runner.forward = spy  # type: ignore[method-assign]
    yield seen
    llm.engine.runner.forward = forward  # type: ignore[method-assign]


def answer(llm: LLM, prompts: list[list[int]], target: int = 0) -> tuple[tuple[int, ...], torch.Tensor, int]:
    """Tokens, logits and cached tokens of prompts[target], answered together with the others."""
    with recorded(llm) as seen:
        outputs = llm.generate(prompts, max_tokens=ANSWER, ignore_eos=True)
    logits = list(seen.values())
    mine = next(
        rows
        for name, rows in seen.items()
        if name.endswith("-0") and name == sorted(seen, key=_number)[target]
    )
    assert len(mine) == ANSWER == len(logits[0])
    return outputs[target].completions[0].token_ids, torch.stack(mine), outputs[target].cached_tokens


def _number(name: str) -> int:
    return int(name.split("-", maxsplit=1)[0])


def same(
    found: tuple[tuple[int, ...], torch.Tensor, int], cold: tuple[tuple[int, ...], torch.Tensor, int]
) -> None:
    assert found[0] == cold[0]
    assert (found[1] - cold[1]).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", SCHEMES)
def test_same_answer_however_computed(kv_format: str, tiny: Path, scales: Path) -> None:
    check(kv_format, tiny, scales)


@pytest.fixture(scope="module")
def tiny_mla(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random MLA checkpoint with experts, and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("mla"), "deepseek_v3", **MLA))


@pytest.fixture(scope="module")
def tiny_dsa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random checkpoint with sparse attention, of layers that choose and one that shares, and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", **SPARSE))


def measured(path: Path) -> tuple[Path, Path]:
    text = "".join(map(chr, range(32, 127))) * 4
    LLM(str(path), kv_format="fp32", kv_memory="8MiB").measure_scales([text], save=path / "scales.json")
    return path, path / "scales.json"


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("kv_format", scheme.fitting(LATENTS[0]))
def test_same_answer_over_a_latent(kv_format: str, tiny_mla: tuple[Path, Path]) -> None:
    check(kv_format, *tiny_mla)


# of each kind of layout one; every format of a latent is asked above
@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla", "fp4_mx16"])
def test_same_answer_from_chosen_tokens(kv_format: str, tiny_dsa: tuple[Path, Path]) -> None:
    check(kv_format, *tiny_dsa)


def check(kv_format: str, tiny: Path, scales: Path, **fixed: Any) -> None:
    def llm(**options: Any) -> LLM:
        return LLM(
            str(tiny),
            kv_format=kv_format,
            kv_scales=str(scales),
            **{"kv_memory": "4MiB", "max_running": 8, **PLAIN, **fixed, **options},
        )

    whole = llm()
    cold = answer(whole, [PROMPT])
    assert cold[2] == 0

    hit = answer(whole, [PROMPT])
    assert hit[2] >= 80
    same(hit, cold)

    for chunk in (1, 7, 64):
        same(answer(llm(token_budget=chunk), [PROMPT]), cold)

    same(answer(llm(), [PROMPT, *OTHERS]), cold)

    page = whole.plan.layout.bytes_per_page
    pages = -(-(len(PROMPT) + len(OTHERS[2]) + 14) // whole.plan.page_size)
    short = {"kv_memory": str(pages * page), "max_context": 200, "max_running": 4, "prefix_cache": False}
    # An exact window takes more than so few pages, and then nobody is preempted.
    tight = [llm(**short)] if not whole.plan.window else []
    for pressed in (*tight, preempting(llm(prefix_cache=False)), preempting(llm())):
        preempted = answer(pressed, [OTHERS[2], PROMPT], target=1)
        assert pressed.engine.scheduler.metrics.preemptions > 0
        same(preempted, cold)


def test_widths_that_fill_no_vector(tmp_path: Path) -> None:
    """torch rounds the tail of an activation otherwise than its body: the engine fills vectors up."""
    model = str(save_tiny(tmp_path, intermediate_size=304))
    answers = [
        answer(LLM(model, kv_format="bf16", kv_memory="4MiB", max_running=8, token_budget=budget), [PROMPT])
        for budget in (512, 7, 11, 1)
    ]
    for other in answers[1:]:
        same(other, answers[0])


def test_a_flipped_code_is_noticed(tiny: Path, scales: Path) -> None:
    """The comparison above can fail: one changed byte in the cache moves the logits by more than it allows."""
    llm = LLM(str(tiny), kv_format="nvfp4", kv_scales=str(scales), kv_memory="4MiB", **PLAIN)
    cold = answer(llm, [PROMPT])
    plane = llm.engine.runner.pool.view(0).streams["k"].planes[0]
    page = llm.engine.scheduler.manager._radix.match(llm.engine.namespace + "/", PROMPT, len(PROMPT) - 1)[0]
    plane[page, 3, 0, 0] ^= 0x77
    hit = answer(llm, [PROMPT])
    assert hit[2] >= 80 and (hit[1] - cold[1]).abs().max() > 1e-5
