"""recurrence: layers with a state of fixed size, over any cut of a request into steps.

The rule, the same for every cut (docs/architecture.md). Let S be a head's matrix [V, K] at the last multiple of BLOCK
tokens, and G_i the sum of log decays from there to token i, this one included:

    u_i = beta_i (v_i - S (k_i e^G_i) - sum over j < i of (k_i . k_j e^(G_i - G_j)) u_j)     delta rule
    u_i = beta_i v_i                                                                         else
    o_i = S (q_i e^G_i) + sum over j <= i of (q_i . k_j e^(G_i - G_j)) u_j
    at the next multiple:  S <- S e^G + sum over j of u_j (k_j e^(G - G_j))^T, then rounded to the state's format

So between multiples only keys, updates and sums of decays are kept, a query reads the same values by the same sums in
a prompt, a decode step and a verification, and a rejected draft leaves no trace: its place is written again. Sums run
over all places of a block, those without a token being zero, so their order depends on nothing. Keys and updates are
rounded to the dtype in which they are kept before anything reads them.

Mamba 1 has another decay for each entry, by A and the token's dt, so its block is scanned from S token by token, and
keeps B, dt x and dt:

    s_0 = S
    s_i[c, n] = s_{i-1}[c, n] e^(A[c, n] dt_i[c]) + dt_i[c] x_i[c] B_i[n]
    y_i[c] = sum over n of C_i[n] s_i[c, n]

A request has a slot: its place in the tensors of all layers. What lies there is never cleared: a state at position 0 is
zero by definition, and of keys, updates and inputs of convolutions only those of tokens before a step are read.

Shape suffixes: B requests, T tokens of all of them, H heads of states, G heads of keys, V rows, K columns, C channels,
W taps of a convolution, S slots, P places of a block or of a convolution's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.recurrence import naive
from nibble.kernels.recurrence.formats import layer_state
from nibble.kernels.recurrence.types import (
    Convolution,
    LayerState,
    Projection,
    Runs,
    StateBatch,
    StateMetadata,
)
from nibble.kernels.state_formats import BLOCK

if TYPE_CHECKING:
    from nibble.kernels.recurrence.copies import CopyTable

__all__ = [
    "BLOCK",
    "Convolution",
    "LayerState",
    "Projection",
    "Runs",
    "StateBatch",
    "StateMetadata",
    "causal_conv",
    "conv_recurrence",
    "copy_slots",
    "copy_tables",
    "layer_state",
    "projected_recurrence",
    "recurrence",
    "selective",
]


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    state: LayerState,
    batch: StateBatch | StateMetadata,
) -> Tensor:
    """Convolve each channel over the inputs up to the present one, those before position 0 being zero.

    Args:
        x_TC: Inputs.
        weight_CW: Taps, that of the present input last.
        bias_C: Added to each token.
        activation: `silu`, `swish` (the same), or None.
        state: Has the inputs before the step, and gets its newest.
        batch: The requests.

    Returns:
        [T, C] in the dtype of x, computed in float32.

    Raises:
        ValueError: The activation is another one, shapes do not fit, or drafts have too few places.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"a convolution's activation must be silu, swish or none, not {activation!r}")
    if weight_CW.shape[0] != x_TC.shape[1] or x_TC.shape[1] != state.inputs_SPC.shape[2]:
        raise ValueError(
            f"inputs {list(x_TC.shape)}, taps {list(weight_CW.shape)} and stored inputs "
            f"{list(state.inputs_SPC.shape)} must have the same channels"
        )
    if _has_kernels(batch, x_TC):
        from nibble.kernels.recurrence import conv

        parts = batch.parts()
        if parts is None:
            return conv.causal_conv(x_TC, weight_CW, bias_C, activation, state, batch)
        # A program for each tile of the longest prompt, for each request, would mostly find nothing to do.
        many, ones = parts
        rows, out_TC = slice(batch.num_rows), x_TC.new_empty(x_TC.shape)
        conv.causal_conv(x_TC[rows], weight_CW, bias_C, activation, state, many, out=out_TC[rows])
        return conv.causal_conv(x_TC, weight_CW, bias_C, activation, state, ones, out=out_TC)
    return naive.causal_conv(x_TC, weight_CW, bias_C, activation, state, _on_host(x_TC, batch))


def recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    batch: StateBatch | StateMetadata,
    *,
    delta: bool,
    unit: bool = False,
) -> Tensor:
    """Update matrices by keys and values, and read them by queries.

    A head of keys serves H / G heads that follow one another: head h has the keys of h // (H / G), as after
    repeat_interleave in Transformers.

    Args:
        q_TGK: Queries, scaled, or raw ones with `unit`.
        k_TGK: Keys, normalised where the rule wants it, or raw ones with `unit`.
        v_THV: Values.
        log_decay: Logarithms of decays, finite: float32 [T, H], or [T, H, K] with one for each column.
        beta_TH: Learning rates, or steps of time; None: 1.
        state: The layer's slots, which are updated.
        batch: The requests. Of StateMetadata nothing is checked, and nothing is read on the host.
        delta: Whether updates are by the delta rule.
        unit: Whether queries and keys are normalised here, and queries multiplied with K^-1/2.

    Returns:
        [T, H, V] in the dtype of v, computed in float32.

    Raises:
        ValueError: Shapes do not fit, or drafts have too few places.
    """
    heads, columns = v_THV.shape[1], k_TGK.shape[2]
    if q_TGK.shape != k_TGK.shape or heads % k_TGK.shape[1]:
        raise ValueError(
            f"queries {list(q_TGK.shape)} and keys {list(k_TGK.shape)} cannot serve {heads} heads"
        )
    if (
        state.planes[0].shape[1:] != (heads, v_THV.shape[2], columns)
        or state.keys_SPGK.shape[2:] != k_TGK.shape[1:]
    ):
        raise ValueError(
            f"keys {list(k_TGK.shape)} and values {list(v_THV.shape)} do not fit matrices "
            f"{list(state.planes[0].shape)} and stored keys {list(state.keys_SPGK.shape)}"
        )
    if log_decay.shape[1:] != state.decays.shape[2:]:
        raise ValueError(
            f"decays {list(log_decay.shape)} do not fit those stored, {list(state.decays.shape)}"
        )
    if _has_kernels(batch, v_THV):
        inputs = (q_TGK, k_TGK, v_THV, log_decay, beta_TH)
        return _by_kernels(inputs, state, batch, delta=delta, unit=unit)
    host = _on_host(v_THV, batch)
    if unit:
        q_TGK, k_TGK = _unit_rows(q_TGK, k_TGK)
    return naive.recurrence(q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, host, delta=delta)


def conv_recurrence(
    conv: Convolution,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    batch: StateBatch | StateMetadata,
    *,
    delta: bool,
    unit: bool,
) -> Tensor:
    """Convolve as causal_conv() does, and go on with its outputs as recurrence(): a decode step in one launch.

    Args:
        conv: The convolution, and where queries, keys and values are among its channels.
        log_decay: As in recurrence(), and so are the following.
        beta_TH: See there.
        state: See there.
        batch: See there.
        delta: See there.
        unit: See there.

    Returns:
        [T, H, V] in the dtype of the convolution's inputs.
    """
    if _has_kernels(batch, conv.x_TC):
        from nibble.kernels.recurrence import decode
        from nibble.kernels.recurrence.triton import is_one_token

        if is_one_token(batch) and not batch.invariant and decode.convolves(conv, state):
            return decode.conv_recurrence(conv, log_decay, beta_TH, state, batch, delta=delta, unit=unit)
    y_TC = causal_conv(conv.x_TC, conv.weight_CW, conv.bias_C, conv.activation, state, batch)
    q_TGK, k_TGK, v_THV = conv.split(y_TC, state)
    if conv.share > 1:
        if unit:
            q_TGK, k_TGK = _unit_rows(q_TGK, k_TGK)
        q_TGK, k_TGK, unit = *(x.repeat_interleave(conv.share, 1) for x in (q_TGK, k_TGK)), False
    return recurrence(q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, batch, delta=delta, unit=unit)


def projected_recurrence(
    projection: Projection,
    conv: Convolution,
    state: LayerState,
    batch: StateBatch | StateMetadata,
    *,
    delta: bool,
    unit: bool,
) -> Tensor:
    """Compute gates, and go on as conv_recurrence(), all of it from a layer's first products.

    Args:
        projection: The products, and where everything is in them.
        conv: The convolution; its own inputs are not read.
        state: As in recurrence(), and so are the following.
        batch: See there.
        delta: See there.
        unit: See there.

    Returns:
        [T, H, V] in the dtype of the products.
    """
    if _has_kernels(batch, projection.x_TW):
        from nibble.kernels.recurrence import decode, project
        from nibble.kernels.recurrence.triton import is_one_token

        is_decode = is_one_token(batch) and not batch.invariant
        if is_decode and decode.convolves(conv, state) and decode.projects(projection, state):
            return decode.projected_recurrence(projection, conv, state, batch, delta=delta, unit=unit)
        x_TC, log_decay_TH, beta_TH = project.project(projection, conv, state)
    else:
        x_TC, log_decay_TH, beta_TH = naive.project(projection, conv, state)
    conv = replace(conv, x_TC=x_TC)
    return conv_recurrence(conv, log_decay_TH, beta_TH, state, batch, delta=delta, unit=unit)


