"""Recurrent layers by the book in torch and float32: the definition, and what serves on a CPU.

A result has the same bits however a request is cut into steps, and whoever shares them. So no product of a library is
used, whose sums depend on shapes: values are multiplied one by one and summed by halves (_total). torch.exp, unlike
its sigmoid, gives a value the same bits wherever it lies.

What is summed over is the first dimension of both factors, so that halves are contiguous.

Shape suffixes: those of the package, and of a piece N requests, R tokens of each, J places of a block (BLOCK of them);
D is 1, or K where each column has a decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nibble.kernels.recurrence.formats import decode, encode
from nibble.kernels.recurrence.pieces import Piece, conv_rows, pieces
from nibble.kernels.recurrence.types import UNIT_EPSILON, Convolution, LayerState, Projection, StateBatch
from nibble.kernels.state_formats import BLOCK


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    state: LayerState,
    batch: StateBatch,
) -> Tensor:
    """Convolve each channel over the inputs up to the present one -> [T, C]; see the package."""
    tokens, taps = sum(batch.lengths), weight_CW.shape[1]
    rows = conv_rows(batch, taps, state.inputs_SPC.shape[1], x_TC.device)
    # What is stored is what is read, of this step, too.
    inputs_TC = x_TC[:tokens].to(state.inputs_SPC.dtype)
    past_BWC = state.inputs_SPC[rows.slots_B[:, None], rows.past_places_BW]
    buffer_XC = inputs_TC.new_empty(tokens + rows.past_rows_BW.numel(), x_TC.shape[1])
    buffer_XC[rows.rows_T] = inputs_TC
    buffer_XC[rows.past_rows_BW] = past_BWC.where(rows.past_live_BW[..., None], 0)
    weight_WC = weight_CW.float().t().contiguous()
    sum_TC = torch.zeros_like(inputs_TC, dtype=torch.float32)
    for tap in range(taps):
        sum_TC += buffer_XC[rows.rows_T - (taps - 1) + tap].float() * weight_WC[tap]
    if bias_C is not None:
        sum_TC += bias_C.float()
    if activation is not None:
        sum_TC = sum_TC / (1 + (-sum_TC).exp())
    state.inputs_SPC[rows.newest_slots_N, rows.newest_places_N] = inputs_TC[rows.newest_N]
    y_TC = torch.zeros_like(x_TC)
    y_TC[:tokens] = sum_TC
    return y_TC


def project(projection: Projection, conv: Convolution, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of the convolution [T, C], and log decays and learning rates [T, H], of the products before it."""
    x_TC = projection.x_TW.new_empty(len(projection.x_TW), len(conv.weight_CW))
    targets = conv.split(x_TC, state)
    for target, runs in zip(targets, projection.runs[:3], strict=True):
        target.flatten(1).copy_(runs.of(projection.x_TW, target[0].numel()))
    heads = len(projection.paces_H)
    a_TH, b_TH = (
        runs.of(y_TW, heads).float()
        for runs, y_TW in zip(projection.runs[3:], (projection.a_TW, projection.b_TW), strict=True)
    )
    softplus_TH = torch.nn.functional.softplus(a_TH + projection.offsets_H.float())
    return x_TC, -projection.paces_H.float().exp() * softplus_TH, b_TH.sigmoid()


