"""What the facts of other people's kernels share: the search for a package that serves, and rows.

A package is imported by an adapter's constructor, or where a plan asks what keeps it from working. So a missing, old or
broken package is a reason of the plan, never an error of the first request.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.version import Version

from nibble.attention.planner.support import NEVER, Support
from nibble.errors import BackendError
from nibble.kernels import MISSING, import_problem

PLAIN = (("bf16", "bfloat16"), ("fp16", "float16"))
"""Formats of 16 bits, each with the dtype that it is."""
RANK, ROPE = 512, 64
"""Latents that vendors' kernels read: DeepSeek's."""
WIDTH = RANK + ROPE


@dataclass(frozen=True, slots=True)
class KernelPackages:
    """Kernels that several packages bring."""

    modules: tuple[str, ...]
    """Where they are, best first."""
    install: str
    """How a user gets one of them."""
    incompatibility: Callable[[ModuleType], str | None]
    """Returns what the version at hand of a module lacks, if anything."""
    import_alone: frozenset[str] = frozenset()
    """Packages of which only that module is imported."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages, each once."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.modules))

    def unavailable_reason(self) -> str | None:
        """Return what keeps all of those that are here from working; None if one does."""
        if reason := without_cuda():
            return reason
        module, faults = self._search()
        return None if module else f"kernels that work here, and {'; '.join(faults)}"

    def load(self) -> ModuleType:
        """Return the first module that works; raise BackendError where none does."""
        module, faults = self._search()
        if module is None:
            raise BackendError(f"{'; '.join(faults)}: {self.install}")
        return module

    def _search(self) -> tuple[ModuleType | None, list[str]]:
        faults = []
        for name in self.modules:
            package = name.partition(".")[0]
            if why := import_problem(package):
                # A package that is not installed is no fault; one that is broken is.
                if why != MISSING:
                    faults.append(f"{package} {why}")
                continue
            try:
                with _without_init(package) if package in self.import_alone else nullcontext():
                    module = import_package(name, self.install)
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
        except Exception as error:  # of a version later than those that were tried
            return f"is not as expected ({type(error).__name__}: {error})"


@contextmanager
def _without_init(package: str) -> Iterator[None]:
    """Let modules of a package be imported without its own `__init__`; afterwards the package counts as not imported.

    An engine's `__init__` changes how torch compiles, and the environment, which a kernel does not need.
    """
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None or spec.submodule_search_locations is None:
        yield
        return
    # It has the package's path, so its modules are found, and none of its code has run.
    hollow = importlib.util.module_from_spec(spec)
    sys.modules[package] = hollow
    try:
        yield
    finally:
        del sys.modules[package]


def import_package(name: str, install: str) -> ModuleType:
    """Return a module of a package, or raise a BackendError that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # what a package's import may do is its own business
        raise BackendError(
            f"{name} cannot be imported ({type(error).__name__}: {error}): {install}"
        ) from error


def without_cuda() -> str | None:
    """Return what is lacking where PyTorch was built for no GPU."""
    import torch

    if torch.version.cuda is None:
        return f"a CUDA build of PyTorch, and {torch.__version__} is installed"
    return None


def outdated(distribution: str, oldest: str) -> str | None:
    """Return what is lacking where a distribution is older. A copy without metadata is taken as it is."""
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    if Version(installed) >= Version(oldest):
        return None
    return f"{distribution} {oldest} or later, and {installed} is installed"


LATENT_FACTS: dict[str, Any] = {
    "kind": {"mla"}, "packing": {"nhd"}, "dim": {WIDTH}, "window": NEVER, "softcap": NEVER, "sinks": NEVER
}  # fmt: skip
"""No kernel of latents has windows, caps or sinks, and all want a token's values together."""


def plain_rows(**facts: Any) -> tuple[Support, ...]:
    """Return a row each for BF16 and FP16, for kernels that want pages in the query's dtype."""
    # One row would allow BF16 pages under FP16 queries too, since a row is a product of its values.
    return tuple(Support(format={fmt}, dtype={dtype}, **facts) for fmt, dtype in PLAIN)
