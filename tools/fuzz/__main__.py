"""`python -m tools.fuzz`: sends odd messages to whatever takes messages of others, 1,000,000 in `make soak`.

    http        bytes to the gateway                     hand-offs   notifications between agents
    grpc        every method of routers and workers      reports     what workers say to a router
    costs       long inputs of each parser               records     what an earlier supervisor has left

Law: no unexpected exception, no INTERNAL or UNKNOWN, no status 500, no error without a type, and no parser that takes
long (tools/fuzz/costs.py). A batch has 100 messages drawn from its seed. A fault is shown with the command that
sends its batch again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from tools.fuzz import machines, servers
from tools.fuzz.costs import BUSY_SLACK, costs
from tools.fuzz.parsers import PARSERS

BATCH = 100  # messages
TOLD_EVERY = 10_000  # messages of a surface between two lines of progress
MAX_FAULTS = 5  # of a surface; then it is left
Batch = Callable[[random.Random, int], Counter[str]]
MACHINES: dict[str, Batch] = {"hand-offs": machines.hand_offs, "reports": machines.reports, "records": machines.records}
SERVERS = {"http": servers.http_requests, "grpc": servers.grpc_calls}
SHARES = {
    "http": 0.12,
    "grpc": 0.13,
    "hand-offs": 0.49,
    "reports": 0.15,
    "records": 0.1,
    "costs": 0.01,
}  # of all messages


class Run:
    """Batches of one seed. `faults` has a report of each batch that broke the law."""

    def __init__(
        self, seed: int, first_batch: int = 0, further: str = "", tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """`further`: arguments of the command that sends a batch again. `tell` takes progress, and each fault."""
        self.seed, self.first_batch, self.further, self.tell = seed, first_batch, further, tell
        self.outcomes: dict[str, Counter[str]] = {}
        self.faults: list[str] = []

    def fuzz_machine(self, surface: str, batch: Batch, num_batches: int) -> None:
        for number in range(self.first_batch, self.first_batch + num_batches):
            try:
                self._count(surface, batch(self._rng(surface, number), BATCH))
            except Exception:  # noqa: BLE001 - each is what this program looks for
                if not self._goes_on(surface, number):
                    return

    async def fuzz_servers(self, num_batches: Mapping[str, int]) -> None:
        async with servers.servers() as world:
            for surface, number_of in num_batches.items():
                for number in range(self.first_batch, self.first_batch + number_of):
                    try:
                        sends = SERVERS[surface](world, self._rng(surface, number), BATCH)
                        self._count(surface, await world.batch(sends))
                    except Exception:  # noqa: BLE001 - each is what this program looks for
                        if not self._goes_on(surface, number):
                            break

    def _rng(self, surface: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {surface} {number}")

    def _count(self, surface: str, outcomes: Counter[str]) -> None:
        before = self.outcomes.get(surface, Counter())
        self.outcomes[surface] = before + outcomes
        num_messages = self.outcomes[surface].total()
        if num_messages // TOLD_EVERY > before.total() // TOLD_EVERY:
            self.tell(f"{surface}: {num_messages} messages")

    def _goes_on(self, surface: str, number: int) -> bool:
        command = (
            f"python -m tools.fuzz --surface {surface} --seed {self.seed} --first-batch {number} --batches 1"
            f"{self.further}"
        )
        self.faults.append(f"{traceback.format_exc(limit=-6)}replay with `{command}`")
        self.tell(self.faults[-1])
        return sum(f"--surface {surface} " in fault for fault in self.faults) < MAX_FAULTS


def fuzz(
    num_messages: int,
    seed: int,
    surfaces: tuple[str, ...] = tuple(SHARES),
    first_batch: int = 0,
    slack: float = BUSY_SLACK,
    tell: Callable[[str], None] = lambda _: None,
) -> Run:
    """Send about `num_messages`, shared among the surfaces, or all to the only one. `slack`: of costs."""
    run = Run(seed, first_batch, "" if slack == BUSY_SLACK else f" --slack {slack:g}", tell)
    total = sum(SHARES[surface] for surface in surfaces)
    num_batches = {name: max(1, round(num_messages * SHARES[name] / total / BATCH)) for name in surfaces}
    for surface, batch in (MACHINES | {"costs": partial(costs, parsers=PARSERS, slack=slack)}).items():
        if surface in num_batches:
            run.fuzz_machine(surface, batch, num_batches[surface])
    of_servers = {surface: number for surface, number in num_batches.items() if surface in SERVERS}
    if of_servers:
        asyncio.run(run.fuzz_servers(of_servers))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surface", choices=tuple(SHARES), help="only this one")
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--batches", type=int, help="instead of --messages, with --surface")
    parser.add_argument("--slack", type=float, default=BUSY_SLACK, help="how far costs may be over the law")
    given = parser.parse_args()
    surfaces = (given.surface,) if given.surface else tuple(SHARES)
    started_at = time.monotonic()
    num_messages = BATCH * given.batches if given.batches else given.messages
    tell = partial(print, file=sys.stderr, flush=True)
    run = fuzz(num_messages, given.seed, surfaces, given.first_batch, given.slack, tell)
    for surface, outcomes in run.outcomes.items():
        print(f"{surface}: {outcomes.total()} messages: {dict(outcomes.most_common())}")
    print(f"seed {given.seed}, {time.monotonic() - started_at:.1f} s, {len(run.faults)} faults")
    if run.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
