"""The messages between a reader and an owner whose pool is staged through host memory.

    reader --Ask: copy these runs of your pool into a slot--> owner
    reader <--Staged: they are in this slot | Refused-------- owner
    reader --Done: the slot is free-------------------------> owner

The messages are notifications of the underlying transport. MAGIC marks them: no message of the hand-off begins with
these bytes. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import TransportError

MAGIC = b"\xffstg1"  # with the version
MAX_RUNS = 8192  # of one slice: 128 KiB
MAX_DETAIL = 500

_HEADER = struct.Struct("<BQ")  # kind, slice id
_STAGED = struct.Struct("<Id")  # slot, seconds
_ASK, _STAGED_KIND, _REFUSED, _DONE, _KEEPALIVE = range(5)


@dataclass(frozen=True, slots=True)
class Ask:
    slice_id: int  # unique among all slices of the reader
    runs: tuple[tuple[int, int], ...]  # (first byte from block 0 of the owner's pool, bytes), packed in this order


@dataclass(frozen=True, slots=True)
class Staged:
    """`waited_s`: between the owner's receipt of the Ask and this message. The slot's lease runs from this message."""

    slice_id: int
    slot: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    slice_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class Done:
    """The reader has read the slice, or has given up."""

    slice_id: int


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Has no content: the attempt to send it shows whether the owner is gone."""

    slice_id: int = 0


StagingMessage = Ask | Staged | Refused | Done | Keepalive


def encode_staging(message: StagingMessage) -> bytes:
    match message:
        case Ask(slice_id, runs):
            numbers = [number for run in runs for number in run]
            return _head(_ASK, slice_id) + struct.pack(f"<{len(numbers)}Q", *numbers)
        case Staged(slice_id, slot, waited_s):
            return _head(_STAGED_KIND, slice_id) + _STAGED.pack(slot, waited_s)
        case Refused(slice_id, detail):
            return _head(_REFUSED, slice_id) + detail[:MAX_DETAIL].encode()
        case Done(slice_id):
            return _head(_DONE, slice_id)
        case Keepalive(slice_id):
            return _head(_KEEPALIVE, slice_id)


def decode_staging(payload: bytes) -> StagingMessage | None:
    """None for a notification that is no staging message. Raises `TransportError` for one that is malformed."""
    if not payload.startswith(MAGIC):
        return None
    try:
        kind, slice_id = _HEADER.unpack_from(payload, len(MAGIC))
        body = payload[len(MAGIC) + _HEADER.size :]
        if kind == _ASK and body and len(body) <= 16 * MAX_RUNS:
            return Ask(slice_id, tuple(struct.iter_unpack("<QQ", body)))
        if kind == _STAGED_KIND:
            return Staged(slice_id, *_STAGED.unpack(body))
        if kind == _REFUSED:
            return Refused(slice_id, body[:MAX_DETAIL].decode(errors="replace"))
        if kind in (_DONE, _KEEPALIVE) and not body:
            return Done(slice_id) if kind == _DONE else Keepalive(slice_id)
    except struct.error as error:
        raise TransportError(f"malformed staging message: {error}") from error
    raise TransportError(f"malformed staging message of kind {kind}, {len(body)} bytes")


def packed(runs: Sequence[tuple[int, int]], address: int) -> list[tuple[int, int, int]]:
    """(offset in the pool, address in the slot, bytes) of runs that lie packed from `address` on."""
    placed = []
    for first, num_bytes in runs:
        placed.append((first, address, num_bytes))
        address += num_bytes
    return placed


def _head(kind: int, slice_id: int) -> bytes:
    return MAGIC + _HEADER.pack(kind, slice_id)