def selective(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CK: Tensor,
    B_TK: Tensor,
    C_TK: Tensor,
    state: LayerState,
    batch: StateBatch | StateMetadata,
) -> Tensor:
    """Scan as Mamba 1 does, every entry of the matrix with a decay of its own.

    Args:
        x_TC: Inputs.
        dt_TC: Steps of time, after softplus.
        A_CK: Paces of decay, negative.
        B_TK: How inputs enter columns.
        C_TK: How columns are read.
        state: The layer's slots, with one head, which are updated.
        batch: The requests.

    Returns:
        [T, C] in the dtype of x, computed in float32, without D x.

    Raises:
        ValueError: Shapes do not fit, or drafts have too few places.
    """
    if (
        state.planes[0].shape[1:] != (1, *A_CK.shape)
        or x_TC.shape != dt_TC.shape
        or x_TC.shape[1] != len(A_CK)
    ):
        raise ValueError(
            f"inputs {list(x_TC.shape)}, steps {list(dt_TC.shape)} and A {list(A_CK.shape)} do not fit matrices "
            f"{list(state.planes[0].shape)}"
        )
    if _has_kernels(batch, x_TC):
        from nibble.kernels.recurrence import mamba

        return mamba.selective(x_TC, dt_TC, A_CK, B_TK, C_TK, state, batch)
    return naive.selective(x_TC, dt_TC, A_CK, B_TK, C_TK, state, _on_host(x_TC, batch))


def copy_slots(
    layers: Sequence[LayerState],
    sources: Sequence[int],
    targets: Sequence[int],
    tables: Sequence[CopyTable] = (),
) -> None:
    """Copy whole slots, as they are before any is written.

    Args:
        layers: In which layers.
        sources: Slots.
        targets: Slots that get what is in them, one for each.
        tables: Of these layers, from copy_tables(); none: they are made for this call.

    Raises:
        ValueError: There are not as many targets as sources, or a target is there twice.
    """
    if len(sources) != len(targets) or len(set(targets)) < len(targets):
        raise ValueError(f"slots {list(sources)} cannot be copied to {list(targets)}: one target for each")
    if sources and _are_copied_by_kernels(layers):
        from nibble.kernels.recurrence import copies

        copies.copy_slots(layers, sources, targets, tables)
    else:
        naive.copy_slots(layers, sources, targets)


def copy_tables(layers: Sequence[LayerState]) -> Sequence[CopyTable]:
    """Return what copy_slots() needs to know of layers, which stays the same; nothing where no kernel copies."""
    if not _are_copied_by_kernels(layers):
        return ()
    from nibble.kernels.recurrence import copies

    return copies.tables_of(layers)


def _are_copied_by_kernels(layers: Sequence[LayerState]) -> bool:
    return bool(layers) and layers[0].inputs_SPC.is_cuda and triton_present()


def _has_kernels(batch: StateBatch | StateMetadata, x: Tensor) -> TypeGuard[StateMetadata]:
    return isinstance(batch, StateMetadata) and x.is_cuda and triton_present()


def _unit_rows(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of length 1, queries times K^-1/2."""
    if not (q_TGK.is_cuda and triton_present()):
        return naive.unit_rows(q_TGK, k_TGK)
    from nibble.kernels.recurrence import tiles

    return tiles.unit_rows(q_TGK, k_TGK)


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys, values, log decays and learning rates."""


def _by_kernels(
    inputs: _Inputs, state: LayerState, batch: StateMetadata, *, delta: bool, unit: bool
) -> Tensor:
    """Compute a step: decodes beside prompts by the kernel of decode steps."""
    from nibble.kernels.recurrence import decode

    parts, (q_TGK, k_TGK, v_THV, log_decay, beta_TH) = batch.parts(), inputs
    is_decode = _matrix_rule(inputs, state, batch) is decode
    if unit and not is_decode:
        q_TGK, k_TGK = _unit_rows(q_TGK, k_TGK)
        inputs = q_TGK, k_TGK, v_THV, log_decay, beta_TH
    if is_decode:
        return decode.recurrence(*inputs, state, batch, delta=delta, unit=unit)
    if parts is None:
        o_THV: Tensor = _matrix_rule(inputs, state, batch).recurrence(*inputs, state, batch, delta=delta)
        return o_THV
    many, ones = parts
    rows, o_THV = slice(batch.num_rows), v_THV.new_empty(v_THV.shape)
    first = q_TGK[rows], k_TGK[rows], v_THV[rows], log_decay[rows], None if beta_TH is None else beta_TH[rows]
    _matrix_rule(first, state, many).recurrence(*first, state, many, delta=delta, out=o_THV[rows])
    # Of these requests, rows are counted from the step's first.
    return decode.recurrence(*inputs, state, ones, delta=delta, out=o_THV)


def _matrix_rule(inputs: _Inputs, state: LayerState, batch: StateMetadata) -> ModuleType:
    """Return the kernels of a step: where results are to be invariant, the same for all steps."""
    from nibble.kernels.recurrence import decode, prompt
    from nibble.kernels.recurrence import triton as any_cut

    if batch.invariant:
        return any_cut
    if any_cut.is_one_token(batch):
        return decode
    return prompt if prompt.serves(*inputs, state, batch) else any_cut


def _on_host(x: Tensor, batch: StateBatch | StateMetadata) -> StateBatch:
    """Return what naive.py reads of a step; of one for a GPU this waits for the device."""
    host = batch if isinstance(batch, StateBatch) else batch.on_host()
    if sum(host.lengths) > len(x):
        raise ValueError(f"a step of {sum(host.lengths)} tokens has {len(x)} rows")
    return host
