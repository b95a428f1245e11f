"""Faults on the way of a hand-off, in one process: what is stale, full, refused or corrupt.

Real gRPC, agents and machines; the memory transport makes the faults and counts them.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest

from core.errors import PeerDisconnected, TransportError
from core.handoff import HandoffMessage, PullerState, Ready
from kv_transfer.transports.memory_transport import MemoryFabric
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, transfers
from tests.support.faults import (
    FIRST,
    Stream,
    Wire,
    agent_name,
    bystander,
    fault_config,
    prompt_of,
    pulls_ended,
    serves_on,
)
from tests.support.steps import Gate
from tests.support.waiting import until

# ---- time and room


async def test_a_hand_off_to_a_full_pool_waits_its_turn(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        assert fabric.transports, "it must be the memory transport"
        other = await bystander(deployment, num_output=30)
        gate = Gate(deployment.decode[0])
        gate.close()  # or the other one might end before it is seen that somebody waits for its blocks
        pool = deployment.decode[0]._parts.machine.core.pool
        filled = pool.allocate(pool.num_available - 3)
        assert filled is not None
        waiting = Stream(deployment.inference, FIRST)
        await until(lambda: deployment.decode[0]._parts.machine.load().num_pulls_waiting == 1, "it waits")
        assert not other.ended
        gate.open()
        await other.right()
        await waiting.right()
        assert waiting.finished.attempts == 1
        pool.release(filled)
        await deployment.settle()


async def test_a_pool_that_stays_full_ends_the_request_at_its_deadline(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        assert fabric.transports, "it must be the memory transport"
        other = await bystander(deployment, num_output=200)
        pool = deployment.decode[0]._parts.machine.core.pool
        filled = pool.allocate(pool.num_available - 14)  # enough for the other one to grow
        assert filled is not None
        waiting = Stream(deployment.inference, prompt_of(3, num_tokens=400), timeout_s=1.5)
        await until(lambda: deployment.decode[0]._parts.machine.load().num_pulls_waiting == 1, "it waits")
        await waiting.typed(grpc.StatusCode.DEADLINE_EXCEEDED)
        await other.right()
        pool.release(filled)
        await deployment.settle()
        await serves_on(deployment.inference)


# ---- every operation of the transport, one after the other


@pytest.mark.parametrize("error", [TransportError, PeerDisconnected])
async def test_an_error_at_the_nth_operation_for_every_n(fabric: MemoryFabric, error: type[TransportError]) -> None:
    """N = 1, 2, 3, ... in a fresh deployment each, until a request passes without meeting its error."""
    met = 0
    for nth in range(1, 40):
        async with deploy(fault_config(lease_s=0.4)) as deployment:
            fabric.fail_operation(nth, error(f"operation {nth}"))
            before = fabric.faults_done["fail"]
            await Stream(deployment.inference, FIRST, num_output=6).right()
            await deployment.settle()
            if fabric.faults_done["fail"] == before:
                break
            met += 1
            await serves_on(deployment.inference)
    else:
        raise AssertionError("no run passed untouched")
    assert met >= 4, "WANT, READY, a read and RELEASE at least; the two have met before"
    assert nth == met + 1


async def test_errors_all_the_time_end_typed_and_inside_the_deadline(fabric: MemoryFabric) -> None:
    async with deploy(fault_config(local_prefill="never")) as deployment:
        other = await bystander(deployment)
        for nth in range(1, 2000):
            fabric.fail_operation(nth, TransportError("nothing goes"))
        streams = [Stream(deployment.inference, prompt_of(20 + n), timeout_s=8.0) for n in range(4)]
        await asyncio.gather(*(stream.right_or_typed() for stream in streams))
        assert fabric.faults_done["fail"] >= 1
        for stream in streams:  # one failed message loses the peer for all that is under way
            assert stream.answer.end is None or stream.finished.attempts > 1, "it met no failure"
        await other.right()
        await deployment.settle()


# ---- corrupt bytes


def reported(deployment: Deployment, role: str) -> int:
    """Corrupt blocks of a pool, as the router knows of them."""
    shell = deployment.router._shell
    return sum(record.load.num_corrupt_blocks for record in shell.view.workers() if record.role.value == role)


async def test_a_byte_flipped_on_the_way_is_read_again(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        fabric.flip_byte_in_read(1)
        stream = await Stream(deployment.inference, FIRST).right()
        assert fabric.faults_done["flip"] == 1
        assert transfers(deployment.decode[0]).counters.num_digest_mismatches == 1
        await until(lambda: reported(deployment, "decode") == 1, "the router is told of it")
        assert stream.finished.attempts == 1, "reading once more was enough"
        await other.right()
        await deployment.settle()


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
        assert stream.finished.attempts == 2
        await other.right()
        await deployment.settle()
        # The owner's prefix cache does not serve the corrupt block to a later request.
        deployment.drop_caches(deployment.decode)
        again = await Stream(deployment.inference, one_chunk).right()
        assert again.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()
