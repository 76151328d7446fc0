"""Steps with prompts that are recorded piecewise, on a CPU: a tape in place of CUDA graphs repeats each piece.

So everything that a piece reads must be in its buffers: what Python kept from the time of recording shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import make, tiny_config
from nibble import LLM
from nibble.attention.operators import Step
from nibble.attention.step import StepContext
from nibble.engine import piecewise, warmup
from nibble.engine.graphs import Graphs, live
from nibble.engine.piecewise import PiecewiseSteps
from nibble.kernels.types import AttentionMetadata
from nibble.models import forward
from nibble.models.hub import quiet
from tape import Tape

SIZES = (8, 24, 48, 64)
PROMPTS = [[(7 * i + j * j) % 60 + 1 for j in range(n)] for i, n in enumerate((40, 3, 61, 17, 90, 1, 33))]
OPTIONS: dict[str, Any] = {
    "kv_memory": "8MiB", "max_running": 6, "device": "cpu", "dtype": "float32", "token_budget": 70, "kv_scales": "one",
}  # fmt: skip


class PieceTape(Tape):
    """Leaves out what operators of attention do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nibble":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Tapes:
    """Records pieces as tapes."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with PieceTape() as self.tape:
            yield

    def begin(self) -> Callable[[], Callable[[], None]]:
        self.tape.calls = []

        def end() -> Callable[[], None]:
            piece = PieceTape()
            piece.calls, self.tape.calls = self.tape.calls, []

            def replay() -> None:
                self.replayed.append(len(piece.calls))
                piece.replay()

            return replay

        return end

    def alias(self, x: Tensor) -> Tensor:
        return x


def by_operators(model: Any) -> Any:
    """A forward function that calls operators, as a compiled one does."""
    step = Step()

    def run(ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext) -> Any:
        step.context = ctx
        return forward._logits(model, ids, positions, rows_S, step)

    return run


def recorded(llm: LLM) -> Tapes:
    runner, tapes = llm.engine.runner, Tapes()
    runner._run = run = by_operators(runner.model)
    pieces = PiecewiseSteps(Graphs((64,), runner.device, live), run)
    ctx = StepContext(
        runner.plan, runner.pool, runner.backends, AttentionMetadata(torch.empty(0, device=runner.device), ())
    )
    pieces.record(SIZES, tapes, ctx)
    runner.pieces = pieces
    return tapes


def answers(llm: LLM) -> list[tuple[tuple[int, ...], list[float]]]:
    outputs = llm.generate(
        PROMPTS, max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0, progress=False
    )
    done = [output.completions[0] for output in outputs]
    return [(tuple(one.token_ids), [entry.logprob for entry in one.logprobs or ()]) for one in done]


def saved(name: str, folder: Path) -> str:
    config = tiny_config(name)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = config.num_hidden_layers
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    with quiet():
        make(name, config).save_pretrained(folder)
    return str(folder)


# Without experts, whose tokens a CPU counts on the host.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"kv_format": "bf16"}),
        ("qwen3", {"kv_format": "nvfp4"}),
        ("gemma3_text", {"kv_format": "fp8_e4m3"}),
        ("deepseek_v3", {"kv_format": "bf16"}),
        ("deepseek_v32", {"kv_format": "bf16"}),
        ("qwen3_5_text", {"kv_format": "bf16"}),
        ("falcon_h1", {"kv_format": "bf16"}),
        ("qwen3", {"kv_format": "nvfp4", "kv_window": 16, "kv_sinks": 16, "page_size": 16}),
        ("qwen3", {"kv_format": "k8v4"}),
        ("qwen3", {"kv_format": "bf16", "speculative": "lookup"}),
        ("deepseek_v32", {"kv_format": "bf16", "hisparse": "on"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_pieces_give_the_answers_of_steps_as_they_are(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(name, tmp_path)
    with LLM(path, **OPTIONS, **options) as llm:
        plain, again = answers(llm), answers(llm)
    with LLM(path, **OPTIONS, **options) as llm:
        tapes = recorded(llm)
        for expected in (plain, again):  # the second time prefixes are there
            tapes.replayed.clear()
            for (ids, logprobs), (other_ids, other) in zip(answers(llm), expected, strict=True):
                assert ids == other_ids
                assert logprobs == pytest.approx(other, abs=1e-4)
            assert len(tapes.replayed) > 20 and sum(tapes.replayed) > 200


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LLM]:
    with LLM(saved("qwen3", tmp_path), kv_format="bf16", **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("part", range(3))
def test_inputs_that_stay_are_noticed(small: LLM, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [ids for ids, _ in answers(small)]
    recorded(small)
    fill = piecewise._Size.fill

    def spoilt(self: Any, *inputs: Tensor) -> None:
        fill(self, *(x if i != part else x[:0] for i, x in enumerate(inputs)))

    monkeypatch.setattr(piecewise._Size, "fill", spoilt)
    small.engine.reset_prefix_cache()
    assert [ids for ids, _ in answers(small)] != plain


def test_steps_that_no_size_has_room_for_are_computed_as_they_are(small: LLM) -> None:
    tapes = recorded(small)
    small.logits(PROMPTS[4][:70])  # more tokens than the largest size
    assert not tapes.replayed
    with small.engine.runner.eager():
        small.logits(PROMPTS[0])
    assert not tapes.replayed, "another forward function"
    small.logits(PROMPTS[0])
    assert tapes.replayed


def test_logits_of_several_chunks_are_those_of_each(tmp_path: Path) -> None:
    prompt = [(5 * i + i * i) % 60 + 1 for i in range(120)]
    with LLM(saved("qwen3", tmp_path), kv_format="bf16", **{**OPTIONS, "token_budget": 48}) as llm:
        expected_TV = llm.logits(prompt)
        tapes = recorded(llm)
        assert torch.allclose(llm.logits(prompt), expected_TV, atol=1e-4)
        assert tapes.replayed


class Failing(Tapes):
    """Cannot hold what some piece does."""

    num_left = 7

    def begin(self) -> Callable[[], Callable[[], None]]:
        end = super().begin()

        def ends() -> Callable[[], None]:
            self.num_left -= 1
            if not self.num_left:
                raise RuntimeError("this waits for the device")
            return end()

        return ends


def test_a_step_that_cannot_be_recorded_is_computed_as_it_is(small: LLM) -> None:
    plain, runner, startup = answers(small), small.engine.runner, small.engine.startup
    runner.run = runner._run = by_operators(runner.model)
    runner.graphs = Graphs((64,), runner.device, live)
    warmup._record_pieces(runner, SIZES, Failing(), startup)  # type: ignore[arg-type]
    assert "without CUDA graphs (RuntimeError: this waits for the device)" in startup.notes[-1]
    assert runner.pieces is None
    runner.graphs = None
    small.engine.reset_prefix_cache()
    assert [ids for ids, _ in answers(small)] == [ids for ids, _ in plain]


def test_a_model_without_operators_is_refused(small: LLM) -> None:
    runner = small.engine.runner
    pieces = PiecewiseSteps(Graphs((64,), runner.device, live), forward.plain(runner.model))
    ctx = StepContext(runner.plan, runner.pool, runner.backends, AttentionMetadata(torch.empty(0), ()))
    with pytest.raises(Exception):  # noqa: B017 — whatever attention without requests says
        pieces.record(SIZES, Tapes(), ctx)
