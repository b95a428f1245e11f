"""An owner and a puller of blocks, each on a core of its own where there are two."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.processes import ChildProcess
from benchmarks.transfer.side import Spec, packed, unpacked
from core.kv_layout import KVLayout

OWNER_CORE, PULLER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Pair:
    owner: ChildProcess
    puller: ChildProcess
    layout: KVLayout  # of the owner

    def move(self, num_blocks: int, digests_made: bool = False, shuffled: bool = False) -> float:
        """Seconds of one hand-off of blocks that have been offered."""
        blocks = {"transfer_id": secrets.randbits(128), "num_blocks": num_blocks, "shuffled": shuffled}
        self.owner.call("offer", digests_made=digests_made, **blocks)
        self.owner.begin("offer_ended")
        total_s: float = self.puller.call("pull", **blocks)[0]
        self.owner.answer()
        return total_s

    def prefill(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of computing a prompt, and seconds from the end of it until its last block was pulled."""
        transfer_id, num_blocks = secrets.randbits(128), self.layout.num_blocks_for(num_tokens)
        self.owner.begin("prefill", transfer_id=transfer_id, num_tokens=num_tokens)
        pulled_at = self.puller.call("pull", transfer_id=transfer_id, num_blocks=num_blocks, shuffled=False)[1]
        seconds, computed_at = self.owner.answer()
        return seconds, pulled_at - computed_at


@contextlib.contextmanager
def start_pair(owner: Spec, puller: Spec, environment: Mapping[str, str]) -> Iterator[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:

        def started(name: str, spec: Spec, core: int) -> ChildProcess:
            command = [sys.executable, "-m", "benchmarks.transfer.side", packed(spec)]
            side = ChildProcess(name, command, environment, core=cores[core % len(cores)])
            stack.callback(side.stop)
            return side

        first = started("the owner", owner, OWNER_CORE)
        address = first.call("address")
        layout = unpacked(address).layout
        second = started("the puller", replace(puller, layout=layout), PULLER_CORE)
        second.call("meet", address=address)
        first.call("meet", address=second.call("address"))
        yield Pair(first, second, layout)
