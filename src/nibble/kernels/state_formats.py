"""How recurrent states are kept: formats of their matrices, and the shapes and bytes of all that a slot has. No torch.

A format has codes, and where it has scales one float32 for each row of a head's matrix: value = code * scale, with
scale = max |value| / largest code. What was decoded is encoded as the very same bytes: for 127 and 448, and every
float32 s = x / n, (s * n) / n is s again.

Shape suffixes: see kernels/recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibble.model_spec import RecurrentGroup

BLOCK = 16
"""Tokens after which a state is updated and rounded."""
IN_FLIGHT = 1
"""Tokens that may be computed behind the last one that counts, where there are no drafts: of a step in flight."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of a value, by torch's name of its dtype."""
SCALE = "float32"
MIN_SCALE = 2.0**-100
"""The scale of a row of zeros; smaller values become zeros."""

Shape = tuple[tuple[int, ...], str]
"""A tensor's shape, and torch's name of its dtype."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How values of matrices are kept."""

    name: str
    dtype: str
    """Of codes, as torch calls it."""
    max_code: float = 0.0
    """The largest code; 0: values are kept without scales."""

    @property
    def update_dtype(self) -> str:
        """Of updates, where not the compute dtype: an exact state has exact updates."""
        return self.dtype if self.dtype == "float32" else ""


FORMATS = {
    format.name: format
    for format in (
        StateFormat("fp32", "float32"),
        StateFormat("bf16", "bfloat16"),
        StateFormat("fp8", "float8_e4m3fn", 448.0),  # E4M3
        StateFormat("int8", "int8", 127.0),  # -128 is not used
    )
}


def state_format(name: str) -> StateFormat:
    """Return a format by its name.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in FORMATS:
        raise ValueError(f"there is no format of states called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def plane_shapes(format: str, slots: int, heads: int, rows: int, columns: int) -> tuple[Shape, ...]:
    """Return the tensors that hold matrices: codes [S, H, V, K], and scales [S, H, V] where the format has them."""
    kind = state_format(format)
    codes = ((slots, heads, rows, columns), kind.dtype)
    return (codes, (codes[0][:-1], SCALE)) if kind.max_code else (codes,)


def bytes_per_layer(format: str, heads: int, rows: int, columns: int) -> int:
    """Return the bytes of one slot's matrices in one layer, scales included."""
    return sum(_bytes(shape) for shape in plane_shapes(format, 1, heads, rows, columns))


def block_places(max_drafts: int) -> int:
    """Return how many places hold a block and all drafts: a multiple of BLOCK."""
    return BLOCK * -(-(BLOCK + max_drafts) // BLOCK)


def layer_shapes(
    group: RecurrentGroup, slots: int, format: str, dtype: str, max_drafts: int
) -> dict[str, tuple[Shape, ...]]:
    """Return all tensors of a layer's slots, by the names of LayerState's fields.

    Args:
        group: What its layers keep.
        slots: Of the tensors.
        format: Of matrices, one of FORMATS.
        dtype: The compute dtype, as torch calls it: of keys and convolutions' inputs, and of updates unless the format
            has exact ones.
        max_drafts: Most tokens of a step that a later one may take back.

    Raises:
        ValueError: The format or dtype is unknown, or key heads do not divide heads.
    """
    if dtype not in BYTES:
        raise ValueError(f"states cannot be kept in {dtype}; known dtypes are {', '.join(BYTES)}")
    if group.heads and (group.key_heads < 1 or group.heads % group.key_heads):
        raise ValueError(f"{group.name}: {group.heads} heads cannot share {group.key_heads} heads of keys")
    places = block_places(max_drafts) if group.heads else 0
    conv_places = group.conv_taps - 1 + max(max_drafts, IN_FLIGHT) if group.conv_channels else 0
    pace = {"selective": (group.rows,)}.get(group.rule, (group.columns,) if group.key_decay else ())
    updates = state_format(format).update_dtype or dtype
    has = bool(group.heads)
    return {
        "planes": plane_shapes(format, slots, group.heads, group.rows, group.columns) if has else (),
        "keys_SPGK": (((slots, places, group.key_heads * has, group.columns * has), dtype),),
        "updates_SPHV": (((slots, places, group.heads, group.rows * has), updates),),
        "decays": (((slots, places, group.heads, *pace), "float32"),),
        "inputs_SPC": (((slots, conv_places, group.conv_channels), dtype),),
    }


def state_bytes(group: RecurrentGroup, format: str, dtype: str, max_drafts: int) -> int:
    """Return the bytes of one slot in one layer, of everything that layer_shapes() has."""
    tensors = layer_shapes(group, 1, format, dtype, max_drafts).values()
    return sum(_bytes(shape) for shapes in tensors for shape in shapes)


def _bytes(shape: Shape) -> int:
    return prod(shape[0]) * BYTES[shape[1]]
