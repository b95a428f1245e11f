"""Bytes that change on the way of a hand-off, in memory or in a cache reach nobody.

Real gRPC, agents and machines; the memory transport makes the faults and counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.handoff import AbortReason, HandoffMessage, OwnerState, PullerState, Ready, Release
from kv_transfer.transports.memory_transport import MemoryFabric
from protos import inference_pb2
from tests.support.deployment import Deployment, deploy, transfers
from tests.support.faults import Stream, Wire, fault_config, prompt_of, serves_on
from tests.support.hand_offs import FIRST, SECOND, agent_name, bystander, offers_ended, pulls_ended
from tests.support.steps import Gate
from tests.support.waiting import until


def reported(deployment: Deployment, role: str) -> int:
    """Corrupt blocks of a pool, as the router knows of them."""
    shell = deployment.router._shell
    assert shell is not None
    return sum(record.load.num_corrupt_blocks for record in shell.machine.workers if record.role.value == role)


async def test_a_byte_flipped_on_the_way_is_read_again(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        fabric.flip_byte_in_read(1)
        stream = await Stream(deployment.inference, FIRST).right()
        assert fabric.faults_done["flip"] == 1
        assert transfers(deployment.decode[0]).counters.num_digest_mismatches == 1
        await until(lambda: reported(deployment, "decode") == 1, "the router is told of it")
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 1, "reading once more was enough"
        await other.right()
        await deployment.settle()


async def test_bytes_that_flip_at_every_reading_end_the_hand_off_and_not_the_request(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        for nth in range(1, deployment.config.transfer.max_read_attempts + 1):
            fabric.flip_byte_in_read(nth)
        gate = Gate(deployment.prefill[0])
        gate.close()  # so that all blocks are read in one go
        streaming = Stream(deployment.inference, FIRST[:60])
        await until(lambda: gate.waiting, "the prompt waits")
        gate.open()
        stream = await streaming.right()
        assert fabric.faults_done["flip"] == 2
        assert pulls_ended(deployment, PullerState.FAILED) == 1
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 2
        assert stream.answer.finished.path == inference_pb2.REQUEST_PATH_RECOMPUTED
        await other.right()
        await deployment.settle()


def spoil(fabric: MemoryFabric, deployment: Deployment, block: int) -> None:
    """One bit of the owner's memory changes."""
    pool = fabric.transports[agent_name(deployment)]._pool
    assert pool is not None
    pool.block(block)[5] ^= 0x40


def offered_blocks(wire: Wire) -> list[int]:
    """Blocks that READYs name from now on; other rules are off."""
    seen: list[int] = []

    def note(message: HandoffMessage) -> None:
        if isinstance(message, Ready):
            seen.extend(message.blocks.blocks)

    wire.rule = note
    return seen


@pytest.mark.parametrize("reader_has_the_block", [False, True])
async def test_a_byte_that_changes_in_the_owners_cache_reaches_nobody(
    fabric: MemoryFabric, wire: Wire, reader_has_the_block: bool
) -> None:
    """Also where the reader needs only what the owner computes from the spoilt block, and the first token."""
    async with deploy(fault_config()) as deployment:
        blocks = offered_blocks(wire)
        await Stream(deployment.inference, FIRST[:64]).right()
        await deployment.settle()
        spoil(fabric, deployment, blocks[1])
        if not reader_has_the_block:
            deployment.drop_caches(deployment.decode)
        counters = transfers(deployment.prefill[0]).counters
        assert counters.num_spoilt_blocks == 0
        longer = FIRST[:64] + SECOND[:60]
        stream = await Stream(deployment.inference, longer).right()
        assert counters.num_spoilt_blocks == 1, "found before anything computed from it had left"
        await until(lambda: reported(deployment, "prefill") == 1, "the router is told of it")
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 2
        await deployment.settle()
        again = await Stream(deployment.inference, FIRST[:64] + prompt_of(5)[:60]).right()
        assert again.answer.finished is not None
        assert again.answer.finished.attempts == 1
        await deployment.settle()


async def test_a_mismatch_whose_release_is_lost_is_found_by_the_next_request(fabric: MemoryFabric, wire: Wire) -> None:
    spoilt: list[int] = []

    def flip_after_the_digest_and_lose_the_release(message: HandoffMessage) -> Sequence[int] | None:
        if isinstance(message, Ready) and message.last and not spoilt:
            spoilt.append(message.blocks.blocks[0])
            spoil(fabric, deployment, spoilt[0])
        return () if isinstance(message, Release) and message.reason is AbortReason.DIGEST_MISMATCH else None

    async with deploy(fault_config()) as deployment:
        wire.rule = flip_after_the_digest_and_lose_the_release
        await Stream(deployment.inference, FIRST[:64]).right()
        assert (len(spoilt), wire.done["Release"]) == (1, 1)
        assert pulls_ended(deployment, PullerState.FAILED) == 1
        await deployment.settle()
        assert offers_ended(deployment, OwnerState.EXPIRED) == 1, "the owner has not heard of the mismatch"
        deployment.drop_caches(deployment.decode)
        counters = transfers(deployment.prefill[0]).counters
        assert counters.num_spoilt_blocks == 0
        await Stream(deployment.inference, FIRST[:64]).right()
        assert counters.num_spoilt_blocks == 1
        await deployment.settle()
        await serves_on(deployment.inference)


async def test_a_byte_that_changes_in_the_source_pool_after_the_digest_reaches_nobody(
    fabric: MemoryFabric, wire: Wire
) -> None:
    changed: list[int] = []
    one_chunk = FIRST[:64]  # the first token is out before the byte changes, and every block is full and cached

    def flip_after_the_digest(message: HandoffMessage) -> None:
        if isinstance(message, Ready) and message.last and not changed:  # its digests are in it already
            pool = fabric.transports[agent_name(deployment)]._pool
            assert pool is not None
            changed.append(message.blocks.blocks[0])
            pool.block(changed[0])[5] ^= 0x40

    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        wire.rule = flip_after_the_digest
        stream = await Stream(deployment.inference, one_chunk).right()
        assert len(changed) == 1
        assert pulls_ended(deployment, PullerState.FAILED) == 1
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 2
        await other.right()
        await deployment.settle()
        # Nor does the owner's prefix cache bring the spoilt block to a later request.
        deployment.drop_caches(deployment.decode)
        again = await Stream(deployment.inference, one_chunk).right()
        assert again.answer.finished is not None
        assert again.answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()
