"""Counts the objects that Tandem keeps in this process: instances by class, elements by container attribute.

Two counts with only finished requests between them are equal, except for containers that are bounded by design. A
container that grows by the request is a leak, whichever object owns the container.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from router.operations.request_ring import RequestRing

PACKAGES = frozenset(
    ("core", "runtime", "text", "engine", "kv_transfer", "worker", "router", "prefill_worker", "decode_worker", "fleet")
)
CONTAINERS = (dict, list, set, deque)


def count_live() -> Counter[str]:
    """Instances by `module.Class`, elements by `module.Class.attribute`.

    Empties the rings of the last requests first: what they keep is bounded, but of many classes.
    """
    _empty_rings()
    gc.collect()
    counts: Counter[str] = Counter()
    for live in gc.get_objects():
        kind = type(live)
        if str(kind.__module__).partition(".")[0] in PACKAGES:
            name = f"{kind.__module__}.{kind.__qualname__}"
            counts[name] += 1
            counts.update({f"{name}.{attribute}": size for attribute, size in _sizes(live)})
    return counts


def _empty_rings() -> None:
    """A function of its own: its loop variable, the last of all objects, would outlive the loop and be counted."""
    for live in gc.get_objects():
        if type(live) is RequestRing:  # isinstance would run the __class__ of any object
            live._ended.clear()


def _sizes(live: object) -> Iterator[tuple[str, int]]:
    names = {*getattr(live, "__dict__", ()), *(name for base in type(live).__mro__ for name in _slots(base))}
    for name in names:
        value = getattr(live, name, None)
        if isinstance(value, dict | set) and all(isinstance(key, Enum) for key in value):
            continue  # has at most as many as its enum
        if isinstance(value, CONTAINERS):
            yield name, len(value)
        elif isinstance(value, asyncio.Queue):
            yield name, value.qsize()


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    # Python 3.11.2 fails to get the weak references of a dataclass with slots.
    return tuple({slots} if isinstance(slots, str) else set(slots) - {"__weakref__"})


# Bounded by label sets, by a pool, by the pools of all workers, by max_transfers, by the sizes of a step, by the number
# of workers, or by the methods of a service. The heap of deadlines has at most 64 entries more than twice their number.
BOUNDED = (
    "runtime.prometheus.metric_series.",
    "runtime.rpc.checked_handlers._CheckedHandler._checked",
    "core.scheduling.block_pool.",
    "core.deadlines.Deadlines._heap",
    "router.routing.policy.SecondsPolicy.compared",
    "router.routing.workers.WorkerTable.compared",
    # The policy keeps the candidates of the last decision; choices that leak are found by themselves.
    "router.routing.question.Candidate",
    "router.routing.prefix_index.",
    "kv_transfer.offered_digests.",
    "kv_transfer.protocol.plan.",  # one of each pair of workers, made with its first read
    "kv_transfer.protocol.peers.TransferCounters.",
    "kv_transfer.protocol.owner.Owner._ended",
    "kv_transfer.protocol.puller.Puller._ended",
    "core.step.",
    "worker.core.StepTimes.",
    "core.cost.step_cost_fit.StepCostFit._bins",
    "core.cost.step_cost.StepCost",
)
# Of each link, its last report, and the load that an earlier one brought: the first report is of another class, and
# names no router. Of each pair of workers, the status of their path: with the path, in a last report, and in a table.
REPORTED = ("router.requests.events.WorkerReported", "core.scheduling.worker_load.", "core.paths.PathStatus")


@dataclass(frozen=True, slots=True)
class Footprint:
    live: Counter[str]
    num_descriptors: int
    resident_mb: float

    @classmethod
    def now(cls) -> Footprint:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(count_live(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE") / 1e6)


def growth(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """The counts that have grown, except for what is bounded by design."""
    most_reported = 6 * after["router.links.worker_link.WorkerLink"] ** 2
    return {
        name: count - before[name]
        for name, count in after.items()
        if count > before[name] + most_reported * name.startswith(REPORTED) and not name.startswith(BOUNDED)
    }
