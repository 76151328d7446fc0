"""linear: y = x W^T + b where few rows meet a large weight; and rotate: the rotation of queries that meet rotated keys.

A decode step does hardly anything but read such a weight. Libraries split such products along K and add the parts up in
a second kernel; linear/triton.py reads the weight once, and so does sm90.py on Hopper, where a cluster adds parts up.
linear/triton.py also does so with weights of a few outputs, as routers of experts have. Which is fastest depends on
shape, rows and GPU, so a trial at load decides for each shape and number of rows. The references are F.linear, and for
the rotation that `rot` applied to stored keys formats/transforms.py.

Shape suffixes: N values of the output, K of the input; T tokens, H heads, D values of a head.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.files import write_atomic, write_new
from nibble.formats import transforms
from nibble.hardware import cache_folder
from nibble.kernels import MMA_ROWS, ahead, cdiv, gpu_of, triton_present
from nibble.kernels.capture import capture

MIN_BYTES = 1 << 23
"""Bytes of a weight from which on it pays, unless it is narrow."""
NARROW = 256
"""Outputs up to which a weight has a kernel of its own: routers of experts, gates."""
TRIALS = {MMA_ROWS: MMA_ROWS // 2, 32: 32, 64: 64, 128: 128}
"""Rows up to which a trial counts -> rows of the trial. A narrow weight has the first alone."""
TORCH, TRITON, CUDA = "torch", "triton", "sm90"
"""Ways to multiply: the library's, and two of our own."""
TRITON_ROWS = 2 * MMA_ROWS
"""Rows that linear/triton.py multiplies with at most."""
MAX_ERROR = 0.01
"""How far a way may be off the library, norm over norm, in a trial; in 16 bits both round by a quarter of that."""
RUNS, FEW_ROWS, RIGHT_ROWS = 5, MMA_ROWS, 256
"""Runs of a way in a trial, rows at most of the product in front of each, and rows that are compared."""
FROM_MEMORY, MOST_COPIES, FEWEST_PRODUCTS = 1 << 28, 128, 4
"""Bytes of a weight and its copies in a trial, so that none is in the GPU's cache; their number at most, and products
at least."""
FEW_INPUTS = 256
"""Inputs and outputs of that product."""
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Key = tuple[str, torch.device, torch.dtype, torch.Size, int]
_fastest: dict[Key, str] = {}
results: dict[str, str] = {}
"""Who was fastest in trials, by the names of their files."""
of_rank_0: dict[str, str] = {}
"""Those of rank 0, which the other ranks of a model take: all must compute as it does."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What trials are about: products, or what stands behind them, too."""

    name: str
    """Of their files."""
    ways: Callable[[Tensor, int], Mapping[str, Multiply]]
    """Weight, and rows up to which a trial counts -> ways to compute it, the library's first."""
    trials: Mapping[int, int]
    """Rows up to which a trial counts -> rows of the trial."""

    def of(self, weight_NK: Tensor) -> list[int]:
        """Return the numbers of rows up to which trials of a weight count."""
        return [MMA_ROWS] if len(weight_NK) <= NARROW else list(self.trials)


def serves(weight_NK: Tensor) -> bool:
    """Return whether one of our kernels is right and the fastest in a trial, for some number of rows.

    Each shape takes its trials, the first time.
    """
    return bool(decide(weight_NK, PRODUCT) - {TORCH})


def decide(weight_NK: Tensor, operation: Operation) -> set[str]:
    """Let a weight take its trials, if it can, and return who is fastest: all here, none in the middle of a step."""
    tried = operation.of(weight_NK) if _may_serve(weight_NK) else []
    return {_fastest_of(weight_NK, most, operation) for most in tried}


def compile_ahead(weights: Iterable[Tensor], operation: Operation | None = None) -> None:
    """Begin to compile what trials of weights run, at the same time; decide() waits for it."""
    operation = operation or PRODUCT
    new = {
        key: x
        for x in weights
        if _may_serve(x)
        for most in operation.of(x)
        if (key := _key(x, most, operation)) not in _fastest
        and set(operation.ways(x, most)) > {TORCH}
        and not _trial_path(x, most, operation).exists()
    }
    if not new:
        return
    with ahead.rehearsal():
        for (*_, most), weight_NK in new.items():
            x = weight_NK.new_zeros(operation.trials[most], weight_NK.shape[1])
            for name, multiply in operation.ways(weight_NK, most).items():
                # What goes wrong shows in the trial. The library's alone would compute something.
                with suppress(Exception):
                    if name != TORCH:
                        multiply(x, weight_NK, None)
            with suppress(Exception):
                _triton_linear(x[:FEW_ROWS, :FEW_INPUTS], _few(weight_NK), None)


