"""Settings of humming-kernels' products: candidates, each held against the definition, and the fastest.

    python benchmarks/weight_schedules.py [--formats fp8,fp8a8] [--shapes qkv,gate_up] [--rows 1,8,16,64] [--most 24]
        [--limit 110] [--cubins FOLDER] [--out FOLDER] [--report]
    python benchmarks/weight_schedules.py --compile FOLDER [--processors 132] [--workers 16] ...

Shapes and times are those of quantized_linear.py; `fp8a8` has activations in FP8 too, quantised before. Candidates are
measured as they are compiled, in parallel, in an order that begins with the library's own choice; what is not compiled
within three quarters of the limit, in seconds, is left out; in the rest the library's own and the fastest settings of
each matrix are measured as dependent launches (`use_pdl`), which start while the kernel in front ends. Those of 1 and 8
rows are the same kernels, and with FP8 activations so are those of all numbers above 64 (--formats fp8a8 --rows
256,2048,8192). Entries for the table in src/nibble/kernels/quantized_linear/schedules.py are printed where a candidate
is faster by 3% or more.

--compile needs no GPU: it writes machine code for an SM90 to a folder, which --cubins finds by its source on the
machine that measures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from packed_weights import KINDS, quantize
from quantized_linear import SHAPES, copied, copies, inputs, time_us, weight
from report import markdown
from torch import Tensor

import gpu
from nibble.kernels import UNBOUNDED, quantized_linear
from nibble.kernels.quantized_linear import TOLERANCE, expected_product, humming, naive, schedules
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix

SLOWER = 0.97
"""Times what the library's own choice takes, from which on an entry is worth its line."""
RESIDENCIES = ((4, 1), (4, 2), (6, 1), (6, 2), (4, 3), (8, 1), (3, 2), (3, 3), (3, 4))
"""Stages of the pipeline, and programs on a processor."""
MMA = ((128, 128, 64, 32), (64, 128, 64, 32), (128, 64, 64, 32), (256, 64, 64, 32), (128, 128, 32, 64),
       (128, 256, 64, 64), (64, 256, 64, 64))  # fmt: skip
WGMMA = ((128, 64, 32, 64), (128, 128, 32, 64), (256, 64, 32, 64), (256, 64, 64, 64))
WGMMA_FP8 = ((128, 128, 32, 128), (128, 128, 16, 128), (64, 128, 16, 128), (128, 256, 32, 128), (64, 256, 16, 128),
             (256, 128, 32, 128))  # fmt: skip
"""Outputs and inputs of a program, and those of a warp."""
MANY = 2048
"""Stands for all numbers of rows above FEW, in cases with FP8 activations."""
FEW = 64
MIDDLE = ((128, 256, 64, 128, 32, 1), (128, 128, 64, 128, 32, 2), (256, 128, 64, 128, 32, 1),
          (128, 256, 128, 128, 32, 1), (256, 256, 64, 256, 32, 1))  # fmt: skip
"""Rows, outputs and inputs of a program for more rows in 16 bits; those of a warp; programs of a processor."""
LARGE = ((64, 256, 64, 32), (96, 256, 96, 32), (128, 128, 128, 16), (160, 128, 160, 16), (128, 128, 64, 32))
"""Rows and outputs of a program that computes many rows, and those of a warp; inputs are 128."""
SHARED = ((1, 1), (2, 1), (1, 2))
"""Programs beside one another that read the same activations, and the same weights, once."""
SAID = ("multi_cast_size_a", "multi_cast_size_b", "raster_group_m", "wgmma_split_issue_wait", "use_pdl")
"""Settings that are said where they are not as usual."""
LAST = 0.25
"""Share of the limit that is left for the best settings as dependent launches."""
Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A matrix, and the rows of a tile."""

    format: str
    shape: str
    tile: int

    @property
    def key(self) -> KernelKey:
        return KINDS[self.format].key(SHAPES[self.shape])


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    case: Case
    rows: int
    settings: Settings
    is_own: bool
    us: float
    error: float


Job = tuple[Case, Settings, bool, Future[Any]]
"""A kernel that compiles: for which matrix, with which settings, and whether they are the library's own."""


