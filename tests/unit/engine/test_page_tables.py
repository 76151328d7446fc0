"""The integers of a step on their way to where a recorded step reads them."""

from __future__ import annotations

import torch

from nibble.cache.lease import Lease
from nibble.engine.page_tables import PackedInts, PageTables
from nibble.kernels.transfer import HostInputs

CPU = torch.device("cpu")


def test_a_recorded_step_finds_its_inputs_alone() -> None:
    """They lie between others, and behind them on the host is what it does not read."""
    tables, inputs = PageTables(3, 4, CPU), HostInputs(8, CPU)
    inputs.on_host.fill_(-1)
    packed = PackedInts()
    packed.add([1, 2, 3])
    place = packed.add([1 << 40, -7, 5])
    packed.add([9])
    tables.send_inputs(packed, place, inputs, tables.pack_updates(packed))
    assert inputs.on_device.tolist() == [0] * 8, "the step itself copies them"
    inputs.copy(4)
    assert inputs.on_device.tolist() == [1 << 40, -7, 5, -1, 0, 0, 0, 0]


def test_new_pages_come_with_the_inputs() -> None:
    tables, inputs = PageTables(3, 4, CPU), HostInputs(8, CPU)
    lease = Lease(pages=[6, 8])
    row, packed = tables.row(lease), PackedInts()
    place = packed.add([row])
    tables.send_inputs(packed, place, inputs, tables.pack_updates(packed))
    assert tables.table_RN[row, :2].tolist() == [6, 8] and inputs.on_host[0] == row


def test_what_was_sent_is_sent_again_once_it_is_forgotten() -> None:
    """After a step that raised midway nobody knows what came to the device."""
    tables, lease = PageTables(3, 4, CPU), Lease(pages=[6, 8])
    row = tables.row(lease)
    assert tables.take_updates() == ([4 * row, 4 * row + 1], [6, 8])
    assert tables.row(lease) == row and tables.take_updates() == ([], [])
    tables.forget_sent()
    assert tables.row(lease) == row and tables.take_updates() == ([4 * row, 4 * row + 1], [6, 8])
