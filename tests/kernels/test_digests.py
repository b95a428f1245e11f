"""The digest kernel gives what xxhash gives for the same bytes."""

from __future__ import annotations

import pytest
import torch
import xxhash

from engine.gpu import digests, reference


def digests_of(memory: torch.Tensor, blocks: list[int]) -> list[int]:
    found = torch.full((len(blocks),), -1)
    sums = torch.full(digests.scratch_shape(len(blocks), memory.shape[1]), -1)
    digests.block_digests(memory, torch.tensor(blocks, dtype=torch.int32), sums, found)
    return [digest % 2**64 for digest in found.tolist()]


# The shortest block; the last chunk of 8, of 1,024 and of 64 bytes; several loops of the chain and of the sums.
@pytest.mark.parametrize("block_bytes", [248, 1032, 2048, 16 * 1024 + 64, 34 * 1024 + 512])
def test_digests_are_those_of_xxhash(block_bytes: int) -> None:
    memory = torch.randint(0, 256, (3, block_bytes), dtype=torch.uint8)
    expected = [xxhash.xxh3_64_intdigest(memory[block].numpy().tobytes()) for block in (2, 0)]
    assert digests_of(memory, [2, 0]) == expected


def test_blocks_may_repeat_and_fill_several_programs() -> None:
    memory = torch.randint(0, 256, (4, 256), dtype=torch.uint8)
    blocks = [3, 1, 1, 0, 2, 3]
    assert digests_of(memory, blocks) == [xxhash.xxh3_64_intdigest(memory[block].numpy().tobytes()) for block in blocks]


@pytest.mark.parametrize("value", [0, 255])
def test_blocks_of_one_byte_value_overflow_nothing(value: int) -> None:
    memory = torch.full((1, 1088), value, dtype=torch.uint8)
    assert digests_of(memory, [0]) == [xxhash.xxh3_64_intdigest(bytes([value]) * 1088)]


def test_blocks_of_a_wider_row_are_found() -> None:
    memory = torch.randint(0, 256, (3, 512), dtype=torch.uint8)
    assert digests_of(memory[:, :320], [1]) == [xxhash.xxh3_64_intdigest(memory[1, :320].numpy().tobytes())]


def test_the_reference_gives_the_same() -> None:
    memory, found = torch.randint(0, 256, (2, 512), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    reference.block_digests(memory, torch.tensor([1]), torch.empty(0), found)
    assert [found.item() % 2**64] == digests_of(memory, [1])
