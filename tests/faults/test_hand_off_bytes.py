"""Corrupt bytes of a hand-off reach no client.

Real gRPC, agents and machines; the memory transport makes the faults and counts them.
"""

from __future__ import annotations

from core.handoff import HandoffMessage, PullerState, Ready
from kv_transfer.transports.memory_transport import MemoryFabric
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, transfers
from tests.support.faults import Stream, Wire, fault_config
from tests.support.hand_offs import FIRST, agent_name, bystander, pulls_ended
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
        # The owner's prefix cache does not serve the corrupt block to a later request.
        deployment.drop_caches(deployment.decode)
        again = await Stream(deployment.inference, one_chunk).right()
        assert again.answer.finished is not None
        assert again.answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        await deployment.settle()
