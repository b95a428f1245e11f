"""The least worker that can hand off: a pool, a TransferMachine, a TransferAgent, and a queue between them."""

from __future__ import annotations

import queue
import time
import zlib
from collections.abc import Callable

import numpy as np

from core.config import TransferConfig
from core.kv_layout import KVLayout
from core.machine import Tick
from core.scheduling.block_pool import BlockPool
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import (
    AgentAction,
    AgentEvent,
    AgentFailed,
    OfferEnded,
    PullCompleted,
    PullFailed,
    TransferAction,
)
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.transports.transport import PoolMemory, Transport

OpenTransport = Callable[[str], Transport]
OpenPool = Callable[[KVLayout, int], tuple[np.ndarray, PoolMemory]]


def host_pool(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
    """[num_blocks, block_bytes] of zeros, touched, and the PoolMemory over it."""
    array = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    array[:] = 0
    return array, PoolMemory(array.ctypes.data, num_blocks, layout, memoryview(array.reshape(-1).data))


Result = PullCompleted | PullFailed | OfferEnded | AgentFailed


class TransferWorker:
    def __init__(
        self,
        worker_id: str,
        open_transport: OpenTransport,
        config: TransferConfig,
        layout: KVLayout,
        num_blocks: int,
        open_pool: OpenPool = host_pool,
    ) -> None:
        self.bytes, memory = open_pool(layout, num_blocks)  # [num_blocks, block_bytes]
        self.events: queue.SimpleQueue[list[AgentEvent]] = queue.SimpleQueue()
        identity = AgentIdentity(worker_id, incarnation=zlib.crc32(worker_id.encode()))
        self.agent = TransferAgent(config, identity, memory, open_transport, self.events.put)
        self.pool = BlockPool(memory.num_blocks)
        self.machine = TransferMachine(config, self.pool, self.agent.start())
        self.results: list[Result] = []

    def act(self, actions: list[TransferAction]) -> None:
        self.results += [action for action in actions if isinstance(action, PullCompleted | PullFailed | OfferEnded)]
        self.agent.perform([action for action in actions if isinstance(action, AgentAction)], self.machine.alive)

    def step(self, wait_s: float) -> None:
        """Take what the agent reports, or a Tick that is due, within `wait_s`."""
        deadline = self.machine.next_deadline()
        now = time.monotonic()
        try:
            events = self.events.get(timeout=max(0.0, min(wait_s, (deadline or now + wait_s) - now)))
        except queue.Empty:
            events = []
        self.take(events)
        if deadline is not None and time.monotonic() >= deadline:
            self.act(self.machine.handle(Tick(), time.monotonic()))

    def take(self, events: list[AgentEvent]) -> None:
        for event in events:
            if isinstance(event, AgentFailed):
                self.results.append(event)
            else:
                self.act(self.machine.handle(event, time.monotonic()))

    def close(self) -> None:
        self.agent.close()
