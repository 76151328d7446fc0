"""merge: two parts of an attention that saw different keys become one, by the log-sum-exp of their scores.

Owns Part and the torch reference. Must not know where parts come from.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble.kernels import triton_present


class Part(NamedTuple):
    """Attention over some of the keys. lse_HT: float32, the logarithm of the sum of exp(score) over them."""

    values_THD: Tensor
    lse_HT: Tensor


def merge_lse(a: Part, b: Part, dtype: torch.dtype) -> Part:
    """The attention over the keys of both, with values in `dtype`; computed in float32."""
    if a.lse_HT.is_cuda and triton_present():
        from nibble.kernels.attention import triton_merge as twin

        return twin.merge(a, b, dtype)
    return reference(a, b, dtype)


def reference(a: Part, b: Part, dtype: torch.dtype) -> Part:
    """The definition, in torch."""
    share_TH1 = torch.sigmoid(a.lse_HT - b.lse_HT).T.unsqueeze(-1)
    values_THD = torch.lerp(b.values_THD.float(), a.values_THD.float(), share_TH1)
    return Part(values_THD.to(dtype), torch.logaddexp(a.lse_HT, b.lse_HT))
