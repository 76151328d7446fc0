"""Index keys of sparse attention: E4M3 values and one FP32 scale a token, 128 + 4 = 132 bytes for 128 values.

scale = amax / 448, at least 1e-4 / 448, rounded up to a power of two, as DeepSeek V3.2 does for its indexer. An indexer
only ranks tokens, so 8 bits suffice; unquantised schemes keep index keys unquantised too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nibble.formats.base import KVFormat, Plane, to_float
from nibble.formats.fp8 import E4M3_MAX, scaled_e4m3
from nibble.model_spec import INDEX, Stream

if TYPE_CHECKING:
    from torch import Tensor

# DeepSeek bounds amax by 1e-4; the bound here is on the scale.
LEAST = 1e-4 / E4M3_MAX


class IndexFP8(KVFormat):
    """Index keys of sparse attention: E4M3 values with a float32 scale per token."""

    name = "index_fp8"
    summary = "index keys of sparse attention: E4M3 with one FP32 scale a token; chosen by itself"
    source = "DeepSeek V3.2 inference code; DeepGEMM's paged MQA logits"

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return the planes of data and scales."""
        return (
            Plane("data", "float8_e4m3fn", (stream.heads, stream.dim)),
            Plane("scale", "float32", (stream.heads,)),
        )

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Encode [T, 1, D] with a scale per token."""
        return scaled_e4m3(x_THD, LEAST)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Decode to float32 [..., 1, D]."""
        return to_float(planes[0]).mul_(planes[1].unsqueeze(-1))

    def refuses(self, stream: Stream) -> str | None:
        """Return why `stream` cannot be stored, None if it can."""
        return None if stream.name == INDEX else f"{self.name} stores index keys, which {stream.name} is not"


FORMATS = (IndexFP8(),)
