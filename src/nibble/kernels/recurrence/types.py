"""What a step says of its requests, and what slots of a layer hold.

Shape suffixes: see kernels/recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from nibble.kernels.state_formats import BLOCK

UNIT_EPSILON = 1e-6
"""Added to the squared length of queries and keys that are normalised, in all families."""
MIN_ONES = 8
"""Requests of one token beside longer ones that are worth launches of their own."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The requests of a step: their tokens are rows of the layers' inputs, one request after the other.

    Rows behind the last request are padding: nothing is stored of them, and their outputs are zero.

    Raises:
        ValueError: Fields have different lengths, a slot is there twice, a matrix is not at a multiple of BLOCK up to
            its request's first token, or more tokens are settled than there are.
    """

    slots: tuple[int, ...]
    """Slot of each request."""
    starts: tuple[int, ...]
    """Position of its first token in this step."""
    lengths: tuple[int, ...]
    """Its tokens in this step."""
    states_at: tuple[int, ...]
    """The position at which its slot has the matrix, a multiple of BLOCK, at most BLOCK tokens and drafts before
    `starts`. It is brought forward to the last multiple up to `starts` first, and after the step is at
    `next_states_at`."""
    settled: tuple[int, ...]
    """Leading ones of its tokens that no later step takes back: all but drafts."""

    def __post_init__(self) -> None:
        fields = (self.slots, self.starts, self.lengths, self.states_at, self.settled)
        if len({len(field) for field in fields}) > 1:
            raise ValueError(
                f"the fields of a batch of states have lengths {[len(field) for field in fields]}"
            )
        if len(set(self.slots)) < len(self.slots):
            raise ValueError(f"two requests of a step have the same slot: {self.slots}")
        for slot, start, length, state_at, settled in zip(*fields, strict=True):
            if state_at % BLOCK or not 0 <= state_at <= start:
                raise ValueError(
                    f"the state of slot {slot} is at {state_at}: it must be a multiple of {BLOCK} up to {start}"
                )
            if not 0 <= settled <= length:
                raise ValueError(f"{settled} of {length} tokens of slot {slot} are settled")

    @property
    def next_states_at(self) -> tuple[int, ...]:
        """Where the matrices are after the step: at the last multiples of BLOCK up to starts + settled."""
        return tuple((start + n) // BLOCK * BLOCK for start, n in zip(self.starts, self.settled, strict=True))


def ones_behind(lengths: Sequence[int]) -> tuple[int, int]:
    """Return how many requests behind all others have one token, and the rows of the others."""
    count = next((n for n, length in enumerate(reversed(lengths)) if length != 1), len(lengths))
    return count, sum(lengths) - count


@dataclass(frozen=True, slots=True, eq=False)
class StateMetadata:
    """The same of a step on a GPU, in tensors that kernels read, so that a recorded step may find others there.

    Tokens of the requests are rows of the layers' inputs, one request after the other. Nothing of it is checked: the
    host does not know what the tensors hold.
    """

    slots_B: Tensor
    """int32, slot of each request; -1: padding, of which nothing is stored and whose output is zero."""
    starts_B: Tensor
    """int32, position of its first token in this step."""
    cu_seqlens_B1: Tensor
    """int32, where its tokens begin among the rows; the last one is where all end."""
    max_length: int
    """Most tokens of a request that there may be; 1: a step of decodes."""
    settled_B: Tensor | None = None
    """int32, leading ones of its tokens that no later step takes back; None: all."""
    states_at_B: Tensor | None = None
    """int32, the position at which its slot has the matrix, as in StateBatch; None: the last multiple of BLOCK up to
    its first token, where steps without drafts leave it."""
    invariant: bool = False
    """Whether a token's result is to have the same bits in every cut and company (--deterministic)."""
    num_ones: int = 0
    """Requests behind all others that have one token each, as far as the host knows."""
    num_rows: int = 0
    """Rows of the others, where there are any such."""

    def parts(self) -> tuple[StateMetadata, StateMetadata] | None:
        """Return the requests with several tokens, and those behind them with one, where each may be computed apart.

        Their rows are those of the step's tensors, up to `num_rows` and from there on.
        """
        count = len(self.slots_B) - self.num_ones
        plain = self.settled_B is None and self.states_at_B is None and not self.invariant
        if self.num_ones < MIN_ONES or count <= 0 or not plain:
            return None
        slots_B, starts_B, ends_B1 = self.slots_B, self.starts_B, self.cu_seqlens_B1
        many = StateMetadata(slots_B[:count], starts_B[:count], ends_B1[: count + 1], self.max_length)
        return many, StateMetadata(slots_B[count:], starts_B[count:], ends_B1[count:], 1)

    def on_host(self) -> StateBatch:
        """Return the same for naive.py, without padding; waits for the device."""
        slots, starts, ends = (x.tolist() for x in (self.slots_B, self.starts_B, self.cu_seqlens_B1))
        lengths = [stop - first for first, stop in pairwise(ends)]
        settled = lengths if self.settled_B is None else self.settled_B.tolist()
        at = [start // BLOCK * BLOCK for start in starts]
        states_at = at if self.states_at_B is None else self.states_at_B.tolist()
        rows = zip(slots, starts, lengths, states_at, settled, strict=True)
        live = [row for row in rows if row[0] >= 0]
        return StateBatch(*zip(*live, strict=True)) if live else StateBatch((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution whose outputs are nothing but queries, keys and values of the rule behind it."""

    x_TC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None
    activation: str | None
    """As causal_conv() takes all these."""
    q_at: int
    """The channel of the first value of the first query; heads follow one another."""
    k_at: int
    """The same of keys."""
    v_at: int
    """The same of values."""
    share: int = 1
    """How many heads of queries and keys, one behind the other, have the same channels."""

    def split(self, y_TC: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [T, G / share, K] and values [T, H, V] of its output."""
        key_heads, columns = state.keys_SPGK.shape[2] // self.share, state.keys_SPGK.shape[3]
        heads, rows = state.updates_SPHV.shape[2:]
        shapes = ((self.q_at, key_heads, columns), (self.k_at, key_heads, columns), (self.v_at, heads, rows))
        q, k, v = (y_TC[:, at : at + n * d].unflatten(1, (n, d)) for at, n, d in shapes)
        return q, k, v


@dataclass(frozen=True, slots=True)
class Runs:
    """Where values lie in a row of a product: some behind one another, then as many again further on."""

    first: int
    length: int
    """Of a run."""
    stride: int
    """From the first value of a run to that of the next."""

    def of(self, y_TW: Tensor, count: int) -> Tensor:
        """Return so many of the values of each row, in their order."""
        row = y_TW.stride(1)
        sizes = len(y_TW), -(-count // self.length), min(self.length, count)
        strides = y_TW.stride(0), self.stride * row, row
        at = y_TW.storage_offset() + self.first * row
        return y_TW.as_strided(sizes, strides, at).flatten(1)


@dataclass(frozen=True, slots=True)
class Projection:
    """The products that a layer begins with: rows that have the inputs of its convolution, and its gates.

    A head's log decay is -e^pace softplus(a + offset), and its learning rate sigmoid(b), all in float32.
    """

    x_TW: Tensor
    a_TW: Tensor
    """The same, or another one, and so is b."""
    b_TW: Tensor
    runs: tuple[Runs, ...]
    """Where inputs of queries, keys and values are in x, the heads of each behind one another, and where the heads' a's
    and b's are. Which channel an input is, Convolution says."""
    paces_H: Tensor
    offsets_H: Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """The slots of one layer. Of a convolution alone, only `inputs` has any values."""

    planes: tuple[Tensor, ...]
    """The matrices in the state's format: [S, H, V, K], and scales [S, H, V] where the format has them."""
    format: str
    keys_SPGK: Tensor
    """Keys by position modulo P, a multiple of BLOCK that holds a block and all drafts. Mamba 1: B, with G = 1."""
    updates_SPHV: Tensor
    """u, in float32 or the compute dtype. Mamba 1: dt x, with H = 1 and channels as V."""
    decays: Tensor
    """G since the block's begin: float32 [S, P, H], or [S, P, H, K] with a decay for each column. Mamba 1: dt of the
    token itself [S, P, 1, V]."""
    inputs_SPC: Tensor
    """Inputs of the convolution by position modulo P, at least W - 1 and all drafts."""