def tile_of(format: str, rows: int) -> int:
    """The rows that settings are for: a power of two, 8 at least; with FP8 activations MANY above FEW."""
    is_fp8 = bool(KINDS[format].activations)
    return MANY if is_fp8 and rows > FEW else max(8, 1 << (rows - 1).bit_length())


def candidates(case: Case, config: Any) -> Iterator[Settings]:
    """Settings that fit the matrix and a processor, the library's own first."""
    from humming.config import GemmType
    from humming.tune import get_heuristics_config
    from humming.tune.candidate import DeviceProfile, ScheduleCandidate, TuningProblem, analyze_candidate

    own = get_heuristics_config(config, shape_m=case.tile, device=0)
    yield own
    profile = DeviceProfile("sm90", 90, 132, 227 << 10)
    problem = TuningProblem(config, case.tile, GemmType.DENSE, profile)
    for settings in _variants(case.tile, config.a_dtype.num_bits == 8):
        # What the library's own policies leave out it does not know here.
        known = {name: value for name, value in settings.items() if name != "multi_cast_size_b"}
        is_new = own | settings != own
        if is_new and analyze_candidate(problem, ScheduleCandidate.from_config("candidate", known)).legal:
            yield settings


def _variants(rows: int, is_fp8: bool) -> Iterator[Settings]:
    """All residencies of a kind of product, kinds in turn."""
    families: list[list[Settings]] = []
    if rows > FEW:
        yield from _large() if is_fp8 else _middle()
        return
    if is_fp8:
        families += [
            [_settings(rows, "wgmma", tile, pair, is_specialized) for pair in RESIDENCIES]
            for tile, is_specialized in product(WGMMA_FP8, (True, False))
        ]
    else:
        families += [[_settings(rows, "wgmma", tile, pair, True) for pair in RESIDENCIES] for tile in WGMMA]
        if rows <= 32:
            families[:0] = [
                [_settings(rows, "mma", tile, pair, False) for pair in RESIDENCIES] for tile in MMA
            ]
    yield from chain.from_iterable(zip(*families, strict=True))


def _large() -> Iterator[Settings]:
    """Settings for many rows of FP8 activations."""
    for raster, splits, (activations, weights), tile in product((16, 1), (False, True), SHARED, LARGE):
        rows, outputs, warp_rows, warp_outputs = tile
        yield {
            "mma_type": "wgmma",
            "block_shape": (rows, outputs, 128),
            "warp_shape": (warp_rows, warp_outputs, 128),
            "num_stages": 4 if rows * outputs < 96 * 256 else 3,
            "num_ctas_per_sm": 1,
            "use_stream_k": False,
            "use_tma": True,
            "use_warp_spec": True,
            "smem_reuse_mode": "none",
            "raster_group_m": raster,
            "multi_cast_size_a": activations,
            "multi_cast_size_b": weights,
            "wgmma_split_issue_wait": splits,
            "wgmma_use_late_as": warp_rows > 96,
        }


def _middle() -> Iterator[Settings]:
    """Settings for more than FEW rows in 16 bits."""
    for stages, splits, (activations, weights), tile in product((4, 3, 5), (False, True), SHARED, MIDDLE):
        rows, outputs, columns, warp_rows, warp_outputs, programs = tile
        shape = outputs, columns, warp_outputs, columns
        yield _settings(rows, "wgmma", shape, (stages, programs), True) | {
            "warp_shape": (warp_rows, warp_outputs, columns),
            "multi_cast_size_a": activations,
            "multi_cast_size_b": weights,
            "wgmma_split_issue_wait": splits,
        }


def _settings(
    rows: int, mma: str, tile: tuple[int, int, int, int], residency: tuple[int, int], is_specialized: bool
) -> Settings:
    outputs, columns, warp_outputs, warp_columns = tile
    return {
        "mma_type": mma,
        "block_shape": (rows, outputs, columns),
        "warp_shape": (rows, warp_outputs, warp_columns),
        "num_stages": residency[0],
        "num_ctas_per_sm": residency[1],
        "use_stream_k": True,
        "use_tma": is_specialized,
        "use_warp_spec": is_specialized,
    }