def _may_serve(weight_NK: Tensor) -> bool:
    """Return whether our kernels can compute products with this weight."""
    n, k = weight_NK.shape
    return (
        weight_NK.is_cuda
        and weight_NK.dtype in {torch.bfloat16, torch.float16}
        and weight_NK.is_contiguous()
        # Whole tiles only: the kernel of large weights has no masks along them.
        and (n <= NARROW or (weight_NK.nbytes >= MIN_BYTES and n % 32 == k % 256 == 0))
        and triton_present()
    )


def _ways(weight_NK: Tensor, most: int) -> dict[str, Multiply]:
    """Return the ways to multiply with a weight that _may_serve() accepts, for rows up to so many."""
    ways: dict[str, Multiply] = {TORCH: F.linear}
    if most <= TRITON_ROWS:
        ways[TRITON] = _triton_linear
    if is_cuda_served(weight_NK, most):
        from nibble.kernels.linear import sm90

        ways[CUDA] = sm90.linear
    return ways


PRODUCT = Operation("", _ways, TRIALS)


def is_cuda_served(weight_NK: Tensor, most: int) -> bool:
    """Return whether sm90.py is tried for a weight, for rows up to so many."""
    # With it for few rows a step of 8 requests takes 4.71 ms in place of 4.50 (Llama-3.1-8B, one H200).
    if most <= MMA_ROWS or len(weight_NK) <= NARROW or not weight_NK.is_cuda:
        return False
    from nibble.kernels.linear import sm90

    return most <= sm90.MOST_ROWS and sm90.serves(
        weight_NK.shape, weight_NK.dtype, gpu_of(weight_NK.device).arch
    )


def _key(weight_NK: Tensor, most: int, operation: Operation = PRODUCT) -> Key:
    return operation.name, weight_NK.device, weight_NK.dtype, weight_NK.shape, most


def _fastest_of(weight_NK: Tensor, most: int, operation: Operation = PRODUCT) -> str:
    """Return the result of a trial, one for each shape, rows and machine."""
    key = _key(weight_NK, most, operation)
    if key not in _fastest:
        path, ways = _trial_path(weight_NK, most, operation), operation.ways(weight_NK, most)
        result = of_rank_0.get(path.name) or _result_of(path)
        # What is kept may be of another machine, or of another set of packages.
        if result is None or result not in ways:
            result = _trial(weight_NK, most, operation, path)
        _fastest[key] = results[path.name] = result
    return _fastest[key]


def _result_of(path: Path) -> str | None:
    """Return what a trial left, None if there is nothing yet."""
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return None


def _trial_path(weight_NK: Tensor, most: int, operation: Operation = PRODUCT) -> Path:
    """Return the file that keeps the result of a trial.

    Where both are equally fast each trial ends as it likes, and a model whose layers are computed in another way is
    compiled anew (models/compile_cache.py).
    """
    n, k = weight_NK.shape
    gpu = torch.cuda.get_device_name(weight_NK.device) if weight_NK.is_cuda else ""
    digest = hashlib.sha256(repr((gpu, *_facts())).encode()).hexdigest()[:16]
    dtype = str(weight_NK.dtype).removeprefix("torch.")
    return cache_folder() / "linear" / f"{operation.name}{dtype}-{most}x{n}x{k}-{digest}"


@cache
def _facts() -> tuple[object, ...]:
    """Return what decides beside the GPU: kernels, this file, and what makes code of them."""
    kernels = Path(__file__).parents[1]
    paths = [kernels / name for name in ("dependent_launch.py", "nvrtc.py", "tensor_map.py")]
    paths += [path for folder in ("linear", "gated") for path in sorted((kernels / folder).glob("*.[pc]*"))]
    paths += sorted((kernels / "codecs").glob("*.cuh"))
    versions = []
    for package in ("torch", "triton", "cuda-bindings"):
        with suppress(metadata.PackageNotFoundError):  # Triton comes by other names too
            versions.append(metadata.version(package))
    return torch.version.cuda, versions, [path.read_text(encoding="utf-8") for path in paths]


def _trial(weight_NK: Tensor, most: int, operation: Operation, path: Path) -> str:
    """Run a trial, and return its result or that of another process, which was first.

    A kernel that fails for whatever reason does not win, this time.
    """
    ways = dict(operation.ways(weight_NK, most))
    if set(ways) <= {TORCH}:
        return TORCH
    rows = operation.trials[most]
    x = torch.randn(rows, weight_NK.shape[1], device=weight_NK.device).to(weight_NK.dtype)
    times, has_failed, library = dict[str, float](), False, ways.pop(TORCH)
    for name, multiply in (*ways.items(), (TORCH, library)):
        if name == TORCH and not times:
            break  # there is no other way
        try:
            if name == TORCH or _is_right(multiply, library, x[:RIGHT_ROWS], weight_NK):
                times[name] = _ms(multiply, x, weight_NK)
        except Exception:
            has_failed = True
    fastest = min(times, key=lambda name: times[name]) if TORCH in times else TORCH
    return fastest if has_failed else _keep(path, fastest, {TORCH, *ways})


