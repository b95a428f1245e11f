"""One side of a measured hand-off: a pool, a TransferMachine and a TransferAgent, and what may be asked of them.

The pool is private memory in huge pages, like the engine's (engine/kv_pool.py): numpy asks the kernel for them. It is
larger than any cache, so that bytes are cold, and touched. Blocks that others hold lie strewn over it, one by one, so
the free ones are in short runs; or the blocks of a hand-off are shuffled, and hardly two are neighbours on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from cli.compose import open_transport
from core.block_pool import BlockPool
from core.config import EngineConfig, TransferConfig
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.request import SamplingParams
from core.step import ScheduledChunk, StepPlan
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.events import AgentEvent, AgentFailed, CacheChecked, OfferEnded, PullCompleted, PullFailed, PullStats
from kv_transfer.machine import TransferMachine
from kv_transfer.reads import SLICE_BYTES
from kv_transfer.transports.transport import PoolMemory, ReadDone, Transport
from runtime.driver import Driver

TIMEOUT_S = 120.0
BLOCKS_PER_HELD = 10  # one of so many is held by others
BLOCKS_PER_READV = 16  # per call of the system
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a process is to be. With an engine its layout is the model's, and its puller has the same."""

    config: TransferConfig
    layout: KVLayout
    num_blocks: int
    core: int | None  # None: the scheduler's choice
    environment: dict[str, str]
    engine: EngineConfig | None = None  # with it, the pool is that of a real runner


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a span of time in one process."""

    seconds: float
    cpu_seconds: float
    longest_stall_s: float  # of its event loop


class Side:
    def __init__(self, spec: Spec) -> None:
        self._runner: Any = None
        if spec.engine is not None:
            from engine.factory import build_runner

            self._runner = build_runner(spec.engine)
            memory = PoolMemory(
                self._runner.pool_address(), self._runner.num_blocks, self._runner.layout, self._runner.pool_memory()
            )
            self.array = np.frombuffer(memory.view, np.uint8).reshape(memory.num_blocks, -1)
        else:
            self.array = np.empty((spec.num_blocks, spec.layout.block_bytes), np.uint8)
            self.array[:] = np.random.default_rng(1).integers(0, 256, self.array.shape, np.uint8)
            memory = PoolMemory(
                self.array.ctypes.data, spec.num_blocks, spec.layout, memoryview(self.array.reshape(-1))
            )
        self.layout = memory.layout
        self._config, self._memory = spec.config, memory
        self._bare: Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Any] = self._loop.create_future()
        identity = AgentIdentity("bench", secrets.randbits(63) | 1)
        self._agent = TransferAgent(
            spec.config, identity, memory, lambda name: open_transport(spec.config, name), self._on_events
        )
        self.address = self._agent.start()
        self._pool = BlockPool(memory.num_blocks)
        self._machine = TransferMachine(spec.config, self._pool, self.address)
        self._driver: Driver[Any, Any] = Driver(self._machine, self._perform, self._fail, self._flush)
        self._actions: list[Any] = []
        self._offered: list[int] = []
        self._random = random.Random(f"of core {spec.core}")  # each side its own
        blocks = self._pool.allocate(memory.num_blocks) or []
        held = set(self._random.sample(blocks, len(blocks) // BLOCKS_PER_HELD))
        self._pool.release([block for block in blocks if block not in held])

    # ---- what the parent asks for

    async def offer(
        self, transfer_id: int, peer: AgentAddress, num_blocks: int, digests_made: bool, shuffled: bool
    ) -> None:
        """Offer blocks that are ready; returns when their digests are, if they shall be. `offer_ended` follows."""
        blocks = await self._taken(self._pool.allocate(num_blocks), shuffled)
        self._offered = blocks
        now = self._driver.now()
        self._act(self._machine.offer(transfer_id, peer, now))
        self._act(self._machine.add_ready(transfer_id, list(enumerate(blocks)), True, 1, now))
        if digests_made:
            self._act(self._machine.check_cached(transfer_id, blocks[-1:]))  # after those before it: one thread
            await self._end()

    async def offer_ended(self) -> None:
        await self._end()
        self._pool.release(self._offered)

    async def prefill(
        self, transfer_id: int, peer: AgentAddress, num_tokens: int, chunk: int, late: bool
    ) -> tuple[float, float]:
        """Compute a prompt and offer it chunk by chunk, or all of it `late`, at the end.

        Returns the seconds of computing, and when it ended.
        """
        num_blocks = self.layout.num_blocks_for(num_tokens)
        blocks = self._pool.allocate(num_blocks)
        assert blocks is not None
        tokens = np.random.default_rng(2).integers(1000, 40_000, num_tokens).tolist()
        self._act(self._machine.offer(transfer_id, peer, self._driver.now()))
        seconds = 0.0
        for start in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - start)
            last = start + count == num_tokens
            plan = StepPlan(0, (ScheduledChunk("p", tokens, num_tokens, start, count, blocks, last, SAMPLING),))
            begun = time.perf_counter()
            await self._loop.run_in_executor(self._compute, self._runner.run, plan)
            seconds += time.perf_counter() - begun
            if last or not late:
                ready = num_blocks if last else (start + count) // self.layout.block_size
                offered = list(enumerate(blocks[:ready]))
                self._act(self._machine.add_ready(transfer_id, offered, last, 1 if last else None, self._driver.now()))
        ended_at = time.perf_counter()
        await self._end()
        self._pool.release(blocks)
        return seconds, ended_at

    async def pull(
        self, transfer_id: int, owner: AgentAddress, num_blocks: int, num_cached: int = 0, shuffled: bool = False
    ) -> tuple[PullStats, float]:
        """Pull what is not cached of a sequence. Returns also when it had ended, on a clock all processes share."""
        targets = await self._taken(self._pool.reserve(num_blocks - num_cached), shuffled)
        target_of = dict(enumerate(targets, num_cached))
        now = self._driver.now()
        self._act(self._machine.reserve_pull(transfer_id, owner, now))
        self._act(self._machine.start_pull(transfer_id, target_of, now))
        result = await self._end()
        self._pool.cancel_reservation(targets)
        if isinstance(result, PullFailed):
            raise RuntimeError(f"{result.reason}: {result.detail}")
        assert isinstance(result, PullCompleted)
        return result.stats, time.perf_counter()

    async def copy_memory(self, num_blocks: int) -> float:
        """Seconds to copy blocks to others of this pool, each cold."""
        order = np.random.default_rng(5).permutation(len(self.array))
        begun = time.perf_counter()
        for source, target in zip(order[:num_blocks], order[::-1][:num_blocks], strict=True):
            np.copyto(self.array[target], self.array[source])
        return time.perf_counter() - begun

    async def read_process(
        self, pid: int, owner: AgentAddress, num_blocks: int, per_call: int = BLOCKS_PER_READV
    ) -> float:
        return self._read_process(pid, owner, num_blocks, per_call)

    async def read_and_hash(self, pid: int, owner: AgentAddress, num_blocks: int) -> float:
        """As many at a time as stay in the cache, and each hashed at once: the least that a core can do where every
        block is verified."""
        return self._read_process(pid, owner, num_blocks, max(1, SLICE_BYTES // self.layout.block_bytes), hashed=True)

    def _read_process(
        self, pid: int, owner: AgentAddress, num_blocks: int, per_call: int, hashed: bool = False
    ) -> float:
        """Seconds to read blocks out of the owner's memory by process_vm_readv, so many with each call."""
        libc = ctypes.CDLL(None, use_errno=True)
        size = self.layout.block_bytes
        sources, targets = self._scattered(owner, num_blocks)
        pieces = [
            (self._vectors(self.address.pool_base, targets[i : i + per_call], size),
             self._vectors(owner.pool_base, sources[i : i + per_call], size), targets[i : i + per_call].tolist())
            for i in range(0, len(sources), per_call)
        ]  # fmt: skip
        begun = time.perf_counter()
        for local, remote, blocks in pieces:
            done = libc.process_vm_readv(pid, local, len(local), remote, len(remote), 0)
            if done != len(local) * size:
                raise OSError(ctypes.get_errno(), f"process_vm_readv read {done} bytes")
            for block in blocks if hashed else ():
                xxhash.xxh3_64_intdigest(self.array[block])
        return time.perf_counter() - begun

    async def read_bare(self, owner: AgentAddress, num_blocks: int) -> float:
        """Seconds to read blocks by a transport alone, read after read: the most that the path around it can reach."""
        return await asyncio.to_thread(self._read_bare, owner, num_blocks)

    async def hash_memory(self, num_blocks: int) -> float:
        """Seconds to hash blocks of this pool, each cold."""
        order = np.random.default_rng(8).permutation(len(self.array))[:num_blocks].tolist()
        begun = time.perf_counter()
        for block in order:
            xxhash.xxh3_64_intdigest(self.array[block])
        return time.perf_counter() - begun

    async def idle(self, seconds: float) -> Cost:
        with self._watched() as costs:
            await asyncio.sleep(seconds)
        return costs[0]

    async def pull_often(self, owner: AgentAddress, transfer_ids: list[int], num_blocks: int) -> Cost:
        """Several pulls, while the event loop is watched."""
        with self._watched() as costs:
            async with self._watching_loop():
                for transfer_id in transfer_ids:
                    await self.pull(transfer_id, owner, num_blocks, shuffled=True)
        return costs[0]

    async def read_often(self, pid: int, owner: AgentAddress, times: int, num_blocks: int) -> Cost:
        """The same bytes by process_vm_readv, on a thread that does nothing else, while the event loop is watched."""
        with self._watched() as costs:
            async with self._watching_loop():
                for _ in range(times):
                    await asyncio.to_thread(self._read_process, pid, owner, num_blocks, BLOCKS_PER_READV)
        return costs[0]

    async def offer_often(self, peer: AgentAddress, transfer_ids: list[int], num_blocks: int) -> None:
        for transfer_id in transfer_ids:
            await self.offer(transfer_id, peer, num_blocks, False, True)
            await self.offer_ended()

    async def about(self) -> tuple[int, AgentAddress]:
        return os.getpid(), self.address

    async def close(self) -> None:
        await asyncio.to_thread(self._agent.close)
        if self._bare is not None:
            self._bare.close()

    # ---- inside

    async def _taken(self, blocks: list[int] | None, shuffled: bool) -> list[int]:
        """What the pool gave, in the order in which a sequence has it."""
        assert blocks is not None, "the pool is too small"
        if shuffled:  # not on the loop, which may be watched
            await asyncio.to_thread(self._random.shuffle, blocks)
        return blocks

    @property
    def _compute(self) -> ThreadPoolExecutor:
        if not hasattr(self, "_executor"):
            self._executor = ThreadPoolExecutor(1)
        return self._executor

    def _read_bare(self, owner: AgentAddress, num_blocks: int) -> float:
        if self._bare is None:
            self._bare = open_transport(self._config, f"bare-{os.getpid()}")
            self._bare.register(self._memory)
            self._bare.connect(owner)
            self._end_reads(self._bare, {self._bare.start_block_read(owner.name, [0], [0])}, 0)
        size = self._config.blocks_per_read(self.layout.block_bytes)
        sources, targets = [blocks.tolist() for blocks in self._scattered(owner, num_blocks)]
        parts = [(sources[i : i + size], targets[i : i + size]) for i in range(0, len(sources), size)]
        reading: set[int] = set()
        begun = time.perf_counter()
        for part in parts:
            handle = self._bare.start_block_read(owner.name, *part)
            if not self._bare.take_ended(handle):
                reading.add(handle)
                self._end_reads(self._bare, reading, self._config.max_reads_in_flight - 1)
        self._end_reads(self._bare, reading, 0)
        return time.perf_counter() - begun

    @staticmethod
    def _end_reads(transport: Transport, reading: set[int], num_left: int) -> None:
        """Wait until no more than so many are under way."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while len(reading) > num_left:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"the transport alone did not read within {TIMEOUT_S:g} s")
            for event in transport.poll():
                if not isinstance(event, ReadDone):
                    raise RuntimeError(f"the transport alone did not read: {event}")
                reading.remove(event.handle)

    def _scattered(self, owner: AgentAddress, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """As many blocks of the owner, and of ours, in an order that repeats with every call and has no runs."""
        count = min(num_blocks, len(self.array), owner.num_blocks)
        sources = np.random.default_rng(6).permutation(owner.num_blocks)[:count]
        return sources, np.random.default_rng(7).permutation(len(self.array))[:count]

    @staticmethod
    def _vectors(base: int, blocks: np.ndarray, size: int) -> ctypes.Array[Any]:
        class Vector(ctypes.Structure):
            _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

        return (Vector * len(blocks))(*[Vector(base + int(block) * size, size) for block in blocks])

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[Cost]]:
        costs: list[Cost] = []
        self._longest_stall_s = 0.0
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        yield costs
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begun
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        costs.append(Cost(seconds, cpu, self._longest_stall_s))

    @contextlib.asynccontextmanager
    async def _watching_loop(self) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch_loop())
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch_loop(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self._longest_stall_s = max(self._longest_stall_s, time.perf_counter() - before - 0.001)

    def _perform(self, action: Any) -> None:
        if isinstance(action, PullCompleted | PullFailed | OfferEnded | CacheChecked):
            self._ended.set_result(action)
        else:
            self._actions.append(action)

    def _flush(self) -> None:
        actions, self._actions = self._actions, []
        self._agent.perform(actions, self._machine.alive)

    def _act(self, actions: list[Any]) -> None:
        for action in actions:
            self._perform(action)
        self._flush()
        self._driver._set_timer()

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