def compile_one(config: Any, settings: Settings) -> Any:
    """The library's kernel; raises where it does not compile."""
    from humming.kernel.humming import HummingKernel

    values = {**json.loads(config.to_str()), **settings}
    values.pop("sublayer_name", None)
    values.pop("num_sms", None)
    with torch.cuda.device(0):
        return HummingKernel(**values)


def keep_machine_code(folder: Path, *, is_read: bool) -> None:
    """Let the library's compiler look for machine code in a folder, by its source, or write it there."""
    from humming.jit.compiler import NVRTCCompiler

    own, unpacked = NVRTCCompiler.compile, Path(tempfile.mkdtemp(prefix="cubins-"))
    folder.mkdir(parents=True, exist_ok=True)

    def compile(
        code: str, sm_version: str, kernel_expr: str | None, disable_fast_math: bool = False,
        postprocess_cubin: Callable[[str], None] | None = None,
    ) -> str:  # fmt: skip
        source = f"{sm_version} {kernel_expr} {code}"
        kept = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.cubin.xz"
        if not kept.exists():
            path: str = own(code, sm_version, kernel_expr, disable_fast_math, postprocess_cubin)
            if not is_read:
                kept.write_bytes(lzma.compress(Path(path).read_bytes()))
            return path
        file = unpacked / kept.stem
        if is_read and not file.exists():
            file.write_bytes(lzma.decompress(kept.read_bytes()))
        return str(file)

    NVRTCCompiler.compile = staticmethod(compile)  # type: ignore[method-assign]


def stand_in(processors: int) -> None:
    """Let the library take an absent H200 for the current GPU, and register no kernels."""
    import humming.device as devices
    from humming.kernel.humming import HummingKernel

    facts = SimpleNamespace(
        index=0, name="NVIDIA H200", is_ppu=False, sm_count=processors, sm_major=9, sm_minor=0, sm_version=90,
        max_threads_per_sm=2048, max_registers_per_sm=1 << 16, l2_cache_size=50 << 20, max_smem_size=227 << 10,
        memory_bandwidth_gbps=4800.0, sm_clock_khz=1_980_000,
        tensorcore_tops={"float16": 989.0, "bfloat16": 989.0, "float8e4m3": 1979.0},
    )  # fmt: skip
    devices._get_device_info_extension = lambda: SimpleNamespace(_DeviceInfo=lambda index: facts)
    torch.cuda.device = lambda *_: nullcontext()  # type: ignore[misc,assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.version.cuda = torch.version.cuda or "13.0"  # type: ignore[assignment]
    HummingKernel.register_kernel = lambda self: setattr(self, "kernel_id", 0)


def submit(pool: ThreadPoolExecutor, cases: Sequence[Case], most: int) -> tuple[dict[Case, Any], list[Job]]:
    """Begin to compile: the first candidates of all cases, then the second ones."""
    configs = {case: humming.layer_config(case.key, torch.device("cuda", 0)) for case in cases}
    columns = [list(candidates(case, configs[case]))[:most] for case in cases]
    jobs = [
        (case, column[i], i == 0, pool.submit(compile_one, configs[case], column[i]))
        for i in range(most)
        for case, column in zip(cases, columns, strict=True)
        if i < len(column)
    ]
    return configs, jobs


