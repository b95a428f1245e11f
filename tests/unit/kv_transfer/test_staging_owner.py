"""The owner's half of a staged read, with the test's clock."""

from __future__ import annotations

import pytest

from core.errors import TransportError
from core.kv_layout import KVLayout
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.device.staging_messages import (
    MAGIC,
    Ask,
    Done,
    Keepalive,
    Refused,
    Staged,
    StagingMessage,
    decode_staging,
    encode_staging,
)
from kv_transfer.transports.device.staging_owner import LEASE_S, MAX_ASKED, StagingOwner
from kv_transfer.transports.device.staging_ring import SLOTS_PER_HALF, StagingRing
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=16, head_dim=8)
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 16


class Owner:
    def __init__(self) -> None:
        self.memory = FakeDeviceMemory(NUM_BLOCKS * BLOCK, polls_per_copy=0)
        self.memory.bytes.reshape(NUM_BLOCKS, BLOCK)[:] = [[block] for block in range(NUM_BLOCKS)]
        self.ring = StagingRing(self.memory, 2 * SLOTS_PER_HALF * 4 * BLOCK)
        self.sent: list[tuple[str, StagingMessage]] = []
        self.gone: set[str] = set()
        pool = PoolMemory(self.memory.address, NUM_BLOCKS, LAYOUT, None, 0, 0, self.memory)
        self.owner = StagingOwner(self.memory, pool, self.ring, self.send)

    def send(self, reader: str, message: StagingMessage) -> None:
        if reader in self.gone:
            raise TransportError("gone")
        self.sent.append((reader, message))

    def ask(self, slice_id: int, blocks: list[int], reader: str = "r", now: float = 0.0) -> None:
        self.owner.on_ask(reader, Ask(slice_id, tuple((block * BLOCK, BLOCK) for block in blocks)), now)
        self.owner.check()

    def poll(self, now: float) -> list[tuple[str, StagingMessage]]:
        self.owner.poll(now)
        self.owner.check()
        sent, self.sent = self.sent, []
        return sent

    def slot(self, number: int, num_blocks: int) -> list[int]:
        first = number * self.ring.slot_bytes
        return [self.ring.view[first + index * BLOCK] for index in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return len(self.ring.for_readers)


def test_runs_lie_packed_in_the_slot_that_is_announced_and_the_wait_is_told() -> None:
    owner = Owner()
    owner.ask(3, [7, 2, 9], now=1.0)
    ((reader, message),) = owner.poll(1.5)
    assert isinstance(message, Staged)
    assert (reader, message.slice_id, message.waited_s) == ("r", 3, 0.5)
    assert owner.slot(message.slot, 3) == [7, 2, 9]
    owner.owner.on_done("r", 3)
    assert owner.num_free == SLOTS_PER_HALF


def test_more_slices_than_slots_wait_in_order() -> None:
    owner = Owner()
    for number in range(SLOTS_PER_HALF + 2):
        owner.ask(number, [number])
    assert owner.num_free == 0
    announced = [message.slice_id for _ in range(20) for _, message in owner.poll(0.0)]  # type: ignore[union-attr]
    assert announced == list(range(SLOTS_PER_HALF))
    owner.owner.on_done("r", 4)
    owner.poll(0.0)
    assert [message.slice_id for _, message in owner.poll(0.0)] == [SLOTS_PER_HALF]  # type: ignore[union-attr]


def test_a_slot_whose_reader_is_lost_is_kept_for_its_lease_as_the_reader_may_still_read() -> None:
    owner = Owner()
    owner.ask(1, [1])
    owner.poll(10.0)
    owner.owner.forget("r")
    owner.poll(10.0 + LEASE_S - 0.1)
    assert owner.num_free == SLOTS_PER_HALF - 1
    owner.poll(10.0 + LEASE_S)
    assert owner.num_free == SLOTS_PER_HALF


def test_a_slice_that_nobody_wants_any_more_is_not_announced_and_its_copy_ends_first() -> None:
    owner = Owner()
    owner.memory.polls_per_copy = 1
    owner.ask(1, [1])
    owner.owner.on_done("r", 1)
    assert owner.poll(0.0) == []
    assert owner.num_free == SLOTS_PER_HALF - 1, "the copy still writes into the slot"
    assert owner.poll(0.0) == []
    assert owner.num_free == SLOTS_PER_HALF


def test_a_reader_that_is_gone_frees_its_slot_and_its_waiting_slices() -> None:
    owner = Owner()
    owner.gone.add("r")
    for number in range(SLOTS_PER_HALF + 3):
        owner.ask(number, [0])
    owner.owner.forget("r")
    for _ in range(20):
        owner.poll(0.0)
    assert owner.num_free == SLOTS_PER_HALF
    assert not owner.owner.busy


@pytest.mark.parametrize(
    ("runs", "detail"),
    [
        (((NUM_BLOCKS * BLOCK - 8, 9),), "outside the pool"),
        ((((1 << 64) - 1, 1),), "outside the pool"),
        (((0, 16 * BLOCK),), "more than a slot"),
    ],
)
def test_a_slice_that_cannot_be_staged_is_refused_by_its_reason(runs: tuple[tuple[int, int], ...], detail: str) -> None:
    owner = Owner()
    owner.owner.on_ask("r", Ask(1, runs), 0.0)
    ((_, message),) = owner.poll(0.0)
    assert isinstance(message, Refused)
    assert detail in message.detail
    assert owner.num_free == SLOTS_PER_HALF


def test_one_reader_cannot_fill_the_queue() -> None:
    owner = Owner()
    for number in range(MAX_ASKED + 1):
        owner.ask(number, [0])
    refused = [message for _, message in owner.sent if isinstance(message, Refused)]
    assert [message.slice_id for message in refused] == [MAX_ASKED]
    owner.ask(0, [0], reader="other")
    assert len([message for _, message in owner.sent if isinstance(message, Refused)]) == 1


@pytest.mark.parametrize(
    "message", [Ask(5, ((0, 7), (1 << 40, 2))), Staged(1 << 60, 15, 0.25), Refused(0, "no"), Done(9), Keepalive()]
)
def test_messages_arrive_as_they_were_sent(message: StagingMessage) -> None:
    assert decode_staging(encode_staging(message)) == message


@pytest.mark.parametrize(
    "body", [b"", b"\x00" + bytes(8), b"\x00" + bytes(15), b"\x01" + bytes(9), b"\x03" + bytes(9), b"\x63" + bytes(8)]
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(TransportError, match="malformed"):
        decode_staging(MAGIC + body)


def test_other_notifications_are_left_alone() -> None:
    assert decode_staging(b"\x08\x04") is None
    assert decode_staging(b"") is None
