"""Faults on the way of a hand-off, in one process: what is lost, doubled, late, stale, full, or refused.

Real gRPC, agents and machines; the memory transport makes the faults and counts them.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest

from cli.compose import build_prefill_worker
from core.errors import PeerDisconnected, TransportError
from core.handoff import Heartbeat, OwnerState, PullerState, Ready, Release
from kv_transfer.protocol.peers import Drop
from kv_transfer.transports.memory_transport import MemoryFabric
from tests.support.deployment import SLACK_S, busy_blocks, deploy, place, transfers, wait_until_known
from tests.support.faults import LEASE_S, Stream, Wire, fault_config, prompt_of, serves_on
from tests.support.hand_offs import FIRST, SECOND, agent_name, bystander, lose, offers_ended, pulls_ended
from tests.support.steps import Gate
from tests.support.waiting import until

# ---- messages


async def test_a_lost_ready_costs_time_and_nothing_else(wire: Wire) -> None:
    async with deploy(fault_config()) as deployment:
        gate = Gate(deployment.prefill[0])
        gate.close(after=1)  # between two chunks, so that heartbeats are due
        wire.rule = lose(Ready, 1)
        stream = Stream(deployment.inference, FIRST)
        await until(lambda: wire.done["Ready"] == 1, "a READY is lost")
        await until(lambda: wire.seen["Heartbeat"] >= 3, "heartbeats go on")
        gate.open()
        await stream.right()
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 1
        await deployment.settle()


async def test_a_lost_release_costs_the_owner_its_blocks_until_the_lease_ends(wire: Wire) -> None:
    async with deploy(fault_config()) as deployment:
        wire.rule = lose(Release)
        stream = Stream(deployment.inference, FIRST)
        await until(lambda: wire.done["Release"] == 1, "the RELEASE is lost")
        assert busy_blocks(deployment.prefill[0]) == {"leased": 5}
        await stream.right()
        await deployment.settle()
        assert offers_ended(deployment, OwnerState.EXPIRED) == 1
        wire.rule = lambda _message: None
        await serves_on(deployment.inference)


async def test_a_late_release_frees_nothing_that_belongs_to_another(fabric: MemoryFabric, wire: Wire) -> None:
    async with deploy(fault_config(read_grace_s=30.0)) as deployment:
        wire.rule = lose(Release, 1)
        await Stream(deployment.inference, FIRST).right()
        await until(lambda: offers_ended(deployment, OwnerState.EXPIRED) == 1, "the lease ends")
        deployment.drop_caches(deployment.decode)
        fabric.stall_reads = True
        second = Stream(deployment.inference, FIRST)  # the same blocks, leased to another transfer
        await until(lambda: fabric.faults_done["stall"], "they are being read")
        leased = busy_blocks(deployment.prefill[0])
        assert leased
        fabric.inject(*wire.kept[0])
        dropped = transfers(deployment.prefill[0]).counters.dropped
        await until(lambda: dropped[Drop.LATE] == 1, "the late one is dropped")
        assert busy_blocks(deployment.prefill[0]) == leased
        fabric.stall_reads = False
        await second.right()
        await deployment.settle()


async def test_a_peer_that_restarts_under_its_name_is_another_one(fabric: MemoryFabric, wire: Wire) -> None:
    config = fault_config()
    async with deploy(config) as deployment:
        old, decode_agent = deployment.prefill[0], transfers(deployment.decode[0]).address.name
        other = await bystander(deployment)
        gate = Gate(old)
        gate.close(after=1)
        counters = transfers(deployment.decode[0]).counters
        num_reads = counters.num_reads
        stream = Stream(deployment.inference, FIRST)
        await until(lambda: counters.num_reads > num_reads, "the first chunk is read")
        wire.rule = lose(Ready)
        gate.open()
        await until(lambda: wire.kept, "its last word is on the way")
        fabric.kill(agent_name(deployment))
        await old.stop()

        new = build_prefill_worker(config, place(0))
        deployment.prefill[0] = new
        started = await new.start()
        deployment.endpoints[id(new)] = started
        await deployment.router.set_workers([started, deployment.endpoints[id(deployment.decode[0])]])
        await wait_until_known(deployment, 2)
        wire.rule = lambda _message: None
        assert transfers(new).address.name.split(".")[0] == wire.kept[0][0].split(".")[0], "the same worker id"
        await stream.right()
        assert stream.answer.finished is not None
        assert stream.answer.finished.attempts == 2
        await other.right()

        gate = Gate(new)
        gate.close()
        second = Stream(deployment.inference, SECOND)
        await until(lambda: gate.waiting, "the new one computes")
        fabric.inject(wire.kept[0][0], decode_agent, wire.kept[0][2])
        dropped = transfers(deployment.decode[0]).counters.dropped
        await until(lambda: dropped[Drop.LATE] + dropped[Drop.UNKNOWN_TRANSFER] == 1, "the old one's READY is dropped")
        gate.open()
        await second.right()
        await deployment.settle()
        await new.stop()


# ---- time and room


@pytest.mark.parametrize("verify_digests", [True, False])
async def test_a_lease_that_expires_during_a_read_makes_its_bytes_worthless(
    fabric: MemoryFabric, wire: Wire, verify_digests: bool
) -> None:
    """Also without digests: the lease alone must keep what was overwritten from being used."""
    config = fault_config(verify_digests=verify_digests, read_grace_s=30.0)
    async with deploy(config) as deployment:
        other = await bystander(deployment, num_output=120)
        fabric.stall_reads = True
        wire.rule = lose(Heartbeat)
        stream = Stream(deployment.inference, FIRST)
        await until(lambda: offers_ended(deployment, OwnerState.EXPIRED) == 1, "the lease ends", LEASE_S + SLACK_S)
        assert busy_blocks(deployment.decode[0])["incoming"] == 5, "targets stay reserved while a read may write"
        assert fabric.faults_done["stall"]
        assert wire.done["Heartbeat"]
        deployment.drop_caches(deployment.prefill)
        pool = fabric.transports[agent_name(deployment)]._pool
        assert pool is not None
        assert pool.view is not None
        pool.view[:] = bytes([0xAA]) * pool.num_bytes  # somebody else's content now
        wire.rule = lambda _message: None
        fabric.stall_reads = False
        await stream.right()
        await until(lambda: pulls_ended(deployment, PullerState.FAILED) == 1, "the reads end, and the pull with them")
        await other.right()
        await deployment.settle()
        await serves_on(deployment.inference)


async def test_a_read_without_end_is_given_up_and_the_request_recomputed(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        fabric.stall_reads = True
        stream = Stream(deployment.inference, FIRST)
        await until(lambda: pulls_ended(deployment, PullerState.FAILED) == 1, "the read is given up")
        assert fabric.faults_done["stall"]
        fabric.stall_reads = False
        await stream.right()
        await other.right()
        await deployment.settle()


async def test_a_hand_off_to_a_full_pool_waits_its_turn(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        assert fabric.transports, "it must be the memory transport"
        other = await bystander(deployment, num_output=30)
        gate = Gate(deployment.decode[0])
        gate.close()  # or the other one might end before it is seen that somebody waits for its blocks
        pool = deployment.decode[0]._parts.machine.core.pool  # type: ignore[union-attr]
        filled = pool.allocate(pool.num_available - 3)
        assert filled is not None
        waiting = Stream(deployment.inference, FIRST)
        await until(lambda: deployment.decode[0]._parts.machine.load().num_pulls_waiting == 1, "it waits")  # type: ignore[union-attr]
        assert not other.ended
        gate.open()
        await other.right()
        await waiting.right()
        assert waiting.answer.finished is not None
        assert waiting.answer.finished.attempts == 1
        pool.release(filled)
        await deployment.settle()


async def test_a_pool_that_stays_full_ends_the_request_at_its_deadline(fabric: MemoryFabric) -> None:
    async with deploy(fault_config()) as deployment:
        assert fabric.transports, "it must be the memory transport"
        other = await bystander(deployment, num_output=200)
        pool = deployment.decode[0]._parts.machine.core.pool  # type: ignore[union-attr]
        filled = pool.allocate(pool.num_available - 14)  # enough for the other one to grow
        assert filled is not None
        waiting = Stream(deployment.inference, prompt_of(3, num_tokens=400), timeout_s=1.5)
        await until(lambda: deployment.decode[0]._parts.machine.load().num_pulls_waiting == 1, "it waits")  # type: ignore[union-attr]
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
            assert stream.answer.finished is None or stream.answer.finished.attempts > 1, "it met no failure"
        await other.right()
        await deployment.settle()
