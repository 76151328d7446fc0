"""Memory of the host that a GPU reaches: managed where the driver gives it, else pinned, and given back either way."""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.kernels.offload import host_memory

GPU = torch.device("cuda", 0)
CALLS = ("cuMemAllocManaged", "cuMemAdvise", "cuMemPrefetchAsync", "cuStreamSynchronize")


class Driver:
    """Stands in for libcuda. fails: the call that does not work. current: whether a context was made so."""

    def __init__(self, fails: str | None, shares: bool) -> None:
        self.fails, self.shares = fails, shares
        self.bytes = (ctypes.c_uint8 * 64)()
        self.called: list[str] = []
        self.freed: list[int] = []
        self.current = False

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            assert self.current, "the driver's calls need a context"
            self.called.append(name)
            return 201 if name == self.fails else 0

        return call

    def cuDeviceGetAttribute(self, found: Any, attribute: int, index: int) -> int:
        assert (attribute, index) == (host_memory.CONCURRENT_MANAGED_ACCESS, 0)
        found._obj.value = self.shares
        return 0

    def cuMemAllocManaged(self, pointer: Any, size: ctypes.c_size_t, flags: int) -> int:
        failed: int = self.__getattr__("cuMemAllocManaged")()
        if not failed:
            assert size.value <= len(self.bytes) and flags == host_memory.ATTACH_GLOBAL
            pointer._obj.value = ctypes.addressof(self.bytes)
        return failed

    def cuMemFree_v2(self, pointer: ctypes.c_uint64) -> int:
        self.freed.append(pointer.value)
        return 0


def made(monkeypatch: pytest.MonkeyPatch, *, fails: str | None = None, shares: bool = True) -> Driver:
    driver = Driver(fails, shares)

    def pinned(size: int) -> Tensor:
        driver.called.append("pinned")
        return torch.zeros(size, dtype=torch.uint8)

    host_memory._shares.cache_clear()
    monkeypatch.setattr(host_memory, "_driver", lambda: driver)
    monkeypatch.setattr(host_memory, "_pinned", pinned)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(driver, "current", True))
    return driver


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    host_memory._shares.cache_clear()


def test_managed_memory_is_given_back_with_the_last_view_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = made(monkeypatch)
    found = host_memory.empty((2, 3), dtype=torch.float16, device=GPU)
    assert (found.shape, found.dtype) == ((2, 3), torch.float16)
    assert found.data_ptr() == ctypes.addressof(driver.bytes) and "pinned" not in driver.called
    assert driver.called.count("cuMemAdvise") == 2 and set(CALLS) <= set(driver.called)
    row = found[1]
    del found
    gc.collect()
    assert not driver.freed
    del row
    gc.collect()
    assert driver.freed == [ctypes.addressof(driver.bytes)]


@pytest.mark.parametrize("fails", CALLS)
def test_where_managed_memory_fails_it_is_pinned(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = made(monkeypatch, fails=fails)
    found = host_memory.empty((4, 5), dtype=torch.uint8, device=GPU)
    assert found.shape == (4, 5) and driver.called[-1] == "pinned"
    gc.collect()
    assert len(driver.freed) == (fails != "cuMemAllocManaged")


def test_where_the_driver_cannot_share_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = made(monkeypatch, shares=False)
    assert host_memory.empty((4,), dtype=torch.float32, device=GPU).shape == (4,)
    assert driver.called == ["pinned"]


def test_each_thread_has_its_context_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = made(monkeypatch)
    host_memory.empty((4,), dtype=torch.uint8, device=GPU)
    driver.current = False  # as in another thread
    host_memory.empty((4,), dtype=torch.uint8, device=GPU)
    assert driver.called.count("cuMemAllocManaged") == 2