class Measured:
    """Matrices on the GPU, one case's at a time."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[str, str], tuple[PackedMatrix, list[tuple[PackedMatrix, Tensor]]]] = {}
        self._expected: dict[tuple[str, str, int], Tensor] = {}

    def matrices(self, case: Case) -> tuple[PackedMatrix, list[tuple[PackedMatrix, Tensor]]]:
        """One in the naive layout, and several alike in that of the kernels."""
        place = case.format, case.shape
        if place not in self._prepared:
            kind = KINDS[case.format]
            matrix = replace(quantize(weight(SHAPES[case.shape]), kind.format), activations=kind.activations)
            first = humming.prepare(matrix)
            more = [copied(first) for _ in range(copies(matrix.nbytes) - 1)]
            self._prepared[place] = matrix, [first, *more]  # type: ignore[list-item]
        return self._prepared[place]

    def expected(self, case: Case, rows: int) -> Tensor:
        """By the definition."""
        place = case.format, case.shape, rows
        if place not in self._expected:
            matrix, _ = self.matrices(case)
            self._expected[place] = expected_product(inputs(rows, matrix.shape[1]), matrix).float()
        return self._expected[place]

    def cell(self, case: Case, rows: int, settings: Settings, is_own: bool, kernel: Any) -> Cell:
        """Measure a kernel for a number of rows."""
        matrix, alike = self.matrices(case)
        table = torch.tensor([0, UNBOUNDED, kernel.kernel_id, 0])
        humming.use(table, alike[0][0].layout, matrix.codes.device)
        x = inputs(rows, matrix.shape[1])
        expected = self.expected(case, rows)
        y = quantized_linear.quantized_linear(x, *alike[0])
        error = float((y.float() - expected).norm() / expected.norm())
        # What is measured is the product alone.
        codes = naive.quantize_activations(x, matrix.activations) if matrix.activations else (x, None)
        calls = [lambda x, one=one: humming.quantized_linear(*codes, *one) for one in alike]
        return Cell(case, rows, settings, is_own, time_us(calls, x), error)


def best(cells: Iterable[Cell]) -> dict[tuple[Case, int], tuple[Cell, Cell]]:
    """For each case and number of rows the library's own choice and the fastest right one."""
    by_case: dict[tuple[Case, int], list[Cell]] = {}
    for cell in cells:
        by_case.setdefault((cell.case, cell.rows), []).append(cell)
    return {
        key: (own, min((x for x in group if x.error <= TOLERANCE), key=lambda x: x.us, default=own))
        for key, group in by_case.items()
        if (own := min((x for x in group if x.is_own), key=lambda x: x.us, default=None))
    }


def brief(settings: Mapping[str, Any]) -> str:
    """Settings in few words."""
    block, warp = ("x".join(map(str, settings[name])) for name in ("block_shape", "warp_shape"))
    how = "tma" if settings.get("use_tma") else "async"
    return (
        f"{settings.get('mma_type', '')} {block} of {warp}, {settings.get('num_stages')} stages, "
        f"{settings.get('num_ctas_per_sm', 1)} a processor, {how}"
        + "".join(f", {name} {settings[name]}" for name in SAID if settings.get(name, 1) not in (1, False))
    )


def table(cells: Sequence[Cell]) -> str:
    rows = [
        (
            *(case.shape, case.format, str(n), f"{own.us:.1f}", f"{fastest.us:.1f}"),
            *(brief(own.settings), brief(fastest.settings)),
        )
        for (case, n), (own, fastest) in best(cells).items()
    ]
    return markdown(("shape", "format", "rows", "own, us", "fastest, us", "own", "fastest"), sorted(rows))


def entries(cells: Sequence[Cell]) -> str:
    """Lines for schedules.py, of the largest number of rows of a tile."""
    lines: dict[schedules.Entry, dict[int, Settings]] = {}
    for (case, n), (own, fastest) in best(cells).items():
        if (n == case.tile or n > FEW) and fastest.us <= SLOWER * own.us:
            key = case.key
            entry = 90, *schedules.name(key.format, key.activations), schedules.size_class(key.shape)
            lines.setdefault(entry, {})[n] = fastest.settings
    return "\n".join(f"    {entry}: {settings}," for entry, settings in lines.items())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="fp8,fp8a8,int4,nvfp4")
    parser.add_argument("--shapes", default="gate_up,down,qkv")
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--most", type=int, default=24, help="candidates of a case")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds, all in all")
    parser.add_argument("--workers", type=int, default=16, help="compilers at a time")
    parser.add_argument("--cubins", type=Path, help="a folder that --compile wrote")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile only; needs no GPU")
    parser.add_argument("--processors", type=int, default=132, help="of the GPU that --compile is for")
    gpu.add_output_options(parser)
    return parser


