"""Copies of runs of any length between any addresses, and digests of blocks beside those of xxhash."""

from __future__ import annotations

import random

import torch
import xxhash

from benchmarks.gpu_sections.measure import finish
from benchmarks.gpu_sections.pool_end import copy_and_wait, random_bytes
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.device.device_memory import Copy

POOL_BYTES, TINY_POOL_BYTES = 64 << 20, 1 << 20
NUM_RUNS, TINY_NUM_RUNS = 2000, 40
BLOCK_BYTES = (248, 1000, 4096, 65_544)  # all are lengths that the operator takes
NUM_BLOCKS = 5
CASE_S = 5.0


def run(section: Section) -> None:
    if not section.has_time_for(CASE_S if not section.rehearse else 0, "copies and digests"):
        return
    with section.case("copies and digests"):
        pool = random_bytes(TINY_POOL_BYTES if section.rehearse else POOL_BYTES, section.device, 1)
        memory = CudaDeviceMemory(pool.view(16, -1), probe_bytes=1 << 20)
        check_digests(section, pool, memory)
        check_copies(section, pool, memory)


def check_digests(section: Section, pool: torch.Tensor, memory: CudaDeviceMemory) -> None:
    content = pool[: NUM_BLOCKS * max(BLOCK_BYTES)].cpu().numpy().tobytes()
    differing = 0
    for size in BLOCK_BYTES:
        found = memory.digests(range(NUM_BLOCKS), size)
        expected = [xxhash.xxh3_64_intdigest(content[n * size : (n + 1) * size]) for n in range(NUM_BLOCKS)]
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
    section.add(Line(f"digests that differ from xxhash's, of {NUM_BLOCKS * len(BLOCK_BYTES)}", differing, "", most=0))


def check_copies(section: Section, pool: torch.Tensor, memory: CudaDeviceMemory) -> None:
    """From the first half of the pool to places in the second half that do not overlap."""
    draw, half = random.Random(2), pool.numel() // 2
    num_runs = TINY_NUM_RUNS if section.rehearse else NUM_RUNS
    room = half // num_runs
    copies, expected = [], pool.clone()
    for number in range(num_runs):
        length = draw.choice((1, 2, 7, 16, 48, room // 2, room - 32))
        source, target = draw.randrange(half - length), half + number * room + draw.randrange(16)
        copies.append(Copy(pool.data_ptr() + source, pool.data_ptr() + target, length))
        expected[target : target + length] = expected[source : source + length]
    finish(pool.device)
    copy_and_wait(memory, copies)
    differing = int((pool != expected).sum())
    section.add(Line(f"copies of {num_runs:,} runs: bytes that differ", differing, "", most=0))
