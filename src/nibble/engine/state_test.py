"""The start-up test of recurrent layers: the kernels and slots that will serve, held against the definition.

Two requests get random tokens, as a prompt, in decode steps and in chunks that are cut anywhere. For each kind of layer
both what is answered and what is kept is compared with kernels/recurrence/naive.py. So a kernel that is wrong on this
machine stops the start, and not an answer.

Shape suffixes: T tokens of a step, C channels, W taps, G heads of keys, K their values, H heads of the state, V their
values; R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention import recurrent
from nibble.attention.recurrent import RecurrentStates
from nibble.cache.state_pool import StatePool
from nibble.errors import BackendError
from nibble.kernels import ahead
from nibble.kernels.recurrence import (
    Convolution,
    LayerState,
    Projection,
    Runs,
    StateBatch,
    layer_state,
)
from nibble.kernels.recurrence.formats import decode
from nibble.kernels.recurrence.types import StateMetadata
from nibble.kernels.state_formats import BLOCK
from nibble.model_spec import RecurrentGroup

STEPS = ((303, 31), (1, 1), (1, 1), (1, 1), (5, 70), (17, 1))
"""New tokens of both requests, step by step. The decode steps end a block of tokens, and begin one."""
TOLERANCE = {"float32": 2e-3}
"""Largest deviation of outputs and states, norm over norm: a value between two codes may be rounded otherwise."""
TOLERANCE_16_BITS = 0.02
COARSE = "fp8"
"""Its codes are far apart, so one that is rounded otherwise counts twice."""

ADVICE = "serve this model on a CPU (--device cpu), and please report this"

Serve = Callable[[RecurrentStates], Tensor]
"""Computes one layer of a step."""


def state_test(pool: StatePool, groups: Sequence[RecurrentGroup], dtype: str) -> None:
    """Run each kind of recurrent layer against the definition. The pool is afterwards as it was before.

    Args:
        pool: where states are kept.
        groups: layers with states.
        dtype: the compute dtype, as torch calls it.

    Raises:
        BackendError: a layer does not do what it should.
    """
    # From both ends, so that places far away are reached, too.
    slots = tuple(dict.fromkeys((pool.num_slots - 1, 0)))
    for group in groups:
        state = pool.layers[group.layers[0]]
        with torch.inference_mode(), _restored(state, slots):
            _GroupTest(group, state, slots, dtype, pool.invariant).run()
    with torch.inference_mode():
        _test_copies(pool, slots)


class _GroupTest:
    """The test of one kind of layers."""

    def __init__(
        self, group: RecurrentGroup, state: LayerState, slots: tuple[int, ...], dtype: str, invariant: bool
    ) -> None:
        self.group, self.state, self.slots, self.invariant = group, state, slots, invariant
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = state.inputs_SPC.device
        self.limit = TOLERANCE.get(dtype, TOLERANCE_16_BITS)
        if state.format == COARSE:
            self.limit *= 2
        self.random = torch.Generator(self.device).manual_seed(0)
        self.expected = layer_state(group, len(slots), state.format, self.dtype, 0, self.device)
        self.computed = [0] * len(slots)
        self.weight_CW = (
            self._noise(group.conv_channels, max(group.conv_taps, 1)) / max(group.conv_taps, 1) ** 0.5
        )
        self.pace_CK = -self._noise(group.rows, group.columns).exp()

    def run(self) -> None:
        """Run all steps."""
        for lengths in STEPS:
            self._step(lengths[: len(self.slots)])
        if self.group.values:
            planes = [plane[list(self.slots)] for plane in self.state.planes]
            actual, expected = (decode(self.state.format, x) for x in (planes, self.expected.planes))
            self._compare(actual, expected, "a state", "keeps")

    def _step(self, lengths: tuple[int, ...]) -> None:
        """Run one step, with a row of padding behind it, which in a decode step is a request's."""
        ends, starts, longest = list(accumulate(lengths, initial=0)), tuple(self.computed), max(lengths)
        padding = ((-1,), (0,), (ends[-1] + 1,)) if longest == 1 else ((), (), ())
        numbers = zip((self.slots, starts, ends), padding, strict=True)
        tensors = (self._ints((*values, *more)) for values, more in numbers)
        slots, begins, cu_seqlens = tensors
        metadata = StateMetadata(slots, begins, cu_seqlens, longest, invariant=self.invariant)
        states_at = tuple(start // BLOCK * BLOCK for start in starts)
        batch = StateBatch(tuple(range(len(lengths))), starts, lengths, states_at, lengths)
        layer = self.group.layers[0]
        actual = RecurrentStates({layer: self.state}, metadata)
        definition = RecurrentStates({layer: self.expected}, batch)
        what = "a decode step" if longest == 1 else f"chunks of {' and '.join(map(str, lengths))} tokens"
        for serve in self._served(ends[-1] + 1, is_decode=longest == 1):
            self._compare(serve(actual), serve(definition), what, "computes")
        self.computed = [start + length for start, length in zip(starts, lengths, strict=True)]

    def _served(self, tokens: int, *, is_decode: bool) -> Iterator[Serve]:
        """Yield what computes a layer: from the second decode step on as in compiled models, by a joined operator."""
        num_decodes = self.computed[0] - STEPS[0][0]
        if not is_decode or not num_decodes or not self._share:
            yield from self._layers(tokens)
        elif num_decodes == 1 or self.group.key_decay:
            yield self._joined(tokens)
        else:
            yield self._projected(tokens)

    def _layers(self, tokens: int) -> Iterator[Serve]:
        """Yield the convolution and the rule of a layer over so many random tokens."""
        group, layer = self.group, self.group.layers[0]
        if group.conv_channels:
            x_TC = self._noise(tokens, group.conv_channels).to(self.dtype)
            weight_CW = self.weight_CW.to(self.dtype)
            yield lambda states: recurrent.conv(states, layer, x_TC, weight_CW, None, "silu")
        if group.rule == "selective":
            yield self._selective(tokens)
        elif group.rule != "conv":
            yield self._recurrence(tokens)

    @property
    def _share(self) -> int:
        """Return how many heads of keys have the same channels of a convolution that makes nothing else; 0: none is."""
        group = self.group
        left = group.conv_channels - group.heads * group.rows
        shares = [n for n in range(1, group.key_heads + 1) if not group.key_heads % n]
        widths = {2 * group.key_heads // share * group.columns: share for share in shares}
        return widths.get(left, 0) if group.rule in ("delta", "decay") else 0

    def _joined(self, tokens: int) -> Serve:
        """Return a layer whose convolution makes queries, keys and values."""
        group, layer, share = self.group, self.group.layers[0], self._share
        x_TC = self._noise(tokens, group.conv_channels).to(self.dtype)
        width, is_delta = group.key_heads // share * group.columns, group.rule == "delta"
        conv = Convolution(x_TC, self.weight_CW.to(self.dtype), None, "silu", 0, width, 2 * width, share)
        gates = self._gates(tokens)
        return lambda states: recurrent.conv_recurrence(
            states, layer, conv, *gates, delta=is_delta, unit=True
        )

    def _projected(self, tokens: int) -> Serve:
        """Return a layer that reads the products that it begins with: its heads' parts beside one another."""
        group, layer, share = self.group, self.group.layers[0], self._share
        key_heads, is_delta = group.key_heads // share, group.rule == "delta"
        values, group_heads = group.heads // key_heads * group.rows, group.heads // key_heads
        width = 2 * group.columns + values + 2 * group_heads
        sizes = group.columns, group.columns, values, group_heads, group_heads
        starts = accumulate(sizes, initial=0)
        runs = tuple(Runs(first, size, width) for first, size in zip(starts, sizes, strict=False))
        y_TW = self._noise(tokens, key_heads * width).to(self.dtype)
        paces_H, offsets_H = (self._noise(group.heads) - 2 for _ in range(2))
        projection = Projection(y_TW, y_TW, y_TW, runs, paces_H, offsets_H)
        keys = key_heads * group.columns
        conv = Convolution(y_TW, self.weight_CW.to(self.dtype), None, "silu", 0, keys, 2 * keys, share)
        return lambda states: recurrent.projected_recurrence(
            states, layer, projection, conv, delta=is_delta, unit=True
        )

    def _gates(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return random decays and learning rates."""
        paces = (self.group.columns,) if self.group.key_decay else ()
        log_decay = -F.softplus(self._noise(tokens, self.group.heads, *paces)) / 10
        return log_decay, self._noise(tokens, self.group.heads).sigmoid()

    def _recurrence(self, tokens: int) -> Serve:
        group, layer = self.group, self.group.layers[0]
        q_TGK, k_TGK = (
            F.normalize(self._noise(tokens, group.key_heads, group.columns), dim=-1).to(self.dtype)
            for _ in "qk"
        )
        v_THV = self._noise(tokens, group.heads, group.rows).to(self.dtype)
        log_decay, beta_TH = self._gates(tokens)
        is_delta = group.rule == "delta"
        return lambda states: recurrent.recurrence(
            states, layer, q_TGK, k_TGK, v_THV, log_decay, beta_TH, delta=is_delta
        )

    def _selective(self, tokens: int) -> Serve:
        group, layer = self.group, self.group.layers[0]
        x_TC, B_TN, C_TN = (
            self._noise(tokens, width).to(self.dtype) for width in (group.rows, group.columns, group.columns)
        )
        dt_TC = F.softplus(self._noise(tokens, group.rows) - 2)
        return lambda states: recurrent.selective(states, layer, x_TC, dt_TC, self.pace_CK, B_TN, C_TN)

    def _compare(self, actual: Tensor, expected: Tensor, what: str, verb: str) -> None:
        if ahead.is_rehearsal():
            return
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        if error <= self.limit:  # which NaN is not
            return
        raise BackendError(
            f"the start-up test failed: a recurrent layer ({self.group.name}, states in {self.state.format}) {verb} "
            f"{what} wrongly on this {self.device.type}: off by {error:.3g} of the definition's norm, where "
            f"{self.limit:g} is allowed; {ADVICE}"
        )

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _tensors(state: LayerState) -> tuple[Tensor, ...]:
    return *state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC


@contextmanager
def _restored(state: LayerState, slots: tuple[int, ...]) -> Iterator[None]:
    """Restore slots in the end."""
    saved = [tensor[list(slots)] for tensor in _tensors(state)]
    try:
        yield
    finally:
        for tensor, values in zip(_tensors(state), saved, strict=True):
            tensor[list(slots)] = values


def _test_copies(pool: StatePool, slots: tuple[int, ...]) -> None:
    """Copy a slot onto another one in all layers, each tensor with bytes of its own."""
    if len(slots) < 2:
        return
    source, target = slots
    with ExitStack() as restored:
        tensors: list[Tensor] = []
        for state in pool.layers.values():
            restored.enter_context(_restored(state, slots))
            tensors += [tensor for tensor in _tensors(state) if tensor.numel()]
        for number, tensor in enumerate(tensors):
            tensor[source].view(torch.uint8).copy_(_pattern(tensor[source], number))
        pool.copy([(source, target)])
        for number, tensor in enumerate(tensors):
            if not ahead.is_rehearsal() and not torch.equal(
                tensor[target].view(torch.uint8), _pattern(tensor[source], number)
            ):
                raise BackendError(
                    f"the start-up test failed: copies of recurrent states are wrong on this {tensor.device.type} "
                    f"(tensor {number} of {len(tensors)}); {ADVICE}"
                )


def _pattern(x: Tensor, number: int) -> Tensor:
    """Return bytes for `x` [..., n] that differ from place to place and between tensors."""
    count = torch.arange(x.nbytes, device=x.device) + 31 * number
    return (count % 113).to(torch.uint8).view(*x.shape[:-1], -1)
