"""KV blocks of an 8B model from the pool of another process into ours, each read checked byte for byte.

    runs        64 neighbouring blocks at a time
    shuffled    every block alone, in random order on both sides

A pool that is mapped is read by one kernel; the floor is a copy of as many bytes on the device. The paths of the
transport need nixl, and are reported with their lane.
"""

from __future__ import annotations

import base64
import importlib.util
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_sections.measure import copy_rate, finish
from benchmarks.gpu_sections.pool import OWNER_SEED, READER_SEED, Pairs, PoolEnd, random_bytes, start_owner
from benchmarks.gpu_sections.section import Section
from benchmarks.processes import ChildProcess
from benchmarks.report import Line
from core.handoff import DevicePath

NUM_BLOCKS, RUN_BLOCKS, REPEATS = 1024, 64, 7
TINY_BLOCKS, TINY_RUN_BLOCKS = 16, 4
PATH_S = 10.0


def run(section: Section) -> None:
    num_blocks, run_blocks = (TINY_BLOCKS, TINY_RUN_BLOCKS) if section.rehearse else (NUM_BLOCKS, RUN_BLOCKS)
    copied = copy_rate(section.device, 1 << 16 if section.rehearse else 1 << 31) / 2
    end = PoolEnd(num_blocks, section.rehearse, READER_SEED)
    orders = {"runs": in_runs(num_blocks, run_blocks), "shuffled": shuffled(num_blocks)}
    owner = start_owner(num_blocks, section.rehearse)
    try:
        with section.case("mapped pool"):
            base = end.memory.map(base64.b64decode(owner.call("export")))
            for name, pairs in orders.items():
                checked_rate(end, pairs, partial(end.copy, base, pairs))
                seconds = statistics.median(end.seconds_on_device(base, pairs) for _ in range(REPEATS))
                measure, rate = f"kernel over the mapped pool, {name}", end.bytes.numel() / seconds
                section.add(Line(measure, rate / 1e9, "GB/s", floor=copied / 1e9, least_share=0.7))
            end.memory.unmap(base)
        with section.case("digests"):
            rate = rate_of(end, lambda: end.memory.digests(list(range(num_blocks)), end.layout.block_bytes))
            section.add(Line("digests of blocks", rate / 1e9, "GB/s", floor=copied / 1e9))
        for path in DevicePath:
            measure_path(section, end, owner, path, orders, copied)
    finally:
        owner.stop()


def measure_path(
    section: Section, end: PoolEnd, owner: ChildProcess, path: DevicePath, orders: dict[str, Pairs], copied: float
) -> None:
    """The reads of a worker: transport, notifications and polls included."""
    name = f"transport, path {path.value}"
    if section.rehearse and path is DevicePath.DIRECT:
        return  # nixl cannot register the memory of a pretended device
    if not any(importlib.util.find_spec(package) for package in ("nixl_cu13", "nixl_cu12")):
        section.note(f"{name}: not measured, nixl is not installed")
        return
    if not section.has_time_for(PATH_S, name):
        return
    with section.case(name):
        theirs = owner.call("open", name="owner", path=path.value)
        owner.call("connect", address=end.open("reader", path.value))
        lane = end.connect(theirs)
        try:
            for order, pairs in orders.items():
                sources, targets = blocks_of(pairs)
                rate = checked_rate(end, pairs, partial(end.read, "owner", sources, targets))
                section.add(Line(f"{name}, lane {lane}, {order}", rate / 1e9, "GB/s", floor=copied / 1e9))
        finally:
            end.close()
            owner.call("close")


def checked_rate(end: PoolEnd, pairs: Pairs, read: Callable[[], None]) -> float:
    """Bytes per second of a read of the whole pool. Raises `AssertionError` if a byte differs."""
    end.bytes.zero_()
    rate = rate_of(end, read)
    source = random_bytes(end.bytes.numel(), end.bytes.device, OWNER_SEED).view(end.num_blocks, -1)
    found = end.bytes.view(end.num_blocks, -1)
    for first, target, count in pairs:
        assert torch.equal(found[target : target + count], source[first : first + count]), f"block {target} differs"
    return rate


def rate_of(end: PoolEnd, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        finish(end.bytes.device)
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return end.bytes.numel() / statistics.median(times[1:])


def blocks_of(pairs: Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The source and the target of each block."""
    sources = tuple(source + i for source, _, count in pairs for i in range(count))
    targets = tuple(target + i for _, target, count in pairs for i in range(count))
    return sources, targets


def in_runs(num_blocks: int, run_blocks: int) -> Pairs:
    """Runs change their places."""
    starts = list(range(0, num_blocks, run_blocks))
    return [(start, target, run_blocks) for start, target in zip(starts, reversed(starts), strict=True)]


def shuffled(num_blocks: int) -> Pairs:
    draw = random.Random(0)
    sources, targets = (draw.sample(range(num_blocks), num_blocks) for _ in range(2))
    return [(source, target, 1) for source, target in zip(sources, targets, strict=True)]
