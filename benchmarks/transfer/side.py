"""One side of a measured hand-off: a pool, a TransferMachine, a TransferAgent, and the commands of the benchmark.

    python -m benchmarks.transfer.side SPEC    as `packed`

A pool is private memory in huge pages, like the engine's (engine/kv_pool.py), and larger than any cache. One block in
ten is held by others, so the free blocks lie in short runs; a hand-off may also shuffle its blocks, and then hardly two
of them are neighbours on both sides.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import pickle
import random
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.processes import obey_on_loop, take_stdout
from cli.compose import open_transport
from core.config import EngineConfig, TransferConfig
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.machine import Tick
from core.request import SamplingParams
from core.scheduling.block_pool import BlockPool
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.runner import run_step
from fleet.host.service_host import SWITCH_INTERVAL_S
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.protocol.events import (
    AgentEvent,
    AgentFailed,
    CaughtUp,
    OfferEnded,
    PullCompleted,
    PullFailed,
    PullGivenUp,
)
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.transports.transport import PoolMemory
from runtime.driver import Driver

TIMEOUT_S = 120.0
BLOCKS_PER_HELD = 10  # one of so many is held by others
CHUNK_TOKENS = 512  # of a prefill
QUIET_S = 0.01  # a process without work uses less than half of a core for so long
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One process. With an engine, the pool and its layout are those of the model."""

    config: TransferConfig
    layout: KVLayout
    num_blocks: int
    engine: EngineConfig | None = None


def packed(found: Any) -> str:
    return pickle.dumps(found).hex()


def unpacked(text: str) -> Any:
    return pickle.loads(bytes.fromhex(text))


