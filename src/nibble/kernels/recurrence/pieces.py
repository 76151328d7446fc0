"""Where tokens of a step, and what was stored before, lie: indices that are the same for all layers of a step.

A piece has tokens of several requests, of each as many, and of each within one block, so that they can be computed
together. Pieces of a request are in the order of its blocks. Which requests share a piece changes no result.

Shape suffixes: B requests of the step, T their tokens, N requests of a piece, R tokens of each; W taps.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.kernels.recurrence.types import StateBatch
from nibble.kernels.state_formats import BLOCK


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of requests within a block each. Tensors are int64."""

    requests_N: Tensor
    """Indices in the batch."""
    slots_N: Tensor
    index_N1: Tensor
    """0, 1, 2, ..., which goes with places."""
    blocks_N: Tensor
    """Which block of the places each is kept in."""
    stored_N: Tensor
    """Tokens of the block before this step, whose keys and updates are read."""
    live_NJ11: Tensor
    """Whether places of the block have such tokens; boolean."""
    tokens_NR: Tensor
    """Rows of the step; R is 0 where a state is only brought forward."""
    places_NR: Tensor
    """Their places in the block."""
    seen_2RN1J: Tensor
    """Whether a place is before a token's own, and whether it is that or before it; boolean."""
    kept_NR: Tensor
    """Their places of all P."""
    complete_M: Tensor
    """Which of N fill the block, and need the state at its end."""
    final_L: Tensor
    """Which of M keep that state in their slots."""
    most_stored: int
    """The largest of `stored_N`."""
    keeps: bool
    """Whether later steps read any of these tokens."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one request within one block."""

    request: int
    block: int
    stored: int
    first_row: int
    rows: int
    is_complete: bool
    is_final: bool
    keeps: bool


@functools.lru_cache(maxsize=4)
def pieces(batch: StateBatch, places: int, device: torch.device) -> tuple[Piece, ...]:
    """Return the pieces of a step, in an order in which they can be computed.

    Args:
        batch: Its requests.
        places: P, where keys and updates are kept.
        device: Of the indices.

    Raises:
        ValueError: There are fewer places than tokens behind the matrix after the step, or before it.
    """
    for start, length, state_at, next_at in zip(
        batch.starts, batch.lengths, batch.states_at, batch.next_states_at, strict=True
    ):
        if (most := max(start - state_at, start + length - next_at)) > places:
            raise ValueError(
                f"{most} tokens behind a state do not fit in {places} places: make room for more drafts"
            )
    rounds: defaultdict[tuple[int, int], list[_Part]] = defaultdict(list)
    row = 0
    for request, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        for part in _parts(batch, request, row):
            # New tokens of all requests begin in round 0, and states are brought forward before.
            rounds[part.block - start // BLOCK, part.rows].append(part)
        row += length
    return tuple(_piece(batch, rounds[key], places, device) for key in sorted(rounds))


def _parts(batch: StateBatch, request: int, row: int) -> list[_Part]:
    start, state_at = batch.starts[request], batch.states_at[request]
    end, final = start + batch.lengths[request], batch.next_states_at[request]
    parts = []
    for begin in range(state_at, end, BLOCK):
        stop, stored = begin + BLOCK, min(max(start - begin, 0), BLOCK)
        rows, is_complete = min(stop, end) - begin - stored, stop < end or stop <= final
        if rows or is_complete:
            first_row = row + begin + stored - start
            part = _Part(
                request, begin // BLOCK, stored, first_row, rows, is_complete, stop == final, stop > final
            )
            parts.append(part)
    return parts


def _piece(batch: StateBatch, parts: list[_Part], places: int, device: torch.device) -> Piece:
    def tensor(values: Sequence[int]) -> Tensor:
        return _indices(values, device)

    offsets_R = torch.arange(parts[0].rows, device=device)
    stored_N, block_N = tensor([part.stored for part in parts]), tensor([part.block for part in parts])
    places_NR, places_J = stored_N[:, None] + offsets_R, torch.arange(BLOCK, device=device)
    seen_2RNJ = torch.stack((places_J < places_NR.t()[..., None], places_J <= places_NR.t()[..., None]))
    complete = [n for n, part in enumerate(parts) if part.is_complete]
    return Piece(
        requests_N=tensor([part.request for part in parts]),
        slots_N=tensor([batch.slots[part.request] for part in parts]),
        index_N1=torch.arange(len(parts), device=device)[:, None],
        blocks_N=block_N % (places // BLOCK),
        stored_N=stored_N,
        live_NJ11=(places_J < stored_N[:, None])[..., None, None],
        tokens_NR=tensor([part.first_row for part in parts])[:, None] + offsets_R,
        places_NR=places_NR,
        seen_2RN1J=seen_2RNJ[..., None, :],
        kept_NR=(block_N[:, None] * BLOCK + places_NR) % places,
        complete_M=tensor(complete),
        final_L=tensor([m for m, n in enumerate(complete) if parts[n].is_final]),
        most_stored=max(part.stored for part in parts),
        keeps=any(part.keeps for part in parts),
    )


@dataclass(frozen=True, slots=True)
class ConvRows:
    """Where inputs of a convolution lie: of each request those before the step, and then its own, in one buffer.

    All tensors are int64 but the mask.
    """

    slots_B: Tensor
    past_places_BW: Tensor
    """Places of the W - 1 inputs before each request's first token."""
    past_live_BW: Tensor
    """Whether their positions are not negative."""
    past_rows_BW: Tensor
    """Where they lie in the buffer."""
    rows_T: Tensor
    """Where the step's own lie."""
    newest_N: Tensor
    """Tokens that are stored."""
    newest_slots_N: Tensor
    newest_places_N: Tensor


@functools.lru_cache(maxsize=4)
def conv_rows(batch: StateBatch, taps: int, places: int, device: torch.device) -> ConvRows:
    """Return where inputs of a convolution lie.

    Args:
        batch: The requests.
        taps: W.
        places: P, where inputs are kept.
        device: Of the indices.

    Raises:
        ValueError: There are fewer places than the convolution and drafts need.
    """
    drafts = max((n - settled for n, settled in zip(batch.lengths, batch.settled, strict=True)), default=0)
    if places < taps - 1 + drafts:
        raise ValueError(
            f"{places} places for inputs of a convolution of {taps} taps do not hold {drafts} drafts"
        )
    slots_B, starts_B, lengths_B = (_indices(x, device) for x in (batch.slots, batch.starts, batch.lengths))
    request_B, past_W = torch.arange(len(slots_B), device=device), torch.arange(taps - 1, device=device)
    request_T = torch.repeat_interleave(request_B, lengths_B)
    token_T = torch.arange(len(request_T), device=device)
    begins_B = lengths_B.cumsum(0) - lengths_B
    offset_T = token_T - begins_B[request_T]
    past_B1 = starts_B[:, None] - (taps - 1)
    newest_N = (lengths_B[request_T] - offset_T <= places).nonzero()[:, 0]
    return ConvRows(
        slots_B=slots_B,
        past_places_BW=(past_B1 + past_W) % max(places, 1),
        past_live_BW=past_B1 + past_W >= 0,
        past_rows_BW=(begins_B + request_B * (taps - 1))[:, None] + past_W,
        rows_T=token_T + (request_T + 1) * (taps - 1),
        newest_N=newest_N,
        newest_slots_N=slots_B[request_T[newest_N]],
        newest_places_N=(starts_B[request_T] + offset_T)[newest_N] % max(places, 1),
    )


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
