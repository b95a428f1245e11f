"""An action that no part of a worker handles reaches the transfer agent, and stops it with an error."""

from __future__ import annotations

import queue
from typing import Any, cast

from core.config import TransferConfig
from core.kv_layout import KVLayout
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import AgentEvent, AgentFailed
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)
WAIT_S = 10.0


def test_an_unknown_action_fails_the_agent() -> None:
    events: queue.SimpleQueue[list[AgentEvent]] = queue.SimpleQueue()
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    fabric = MemoryFabric()
    agent = TransferAgent(
        TransferConfig(), AgentIdentity("w", 1), pool, lambda name: MemoryTransport(name, fabric), events.put
    )
    agent.start()
    try:
        agent.perform(cast(Any, [object()]), active=False)
        (event,) = events.get(timeout=WAIT_S)
        assert isinstance(event, AgentFailed)
        assert "object" in event.detail
    finally:
        agent.close()
