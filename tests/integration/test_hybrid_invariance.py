"""Hybrid models give the same answer, however it is computed: over states as over pages, in every format of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import OTHERS, PROMPT, answer, same

from bits import preempting
from families import VOCAB, make, tiny_config
from hybrids import QWEN3_NEXT
from nibble import LLM, SamplingParams
from nibble.config import STATE_FORMATS, Config
from nibble.engine import build
from nibble.engine.plan import plan_engine
from nibble.errors import ConfigError
from nibble.hardware import lookup_gpu
from nibble.models.hub import quiet
from tiny import save_tiny, set_generation_config

@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT)


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model),
        **{"kv_format": "bf16", "kv_memory": "8MiB", "max_running": 8, "kv_scales": "one", **options},
    )


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_same_answer_however_computed(state_format: str, kv_format: str, hybrid: Path) -> None:
    fixed = {"state_format": state_format, "kv_format": kv_format}
    whole = engine(hybrid, **fixed)
    cold = answer(whole, [PROMPT])
    assert cold[2] == 0
    hit = answer(whole, [PROMPT])
    assert hit[2] >= 80
    same(hit, cold)
    for chunk in (1, 7, 64):
        same(answer(engine(hybrid, token_budget=chunk, **fixed), [PROMPT]), cold)
    same(answer(engine(hybrid, **fixed), [PROMPT, *OTHERS]), cold)
    for pressed in (
        preempting(engine(hybrid, prefix_cache=False, **fixed)),
        preempting(engine(hybrid, **fixed)),
    ):
        preempted = answer(pressed, [OTHERS[2], PROMPT], target=1)
        assert pressed.engine.scheduler.metrics.preemptions > 0
        same(preempted, cold)


def test_a_hit_at_every_page_boundary(hybrid: Path) -> None:
    """With a snapshot there, and without, where what is behind the last snapshot is computed again."""
    llm = engine(hybrid, state_format="int8")
    cold = answer(llm, [PROMPT])
    manager = llm.engine.scheduler.manager
    size = llm.plan.page_size
    for boundary in range(len(PROMPT) // size, -1, -1):
        # Others share so many pages, and leave states there, or do not.
        other = [*PROMPT[: boundary * size], 251, 252, 253]
        answer(llm, [other])
        for clear in (False, True):
            if clear:
                manager._states.snapshots.clear()
            same(answer(llm, [PROMPT]), cold)
    assert manager.stats.states.replayed_tokens > 0
    manager.check_integrity()


def test_a_wrong_state_is_noticed(hybrid: Path) -> None:
    """The comparison above can fail: states that are a little off move the logits by more than it allows."""
    llm = engine(hybrid)
    cold = answer(llm, [PROMPT])
    for state in llm.engine.runner.states.layers.values():
        state.planes[0].mul_(1.001)
    hit = answer(llm, [PROMPT])
    assert hit[2] >= 80 and (hit[1] - cold[1]).abs().max() > 1e-5


def test_a_gpu_is_refused_early(hybrid: Path) -> None:
    """Before weights are read, and `nibble plan` says so."""
    planned = plan_engine(Config(model=str(hybrid)), lookup_gpu("h200"))
    assert any("recurrent state" in note for note in planned.plan.notes) and planned.budget.states
    with pytest.raises(ConfigError, match="computes those on CPUs only: --device cpu"):
        build._runnable(planned)


def test_an_abort_leaves_neighbours_as_they_are(hybrid: Path) -> None:
    llm = engine(hybrid)
    cold = answer(engine(hybrid), [PROMPT])
    pieces: list[Any] = []
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    neighbour, mine = (
        llm.engine.submit(OTHERS[2], params, pieces.append),
        llm.engine.submit(PROMPT, params, pieces.append),
    )
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(neighbour)
    while llm.engine.busy:
        llm.engine.step()
    assert mine[0].token_ids[len(PROMPT) :] == list(cold[0])
    # What the aborted request has left behind is used rightly.
    same(answer(llm, [PROMPT]), cold)
    llm.engine.scheduler.check_integrity()


def test_states_of_garbage_are_never_read(hybrid: Path) -> None:
    engine_, _ = build.build(
        Config(model=str(hybrid), kv_format="bf16", kv_memory="8MiB", max_running=8, kv_scales="one"),
        poison=True,
    )
    assert engine_.runner.states is not None
    cold = answer(engine(hybrid), [PROMPT])
    outputs: list[Any] = []
    ticket = engine_.submit(
        PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0), outputs.append
    )
    while engine_.busy:
        engine_.step()
    assert ticket[0].token_ids[len(PROMPT) :] == list(cold[0])
    assert all(
        torch.isfinite(x.planes[0][0].float()).all()
        for x in engine_.runner.states.layers.values()
        if x.planes
    )


WIDE = {"falcon_h1": {"mamba_n_heads": 32, "mamba_d_head": 4}}
"""Where those last bits grow to more than the comparison allows."""


@pytest.mark.parametrize(
    "family", ["bamba", "falcon_h1", "jamba", "kimi_linear", "lfm2", "minimax", "nemotron_h", "zamba2"]
)
def test_families_through_the_engine(family: str, tmp_path: Path) -> None:
    """Without rounding of states and KV: with so few heads, gates differ in the last bits by the number of rows."""
    config = tiny_config(family)
    config.update({**WIDE.get(family, {}), "max_position_embeddings": 512})
    torch.manual_seed(0)
    with quiet():
        make(family, config).save_pretrained(tmp_path)
    set_generation_config(tmp_path, temperature=0.0)
    exact = {"kv_format": "fp32"}
    prompt, others = [token % VOCAB for token in PROMPT], [[token % VOCAB for token in one] for one in OTHERS]
    whole = engine(tmp_path, **exact)
    cold = answer(whole, [prompt])
    hit = answer(whole, [prompt])
    assert hit[2] >= 80
    same(hit, cold)
    same(answer(engine(tmp_path, token_budget=7, **exact), [prompt]), cold)
    same(answer(preempting(engine(tmp_path, **exact)), [others[2], prompt], target=1), cold)
