"""The order in which the agent's thread performs its actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from core.config import TransferConfig
from core.handoff import AgentAddress, Heartbeat, HeartbeatEntry
from core.kv_layout import KVLayout
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import Connect, SendMessage, StartRead
from kv_transfer.transports.transport import PoolMemory, TransportEvent

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)
OWNER = AgentAddress("owner", 2, b"", 0, 4, LAYOUT, 12.0)


class Wire:
    """A transport whose reads copy before their start returns, as over shared memory."""

    busy = False

    def __init__(self) -> None:
        self.done: list[str] = []

    def connect(self, peer: AgentAddress) -> None:
        self.done.append(f"connect {peer.name}")

    def notify(self, peer: str, payload: bytes) -> None:
        assert payload
        self.done.append(f"message to {peer}")

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        assert len(sources) == len(targets)
        self.done.append(f"read from {peer}")
        return len(self.done)

    def try_complete(self, handle: int) -> bool:
        return handle == len(self.done)

    def poll(self) -> list[TransportEvent]:
        self.done.append("poll")
        return []


def test_a_heartbeat_waits_for_no_queued_read() -> None:
    """Each of 1,024 pulls may queue 4 reads of 128 MB. A pull whose heartbeats wait for them all loses its owner."""
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    config, wire = TransferConfig(verify_digests=False), Wire()
    agent = TransferAgent(config, AgentIdentity("w", 1), pool, lambda _: cast(Any, wire), lambda _: None)
    reads = [StartRead(number, 7, "owner", (number,), (number,), 60.0) for number in range(3)]
    heartbeat = SendMessage("owner", Heartbeat(1, 1, None, (HeartbeatEntry(7, 0),)))
    agent.perform([Connect(OWNER), *reads, heartbeat], active=True)
    while agent._run_once(cast(Any, wire)):
        pass
    read = ["read from owner", "poll"]
    assert wire.done == ["connect owner", "message to owner", *read, *read, *read, "poll"]