class Side:
    """Each public method is a command. `meet` comes before the others."""

    _peer: AgentAddress

    def __init__(self, spec: Spec) -> None:
        self._runner: Any = None
        memory = self._engine_pool(spec.engine) if spec.engine is not None else random_pool(spec)
        assert memory.view is not None
        self._array = np.frombuffer(memory.view, np.uint8).reshape(memory.num_blocks, -1)
        self._layout = memory.layout
        self._compute = ThreadPoolExecutor(1)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Any] = self._loop.create_future()
        identity = AgentIdentity("bench", secrets.randbits(63) | 1)
        self._agent = TransferAgent(
            spec.config, identity, memory, lambda name: open_transport(spec.config, name), self._on_events
        )
        self._address = self._agent.start()
        self._pool = BlockPool(memory.num_blocks)
        self._machine = TransferMachine(spec.config, self._pool, self._address)
        self._driver: Driver[Any, Any] = Driver(self._machine, self._perform, self._fail, self._flush)
        self._actions: list[Any] = []
        self._offered: list[int] = []
        self._random = random.Random(f"core {min(os.sched_getaffinity(0))}")  # the two sides draw different numbers
        blocks = self._pool.allocate(memory.num_blocks) or []
        held = set(self._random.sample(blocks, len(blocks) // BLOCKS_PER_HELD))
        self._pool.release([block for block in blocks if block not in held])

    def address(self) -> str:
        return packed(self._address)

    def meet(self, address: str) -> None:
        self._peer = unpacked(address)

    async def offer(self, transfer_id: int, num_blocks: int, digests_made: bool, shuffled: bool) -> None:
        """Offer blocks that are ready, and wait for their digests if `digests_made`."""
        blocks = self._offered = self._ordered(self._pool.allocate(num_blocks), shuffled)
        now = self._driver.now()
        self._act(self._machine.offer(transfer_id, self._peer, math.inf, now))
        self._act(self._machine.owner.add_ready(transfer_id, list(enumerate(blocks)), True, (1,), now))
        if digests_made:
            await self._digests_made()

    async def offer_ended(self) -> None:
        await self._end()
        self._pool.release(self._offered)

    async def prefill(self, transfer_id: int, num_tokens: int) -> tuple[float, float]:
        """Compute a prompt and offer it chunk by chunk.

        Returns the seconds of computing, and when it ended on the machine's clock.
        """
        num_blocks = self._layout.num_blocks_for(num_tokens)
        blocks = self._pool.allocate(num_blocks)
        assert blocks is not None, "the pool is too small"
        tokens = np.random.default_rng(2).integers(1000, 40_000, num_tokens).tolist()
        self._act(self._machine.offer(transfer_id, self._peer, math.inf, self._driver.now()))
        seconds = 0.0
        for start in range(0, num_tokens, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, num_tokens - start)
            last = start + count == num_tokens
            plan = StepPlan(
                0, (ScheduledChunk(SequenceView("p", tokens, num_tokens, blocks, SAMPLING), start, count, last, False),)
            )
            started_at = time.perf_counter()
            await self._loop.run_in_executor(self._compute, run_step, self._runner, plan)
            seconds += time.perf_counter() - started_at
            offered = list(enumerate(blocks[: num_blocks if last else (start + count) // self._layout.block_size]))
            tokens_out = (1,) if last else ()
            self._act(self._machine.owner.add_ready(transfer_id, offered, last, tokens_out, self._driver.now()))
        ended_at = time.perf_counter()
        await self._end()
        self._pool.release(blocks)
        return seconds, ended_at

    async def pull(self, transfer_id: int, num_blocks: int, shuffled: bool) -> tuple[float, float]:
        """Pull a sequence. Returns its seconds, and when it ended on the machine's clock."""
        targets = self._ordered(self._pool.reserve(num_blocks), shuffled)
        now = self._driver.now()
        self._act(self._machine.reserve_pull(transfer_id, self._peer, now))
        self._act(self._machine.puller.start(transfer_id, range(len(targets)), now))
        self._act(self._machine.puller.add_targets(transfer_id, dict(enumerate(targets)), now))
        result = await self._end()
        self._pool.cancel_reservation(targets)
        if not isinstance(result, PullCompleted):
            raise RuntimeError(f"the pull failed: {result}")
        return result.stats.total_s, time.perf_counter()

    def read(self, pid: int, num_blocks: int, per_call: int) -> float:
        """Seconds to read shuffled blocks of the peer by process_vm_readv, `per_call` of them with each call."""
        libc, owner = ctypes.CDLL(None, use_errno=True), self._peer
        size = self._layout.block_bytes
        sources = np.random.default_rng(6).permutation(owner.num_blocks)[:num_blocks]
        targets = np.random.default_rng(7).permutation(len(self._array))[:num_blocks]
        calls = [
            (iovec(self._address.pool_base, targets[i : i + per_call], size),
             iovec(owner.pool_base, sources[i : i + per_call], size))
            for i in range(0, num_blocks, per_call)
        ]  # fmt: skip
        started_at = time.perf_counter()
        for local, remote in calls:
            done = libc.process_vm_readv(pid, local, len(local), remote, len(remote), 0)
            if done != len(local) * size:
                raise OSError(ctypes.get_errno(), f"process_vm_readv read {done} bytes")
        return time.perf_counter() - started_at

    def close(self) -> None:
        self._agent.close()

    # ---- inside

    def _engine_pool(self, engine: EngineConfig) -> PoolMemory:
        from engine.factory import build_runner  # the other side needs no torch

        self._runner = runner = build_runner(engine)
        return PoolMemory(runner.pool_address(), runner.num_blocks, runner.layout, runner.pool_memory())

    async def _digests_made(self) -> None:
        """Until the digest thread is done: this process then uses little of its core."""
        async with asyncio.timeout(TIMEOUT_S):
            cpu_s = -QUIET_S
            while time.process_time() - cpu_s > QUIET_S / 2:
                cpu_s = time.process_time()
                await asyncio.sleep(QUIET_S)

    def _ordered(self, blocks: list[int] | None, shuffled: bool) -> list[int]:
        """The blocks in the order of their sequence."""
        assert blocks is not None, "the pool is too small"
        if shuffled:
            self._random.shuffle(blocks)
        return blocks

    def _perform(self, action: Any) -> None:
        if isinstance(action, PullCompleted | PullFailed | OfferEnded):
            self._ended.set_result(action)
        elif not isinstance(action, CaughtUp | PullGivenUp):  # of a move; before a `PullFailed`
            self._actions.append(action)

    def _flush(self) -> None:
        actions, self._actions = self._actions, []
        self._agent.perform(actions, self._machine.alive)

    def _act(self, actions: list[Any]) -> None:
        for action in actions:
            self._perform(action)
        self._flush()
        self._driver.post(Tick())  # sets the driver's timer to the machine's next deadline

    async def _end(self) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            result = await self._ended
        self._ended = self._loop.create_future()
        return result

    def _on_events(self, events: list[AgentEvent]) -> None:
        for event in events:
            if isinstance(event, AgentFailed):
                self._fail(RuntimeError(event.detail))
            else:
                self._driver.post_threadsafe(event)

    def _fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._ended.set_exception, error)


def random_pool(spec: Spec) -> PoolMemory:
    """Private memory, which numpy has the kernel put into huge pages, filled with random bytes."""
    array = np.empty((spec.num_blocks, spec.layout.block_bytes), np.uint8)
    array[:] = np.random.default_rng(1).integers(0, 256, array.shape, np.uint8)
    return PoolMemory(array.ctypes.data, spec.num_blocks, spec.layout, memoryview(array.reshape(-1)))  # type: ignore[arg-type]


def iovec(base: int, blocks: np.ndarray, size: int) -> ctypes.Array[Any]:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    return (Vector * len(blocks))(*[Vector(base + int(block) * size, size) for block in blocks])


async def main() -> None:
    answers = take_stdout()
    side = Side(unpacked(sys.argv[1]))
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # the interpreter's settings are those of a worker
    gc.freeze()
    await obey_on_loop(side, answers)
    side.close()


if __name__ == "__main__":
    asyncio.run(main())
