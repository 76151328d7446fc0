"""Which versions of which packages a backend's results rest on: for the ledger, and for times that were measured.

Must not import any of those packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from nibble.attention.planner.support import BackendInfo
from nibble.hardware import cuda_version

ALWAYS = ("torch", "triton")
"""What every backend rests on; torch compiles by the other on a GPU."""


def versions(backends: Iterable[BackendInfo]) -> dict[str, str]:
    """Package -> version, of torch and CUDA, and of what brings the kernels of these backends; of what is found."""
    cuda = cuda_version()
    names = [name for name in ALWAYS if cuda or name == "torch"]
    names += [name for info in backends if (name := _distribution(info))]
    found = {name: version for name in dict.fromkeys(names) if (version := _version(name))}
    return dict(sorted((found | ({"CUDA": cuda} if cuda else {})).items()))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _distribution(info: BackendInfo) -> str | None:
    """What somebody installed to have one of its packages; None for what torch brings, and for bare copies."""
    for package in info.packages:
        found = _providers().get(package.partition(".")[0], [])
        own = package.replace(".", "-")
        if found:
            return own if own in found else min(_bringing(package, found) or found)
    return None


def _bringing(package: str, distributions: Iterable[str]) -> list[str]:
    """Those that bring the package itself, where others bring another one beside it."""
    inside = package.replace(".", "/") + "/"
    return [name for name in distributions if any(str(file).startswith(inside) for file in _files(name))]


def _files(distribution: str) -> Iterable[object]:
    try:
        return metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return ()


@cache
def _providers() -> dict[str, list[str]]:
    return {name: list(found) for name, found in metadata.packages_distributions().items()}
