"""Programmatic dependent launch: from SM90 on, a kernel starts while the one in front of it ends.

A kernel that is launched so waits before it reads what others wrote, and only then lets the next one start. So whoever
starts early knows that all but the kernel just in front of it have ended. Before the wait it writes nothing to memory,
and reads nothing but what no kernel writes, as weights are. What inductor makes keeps to it too (models/forward.py).
One token's layer of experts goes further: a kernel reads what the one in front marked as not there yet, and waits for
its end at its own (codecs/early.cuh).
(CUDA C++ Programming Guide, "Programmatic Dependent Launch".)
"""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels import GPU, SM90

LINE = 128
"""Bytes of a line of the L2 cache."""


def launch_options(gpu: GPU) -> dict[str, bool]:
    """Return the options of a Triton launch that may start early; none on GPUs that cannot."""
    return {"launch_pdl": True} if gpu.arch >= SM90 else {}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until what the kernels in front wrote can be read, and let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines):
    """Bring the lines of memory at a tensor of pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