def unit_rows(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of length 1, queries times K^-1/2, in their own dtype; computed in float32."""
    q, k = (
        x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPSILON) for x in (q_TGK.float(), k_TGK.float())
    )
    return (q * q.shape[-1] ** -0.5).to(q_TGK.dtype), k.to(k_TGK.dtype)


def recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    batch: StateBatch,
    *,
    delta: bool,
) -> Tensor:
    """Update matrices by keys and values, and read them by queries -> [T, H, V]; see the package."""
    o_THV, heads = torch.zeros_like(v_THV), v_THV.shape[1]
    k_TGK = k_TGK.to(state.keys_SPGK.dtype)
    decay_THD, sums_SPHD = log_decay.float(), state.decays
    if decay_THD.dim() == 2:
        decay_THD, sums_SPHD = decay_THD[..., None], sums_SPHD[..., None]
    matrices_KBHV = _load(state, batch)
    for piece in pieces(batch, state.keys_SPGK.shape[1], v_THV.device):
        matrix_KNHV = matrices_KBHV[:, piece.requests_N]
        keys_NJHK = _per_head(_places(piece, state.keys_SPGK, k_TGK), heads)
        updates_JNHV = _places(piece, state.updates_SPHV).transpose(0, 1).contiguous()
        sums_NJHD = _sums(piece, sums_SPHD, decay_THD)
        if piece.tokens_NR.numel():
            q_NRHK = _per_head(q_TGK[piece.tokens_NR].float(), heads)
            x_NRHXK = torch.stack((_rows(piece, keys_NJHK), q_NRHK) if delta else (q_NRHK,), dim=3)
            seen_XRNHV, weights_JXRNH = _reads(piece, x_NRHXK, keys_NJHK, sums_NJHD, matrix_KNHV)
            update_RNHV = v_THV[piece.tokens_NR].float().transpose(0, 1)
            if delta:
                update_RNHV = update_RNHV - seen_XRNHV[0]
            if beta_TH is not None:
                beta_RNH = beta_TH[piece.tokens_NR].float().transpose(0, 1)
                update_RNHV = update_RNHV * beta_RNH[..., None]
                weights_JXRNH[:, :-1] *= beta_RNH  # of keys alone
            if delta:
                _solve(piece, update_RNHV, weights_JXRNH[:, 0], updates_JNHV, state.updates_SPHV.dtype)
            update_RNHV = update_RNHV.to(state.updates_SPHV.dtype)
            updates_JNHV[piece.places_NR, piece.index_N1] = update_RNHV.float().transpose(0, 1)
            # A weight of zero would not keep a later token's NaN out.
            live_JRN11 = piece.seen_2RN1J[1].permute(3, 0, 1, 2)[..., None]
            added_JRNHV = (weights_JXRNH[:, -1, ..., None] * updates_JNHV[:, None]).where(live_JRN11, 0)
            o_RNHV = seen_XRNHV[-1] + _total(added_JRNHV)
            o_THV[piece.tokens_NR] = o_RNHV.transpose(0, 1).to(o_THV.dtype)
            if piece.keeps:
                _store(piece, state.keys_SPGK, k_TGK[piece.tokens_NR])
                _store(piece, state.updates_SPHV, update_RNHV.transpose(0, 1))
                _store(piece, sums_SPHD, _rows(piece, sums_NJHD))
        if len(piece.complete_M):
            complete = piece.complete_M
            matrix_KMHV = _advance(
                matrix_KNHV[:, complete], keys_NJHK[complete], updates_JNHV[:, complete], sums_NJHD[complete]
            )
            matrices_KBHV[:, piece.requests_N[complete]] = _round(piece, matrix_KMHV, state)
    return o_THV


def selective(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CK: Tensor,
    B_TK: Tensor,
    C_TK: Tensor,
    state: LayerState,
    batch: StateBatch,
) -> Tensor:
    """Scan as Mamba 1 does -> [T, C]; see the package.

    From the last multiple of BLOCK on, the block's tokens are scanned again, in a decode step, too.
    """
    y_TC, dt_T1C = torch.zeros_like(x_TC), dt_TC.float()[:, None]
    A_K1C = A_CK.float().t()[:, None].contiguous()
    update_T1C = (x_TC.float()[:, None] * dt_T1C).to(state.updates_SPHV.dtype)
    key_T1K = B_TK[:, None].to(state.keys_SPGK.dtype)
    matrices_KBHC = _load(state, batch)
    for piece in pieces(batch, state.keys_SPGK.shape[1], x_TC.device):
        last = piece.most_stored + piece.tokens_NR.shape[1]
        # Places without a token have dt = 0 and no update: they change nothing.
        keys_JKN1 = _places(piece, state.keys_SPGK, key_T1K)[:, :last].permute(1, 3, 0, 2)
        updates_J1NC, dt_J1NC = (
            _places(piece, stored, rows)[:, :last].permute(1, 2, 0, 3)
            for stored, rows in ((state.updates_SPHV, update_T1C), (state.decays, dt_T1C))
        )
        fade_JKNC, new_JKNC = (dt_J1NC * A_K1C).exp(), keys_JKN1 * updates_J1NC
        matrix_KNC = matrices_KBHC[:, piece.requests_N, 0]
        states_JKNC = torch.empty_like(new_JKNC)
        for place in range(last):
            matrix_KNC = torch.add(matrix_KNC * fade_JKNC[place], new_JKNC[place], out=states_JKNC[place])
        if piece.tokens_NR.numel():
            states_NRKC = states_JKNC.transpose(1, 2)[piece.places_NR, piece.index_N1]
            C_KNR1 = C_TK[piece.tokens_NR].float().permute(2, 0, 1)[..., None]
            y_TC[piece.tokens_NR] = _total(states_NRKC.permute(2, 0, 1, 3) * C_KNR1).to(y_TC.dtype)
            if piece.keeps:
                _store(piece, state.keys_SPGK, key_T1K[piece.tokens_NR])
                _store(piece, state.updates_SPHV, update_T1C[piece.tokens_NR])
                _store(piece, state.decays, dt_T1C[piece.tokens_NR])
        if len(piece.complete_M):
            rounded_KMHC = _round(piece, matrix_KNC[:, piece.complete_M, None], state)
            matrices_KBHC[:, piece.requests_N[piece.complete_M]] = rounded_KMHC
    return y_TC


def copy_slots(layers: Sequence[LayerState], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole slots; see the package."""
    for layer in layers:
        for tensor in (*layer.planes, layer.keys_SPGK, layer.updates_SPHV, layer.decays, layer.inputs_SPC):
            tensor[list(targets)] = tensor[list(sources)]


def _total(x: Tensor) -> Tensor:
    """Sum over the first dimension, half added to half: in an order that depends on its size alone."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        upper = x[half:]
        x = x[:half] + upper if len(upper) == half else torch.cat((x[: half - 1] + upper, x[half - 1 : half]))
    return x[0]


def _per_head(x_NXGK: Tensor, heads: int) -> Tensor:
    """Repeat heads of keys for the heads that they serve, which follow one another."""
    times = heads // x_NXGK.shape[2]
    return x_NXGK if times == 1 else x_NXGK.repeat_interleave(times, dim=2)


def _load(state: LayerState, batch: StateBatch) -> Tensor:
    """Return the matrices of all requests in float32 [K, B, H, V]."""
    device = state.keys_SPGK.device
    slots_B, at_B = (
        torch.tensor(x, dtype=torch.int64, device=device) for x in (batch.slots, batch.states_at)
    )
    matrices_BHVK = decode(state.format, [plane[slots_B] for plane in state.planes])
    return matrices_BHVK.where(at_B[:, None, None, None] > 0, 0).permute(3, 0, 1, 2).contiguous()


def _places(piece: Piece, stored_SPHX: Tensor, rows_THX: Tensor | None = None) -> Tensor:
    """Return what the places of a block have, in float32 [N, J, H, X]: stored, or of this step, or else zeros."""
    blocks_SYJHX = stored_SPHX.unflatten(1, (-1, BLOCK))
    x_NJHX = blocks_SYJHX[piece.slots_N, piece.blocks_N].where(piece.live_NJ11, 0).float()
    if rows_THX is not None:
        x_NJHX[piece.index_N1, piece.places_NR] = rows_THX[piece.tokens_NR].float()
    return x_NJHX


def _rows(piece: Piece, x_NJHX: Tensor) -> Tensor:
    """Return the places of this step's tokens [N, R, H, X]."""
    return x_NJHX[piece.index_N1, piece.places_NR]


def _store(piece: Piece, stored_SPHX: Tensor, rows_NRHX: Tensor) -> None:
    """Store the rows of this step's tokens."""
    stored_SPHX[piece.slots_N[:, None], piece.kept_NR] = rows_NRHX.to(stored_SPHX.dtype)


def _sums(piece: Piece, sums_SPHD: Tensor, decay_THD: Tensor) -> Tensor:
    """Return the sums of log decays at all places of a block [N, J, H, D]."""
    sums_NJHD, sums_RNHD = _places(piece, sums_SPHD), []
    # Where none is stored, that is the last place, which has a zero.
    sum_NHD = sums_NJHD[piece.index_N1[:, 0], piece.stored_N - 1]
    for decay_NHD in decay_THD[piece.tokens_NR].unbind(1):
        sum_NHD = sum_NHD + decay_NHD
        sums_RNHD.append(sum_NHD)
    if sums_RNHD:
        sums_NJHD[piece.index_N1, piece.places_NR] = torch.stack(sums_RNHD, dim=1)
    return sums_NJHD


def _reads(
    piece: Piece, x_NRHXK: Tensor, keys_NJHK: Tensor, sums_NJHD: Tensor, matrix_KNHV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what rows x read of the matrix [X, R, N, H, V], and how they weigh updates [J, X, R, N, H].

    Queries are the last of X; keys, where they are before them, do not see their own place.
    """
    x_KXRNH = x_NRHXK.permute(4, 3, 1, 0, 2).contiguous()
    keys_KNHJ = keys_NJHK.permute(3, 0, 2, 1).contiguous()
    # --- e^(G_i - G_j), and behind the places e^G_i
    sums_DRNH1 = _rows(piece, sums_NJHD).permute(3, 1, 0, 2)[..., None]
    sums_DNHJ = torch.nn.functional.pad(sums_NJHD.permute(3, 0, 2, 1), (0, 1))
    fade_DRNHJ = (sums_DRNH1 - sums_DNHJ[:, None]).exp()
    fade_D1RNH, fade_D1RNHJ = fade_DRNHJ[:, None, ..., -1], fade_DRNHJ[:, None, ..., :-1]
    # --- the matrix
    seen_XRNHV = _total((x_KXRNH * fade_D1RNH)[..., None] * matrix_KNHV[:, None, None])
    # --- the places
    x_KXRNH1, keys_K11NHJ = x_KXRNH[..., None], keys_KNHJ[:, None, None]
    if len(fade_DRNHJ) == 1:
        weights_XRNHJ = _total(x_KXRNH1 * keys_K11NHJ) * fade_D1RNHJ[0]
    else:
        weights_XRNHJ = _total(x_KXRNH1 * (keys_K11NHJ * fade_D1RNHJ))
    weights_XRNHJ = weights_XRNHJ.where(piece.seen_2RN1J[-len(weights_XRNHJ) :], 0)
    return seen_XRNHV, weights_XRNHJ.permute(4, 0, 1, 2, 3).contiguous()


def _solve(
    piece: Piece, update_RNHV: Tensor, weights_JRNH: Tensor, updates_JNHV: Tensor, dtype: torch.dtype
) -> None:
    """Make updates by the delta rule, each of which depends on those before it, in their order.

    Args:
        piece: Where they belong.
        update_RNHV: What they are but for other updates; changed.
        weights_JRNH: By how much other updates lessen them.
        updates_JNHV: Those before the step.
        dtype: What they are rounded to.
    """
    stored = slice(piece.most_stored)
    stored_JRNHV = weights_JRNH[stored, ..., None] * updates_JNHV[stored, None]
    for seen_RNHV in stored_JRNHV.unbind(0):
        update_RNHV -= seen_RNHV
    # The place of row R differs between requests.
    weights_NRRH = weights_JRNH.permute(2, 0, 1, 3)[piece.index_N1, piece.places_NR]
    for row, weights_NRH in enumerate(weights_NRRH.unbind(1)):
        update_NHV = update_RNHV[row].copy_(update_RNHV[row].to(dtype))
        update_RNHV[row + 1 :] -= weights_NRH.transpose(0, 1)[row + 1 :, ..., None] * update_NHV


def _advance(matrix_KMHV: Tensor, keys_MJHK: Tensor, updates_JMHV: Tensor, sums_MJHD: Tensor) -> Tensor:
    """Return the matrices at the end of a full block."""
    end_M1HD = sums_MJHD[:, -1:]
    faded_JKMH = (keys_MJHK * (end_M1HD - sums_MJHD).exp()).permute(1, 3, 0, 2).contiguous()
    added_KMHV = _total(faded_JKMH[..., None] * updates_JMHV[:, None])
    return matrix_KMHV * end_M1HD[:, 0].exp().permute(2, 0, 1)[..., None] + added_KMHV


def _round(piece: Piece, matrix_KMHV: Tensor, state: LayerState) -> Tensor:
    """Round matrices to the state's format, and store those that are final."""
    codes = encode(state.format, matrix_KMHV.permute(1, 2, 3, 0))
    slots_L = piece.slots_N[piece.complete_M][piece.final_L]
    for plane, code in zip(state.planes, codes, strict=True):
        plane[slots_L] = code[piece.final_L]
    return decode(state.format, codes).permute(3, 0, 1, 2)
