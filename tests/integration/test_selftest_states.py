"""The start-up test of recurrent layers: right kernels pass and leave no trace, wrong ones stop the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble import BackendError
from nibble.attention import recurrent
from nibble.cache import state_pool
from nibble.cache.state_pool import StatePool
from nibble.config import STATE_FORMATS
from nibble.engine.state_test import state_test
from nibble.kernels import recurrence as kernels
from nibble.model_spec import RecurrentGroup

GROUPS = (
    RecurrentGroup("delta", "delta", (0, 2), 4, 8, 16, 2, False, 96, 4),
    RecurrentGroup("kda", "delta", (1,), 4, 8, 8, 4, True, 64, 4),
    RecurrentGroup("decay", "decay", (3,), 4, 8, 16, 1, False),
    RecurrentGroup("repeated", "delta", (6,), 4, 8, 16, 4, False, 96, 4),
    RecurrentGroup("selective", "selective", (4,), 1, 24, 8, 1, False, 24, 4),
    RecurrentGroup("conv", "conv", (5,), conv_channels=24, conv_taps=3),
)


def pool(format: str = "fp32", dtype: str = "float32", slots: int = 5) -> StatePool:
    return StatePool(GROUPS, slots, format, dtype, "cpu", poison=True)


def bytes_of(pool: StatePool) -> list[Tensor]:
    return [
        x.clone().view(torch.uint8)
        for state in pool.layers.values()
        for x in (*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC)
        if x.numel()
    ]


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_right_kernels_pass_and_leave_no_trace(format: str) -> None:
    for dtype, slots in (("bfloat16", 5), ("float32", 2), ("float32", 1)):
        states = pool(format, dtype, slots)
        before = bytes_of(states)
        state_test(states, GROUPS, dtype)
        assert all(torch.equal(*pair) for pair in zip(before, bytes_of(states), strict=True))


def _with_batch(name: str, change: Callable[[Any], Any]) -> Callable[..., Tensor]:
    function = getattr(kernels, name)
    return lambda *args, **options: function(*args[:-1], change(args[-1]), **options)


def _forgets_the_state(batch: Any) -> Any:
    """A kernel that begins anew at each step."""
    zeros = (0,) * len(batch.starts)
    return dataclasses.replace(batch, starts=zeros, states_at=zeros)


def _swaps_slots(batch: Any) -> Any:
    """A kernel that writes to the slots in another order, at steps of several tokens."""
    return dataclasses.replace(batch, slots=batch.slots[::-1]) if max(batch.lengths) > 1 else batch


def _writes_padding(name: str) -> Callable[..., Tensor]:
    function = getattr(kernels, name)

    def wrong(*args: Any, **options: Any) -> Tensor:
        out = function(*args, **options)
        if out[sum(args[-1].lengths) :].numel() and is_served(args[-2]):
            out[sum(args[-1].lengths) :] = 1.0
        return out

    return wrong


def is_served(state: Any) -> bool:
    """Whether a layer's slots are those that serve, and not those of the definition."""
    return state.inputs_SPC.shape[0] > 2 if state.inputs_SPC.numel() else state.planes[0].shape[0] > 2


def _of_served(name: str, wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function = getattr(kernels, name)
    return lambda *args, **options: (wrong if is_served(args[-2]) else function)(*args, **options)


JOINED = ("conv_recurrence", "projected_recurrence")
RULES = ("causal_conv", "recurrence", "selective", *JOINED)
FAULTS = {
    "forgets": lambda name: _with_batch(name, _forgets_the_state),
    "swaps": lambda name: _with_batch(name, _swaps_slots),
    "padding": _writes_padding,
    "nan": lambda name: lambda *args, **options: getattr(kernels, name)(*args, **options) * float("nan"),
    "scale": lambda name: lambda *args, **options: getattr(kernels, name)(*args, **options) * 1.05,
}


@pytest.mark.parametrize(
    ("fault", "name"),
    # Operators that are joined are tested in a decode step, and that fault is one of longer ones.
    [(fault, name) for fault in FAULTS for name in RULES if fault != "swaps" or name not in JOINED],
)
def test_a_wrong_kernel_stops_the_start(fault: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {one: getattr(kernels, one) for one in RULES}
    functions[name] = _of_served(name, FAULTS[fault](name))
    monkeypatch.setattr(recurrent, "kernels", SimpleNamespace(**functions))
    with pytest.raises(
        BackendError, match=r"a recurrent layer \(\w+, states in int8\) \w+ .* wrongly .*--device cpu"
    ):
        state_test(pool("int8", "bfloat16"), GROUPS, "bfloat16")


def test_wrong_states_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the steps so far are right, and what is kept is not."""
    calls = []

    def wrong(*args: Any, **options: Any) -> Tensor:
        out = kernels.recurrence(*args, **options)
        calls.append(1)
        if (
            len(calls) == 4
        ):  # the last step of the first kind of layers, of which one is joined with its convolution
            args[-2].planes[0][args[-1].slots[0]] *= 1.1
        return out

    functions = {one: getattr(kernels, one) for one in RULES if one != "recurrence"}
    served = _of_served("recurrence", wrong)
    monkeypatch.setattr(recurrent, "kernels", SimpleNamespace(**functions, recurrence=served))
    with pytest.raises(BackendError, match=r"\(delta, states in fp32\) keeps a state wrongly"):
        state_test(pool(), GROUPS, "float32")


def test_wrong_copies_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers but the last."""
    monkeypatch.setattr(
        state_pool, "copy_slots", lambda layers, *pairs: kernels.copy_slots(layers[:-1], *pairs)
    )
    with pytest.raises(BackendError, match="copies of recurrent states are wrong"):
        state_test(pool(), GROUPS, "float32")
