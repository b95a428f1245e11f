"""Copies of many runs by one kernel: within the own pool, and from a mapped pool of a peer.

The kernel works on raw addresses, because a mapped pool is no tensor. With a driver call for each run, the calls would
cost more than the copies of 2 MiB, so one kernel copies all runs. A run is cut into pieces of one tile. A program finds
the runs of its few pieces by their numbers, so the host prepares a row for each run and none for each piece.

    runs of 3 and 5 pieces    first pieces 0, 3    piece 4 is the second piece of the second run

A program lives for microseconds. Programs that stayed until the last piece would hold registers of every processor, and
the large programs of prefill and of the matrix products would wait for the whole hand-off. The stream of copies has the
lower priority, so programs of a step start first wherever a processor has room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

PIECE_BYTES = 32 << 10
PIECES_PER_PROGRAM = 2
_ACCESSES = (16, 8, 4, 2, 1)  # bytes of one access, the preferred first
_NUM_WARPS = 8


class Runs(NamedTuple):
    """Copies that one launch does."""

    table: npt.NDArray[np.int64]  # [runs, 4]: address of the source, address of the target, bytes, first piece
    num_pieces: int


def runs_by_access(copies: npt.ArrayLike) -> dict[int, Runs]:
    """Sort copies, int64 [copies, 3] of source address, target address and bytes, by the largest access that suits one.

    An access of 16 bytes needs addresses and a length divisible by 16. Copies of pools always suit it.
    """
    table = np.asarray(copies, dtype=np.int64).reshape(-1, 3)
    table = table[table[:, 2] > 0]
    if not len(table):
        return {}
    if not int(np.bitwise_or.reduce(table, axis=None)) % _ACCESSES[0]:
        return {_ACCESSES[0]: _numbered(table)}
    bits = np.bitwise_or.reduce(table, axis=1)
    access = np.minimum(bits & -bits, _ACCESSES[0])
    return {size: _numbered(table[access == size]) for size in _ACCESSES if (access == size).any()}


def _numbered(copies: npt.NDArray[np.int64]) -> Runs:
    counts = -(-copies[:, 2] // PIECE_BYTES)
    table = np.empty((len(copies), 4), np.int64)
    table[:, :3] = copies
    behind = np.cumsum(counts)
    np.subtract(behind, counts, out=table[:, 3])
    return Runs(table, int(behind[-1]))


def copy_runs(runs: torch.Tensor, num_pieces: int, access_bytes: int) -> None:
    if num_pieces == 0:
        return
    assert runs.dtype == torch.int64
    assert runs.is_contiguous()
    grid = (triton.cdiv(num_pieces, PIECES_PER_PROGRAM),)
    unit = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[access_bytes]
    unit_bytes = min(access_bytes, 8)
    _copy_runs[grid](
        runs,
        len(runs),
        num_pieces,
        UNIT=unit,
        UNIT_BYTES=unit_bytes,
        ALIGNED=access_bytes == 16,
        TILE=PIECE_BYTES // unit_bytes,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_runs", "num_pieces"])
def _copy_runs(
    runs, num_runs, num_pieces, UNIT: tl.constexpr, UNIT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    places = tl.arange(0, TILE)
    piece = tl.program_id(0)
    step = tl.num_programs(0)
    source, target, num_bytes = _piece(runs, num_runs, piece, TILE * UNIT_BYTES)
    while piece < num_pieces:
        from_source = source.to(tl.pointer_type(UNIT))
        to_target = target.to(tl.pointer_type(UNIT))
        count = (num_bytes // UNIT_BYTES).to(tl.int32)
        if ALIGNED:
            from_source = tl.multiple_of(from_source, 16)
            to_target = tl.multiple_of(to_target, 16)
            count = tl.multiple_of(count, 2)
        inside = places < count
        values = tl.load(from_source + places, mask=inside, cache_modifier=".cg")
        piece += step
        source, target, num_bytes = _piece(runs, num_runs, tl.minimum(piece, num_pieces - 1), TILE * UNIT_BYTES)
        tl.store(to_target + places, values, mask=inside)


@triton.jit
def _piece(runs, num_runs, piece, PIECE_BYTES: tl.constexpr):
    """(source, target, bytes left) of a piece. Its run is the last one whose first piece is at most `piece`."""
    run, behind = 0, num_runs
    while behind - run > 1:
        middle = (run + behind) // 2
        is_later = tl.load(runs + middle * 4 + 3) > piece
        run, behind = tl.where(is_later, run, middle), tl.where(is_later, middle, behind)
    row = runs + run * 4
    offset = (piece - tl.load(row + 3)) * PIECE_BYTES
    return tl.load(row) + offset, tl.load(row + 1) + offset, tl.minimum(tl.load(row + 2) - offset, PIECE_BYTES)
