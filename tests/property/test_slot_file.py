"""The file of a disk tier against a model: whatever is cut off or overwritten, no block has another's KV."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.tier.slot_file import PAGE_BYTES, Buffer, SlotFile, StoredBlock, slot_bytes_for

NUM_SLOTS, BLOCK_BYTES = 4, 96
OURS, THEIRS = b"o" * 32, b"t" * 32
ROOT = b"r" * 32


class MemoryDisk:
    """A file in memory. `room`: bytes that the coming writes still put down before the process dies."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.room: int | None = None

    def read(self, buffers: list[memoryview], offset: int) -> int:
        start = offset
        for buffer in buffers:
            part = self.content[offset : offset + buffer.nbytes]
            buffer[: len(part)] = part
            offset += len(part)
        return offset - start

    def write(self, buffers: list[Buffer], offset: int) -> int:
        content = b"".join(buffers)[: self.room]
        self.content = self.content.ljust(offset, b"\0")
        self.content[offset : offset + len(content)] = content
        return len(content)

    def touch(self) -> None: ...
    def close(self) -> None: ...
    def remove(self) -> None: ...


def name_of(number: int) -> bytes:
    return bytes([number]) * 32


def content_of(number: int, version: int) -> bytes:
    return bytes((number * 31 + version * 7 + place) % 256 for place in range(BLOCK_BYTES))


writes = st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, 5), st.sampled_from([OURS, THEIRS])))
slot_bytes = slot_bytes_for(BLOCK_BYTES)


@given(
    writes, st.integers(0, PAGE_BYTES + BLOCK_BYTES), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)))
)
@settings(max_examples=300)
def test_a_block_that_the_file_gives_back_is_one_that_was_written(
    written: list[tuple[int, int, bytes]], cut: int, flips: list[tuple[int, int]]
) -> None:
    disk = MemoryDisk()
    put: dict[int, list[tuple[bytes, int, bytes]]] = {}  # identity, name and content of each whole write of a slot
    torn: set[int] = set()
    for number, (slot, block, identity) in enumerate(written, start=1):
        is_last = number == len(written)
        disk.room = cut if is_last else None
        content = content_of(block, number)
        try:
            header = StoredBlock(name_of(block), ROOT, number, 0, 1, number)
            SlotFile(disk, NUM_SLOTS, BLOCK_BYTES, identity).write(slot, header, memoryview(content))
            put.setdefault(slot, []).append((identity, block, content))
        except OSError:
            assert is_last
            torn.add(slot)
    for offset, bits in flips:
        if offset < len(disk.content):
            disk.content[offset] ^= bits
    file = SlotFile(disk, NUM_SLOTS, BLOCK_BYTES, OURS)
    found = file.scan()
    assert len({block.name for block in found.values()}) == len(found), "two slots have one name"
    target = bytearray(BLOCK_BYTES)
    for slot in range(NUM_SLOTS):
        for block in range(1, 6):
            if file.read(slot, name_of(block), memoryview(target)):
                assert (OURS, block, bytes(target)) in put[slot][0 if slot in torn else -1 :]
    if not flips:
        ours = {slot: put[slot][-1][1] for slot in put.keys() - torn if put[slot][-1][0] == OURS}
        assert {block.name for block in found.values()} >= {name_of(block) for block in ours.values()}
        assert all(file.read(slot, name_of(block), memoryview(target)) for slot, block in ours.items())


def test_of_two_slots_with_one_name_the_newer_is_found() -> None:
    file = SlotFile(MemoryDisk(), NUM_SLOTS, BLOCK_BYTES, OURS)
    for slot, number in ((2, 8), (1, 9), (3, 7)):
        file.write(slot, StoredBlock(name_of(1), ROOT, number, 0, 1, number), memoryview(content_of(1, number)))
    assert {slot: block.number for slot, block in file.scan().items()} == {1: 9}
    file.erase(1)
    assert {slot: block.number for slot, block in file.scan().items()} == {2: 8}


def test_a_full_disk_raises_whether_it_says_so_or_writes_less() -> None:
    disk = MemoryDisk()
    disk.room = PAGE_BYTES + BLOCK_BYTES - 1
    header = StoredBlock(name_of(1), ROOT, 7, 0, 1, 1)
    file = SlotFile(disk, NUM_SLOTS, BLOCK_BYTES, OURS)
    with pytest.raises(OSError, match="only") as raised:
        file.write(0, header, memoryview(content_of(1, 1)))
    assert raised.value.errno == errno.ENOSPC
    assert not file.read(0, header.name, memoryview(bytearray(BLOCK_BYTES)))
