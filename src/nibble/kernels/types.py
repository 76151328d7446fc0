"""Arguments of every kernel: the pages of a stream, the requests of a step, and parameters of a layer.

One set of types goes from the model runner to a kernel. All of them are frozen: a kernel reads them, nobody edits them.

Shape suffixes: T tokens of the step, B requests of a batch, N pages of its longest request, H query heads, K chosen
tokens, P pages of a pool, S slots of a page, R rotated values of a head, D all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nibble.formats import KVFormat
from nibble.kernels.transfer import to_device
from nibble.model_spec import Phase


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Paged:
    """The pages of one stream."""

    format: KVFormat
    dim: int
    """Values of a head, before encoding."""
    planes_PHS: tuple[Tensor, ...]
    """The format's planes as [page, head, slot, values], with any strides before the last."""
    scale: Tensor
    """The global scale, float32, () or [H, 1]."""
    interleave: int = 0
    """Tokens by which the last plane, of block scales, is interleaved (cache/layout.py); 0 for none."""

    def interleave_of(self, plane: int) -> int:
        """Return the tokens by which plane number `plane` is interleaved, 0 for none."""
        return self.interleave if plane == len(self.planes_PHS) - 1 else 0

    @property
    def heads(self) -> int:
        """Return the stream's number of heads."""
        return self.planes_PHS[0].shape[1]

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page."""
        return self.planes_PHS[0].shape[2]


def is_aligned(plane_PHS: Tensor, size: int) -> bool:
    """Return whether a plane's rows begin at multiples of so many bytes, which a copy takes at a time."""
    steps = plane_PHS.storage_offset(), plane_PHS.stride(0), plane_PHS.stride(2)
    return all(step * plane_PHS.itemsize % size == 0 for step in steps)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The requests of one phase; their tokens are rows [start, stop) of the step, request after request.

    Lengths are there twice. A step that is replayed from a CUDA graph changes those on the device, and `page_table_BN`,
    in place; `query_lens` stay and `seq_lens` are bounds. A kernel that can be captured reads lengths from the device.
    """

    phase: Phase
    start: int
    stop: int
    query_lens: tuple[int, ...]
    """New tokens of each request."""
    seq_lens: tuple[int, ...]
    """Stored tokens of each request, the new ones included."""
    page_table_BN: Tensor
    """int32 page ids in order. Entries beyond a request's pages are 0 and must not be read as its own."""
    cu_seqlens_q_B1: Tensor
    """int32: where each request's rows begin, counted from `start`, with the end of the last."""
    seq_lens_B: Tensor
    """int32, `seq_lens` on the device. A request of 0 stored tokens is padding: its rows of the output are zeros."""
    rows_B: Tensor | None = None
    """int64 rows of the requests in the page tables, for a host tier."""
    bounds: bool = False
    """Whether `seq_lens` are bounds."""
    exact_table_BN: Tensor | None = None
    """int32: the exact page of each page, where there is an exact window (attention/window.py)."""
    new_B: Tensor | None = None
    """int32: how many of a request's rows are new tokens, the last ones, where `query_lens` are bounds; the rows before
    them are padding, and nobody reads their output."""
    num_omitted: int = 0
    """Tokens of each request that the batch leaves out, the newest and maybe the first: lengths are so much shorter."""

    @classmethod
    def from_lens(
        cls,
        phase: Phase,
        start: int,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table_BN: Tensor,
    ) -> AttentionBatch:
        """Return the batch of requests whose first row is `start`, with lengths copied to the table's device.

        Args:
            phase: The phase of all requests.
            start: First row of the batch in the step.
            query_lens: New tokens of each request.
            seq_lens: Stored tokens of each request, the new ones included.
            page_table_BN: int32 pages of each request.
        """
        starts = tuple(accumulate(query_lens, initial=0))
        device, lens = page_table_BN.device, (tuple(query_lens), tuple(seq_lens))
        lens_on_device = to_device(starts, torch.int32, device), to_device(lens[1], torch.int32, device)
        return cls(phase, start, start + starts[-1], *lens, page_table_BN, *lens_on_device)

    @property
    def page_table_TN(self) -> Tensor:
        """Return int32 [T, N]: the pages of each token's request."""
        total = self.stop - self.start
        if len(self.query_lens) == total:
            return self.page_table_BN
        counts_B = self.cu_seqlens_q_B1.diff()
        return self.page_table_BN.repeat_interleave(counts_B, 0, output_size=total)


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """The rows of a step whose logits are computed."""

    rows_S: Tensor
    """int64."""
    batch: AttentionBatch | None
    """Each of them as a request that decodes, counted from the first of them; None where there are none."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the new tokens of a step are stored, and its requests by phase."""

    slot_mapping_T: Tensor
    """int64: page * page_size + offset of every new token. Rows behind the last batch are padding.

    Negative where nothing is stored, which only steps for a CUDA graph have.
    """
    batches: tuple[AttentionBatch, ...]
    frame_slot_mapping_T: Tensor | None = None
    """With a host tier: slots of the frames in which those pages lie, for the streams that attention reads."""
    exact_slot_mapping_T: Tensor | None = None
    """With an exact window: slots in exact pages, negative for tokens that are not kept."""
    logit_rows: LogitRows | None = None
    """Where a layer that serves logits alone attends for their rows only."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of one call."""

    scale: float
    window: int | None = None
    """Tokens that a query sees, itself included."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks_H: Tensor | None = None
    """A learned logit per query head that joins the softmax."""
    topk_indices_TK: Tensor | None = None
    """Sparse attention: the tokens that each query looks at, as positions (kernels/indexer/__init__.py)."""
    index_layer: int = -1
    """The layer that chose them."""
    topk_slots_TK: Tensor | None = None
    """int32: where they lie in the view at hand, which is what a backend reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """What is done to the heads of queries and keys before attention: rotary positions, and a norm before them, if any.

    The first R values x of a head become x * cos + rotate_half(x) * sin (RoPE, Su et al. 2021; halves against each
    other, as Llama has it).
    """

    cos_TR: Tensor
    sin_TR: Tensor
    norms_D: tuple[Tensor, ...] = ()
    """Weights of the RMS norms of a query's head and of a key's, where heads are normed."""
    eps: float = 0.0
    """Of the norms."""
    offset: float = 0.0
    """What is added to their weights."""

    @property
    def q_norm_D(self) -> Tensor | None:
        """Return the weight of the norm of queries, if there is one."""
        return self.norms_D[0] if self.norms_D else None

    @property
    def k_norm_D(self) -> Tensor | None:
        """Return the weight of the norm of keys, if there is one."""
        return self.norms_D[1] if self.norms_D else None
