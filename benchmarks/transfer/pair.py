"""Two processes that hand blocks to each other, and the pipes over which the benchmark commands them.

    benchmark  --Remote, a pipe-->  the owner's Side
               --Remote, a pipe-->  the puller's Side

Each process is pinned to the core of its `Spec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfer.side import TIMEOUT_S, Side, Spec
from core.handoff import AgentAddress
from fleet.host.service_host import SWITCH_INTERVAL_S


class Remote:
    """One side, as the benchmark sees it."""

    def __init__(self, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.start("about")

    def start(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def end(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"no answer within {TIMEOUT_S:g} s")
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.end()

    def stop(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, EOFError):
            self.call("close")
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def serve(spec: Spec, pipe: Connection) -> None:
    """The side's process: (method, arguments) in, (result, error) out, until `close`."""
    os.environ.update(spec.environment)
    os.sched_setaffinity(0, {spec.core})

    async def answer() -> None:
        side = Side(spec)
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # the interpreter's settings are those of a worker
        gc.freeze()
        method = ""
        while method != "close":
            method, arguments = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send((await getattr(side, method)(*arguments), None))
            except (RuntimeError, OSError, TimeoutError) as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))

    asyncio.run(answer())


@dataclass(frozen=True, slots=True)
class Pair:
    owner: Remote
    puller: Remote
    owner_pid: int
    owner_address: AgentAddress
    puller_address: AgentAddress

    def move(self, num_blocks: int, digests_made: bool = False, shuffled: bool = False) -> float:
        """Seconds of one hand-off of blocks that have been offered."""
        transfer_id = secrets.randbits(128)
        self.owner.call("offer", transfer_id, self.puller_address, num_blocks, digests_made, shuffled)
        self.owner.start("offer_ended")
        stats, _ = self.puller.call("pull", transfer_id, self.owner_address, num_blocks, shuffled)
        self.owner.end()
        total_s: float = stats.total_s
        return total_s

    def prefill(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of computing a prompt, and seconds from the end of it until its last block was pulled."""
        transfer_id = secrets.randbits(128)
        self.owner.start("prefill", transfer_id, self.puller_address, num_tokens)
        num_blocks = self.owner_address.layout.num_blocks_for(num_tokens)
        _, pulled_at = self.puller.call("pull", transfer_id, self.owner_address, num_blocks, False)
        seconds, computed_at = self.owner.end()
        return seconds, pulled_at - computed_at


@contextlib.contextmanager
def start_pair(owner: Spec, puller: Spec) -> Iterator[Pair]:
    sides = [Remote(owner)]
    try:
        pid, owner_address = sides[0].end()
        if owner.engine is not None:
            puller = replace(puller, layout=owner_address.layout)
        sides.append(Remote(puller))
        _, puller_address = sides[1].end()
        yield Pair(sides[0], sides[1], pid, owner_address, puller_address)
    finally:
        for side in sides:
            side.stop()
