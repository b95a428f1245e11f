"""One side of a measured hand-off: a worker that can only hand off, and the commands of the benchmark.

    python -m benchmarks.transfer.side SPEC    as `packed`

A pool is private memory in huge pages, like the engine's (engine/kv_pool.py), and larger than any cache. One block in
ten is held by others, so the free blocks lie in short runs; a hand-off may also shuffle its blocks, and then hardly two
of them are neighbours on both sides.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import pickle
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cli.compose import open_transport
from core.config import EngineConfig, TransferConfig
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.runner import run_step
from fleet.host.service_host import SWITCH_INTERVAL_S
from kv_transfer.protocol.events import PullCompleted
from kv_transfer.transports.transport import PoolMemory
from tests.support.child_processes import obey, take_stdout
from tests.support.transfer_worker import Result, TransferWorker, host_pool

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
        open_pool = random_pool if spec.engine is None else self._engine_pool
        self._engine, self._compute = spec.engine, ThreadPoolExecutor(1)
        self._worker = TransferWorker(
            f"side-{os.getpid()}", lambda name: open_transport(spec.config, name), spec.config, spec.layout,
            spec.num_blocks, open_pool,
        )  # fmt: skip
        self._machine, self._pool = self._worker.machine, self._worker.pool
        self._layout = self._machine.address.layout
        self._offered: list[int] = []
        self._random = random.Random(f"core {min(os.sched_getaffinity(0))}")  # the two sides draw different numbers
        blocks = self._pool.allocate(self._pool.num_blocks) or []
        held = set(self._random.sample(blocks, len(blocks) // BLOCKS_PER_HELD))
        self._pool.release([block for block in blocks if block not in held])

    def address(self) -> str:
        return packed(self._machine.address)

    def meet(self, address: str) -> None:
        self._peer = unpacked(address)

    def offer(self, transfer_id: int, num_blocks: int, digests_made: bool, shuffled: bool) -> None:
        """Offer blocks that are ready, and wait for their digests if `digests_made`."""
        self._offered = self._ordered(self._pool.allocate(num_blocks), shuffled)
        now = time.monotonic()
        self._worker.act(self._machine.offer(transfer_id, self._peer, math.inf, now))
        self._add_ready(transfer_id, self._offered, is_last=True)
        if digests_made:
            self._wait_for_digests()

    def offer_ended(self) -> None:
        self._result()
        self._pool.release(self._offered)

    def prefill(self, transfer_id: int, num_tokens: int) -> tuple[float, float]:
        """Compute a prompt and offer it chunk by chunk.

        Returns the seconds of computing, and when it ended on the machine's clock.
        """
        num_blocks = self._layout.num_blocks_for(num_tokens)
        blocks = self._offered = self._ordered(self._pool.allocate(num_blocks), shuffled=False)
        tokens = np.random.default_rng(2).integers(1000, 40_000, num_tokens).tolist()
        self._worker.act(self._machine.offer(transfer_id, self._peer, math.inf, time.monotonic()))
        seconds = 0.0
        for start in range(0, num_tokens, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, num_tokens - start)
            is_last = start + count == num_tokens
            view = SequenceView("p", tokens, num_tokens, blocks, SAMPLING)
            plan = StepPlan(0, (ScheduledChunk(view, start, count, is_last, False),))
            started_at = time.perf_counter()
            computing = self._compute.submit(run_step, self._runner, plan)
            computing.add_done_callback(lambda _: self._worker.events.put([]))  # ends a wait for the agent's events
            while not computing.done():
                self._worker.step(TIMEOUT_S)
            computing.result()
            seconds += time.perf_counter() - started_at
            whole = num_blocks if is_last else (start + count) // self._layout.block_size
            self._add_ready(transfer_id, blocks[:whole], is_last)
        ended_at = time.perf_counter()
        self.offer_ended()
        return seconds, ended_at

    def pull(self, transfer_id: int, num_blocks: int, shuffled: bool) -> tuple[float, float]:
        """Pull a sequence. Returns its seconds, and when it ended on the machine's clock."""
        targets = self._ordered(self._pool.reserve(num_blocks), shuffled)
        now, act, machine = time.monotonic(), self._worker.act, self._machine
        act(machine.reserve_pull(transfer_id, self._peer, now))
        act(machine.puller.start(transfer_id, range(len(targets)), now))
        act(machine.puller.add_targets(transfer_id, dict(enumerate(targets)), now))
        result = self._result()
        self._pool.cancel_reservation(targets)
        if not isinstance(result, PullCompleted):
            raise RuntimeError(f"the pull failed: {result}")
        return result.stats.total_s, time.perf_counter()

    def read(self, pid: int, num_blocks: int, per_call: int) -> float:
        """Seconds to read shuffled blocks of the peer by process_vm_readv, `per_call` of them with each call."""
        libc, owner = ctypes.CDLL(None, use_errno=True), self._peer
        size = self._layout.block_bytes
        sources = np.random.default_rng(6).permutation(owner.num_blocks)[:num_blocks]
        targets = np.random.default_rng(7).permutation(self._pool.num_blocks)[:num_blocks]
        calls = [
            (iovec(self._machine.address.pool_base, targets[i : i + per_call], size),
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
        self._worker.close()

    # ---- inside

    def _engine_pool(self, _: KVLayout, __: int) -> tuple[np.ndarray, PoolMemory]:
        from engine.factory import build_runner  # the other side needs no torch

        assert self._engine is not None
        self._runner = runner = build_runner(self._engine)
        memory = runner.pool_memory()
        assert memory is not None
        array = np.frombuffer(memory, np.uint8).reshape(runner.num_blocks, -1)
        return array, PoolMemory(runner.pool_address(), runner.num_blocks, runner.layout, memory)

    def _add_ready(self, transfer_id: int, blocks: list[int], is_last: bool) -> None:
        ready, tokens = list(enumerate(blocks)), (1,) if is_last else ()
        self._worker.act(self._machine.owner.add_ready(transfer_id, ready, is_last, tokens, time.monotonic()))

    def _wait_for_digests(self) -> None:
        """Until the digest thread is done: this process then uses little of its core."""
        deadline, cpu_s = time.monotonic() + TIMEOUT_S, -QUIET_S
        while time.process_time() - cpu_s > QUIET_S / 2:
            assert time.monotonic() < deadline, "the digests are not made"
            cpu_s = time.process_time()
            time.sleep(QUIET_S)

    def _ordered(self, blocks: list[int] | None, shuffled: bool) -> list[int]:
        """The blocks in the order of their sequence."""
        assert blocks is not None, "the pool is too small"
        if shuffled:
            self._random.shuffle(blocks)
        return blocks

    def _result(self) -> Result:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._worker.results:
            assert time.monotonic() < deadline, "the hand-off does not end"
            self._worker.step(TIMEOUT_S)
        return self._worker.results.pop()


def random_pool(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
    """Private memory, which numpy has the kernel put into huge pages, filled with random bytes."""
    array, memory = host_pool(layout, num_blocks)
    array[:] = np.random.default_rng(1).integers(0, 256, array.shape, np.uint8)
    return array, memory


def iovec(base: int, blocks: np.ndarray, size: int) -> ctypes.Array[Any]:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    return (Vector * len(blocks))(*[Vector(base + int(block) * size, size) for block in blocks])


if __name__ == "__main__":
    answers = take_stdout()
    side = Side(unpacked(sys.argv[1]))
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # the interpreter's settings are those of a worker
    gc.freeze()
    obey(side, answers)
    side.close()
