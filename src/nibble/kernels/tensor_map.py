"""Tensor maps: how the tensor copy engine of SM90 and later finds boxes of a tensor."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from cuda.bindings import driver
from torch import Tensor

from nibble.errors import BackendError

_TYPES = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType."""
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
"""Of CUtensorMapSwizzle and CUtensorMapL2promotion."""
_ALIGNMENT, _SIZE = 64, 128
_SWIZZLED = 128
"""Bytes of the rows of boxes that are swizzled."""
ALIGNED = 8
"""Values of 16 bytes, of which the tensor copy engine wants whole ones."""
_MOST_MAPS = 4096
"""Maps that are kept: the allocator gives a step's tensors the same places again and again."""


class TensorMap:
    """A kernel's argument, to be passed by value (type None of nvrtc.Kernel.launch)."""

    def __init__(
        self,
        address: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> None:
        """See tensor_map()."""
        rank, size = len(shape), dtype.itemsize
        self._memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self._address = start + -start % _ALIGNMENT
        uint32, uint64 = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
        status = _encode()(
            self._address, _TYPES[dtype], rank, address, uint64(*reversed(shape)),
            uint64(*(step * size for step in reversed(strides[:-1]))), uint32(*reversed(box)), uint32(*[1] * rank), 0,
            _SWIZZLE_128B if box[-1] * size == _SWIZZLED else 0, _PROMOTE_256B, 0,
        )  # fmt: skip
        if status:
            name = driver.CUresult(status).name
            raise BackendError(
                f"CUDA: a tensor of {shape} with strides {strides} has no tensor map of boxes {box}: {name}"
            )

    def getPtr(self) -> int:
        """Return the address of its 128 bytes; cuda-bindings asks arguments for it by this name."""
        return self._address


def tensor_map(x: Tensor, box: tuple[int, ...]) -> TensorMap:
    """Return how boxes of a tensor are copied: with 16-byte pieces swizzled within 8 rows, where these are 128 bytes.

    Args:
        x: A tensor of 16-bit floats or bytes on a GPU, whose last dimension is dense; other strides and its address are
            multiples of 16 bytes.
        box: The size of a box in each dimension; the innermost is a multiple of 16 bytes. What lies outside of the
            tensor is copied as zeros.

    Raises:
        BackendError: The driver refuses it.
    """
    return _map(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box)


def copyable(x_TK: Tensor) -> Tensor:
    """Return rows of 16-bit floats as tensor_map() takes them, copied where they lie otherwise."""
    row, value = x_TK.stride()
    is_copyable = value == 1 and row >= x_TK.shape[1] and not (row | x_TK.data_ptr() // 2) % ALIGNED
    return x_TK if is_copyable else x_TK.clone(memory_format=torch.contiguous_format)


_map = lru_cache(maxsize=_MOST_MAPS)(TensorMap)


@cache
def _encode() -> ctypes._NamedFuncPointer:
    # Through ctypes: cuda-bindings does not promise the 64 bytes to which a map must be aligned.
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, word, word, *[pointer] * 5, *[word] * 4]
    return function
