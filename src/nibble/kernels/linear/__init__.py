"""linear: y = x W^T + b where few rows meet a large weight; and rotate: the rotation of queries that meet rotated keys.

A decode step does hardly anything but read such a weight. Libraries split such products along K and add the parts up in
a second kernel; linear/triton.py reads the weight once. So it does with weights of a few outputs, as routers of experts
have. Which is faster depends on shape, rows and GPU, so a trial at load decides for each shape, and another for the
rows of a few requests with drafts. The torch references are F.linear and, for the rotation that `rot` applied to stored
keys, formats/transforms.py.

Shape suffixes: N values of the output, K of the input; T tokens, H heads, D values of a head.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.files import write_atomic
from nibble.formats import transforms
from nibble.hardware import cache_folder
from nibble.kernels import MMA_ROWS, ahead, triton_present

MIN_BYTES = 1 << 23
"""Bytes of a weight from which on it pays, unless it is narrow."""
NARROW = 256
"""Outputs up to which a weight has a kernel of its own: routers of experts, gates."""
MOST_ROWS = 2 * MMA_ROWS
"""Rows that a large weight may be multiplied with; a narrow one with MMA_ROWS."""
FEW, SEVERAL = MMA_ROWS // 2, MOST_ROWS
"""Rows of a trial for MMA_ROWS at most, and of one for more."""
MAX_ERROR = 0.01
"""How far Triton may be off the library, norm over norm, in a trial; in 16 bits both round by a quarter of that."""
TRIALS = 5
FLUSH = 1 << 28
"""Bytes written before each timing, so that no weight is in the GPU's cache."""
FEW_INPUTS = 256
"""Inputs and outputs of the product in front of each timing."""
SLEEP = 1 << 20
"""Clocks, half a millisecond."""
RESULTS = {"triton": True, "torch": False}
"""What the file of a trial says: who was faster."""
_is_faster: dict[tuple[torch.device, torch.dtype, torch.Size, int], bool] = {}
results: dict[str, bool] = {}
"""What trials came to, by the names of their files."""
of_rank_0: dict[str, bool] = {}
"""Those of rank 0, which the other ranks of a model take: all must compute as it does."""


def serves(weight_NK: Tensor) -> bool:
    """Return whether Triton can compute products with this weight, and is right and faster in a trial.

    It is for MMA_ROWS; whether more rows are served too is for another one to say.
    """
    if not _may_serve(weight_NK) or not _wins(weight_NK, FEW):
        return False
    if len(weight_NK) > NARROW:
        _wins(weight_NK, SEVERAL)
    return True


def compile_ahead(weights: Iterable[Tensor]) -> None:
    """Begin to compile what trials of weights run, at the same time; serves() waits for it."""
    new = {
        _key(x, rows): x
        for x in weights
        if _may_serve(x)
        for rows in ((FEW,) if len(x) <= NARROW else (FEW, SEVERAL))
        if _key(x, rows) not in _is_faster and not _trial_path(x, rows).exists()
    }
    if not new:
        return
    with ahead.rehearsal():
        for (*_, rows), weight_NK in new.items():
            x = weight_NK.new_zeros(rows, weight_NK.shape[1])
            # What goes wrong shows in the trial.
            with suppress(Exception):
                _triton_linear(x, weight_NK, None)
                _triton_linear(x[:, :FEW_INPUTS], weight_NK.new_zeros(FEW_INPUTS, FEW_INPUTS), None)


def _may_serve(weight_NK: Tensor) -> bool:
    """Return whether Triton can compute products with this weight."""
    n, k = weight_NK.shape
    return (
        weight_NK.is_cuda
        and weight_NK.dtype in {torch.bfloat16, torch.float16}
        and weight_NK.is_contiguous()
        # Whole tiles only: the kernel of large weights has no masks along them.
        and (n <= NARROW or (weight_NK.nbytes >= MIN_BYTES and n % 32 == k % 256 == 0))
        and triton_present()
    )


