"""What adapters of other people's kernels share: finding a package that does, building rows, scales, latents.

A package is imported by an adapter's constructor, or where a plan asks what keeps it from working: `present()` asks on
machines that have it. So a missing, old or broken package is a reason of the plan, never an error of the first request.
Must not know of any one package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from packaging.version import Version
from torch import Tensor

from nibble.attention.planner.support import NEVER, Phase, Support
from nibble.cache.view import KVView, StreamView
from nibble.errors import BackendError
from nibble.kernels import MISSING, import_problem
from nibble.kernels.types import Paged
from nibble.model_spec import LATENT

ALL = frozenset(Phase)
TOKEN = frozenset({Phase.DECODE, Phase.VERIFY})
HALVES = frozenset({"bfloat16", "float16"})
PLAIN = (("bf16", "bfloat16"), ("fp16", "float16"))
"""A 16-bit cache must have the query's dtype, so each is a row of its own."""
RANK, ROPE = 512, 64
"""Latents that vendors' kernels read: DeepSeek's."""
WIDTH = RANK + ROPE


@dataclass(frozen=True, slots=True)
class KernelPackages:
    """Kernels that several packages bring. modules: where they are, best first. install: for people. fault: what the
    version at hand of a module lacks, if anything. aside: packages of which only that module is imported.
    """

    modules: tuple[str, ...]
    install: str
    incompatibility: Callable[[ModuleType], str | None]
    import_alone: frozenset[str] = frozenset()

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.modules))

    def unavailable_reason(self) -> str | None:
        """What keeps all of those that are here from working; None if one does."""
        lack = without_cuda()
        if lack:
            return lack
        found, faults = self._search()
        return None if found else f"kernels that work here, and {'; '.join(faults)}"

    def load(self) -> ModuleType:
        """The first module that does, or a BackendError."""
        found, faults = self._search()
        if found is None:
            raise BackendError(f"{'; '.join(faults)}: {self.install}")
        return found

    def _search(self) -> tuple[ModuleType | None, list[str]]:
        faults = []
        for name in self.modules:
            package = name.partition(".")[0]
            if why := import_problem(package):
                if why != MISSING:
                    faults.append(f"{package} {why}")
                continue
            try:
                with _aside(package) if package in self.import_alone else nullcontext():
                    module = imported(name, self.install)
            except BackendError as error:
                faults.append(str(error).removesuffix(f": {self.install}"))
                continue
            fault = self._fault(module)
            if fault is None:
                return module, []
            faults.append(f"{name} {fault}")
        return None, faults or [f"none of {', '.join(self.packages)} is here"]

    def _fault(self, module: ModuleType) -> str | None:
        try:
            return self.incompatibility(module)
        except Exception as error:  # of a version that nobody has seen yet
            return f"is not as expected ({type(error).__name__}: {error})"


@contextmanager
def _aside(package: str) -> Iterator[None]:
    """Within, modules of a package can be imported and its own `__init__` does not run: an engine's changes how torch
    compiles, and the environment, which is no business of somebody who wants a kernel. Afterwards the package is as if
    nobody had imported it.
    """
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None or spec.submodule_search_locations is None:
        yield
        return
    hollow = importlib.util.module_from_spec(spec)
    sys.modules[package] = hollow
    try:
        yield
    finally:
        del sys.modules[package]


def imported(name: str, install: str) -> ModuleType:
    """A module of a package, or a BackendError that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # what a package's import may do is its own business
        raise BackendError(
            f"{name} cannot be imported ({type(error).__name__}: {error}): {install}"
        ) from error


def without_cuda() -> str | None:
    """What is lacking where PyTorch was built for no GPU."""
    if torch.version.cuda is None:
        return f"a CUDA build of PyTorch, and {torch.__version__} is installed"
    return None


def outdated(distribution: str, oldest: str) -> str | None:
    """What is lacking where a distribution is older. A copy that nobody installed is taken as it is."""
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    if Version(found) >= Version(oldest):
        return None
    return f"{distribution} {oldest} or later, and {found} is installed"


LATENT_FACTS: dict[str, Iterable[Any]] = {
    "packing": {"nhd"}, "dim": {WIDTH}, "window": NEVER, "softcap": NEVER, "sinks": NEVER,
}  # fmt: skip


def row(
    kind: str, *, prefer: int, cites: str, staged: int | None = None, held: int = 0, **allowed: Iterable[Any]
) -> Support:
    """A Row of collections of allowed values. No kernel of latents has windows, caps or sinks, and all want a token's
    values together."""
    given: dict[str, Iterable[Any]] = {} if kind == "mha" else LATENT_FACTS
    facts: dict[str, Any] = {"format": None}
    facts |= {name: frozenset(values) for name, values in (given | allowed).items()}
    return Support(
        kind=frozenset({kind}), prefer=prefer, staged=staged, source=cites, workspace_bytes=held, **facts
    )


def latents(view: KVView, package: str) -> StreamView:
    """The stream of latents, if it is one of DeepSeek's shape; BackendError otherwise."""
    found = view.streams[LATENT]
    rank, rope = found.stream.dim - found.stream.rope, found.stream.rope
    if (rank, rope) != (RANK, ROPE):
        raise BackendError(
            f"{package} reads latents of {RANK} values and {ROPE} rotary ones, and these have {rank} and {rope}; "
            "--attention-backend triton reads them"
        )
    return found


def some_tokens(lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """For kernels of which nobody says what they do for a request of 0 tokens, which is padding: lengths of at least 1,
    and whose rows are to be zeros, bool [B, 1, 1]."""
    return lens_B.clamp(min=1), (lens_B == 0)[:, None, None]


def capability(x: Tensor) -> int:
    """90 on a Hopper GPU; 0 off GPUs."""
    if not x.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


class Workspace:
    """`size` bytes on a GPU, made at first use: of zeros, which counters of kernels begin with. Stand-ins need none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self._bytes is None:
            size = 1 if device.type == "cpu" else self._size
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._bytes


class Scales:
    """Global scales of streams as numbers, which packages take: read from the device once for each stream."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._known: WeakKeyDictionary[Paged, float] = WeakKeyDictionary()

    def of(self, entry: StreamView) -> float:
        """1.0 for formats without a scale; BackendError where heads have scales of their own."""
        if not entry.format.needs_scale:
            return 1.0
        if entry.scale.dim():
            raise BackendError(
                f"{self._package} takes one scale for all heads of {entry.stream.name!r}, and here each has its own; "
                "--attention-backend triton reads them, or calibrate with one scale a stream"
            )
        if entry.paged not in self._known:
            self._known[entry.paged] = float(entry.scale)
        return self._known[entry.paged]
