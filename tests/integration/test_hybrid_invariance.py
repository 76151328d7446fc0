"""Hybrid models give the same answer, however it is computed: over states as over pages, in every format of states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import OTHERS, PROMPT, answer, same

from bits import preempting
from families import VOCAB, make, tiny_config
from nibble import LLM, SamplingParams
from nibble.cache.state_pool import StatePool
from nibble.config import STATE_FORMATS, Config
from nibble.engine import build
from nibble.engine.plan import plan_engine
from nibble.engine.scheduler import PROMPT_TAIL
from nibble.hardware import lookup_gpu
from nibble.models.hub import quiet
from pairs import rotated
from tiny import QWEN3_NEXT, save_tiny, set_generation_config


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT)


@pytest.fixture(scope="module")
def few_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates that fill no vector, as those of small models: torch rounds the end of a tensor otherwise."""
    changes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 0}
    return save_tiny(tmp_path_factory.mktemp("few_heads"), "qwen3_next", **QWEN3_NEXT | changes)


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model),
        **{"kv_format": "bf16", "kv_memory": "8MiB", "max_running": 8, "kv_scales": "one", **options},
    )


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("state_format", "kv_format"), rotated([*STATE_FORMATS], ["bf16", "nvfp4"]))
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


@pytest.mark.slow
def test_gates_of_few_heads_do_not_depend_on_company(few_heads: Path) -> None:
    """To the last bit."""
    fixed = {"state_format": "int8", "kv_format": "fp32"}
    whole = engine(few_heads, **fixed)
    tokens, logits, _ = answer(whole, [PROMPT])
    others = [answer(whole, [PROMPT]), answer(engine(few_heads, **fixed), [PROMPT, *OTHERS])]
    others += [answer(engine(few_heads, token_budget=chunk, **fixed), [PROMPT]) for chunk in (1, 7, 64)]
    for found in others:
        assert found[0] == tokens and torch.equal(found[1], logits)


@pytest.mark.slow
@pytest.mark.parametrize(("state_format", "kv_format"), [("fp32", "bf16"), ("int8", "nvfp4")])
def test_a_hit_at_every_page_boundary(state_format: str, kv_format: str, hybrid: Path) -> None:
    """With a snapshot there, with one before it, and with none: what follows the last one is computed again."""
    llm = engine(hybrid, state_format=state_format, kv_format=kv_format, page_size=16)
    cold = answer(llm, [PROMPT])
    manager, size = llm.engine.scheduler.manager, llm.plan.page_size
    states = manager._states
    for boundary in range(1, len(PROMPT) // size + 1):
        for dropped in sorted({0, 1, boundary}):
            llm.engine.reset_prefix_cache()
            # Of each length one, whose snapshot leaves its last tokens out: so there is one at each boundary.
            ends = range(size, boundary * size + 1, size)
            llm.generate([PROMPT[:end] + [251] * PROMPT_TAIL for end in ends], max_tokens=1)
            pages = manager._radix.match(llm.engine.namespace + "/", PROMPT, boundary * size)
            assert len(pages) == boundary and all(
                states.snapshots.value_of(page) is not None for page in pages
            )
            for page in pages[boundary - dropped :]:
                states.snapshots.drop(page)
            hit = answer(llm, [PROMPT])
            assert hit[2] == (boundary - dropped) * size
            same(hit, cold)
    assert manager.stats.states.replayed_tokens > 0
    manager.check_integrity()


def scaled(states: StatePool, slot: int, other: int) -> None:
    for state in states.layers.values():
        state.planes[0][slot] *= 1.001


def shifted(states: StatePool, slot: int, other: int) -> None:
    for state in states.layers.values():
        state.inputs_SPC[slot] = state.inputs_SPC[slot].roll(1, 0)


def of_another_node(states: StatePool, slot: int, other: int) -> None:
    states.copy([(other, slot)])


@pytest.mark.parametrize("plant", [scaled, shifted, of_another_node])
def test_a_wrong_snapshot_is_noticed(plant: Callable[[StatePool, int, int], None], hybrid: Path) -> None:
    """The comparison above can fail: what is a little off in a snapshot moves the logits by more than it allows."""
    llm = engine(hybrid)
    cold = answer(llm, [PROMPT])
    # As long, and alike but for its first token.
    answer(llm, [[PROMPT[0] ^ 1, *PROMPT[1:]]])
    same(answer(llm, [PROMPT]), cold)
    manager, states = llm.engine.scheduler.manager, llm.engine.runner.states
    own, other = (
        manager._states.snapshots.value_of(manager._radix.match(llm.engine.namespace + "/", text, 80)[-1])
        for text in (PROMPT, [PROMPT[0] ^ 1, *PROMPT[1:]])
    )
    assert own is not None and other is not None
    plant(states, own, other)
    hit = answer(llm, [PROMPT])
    assert hit[2] == 80 and (hit[1] - cold[1]).abs().max() > 1e-5


def test_a_plan_for_a_gpu_counts_slots(hybrid: Path) -> None:
    """And says what was never run there."""
    planned = plan_engine(Config(model=str(hybrid), state_format="int8"), lookup_gpu("h200"))
    assert planned.budget.states and planned.budget.states.format == "int8"
    assert any("never run on SM90" in note and "delta in int8" in note for note in planned.plan.notes)


@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_an_abort_leaves_neighbours_as_they_are(state_format: str, hybrid: Path) -> None:
    llm = engine(hybrid, state_format=state_format)
    cold = answer(engine(hybrid, state_format=state_format), [PROMPT])
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
    ("family", "state_format"),
    [
        ("bamba", "int8"), ("falcon_h1", "fp8"), ("jamba", "fp32"), ("kimi_linear", "fp32"), ("lfm2", "int8"),
        ("minimax", "fp32"), ("nemotron_h", "bf16"), ("zamba2", "int8"),
    ],
)  # fmt: skip
def test_families_through_the_engine(family: str, state_format: str, tmp_path: Path) -> None:
    """Without rounding of KV, and of states where gates of few heads differ in the last bits by the number of rows."""
    config = tiny_config(family)
    config.update({**WIDE.get(family, {}), "max_position_embeddings": 512})
    torch.manual_seed(0)
    with quiet():
        make(family, config).save_pretrained(tmp_path)
    set_generation_config(tmp_path, temperature=0.0)
    exact = {"kv_format": "fp32", "state_format": state_format}
    prompt, others = [token % VOCAB for token in PROMPT], [[token % VOCAB for token in one] for one in OTHERS]
    whole = engine(tmp_path, **exact)
    cold = answer(whole, [prompt])
    hit = answer(whole, [prompt])
    assert hit[2] >= 80
    same(hit, cold)
    same(answer(engine(tmp_path, token_budget=7, **exact), [prompt]), cold)
    same(answer(preempting(engine(tmp_path, **exact)), [others[2], prompt], target=1), cold)
