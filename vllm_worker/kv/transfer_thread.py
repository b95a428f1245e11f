"""The shell of `EngineTransfers`: one thread, which owns the machine, and the agent with its own threads.

    engine's thread --post--> [ transfer thread: EngineTransfers ] --perform--> agent
                                          ^---------- on_events ------------------'

vLLM calls its connector between its steps only, and not at all while it is idle. So messages of peers, leases and reads
have a thread that waits for no step. It holds no lock: it takes events from a queue, and leaves results in queues.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from core.config import TransferConfig
from core.handoff import AgentAddress
from core.machine import Tick
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import AgentEvent, AgentFailed
from kv_transfer.transports.transport import PoolMemory, Transport
from vllm_worker.kv.transfers import Command, EngineTransfers

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers
CLOSE_TIMEOUT_S = 5.0  # for the thread; beyond: it ends with the process


class TransferThread:
    """Raises `TransportError` in its constructor. `failure` says why it has ended; empty while it runs."""

    def __init__(
        self,
        config: TransferConfig,
        identity: AgentIdentity,
        pool: PoolMemory,
        open_transport: Callable[[str], Transport],
        vocab_size: int,
    ) -> None:
        self.failure = ""
        self._has_news = threading.Event()  # for the engine
        self._events: queue.SimpleQueue[Command | AgentEvent | None] = queue.SimpleQueue()
        self._agent = TransferAgent(config, identity, pool, open_transport, self._on_events)
        self.address: AgentAddress = self._agent.start()
        self.machine = EngineTransfers(config, self.address, vocab_size)
        self._thread = threading.Thread(target=self._run, name="tandem-transfers", daemon=True)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Returns at once."""
        self._events.put(command)

    def wait_for_news(self, timeout_s: float) -> None:
        """Return as soon as a pull has ended or blocks are free, or the thread has failed."""
        self._has_news.wait(timeout_s)
        self._has_news.clear()

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._agent.close()

    def _on_events(self, events: list[AgentEvent]) -> None:
        for event in events:
            self._events.put(event)

    def _run(self) -> None:
        try:
            while not self.failure:
                event = self._next_event()
                if event is None:
                    return
                if isinstance(event, AgentFailed):
                    self.failure = event.detail
                    return
                machine = self.machine
                self._agent.perform(machine.handle(event, time.monotonic()), machine.transfers.alive)
                if machine.outcomes or machine.blocks.freed:
                    self._has_news.set()
        except Exception as error:
            # The thread's boundary. The engine must end without its transfers: its requests would wait for ever.
            logger.exception("the KV transfers of this engine failed")
            self.failure = f"{type(error).__name__}: {error}"

    def _next_event(self) -> Command | AgentEvent | Tick | None:
        """A `Tick` at the machine's deadline. None: close."""
        deadline = self.machine.next_deadline()
        try:
            return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return Tick()