def cases_of(options: argparse.Namespace) -> list[Case]:
    formats, shapes, rows = (getattr(options, name).split(",") for name in ("formats", "shapes", "rows"))
    cases = (Case(f, shape, tile_of(f, int(n))) for f, shape, n in product(formats, shapes, rows))
    return list(dict.fromkeys(cases))


def compile_only(options: argparse.Namespace) -> None:
    """Write machine code, and say how much of it."""
    humming.import_library()
    stand_in(options.processors)
    keep_machine_code(options.compile, is_read=False)
    began, lock, count = time.monotonic(), Lock(), 0
    with ThreadPoolExecutor(options.workers) as pool:
        _, jobs = submit(pool, cases_of(options), options.most)
        for case, settings, _, job in jobs:
            if time.monotonic() - began > options.limit:
                pool.shutdown(wait=True, cancel_futures=True)
                break
            if error := job.exception():
                print(f"{case}: {brief(settings)}: {str(error)[:150]}", flush=True)
            else:
                with lock:
                    count += 1
    print(f"{count} of {len(jobs)} kernels in {options.compile}")


def measure(options: argparse.Namespace) -> list[Cell]:
    """Measure candidates as they are compiled, and then the best ones as dependent launches."""
    began, cells, measured = time.monotonic(), list[Cell](), Measured()
    rows = [int(n) for n in options.rows.split(",")]
    humming.import_library()
    if options.cubins:
        keep_machine_code(options.cubins, is_read=True)

    def run(jobs: Sequence[Job], limit: float) -> None:
        for done, (case, settings, is_own, job) in enumerate(jobs):
            if time.monotonic() - began > limit:
                for _, _, _, rest in jobs[done:]:
                    rest.cancel()
                print(f"left out, for want of time: {len(jobs) - done} of {len(jobs)}")
                return
            if error := job.exception():
                print(f"{case.format} {case.shape}: {brief(settings)}: {str(error)[:120]}")
                continue
            for n in (n for n in rows if tile_of(case.format, n) == case.tile):
                cell = measured.cell(case, n, settings, is_own, job.result())
                cells.append(cell)
                wrong = "" if cell.error <= TOLERANCE else f"  WRONG: off by {cell.error:.2g}"
                what = (
                    f"{case.format:6} {case.shape:8} {n:4} rows {cell.us:7.1f} us  {brief(settings)}{wrong}"
                )
                print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        configs, jobs = submit(pool, cases_of(options), options.most)
        try:
            run(jobs, options.limit * (1 - LAST))
            run(dependent(pool, configs, cells), options.limit)
        except RuntimeError as error:  # a kernel that fails takes the whole process's GPU with it
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"ended by an error of the GPU: {str(error).strip()[:300]}")
    return cells


def dependent(pool: ThreadPoolExecutor, configs: Mapping[Case, Any], cells: Sequence[Cell]) -> list[Job]:
    """Begin to compile the library's own and the fastest settings of each case, as dependent launches."""
    chosen = {
        (case, str(cell.settings)): (case, {**cell.settings, "use_pdl": True}, cell.is_own)
        for (case, _), pair in best(cells).items()
        for cell in pair
    }
    return [
        (case, settings, is_own, pool.submit(compile_one, configs[case], settings))
        for case, settings, is_own in chosen.values()
    ]


def main() -> None:
    options = arguments().parse_args()
    if options.compile:
        compile_only(options)
        return
    cells = measure(options)
    figures = [
        {"format": x.case.format, "shape": x.case.shape, "rows": x.rows, "us": x.us, "error": x.error,
         "own": x.is_own, "settings": x.settings}
        for x in cells
    ]  # fmt: skip
    texts = [table(cells), entries(cells)]
    gpu.publish("weight_schedules", options, __doc__, texts, gpu.versions(), cells=figures)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