def _keep(path: Path, result: str, ways: Container[str]) -> str:
    """Keep the result of a trial, and return it; or that of another process, if it has kept one meanwhile.

    So replicas that start together compute alike.
    """
    # A cache folder that cannot be written costs time, nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not write_new(path, result):
            if (other := _result_of(path)) in ways:
                return str(other)
            write_atomic(path, result)
    return result


def _is_right(multiply: Multiply, library: Multiply, x: Tensor, weight_NK: Tensor) -> bool:
    expected = library(x, weight_NK, None).float()
    return bool((multiply(x, weight_NK, None).float() - expected).norm() <= MAX_ERROR * expected.norm())


def _ms(multiply: Multiply, x: Tensor, weight_NK: Tensor) -> float:
    """Return the median time of a product in a row of them, each with a small one in front.

    So blocks of a product that start early find what they find in a model: multiprocessors that are about to be free.
    Behind an idle GPU another way may be the fastest (docs/design/products.md).
    """
    copies = min(cdiv(FROM_MEMORY, weight_NK.nbytes), MOST_COPIES)
    weights = [weight_NK, *(weight_NK.clone() for _ in range(copies - 1))]
    few_NK, count = _few(weight_NK), max(copies, FEWEST_PRODUCTS)
    # Copies of small weights may lie in the GPU's cache all together.
    other = torch.empty(FROM_MEMORY if copies == MOST_COPIES else 0, dtype=torch.uint8, device=x.device)

    def run() -> None:
        for weight in islice(cycle(weights), count):
            _triton_linear(x[:FEW_ROWS, :FEW_INPUTS], few_NK, None)
            multiply(x, weight, None)

    graph, times = _record(run, x.device), []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(1 + RUNS):
        other.zero_()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / count)
    return statistics.median(times[1:])


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all trials: the library keeps a workspace for each stream that it was used on."""
    return torch.cuda.Stream(device)


def _record(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return what run() launches as a graph: launched one by one, kernels would wait for the host."""
    stream, current, graph = _stream(device), torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            run()  # what is compiled and allocated the first time is not recorded
            capture(graph, run, device)
    finally:
        current.wait_stream(stream)
    return graph


def _few(weight_NK: Tensor) -> Tensor:
    """Return a small weight, for the product in front of what is timed."""
    return weight_NK.new_zeros(FEW_INPUTS, min(FEW_INPUTS, weight_NK.shape[1]))


def way_of(weight_NK: Tensor, rows: int, untried: str = TORCH, operation: Operation | None = None) -> str:
    """Return how a weight is multiplied with so many rows; `untried` where no trial was made."""
    operation = operation or PRODUCT
    most = next((most for most in operation.trials if rows <= most), None)
    return TORCH if most is None else _fastest.get(_key(weight_NK, most, operation), untried)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + b for a weight that serves() accepts.

    Args:
        x: [..., K].
        weight_NK: The weight.
        bias_N: Added to each row, if there is one.

    Returns:
        [..., N] in the dtype of x.
    """
    y: Tensor = torch.ops.nibble.linear(x, weight_NK, bias_N)
    return y


# An operator, so that a compiler of models leaves the choice to the time of the call, when the number of rows is known.
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // x.shape[-1]
    way = way_of(weight, rows, TRITON if rows <= MMA_ROWS else TORCH)
    if way == CUDA:
        from nibble.kernels.linear import sm90

        return sm90.linear(x, weight, bias)
    return _triton_linear(x, weight, bias) if way == TRITON else F.linear(x, weight, bias)


def _triton_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from nibble.kernels.linear import triton as implementation

    multiply = implementation.narrow_linear if len(weight) <= NARROW else implementation.linear
    return multiply(x, weight, bias)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::linear", _shape, lib=_library)


def rotate(x_THD: Tensor) -> Tensor:
    """Multiply heads block by block with the Hadamard matrix, in float32.

    On a GPU it is one launch, which can be captured. Sums have another order there: two results differ by at most a
    few units in the last place of float32, of the largest value of a block.

    Args:
        x_THD: Queries.

    Returns:
        A new tensor in the same dtype.
    """
    if x_THD.is_cuda and triton_present():
        from nibble.kernels.linear import triton as implementation

        return implementation.rotate(x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous())
    return transforms.rotate(x_THD).to(x_THD.dtype)