def _key(weight_NK: Tensor, rows: int) -> tuple[torch.device, torch.dtype, torch.Size, int]:
    return weight_NK.device, weight_NK.dtype, weight_NK.shape, rows


def _wins(weight_NK: Tensor, rows: int) -> bool:
    """Return the result of a trial, one for each shape, rows and machine."""
    key = _key(weight_NK, rows)
    if key not in _is_faster:
        path = _trial_path(weight_NK, rows)
        if path.name in of_rank_0:
            _is_faster[key] = of_rank_0[path.name]
        else:
            try:
                _is_faster[key] = RESULTS[path.read_text(encoding="utf-8")]
            except (OSError, ValueError, KeyError):  # none yet, or not one that _trial() left
                _is_faster[key] = _trial(weight_NK, rows, path)
        results[path.name] = _is_faster[key]
    return _is_faster[key]


def _trial_path(weight_NK: Tensor, rows: int) -> Path:
    """Return the file that keeps the result of a trial.

    Where both are equally fast each trial ends as it likes, and a model whose layers are computed in another way is
    compiled anew (models/compile_cache.py).
    """
    n, k = weight_NK.shape
    # The kernel and this file decide, too.
    folder = Path(__file__).parent
    paths = (*sorted(folder.glob("*.py")), folder.with_name("dependent_launch.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    versions = []
    for package in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):  # Triton comes by other names too
            versions.append(metadata.version(package))
    gpu = torch.cuda.get_device_name(weight_NK.device) if weight_NK.is_cuda else ""
    facts = repr((gpu, torch.version.cuda, versions, sources))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return (
        cache_folder() / "linear" / f"{str(weight_NK.dtype).removeprefix('torch.')}-{rows}x{n}x{k}-{digest}"
    )


def _trial(weight_NK: Tensor, rows: int, path: Path) -> bool:
    """Run a trial and keep its result. A kernel that fails for whatever reason does not win, this time."""
    x = torch.randn(rows, weight_NK.shape[1], device=weight_NK.device).to(weight_NK.dtype)
    try:
        wins = _is_right(x, weight_NK) and _ms(_triton_linear, x, weight_NK) < _ms(F.linear, x, weight_NK)
    except Exception:
        return False
    # A cache folder that cannot be written costs time, nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, next(text for text, result in RESULTS.items() if result == wins))
    return wins


def _is_right(x: Tensor, weight_NK: Tensor) -> bool:
    expected = F.linear(x, weight_NK).float()
    return bool((_triton_linear(x, weight_NK, None).float() - expected).norm() <= MAX_ERROR * expected.norm())


def _ms(multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight_NK: Tensor) -> float:
    """Return the median time of a product whose weight comes from memory.

    A small product is in front of it: as in a model, a kernel that can start before the one in front ends gains by it.
    """
    other = torch.empty(FLUSH, dtype=torch.uint8, device=x.device)
    few_KK = weight_NK.new_zeros(FEW_INPUTS, FEW_INPUTS)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(TRIALS):
        other.zero_()
        torch.cuda._sleep(SLEEP)  # meanwhile the host queues what follows
        start.record()
        _triton_linear(x[:, :FEW_INPUTS], few_KK, None)
        multiply(x, weight_NK, None)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def is_served(weight_NK: Tensor, rows: int) -> bool:
    """Return whether Triton was right and faster in the trial for a large weight and so many rows."""
    return any(
        rows <= most and _is_faster.get(_key(weight_NK, tried), False)
        for tried, most in ((FEW, MMA_ROWS), (SEVERAL, MOST_ROWS))
    )


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
    is_served = rows <= MMA_ROWS or (rows <= MOST_ROWS and _is_faster.get(_key(weight, SEVERAL), False))
    return _triton_linear(x, weight, bias) if is_served else F.linear(x, weight, bias)


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
