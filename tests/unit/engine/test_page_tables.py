"""The integers of a step on their way to where a recorded step reads them."""

from __future__ import annotations

import torch

from nibble.cache.lease import Lease
from nibble.drafts import MAX_DRAFTS
from nibble.engine.page_tables import PackedInts, PageTables
from nibble.kernels.step_inputs import settle_inputs
from nibble.kernels.transfer import HostInputs

CPU = torch.device("cpu")


def test_a_recorded_step_finds_its_inputs_alone() -> None:
    """They lie between others, and behind them on the host is what it does not read."""
    tables, inputs = PageTables(3, 4, CPU), HostInputs(8, CPU)
    inputs.on_host.fill_(-1)
    packed = PackedInts()
    packed.add([1, 2, 3])
    place = packed.add_inputs([1 << 40, -7, 5])
    packed.add([9])
    tables.send_inputs(packed, place, inputs, tables.pack_updates(packed))
    assert not inputs.on_device.any(), "the step itself copies them"
    assert inputs.copy(4).tolist() == [1 << 40, -7, 5, -1]
    assert inputs.on_device[inputs.HEADER :].tolist() == [1 << 40, -7, 5, -1, 0, 0, 0, 0]


def test_new_pages_come_with_the_inputs() -> None:
    tables, inputs = PageTables(3, 4, CPU), HostInputs(8, CPU)
    lease = Lease(pages=[6, 8])
    row, packed = tables.row(lease), PackedInts()
    place = packed.add_inputs([row])
    tables.send_inputs(packed, place, inputs, tables.pack_updates(packed))
    assert tables.table_RN[row, :2].tolist() == [6, 8] and inputs.copy(1)[0] == row


def test_inputs_that_are_sent_ahead_are_the_newer_ones() -> None:
    """Whoever made them last: also where a step that they were made for is made again."""
    tables, inputs, settled = PageTables(3, 4, CPU), HostInputs(7, CPU), torch.zeros(7, dtype=torch.int64)
    tables.keep_drafts()
    verified = tables.verified
    assert verified

    def send(number: int, *, ahead: bool) -> None:
        packed = PackedInts()
        packed.add([-9] * 5)
        place = packed.add_inputs([0, number, 1, *[number] * 4])
        tables.send_inputs(packed, place, inputs, tables.pack_updates(packed), is_ahead=ahead)

    def step() -> list[int]:
        inputs.copy(7)
        settle_inputs(inputs.on_device, inputs.sent_ahead, settled, (1, 2), 0, verified)
        return settled.tolist()

    for number, ahead in enumerate([False, True, True, False, False, True]):
        send(number, ahead=ahead)
        assert step() == [0, number, 1, *[number] * 4]
    send(7, ahead=True)
    send(8, ahead=False)
    assert step()[1] == step()[1] == 8
    send(9, ahead=False)
    send(10, ahead=True)
    assert step()[1] == 10


@torch.inference_mode()
def test_what_device_and_host_know_together() -> None:
    tables = PageTables(3, 4, CPU)
    tables.keep_drafts()
    assert tables.verified and tables.drafts_KR is not None
    leases = [Lease(pages=[one]) for one in (6, 8)]
    for number, lease in enumerate(leases):
        tables.verified.stored_R[tables.row(lease)] = 100 * number
    assert tables.counts_behind([leases[1], leases[0], leases[1]], [1, -2, 3]).tolist() == [101, -2, 103]
    for buffer, place, column in ((0, 0, 0), (0, MAX_DRAFTS - 1, 3), (1, 0, 0), (1, MAX_DRAFTS - 1, 3)):
        unread = tables.unread(buffer * MAX_DRAFTS + place, column)
        assert tables.buffer_of(unread) == buffer
        tables.drafts_KR[buffer * MAX_DRAFTS + place, column] = 77
        assert tables.resolve_ids(torch.tensor([unread]), torch.tensor([0])).tolist() == [77]


def test_what_was_sent_is_sent_again_once_it_is_forgotten() -> None:
    """After a step that raised midway nobody knows what came to the device."""
    tables, lease = PageTables(3, 4, CPU), Lease(pages=[6, 8])
    row = tables.row(lease)
    assert tables.take_updates() == ([4 * row, 4 * row + 1], [6, 8])
    assert tables.row(lease) == row and tables.take_updates() == ([], [])
    tables.forget_sent()
    assert tables.row(lease) == row and tables.take_updates() == ([4 * row, 4 * row + 1], [6, 8])
