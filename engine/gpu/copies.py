"""Copies of many runs by one kernel: between the own pool, a mapped pool of a peer, and pinned host memory.

The kernel works on raw addresses, because a mapped pool is no tensor. One copy per run through the driver is bound by
its submission when a KV block is 2 MiB; one launch is not. A run is cut into pieces of one tile. A program moves a few
pieces with 16-byte accesses, and has the next piece's addresses before it needs them.

A program lives for microseconds. Programs that stayed until the last piece would hold registers of every processor, and
the large programs of prefill and of the matrix products would wait for the whole hand-off. The stream of copies has the
lower priority, so programs of a step start first wherever a processor has room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

PIECE_BYTES = 32 << 10
PIECES_PER_PROGRAM = 2
_ACCESSES = (16, 8, 4, 2, 1)  # bytes of one access, the preferred first
_NUM_WARPS = 8

# int64 [pieces, 3]: address of the source, address of the target, bytes
Pieces = npt.NDArray[np.int64]


def pieces_by_access(copies: Sequence[tuple[int, int, int]]) -> dict[int, Pieces]:
    """Cut copies (source address, target address, bytes) into pieces, by the largest access that suits a copy.

    An access of 16 bytes needs addresses and a length divisible by 16. Copies of pools always suit it.
    """
    table = np.array(copies, dtype=np.int64).reshape(-1, 3)
    table = table[table[:, 2] > 0]
    bits = np.bitwise_or.reduce(table, axis=1)
    access = np.minimum(bits & -bits, _ACCESSES[0])
    return {size: _cut(table[access == size]) for size in _ACCESSES if (access == size).any()}


def _cut(copies: Pieces) -> Pieces:
    counts = -(-copies[:, 2] // PIECE_BYTES)
    pieces = np.repeat(copies, counts, axis=0)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(pieces)) - first_piece) * PIECE_BYTES
    pieces[:, :2] += offsets[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - offsets, PIECE_BYTES)
    return pieces


def copy_runs(runs: torch.Tensor, access_bytes: int) -> None:
    num_runs = len(runs)
    if num_runs == 0:
        return
    assert runs.dtype == torch.int64
    assert runs.is_contiguous()
    grid = (triton.cdiv(num_runs, PIECES_PER_PROGRAM),)
    unit = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[access_bytes]
    unit_bytes = min(access_bytes, 8)
    _copy_runs[grid](
        runs,
        num_runs,
        UNIT=unit,
        UNIT_BYTES=unit_bytes,
        ALIGNED=access_bytes == 16,
        TILE=PIECE_BYTES // unit_bytes,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_runs"])
def _copy_runs(runs, num_runs, UNIT: tl.constexpr, UNIT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    run = tl.program_id(0)
    step = tl.num_programs(0)
    source, target, num_bytes = _load_run(runs, run)
    while run < num_runs:
        from_source = source.to(tl.pointer_type(UNIT))
        to_target = target.to(tl.pointer_type(UNIT))
        count = (num_bytes // UNIT_BYTES).to(tl.int32)
        if ALIGNED:
            from_source = tl.multiple_of(from_source, 16)
            to_target = tl.multiple_of(to_target, 16)
            count = tl.multiple_of(count, 2)
        inside = places < count
        values = tl.load(from_source + places, mask=inside, cache_modifier=".cg")
        run += step
        source, target, num_bytes = _load_run(runs, tl.minimum(run, num_runs - 1))
        tl.store(to_target + places, values, mask=inside)


@triton.jit
def _load_run(runs, run):
    place = runs + run.to(tl.int64) * 3
    return tl.load(place), tl.load(place + 1), tl.load(place + 2)
