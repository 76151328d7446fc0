"""What the CUDA kernels call a format, and the sizes that they need of it. How bytes are read, decode.cu says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """How the kernel names a format, and its sizes: bits of a value, values of a scale block (0: no scales)."""

    name: str
    bits: int
    block: int = 0

    def token_bytes(self, dim: int) -> int:
        return dim * self.bits // 8 + (dim // self.block if self.block else 0)


FORMATS = {
    "nvfp4": Format("NVFP4", 4, 16),
    "mxfp4": Format("MXFP4", 4, 32),
    "fp4_mx16": Format("FP4_MX16", 4, 16),
    "fp8_e4m3": Format("E4M3", 8),
    "fp8_e5m2": Format("E5M2", 8),
    "bf16": Format("BF16", 16),
    "fp16": Format("FP16", 16),
}
