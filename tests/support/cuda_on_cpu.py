"""Kernels in CUDA C++ on a CPU: their source is compiled as C++, over headers that do what PTX does (cuda_on_cpu/)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADERS = Path(__file__).with_name("cuda_on_cpu")
COMPILER = shutil.which("g++")
WARNINGS = (
    "-Wall",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
    "-Wno-unused-variable",
    "-Wno-strict-aliasing",
)


class Kernel:
    """In the place of nvrtc.Kernel: a launch runs to its end."""

    def __init__(self, source: Path, macros: dict[str, int], seed: int = 0) -> None:
        self._library, self._name, self._seed = (
            _library(source, tuple(sorted(macros.items()))),
            source.stem,
            seed,
        )

    def launch(
        self, grid: int, threads: int, shared: int, types: Sequence[Any], values: Sequence[Any], **_: Any
    ) -> None:
        """Run all blocks, in an order and with turns of threads that are random."""
        numbers = (ctypes.c_uint64 * len(values))(*map(_bits, values))
        self._library.run_grid(grid, threads, shared, numbers, len(values), self._seed)


def _bits(value: float) -> int:
    """Return an integer, or the bits of a float32."""
    return struct.unpack("I", struct.pack("f", value))[0] if isinstance(value, float) else int(value)


@functools.cache
def _library(source: Path, macros: tuple[tuple[str, int], ...]) -> Any:
    beside = source.parent.glob(f"{source.stem.partition('_')[0]}*.cuh")
    texts = {path.name: _without_ptx(path.read_text()) for path in (*beside, *HEADERS.glob("*.cuh"))}
    texts["kernel.cpp"] = _translated(source)
    key = hashlib.sha256(repr((texts, macros)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "nibble-cuda-on-cpu" / key
    target = folder / "kernel.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
        defines = [f"-D{name}={value}" for name, value in macros]
        command = [str(COMPILER), "-O1", "-g", "-std=c++17", "-shared", "-fPIC", *WARNINGS, *defines]
        subprocess.run([*command, "-o", f"{target}.new", str(folder / "kernel.cpp")], check=True)
        Path(f"{target}.new").replace(target)
    return ctypes.CDLL(str(target))


PTX = (
    (r'asm\("cvt\.f32\.f16 %0,%1;" : "=f"\(r\) : "h"\(half\)\);', "r = f16_value(half);"),
    (r'asm\("max\.u16x2.*?\);', 'fail("no such formats here");'),
    (r'asm volatile\("ld\.volatile.*?\);', "x = *p;"),
    (r'asm volatile\("cp\.async\.cg.*?\);', "memcpy(shared_memory + to, from, 16);"),
    (r'asm volatile\("cp\.async\.(commit|wait)_group.*?\);', ";"),
    (r"__CUDA_ARCH__ >= 900", "USES_BULK_COPIES"),
)
"""Instructions within headers that are not replaced as a whole, and what does the same. Copies are done at once."""


def _without_ptx(text: str) -> str:
    for pattern, replacement in PTX:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text


def _translated(source: Path) -> str:
    """Return the source as C++, and a function that runs its kernel over a grid."""
    text = _without_ptx(source.read_text())
    text = text.replace("extern __shared__ __align__(128) u8 smem[];", "u8* const smem = shared_memory;")
    text = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) ([^;]*);", _Declarations(), text)
    kernel = rf'extern "C" __global__ void __launch_bounds__\([^{{;]*?\)\s+{source.stem}\(\s*(.*?)\) \{{'
    (parameters,) = re.findall(kernel, text, re.DOTALL)
    # Those of variants are left out.
    parameters = re.sub(r"#if.*?#endif", "", parameters, flags=re.DOTALL)
    types = [part.strip().rsplit(None, 1)[0] for part in parameters.split(",")]
    values = ", ".join(
        f"float_of_word((u32)numbers[{i}])" if type == "float" else f"({type})numbers[{i}]"
        for i, type in enumerate(types)
    )
    return f"""{text}
static const u64* numbers;
static void entry() {{ {source.stem}({values}); }}
extern "C" void run_grid(int grid, int size, int dynamic, const u64* given, int count, int seed) {{
  if (count != {len(types)}) fail("another number of arguments");
  if (dynamic > (int)DYNAMIC) fail("too much shared memory");
  numbers = given;
  gridDim.x = grid;
  kernel_entry = entry;
  std::mt19937 random(seed);
  std::vector<int> order(grid);
  for (int i = 0; i < grid; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (int block : order) run_block(block, size, random);
}}
"""


class _Declarations:
    """Puts what a kernel declares as shared into the memory that operations on addresses know."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, match: re.Match[str]) -> str:
        type, declarators = match.groups()
        here = f"Shared{self._count}"
        names = re.findall(r"(\w+)(?:\[[^,]*\])+", declarators)
        place = f"*({here}*)(shared_memory + DYNAMIC + {self._count} * DECLARED)"
        self._count += 1
        struct = f"struct {here} {{ alignas(16) {type} {declarators}; }};"
        return struct + " ".join(f"auto& {name} = ({place}).{name};" for name in names)
