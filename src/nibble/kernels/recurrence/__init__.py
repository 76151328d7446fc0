"""recurrence: layers with a state of fixed size, over any cut of a request into steps.

The rule, the same for every cut (docs/architecture.md). Let S be a head's matrix [V, K] at the last multiple of BLOCK
tokens, and G_i the sum of log decays from there to token i, this one included:

    u_i = beta_i (v_i - S (k_i e^G_i) - sum over j < i of (k_i . k_j e^(G_i - G_j)) u_j)     delta rule
    u_i = beta_i v_i                                                                         else
    o_i = S (q_i e^G_i) + sum over j <= i of (q_i . k_j e^(G_i - G_j)) u_j
    at the next multiple:  S <- S e^G + sum over j of u_j (k_j e^(G - G_j))^T, then rounded to the state's format

So between multiples only keys, updates and sums of decays are kept, a query reads the same values by the same sums in a
prompt, a decode step and a verification, and a rejected draft leaves no trace: its place is written again. Sums run over
all places of a block, those without a token being zero, so their order depends on nothing.

A request has a slot: its place in the tensors of all layers. What lies there is never cleared: a state at position 0 is
zero by definition, and of keys, updates and inputs of convolutions only those of tokens before a step are read.

Shape suffixes: B requests, T tokens of all of them, H heads of states, G heads of keys, V rows, K columns, C channels,
W taps of a convolution, S slots, P places of a block or of a convolution's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 16
"""Tokens after which a state is updated and rounded."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The requests of a step: their tokens are rows of the layers' inputs, one request after the other.

    Rows behind the last request are padding: nothing is stored of them, and their outputs are zero.
    """

    slots: tuple[int, ...]
    """Slot of each request."""
    starts: tuple[int, ...]
    """Position of its first token in this step."""
    lengths: tuple[int, ...]
    """Its tokens in this step."""
    states_at: tuple[int, ...]
    """The position at which its slot has the matrix, a multiple of BLOCK, at most BLOCK tokens and drafts before
    `starts`. It is brought forward to the last multiple up to `starts` first, and after the step is at the last
    multiple up to starts + settled."""
    settled: tuple[int, ...]
    """Leading ones of its tokens that no later step takes back: all but drafts."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The slots of one layer. Of a convolution alone, only `inputs` has any values."""

    planes: tuple[Tensor, ...]
    """The matrices in the state's format: [S, H, V, K], and scales where the format has them."""
    format: str
    keys_SPGK: Tensor
    """Keys by position modulo P, a multiple of BLOCK that holds a block and all drafts."""
    updates_SPHV: Tensor
    """u, in float32 or the compute dtype."""
    decays: Tensor
    """G since the block's begin: float32 [S, P, H], or [S, P, H, K] with a decay for each column."""
    inputs_SPC: Tensor
    """Inputs of the convolution by position modulo P, at least W - 1 and all drafts."""
