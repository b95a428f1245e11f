"""KV blocks of an 8B model from the pool of another process into ours, each read checked byte for byte.

    runs        64 neighbouring blocks at a time
    shuffled    every block alone, in random order on both sides

The floor is a copy of as many bytes on the device. The reads need nixl.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_sections.measure import copy_rate, finish
from benchmarks.gpu_sections.pool import OWNER_SEED, READER_SEED, Pairs, PoolEnd, random_bytes, start_owner
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line

NUM_BLOCKS, RUN_BLOCKS, REPEATS = 1024, 64, 7
TINY_BLOCKS, TINY_RUN_BLOCKS = 16, 4


def run(section: Section) -> None:
    num_blocks, run_blocks = (TINY_BLOCKS, TINY_RUN_BLOCKS) if section.rehearse else (NUM_BLOCKS, RUN_BLOCKS)
    copied = copy_rate(section.device, 1 << 16 if section.rehearse else 1 << 31) / 2
    end = PoolEnd(num_blocks, section.rehearse, READER_SEED)
    with section.case("digests"):
        rate = rate_of(end, lambda: end.memory.digests(list(range(num_blocks)), end.layout.block_bytes))
        section.add(Line("digests of blocks", rate / 1e9, "GB/s", floor=copied / 1e9))
    if not any(importlib.util.find_spec(package) for package in ("nixl_cu13", "nixl_cu12")):
        section.note("reads: not measured, nixl is not installed")
        return
    owner = start_owner(num_blocks, section.rehearse)
    try:
        with section.case("reads"):
            theirs = owner.call("open", name="owner")
            owner.call("connect", address=end.open("reader"))
            end.connect(theirs)
            for order, pairs in {"runs": in_runs(num_blocks, run_blocks), "shuffled": shuffled(num_blocks)}.items():
                rate = checked_rate(end, pairs)
                section.add(Line(f"reads, {order}", rate / 1e9, "GB/s", floor=copied / 1e9))
            end.close()
    finally:
        owner.stop()


def checked_rate(end: PoolEnd, pairs: Pairs) -> float:
    """Bytes per second of a read of the whole pool. Raises `AssertionError` if a byte differs."""
    end.bytes.zero_()
    sources = tuple(source + i for source, _, count in pairs for i in range(count))
    targets = tuple(target + i for _, target, count in pairs for i in range(count))
    rate = rate_of(end, lambda: end.read("owner", sources, targets))
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


def in_runs(num_blocks: int, run_blocks: int) -> Pairs:
    """Runs change their places."""
    starts = list(range(0, num_blocks, run_blocks))
    return [(start, target, run_blocks) for start, target in zip(starts, reversed(starts), strict=True)]


def shuffled(num_blocks: int) -> Pairs:
    draw = random.Random(0)
    sources, targets = (draw.sample(range(num_blocks), num_blocks) for _ in range(2))
    return [(source, target, 1) for source, target in zip(sources, targets, strict=True)]
