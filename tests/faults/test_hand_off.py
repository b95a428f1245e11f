"""Faults on the way of a hand-off, in one process: what is refused, lost, corrupt, or of another version.

Real gRPC, agents and machines; the memory transport makes the faults and counts them.
"""

from __future__ import annotations

import logging

import pytest

from core.errors import PeerDisconnected, TransportError
from core.handoff import PROTOCOL_VERSION, PullerState, Ready
from core.paths import PathState
from kv_transfer import agent as agent_module
from kv_transfer.transports.memory_transport import MemoryFabric
from protos import handoff_pb2
from protos.handoff_codec import decode, encode, encode_version
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, transfers
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.steps import slow_down
from tests.support.waiting import until

LONG_LEASE_S = 12.0  # three unanswered heartbeats take half of it
FIRST = prompt_of(1)


def pulls_ended(deployment: Deployment, state: PullerState) -> int:
    return transfers(deployment.decode[0]).counters.pulls[state.value]


async def bystander(deployment: Deployment) -> Stream:
    """A request in decode while a fault happens. The fault must not change its stream."""
    slow_down(deployment.decode[0], 0.01)
    return await Stream(deployment.inference, prompt_of(77), 60).reach(3)


# ---- every operation of the transport, one after the other


@pytest.mark.parametrize("error", [TransportError, PeerDisconnected])
async def test_an_error_at_the_nth_operation_for_every_n(fabric: MemoryFabric, error: type[TransportError]) -> None:
    """N = 1, 2, 3, ... in a fresh deployment each, until a request passes without meeting its error."""
    met = 0
    for nth in range(1, 40):
        async with deploy(fault_config()) as deployment:
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
        for stream in streams:
            if (await stream.end()).code is not None:
                await stream.typed()
                continue
            await stream.right()
            assert stream.finished.attempts > 1, "it met no failure: one failed message loses the peer for all"
        assert fabric.faults_done["fail"] >= 1
        await other.right()
        await deployment.settle()


# ---- corrupt bytes


async def test_a_byte_that_changes_in_the_source_pool_after_the_digest_reaches_nobody(fabric: MemoryFabric) -> None:
    changed: list[int] = []
    one_chunk = FIRST[:64]  # the first token is out before the byte changes, and every block is full and cached

    def flip_after_the_digest(sender: str, _: str, payload: bytes) -> tuple[int]:
        message = decode(payload)
        if isinstance(message, Ready) and message.last and not changed:  # its digests are in it already
            pool = fabric.transports[sender]._pool
            assert pool is not None
            changed.append(message.blocks.blocks[0])
            pool.block(changed[0])[5] ^= 0x40
        return (0,)  # the message arrives

    async with deploy(fault_config()) as deployment:
        other = await bystander(deployment)
        fabric.fate = flip_after_the_digest
        stream = await Stream(deployment.inference, one_chunk).right()
        assert len(changed) == 1
        assert pulls_ended(deployment, PullerState.FAILED) == 1
        assert stream.finished.attempts == 2
        workers = deployment.router._shell.view.workers
        await until(lambda: any(w.load.num_corrupt_blocks for w in workers()), "the router is told of it")
        await other.right()
        await deployment.settle()
        # The owner's prefix cache does not serve the corrupt block to a later request.
        deployment.drop_caches(deployment.decode)
        again = await Stream(deployment.inference, one_chunk).right()
        assert again.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()


# ---- two versions of the protocol


def of_another_version(payload: bytes) -> bytes:
    envelope = handoff_pb2.HandoffEnvelope.FromString(payload)
    envelope.version += 1
    return envelope.SerializeToString()


@pytest.mark.usefixtures("fabric")
async def test_peers_of_two_protocol_versions_recompute_each_request_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each agent sees the version of the other as too new."""
    monkeypatch.setattr(agent_module, "encode", lambda message: of_another_version(encode(message)))
    monkeypatch.setattr(agent_module, "encode_version", lambda: of_another_version(encode_version()))
    with caplog.at_level(logging.WARNING):
        async with deploy(fault_config(lease_s=LONG_LEASE_S)) as deployment:
            for seed in range(3):
                stream = await Stream(deployment.inference, prompt_of(seed), timeout_s=LONG_LEASE_S / 4).right()
                assert stream.finished.path != inference_pb2.REQUEST_PATH_DISAGGREGATED
            assert pulls_ended(deployment, PullerState.COMPLETE) == 0
            assert pulls_ended(deployment, PullerState.FAILED) >= 1, "the versions met"
            (path,) = transfers(deployment.decode[0]).paths
            assert path.state is PathState.UNREACHABLE
            await deployment.settle()
    assert f"version must be {PROTOCOL_VERSION}, is {PROTOCOL_VERSION + 1}" in caplog.text
