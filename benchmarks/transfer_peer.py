"""Two processes that hand blocks to each other, each with a `Side` (benchmarks/transfer_side.py), told by a pipe.

`start_pair` makes them, each pinned to a core, and connects them to the parent by `Remote`.
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

from benchmarks.transfer_side import TIMEOUT_S, Side, Spec
from core.handoff import AgentAddress
from fleet.service_host import SWITCH_INTERVAL_S
from kv_transfer.events import PullStats


def _serve(spec: Spec, pipe: Connection) -> None:
    """The process: (method, arguments) in, (result, error) out, until the pipe ends."""
    os.environ.update(spec.environment)
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})

    async def serve() -> None:
        side = Side(spec)
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # this and what follows are as in a worker
        gc.freeze()
        while True:
            method, arguments = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send((await getattr(side, method)(*arguments), None))
            except (RuntimeError, OSError, TimeoutError) as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))
            if method == "close":
                return

    asyncio.run(serve())


class Remote:
    """A process of the pair, in the parent."""

    def __init__(self, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs), daemon=True)
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


@dataclass(frozen=True, slots=True)
class Pair:
    owner: Remote
    puller: Remote
    owner_pid: int
    owner_address: AgentAddress
    puller_address: AgentAddress

    def move(
        self, num_blocks: int, digests_made_before: bool = False, num_cached: int = 0, shuffled: bool = False
    ) -> PullStats:
        """One transfer of blocks that have been offered, but for those the puller has already."""
        transfer_id = secrets.randbits(128)
        self.owner.call("offer", transfer_id, self.puller_address, num_blocks, digests_made_before, shuffled)
        self.owner.start("offer_ended")
        stats, _ = self.puller.call("pull", transfer_id, self.owner_address, num_blocks, num_cached, shuffled)
        self.owner.end()
        assert isinstance(stats, PullStats)
        return stats

    def prefill(self, num_tokens: int, chunk: int, late: bool) -> tuple[float, float]:
        """A prompt computed and pulled: seconds of computing, and seconds from its end until all was there."""
        transfer_id = secrets.randbits(128)
        self.owner.start("prefill", transfer_id, self.puller_address, num_tokens, chunk, late)
        num_blocks = self.owner_address.layout.num_blocks_for(num_tokens)
        _, pulled_at = self.puller.call("pull", transfer_id, self.owner_address, num_blocks)
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
