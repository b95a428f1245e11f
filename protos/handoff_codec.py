"""Converts between the messages of core.handoff and bytes (handoff.proto).

Decoding raises `MalformedMessage` for bytes that are not exactly one well-formed message of this version within the
limits below. Encoding checks the size and the transfer ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import assert_never

from google.protobuf.message import DecodeError

from core.config import MAX_TRANSFERS
from core.errors import ErrorCode, TandemError
from core.handoff import (
    MAX_POSITIONS,
    PROTOCOL_VERSION,
    Abort,
    AbortReason,
    HandoffMessage,
    Heartbeat,
    HeartbeatEntry,
    OfferedBlocks,
    Ping,
    Ready,
    Release,
    TransferId,
    Want,
)
from protos import handoff_pb2

MAX_MESSAGE_BYTES = 1 << 20  # bytes of a message between agents; beyond: refused
MAX_ENTRIES = MAX_TRANSFERS  # in a heartbeat
MAX_DETAIL_CHARS = 1024
_TRANSFER_ID_BYTES = 16

_REASON_TO_WIRE: dict[AbortReason, handoff_pb2.HandoffAbortReason] = {
    reason: getattr(handoff_pb2, f"HANDOFF_ABORT_REASON_{reason.name}") for reason in AbortReason
}
_REASON_FROM_WIRE: dict[int, AbortReason] = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


class MalformedMessage(TandemError, ValueError):
    """Bytes that are not a valid message of this protocol."""

    code = ErrorCode.INVALID_ARGUMENT


class OtherVersion(MalformedMessage):
    """A message of a peer that speaks another version of the protocol."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedMessage(message)


def encode(message: HandoffMessage) -> bytes:
    envelope = handoff_pb2.HandoffEnvelope(
        version=PROTOCOL_VERSION, incarnation=message.incarnation, counter=message.counter
    )
    if not isinstance(message, Heartbeat | Ping):
        envelope.transfer_id = encode_transfer_id(message.transfer_id)
    match message:
        case Want():
            envelope.want.SetInParent()
            envelope.want.layout_fingerprint = message.layout_fingerprint
            envelope.want.position_runs.extend(_runs_to_wire(message.positions))
        case Ready():
            _ready_to_wire(message, envelope.ready)
        case Heartbeat():
            envelope.heartbeat.SetInParent()
            if message.ack is not None:
                envelope.heartbeat.ack = message.ack
            for entry in message.entries:
                envelope.heartbeat.entries.add(
                    transfer_id=encode_transfer_id(entry.transfer_id),
                    num_ready=entry.num_ready,
                    num_unplaced=entry.num_unplaced,
                    num_verified=entry.num_verified,
                )
        case Release():
            envelope.release.SetInParent()
            if message.reason is not None:
                envelope.release.reason = _REASON_TO_WIRE[message.reason]
        case Abort():
            envelope.abort.reason = _REASON_TO_WIRE[message.reason]
            envelope.abort.detail = message.detail[:MAX_DETAIL_CHARS]
        case Ping():
            envelope.ping.SetInParent()
            if message.ack is not None:
                envelope.ping.ack = message.ack
        case _:
            assert_never(message)
    payload = envelope.SerializeToString()
    _require(len(payload) <= MAX_MESSAGE_BYTES, f"{len(payload)} bytes are more than {MAX_MESSAGE_BYTES}")
    return payload


def encode_version() -> bytes:
    """An envelope that says only which version this side speaks. Every other version refuses the envelope."""
    return handoff_pb2.HandoffEnvelope(version=PROTOCOL_VERSION).SerializeToString()


def decode(payload: bytes) -> HandoffMessage:
    """The message in `payload`. Raises `MalformedMessage`, and `OtherVersion` if only the version is wrong so far."""
    _require(len(payload) <= MAX_MESSAGE_BYTES, f"{len(payload)} bytes are more than {MAX_MESSAGE_BYTES}")
    try:
        envelope = handoff_pb2.HandoffEnvelope.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage(f"not a HandoffEnvelope: {error}") from error
    if envelope.version != PROTOCOL_VERSION:
        refusal = OtherVersion if envelope.version else MalformedMessage
        raise refusal(f"version must be {PROTOCOL_VERSION}, is {envelope.version}")
    _require(envelope.incarnation > 0, "incarnation is missing")
    _require(envelope.counter > 0, "counter is missing")
    stamp = (envelope.incarnation, envelope.counter)
    kind = envelope.WhichOneof("body")
    if kind == "heartbeat":
        _require(not envelope.transfer_id, "transfer_id must be empty in a heartbeat")
        return _heartbeat_from_wire(stamp, envelope.heartbeat)
    if kind == "ping":
        _require(not envelope.transfer_id, "transfer_id must be empty in a ping")
        return Ping(*stamp, _ack_from_wire(envelope.ping))
    transfer_id = decode_transfer_id(envelope.transfer_id)
    match kind:
        case "want":
            return _want_from_wire(transfer_id, stamp, envelope.want)
        case "ready":
            return _ready_from_wire(transfer_id, stamp, envelope.ready)
        case "release":
            wire = envelope.release.reason
            return Release(transfer_id, *stamp, None if wire == 0 else _reason_from_wire(wire))
        case "abort":
            num_chars = len(envelope.abort.detail)
            _require(num_chars <= MAX_DETAIL_CHARS, f"{num_chars} characters in detail, at most {MAX_DETAIL_CHARS}")
            return Abort(transfer_id, *stamp, _reason_from_wire(envelope.abort.reason), envelope.abort.detail)
        case _:
            raise MalformedMessage("body is missing")


def encode_transfer_id(transfer_id: TransferId) -> bytes:
    """16 bytes, big-endian."""
    _require(0 <= transfer_id < 1 << 128, "transfer_id is not 128 bits")
    return transfer_id.to_bytes(_TRANSFER_ID_BYTES, "big")


def decode_transfer_id(wire: bytes) -> TransferId:
    _require(len(wire) == _TRANSFER_ID_BYTES, f"transfer_id must have {_TRANSFER_ID_BYTES} bytes, has {len(wire)}")
    return int.from_bytes(wire, "big")


def _reason_from_wire(wire: int) -> AbortReason:
    _require(wire in _REASON_FROM_WIRE, f"abort reason {wire} is unknown")
    return _REASON_FROM_WIRE[wire]


def _runs_to_wire(positions: tuple[int, ...]) -> list[int]:
    """[first, count, first, count, ...]. The first comparison finds the usual case, one run, without a loop."""
    if positions and positions == tuple(range(positions[0], positions[0] + len(positions))):
        return [positions[0], len(positions)]
    runs: list[int] = []
    for position in positions:
        if runs and position == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (position, 1)
    return runs


def _runs_from_wire(wire: Sequence[int]) -> list[range]:
    """The runs as ranges. Their lengths are checked before any range is expanded."""
    numbers = tuple(wire)
    firsts, counts = numbers[::2], numbers[1::2]
    _require(len(firsts) == len(counts) and all(counts), "position_runs must be pairs of a first index and a count > 0")
    _require(sum(counts) <= MAX_POSITIONS, f"{sum(counts)} positions are more than {MAX_POSITIONS}")
    runs = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    _require(all(run.stop <= 1 << 32 for run in runs), "positions have more than 32 bits")
    return runs


def _want_from_wire(transfer_id: TransferId, stamp: tuple[int, int], wire: handoff_pb2.HandoffWant) -> Want:
    runs = _runs_from_wire(wire.position_runs)
    _require(all(run.stop <= after.start for run, after in pairwise(runs)), "position_runs must rise")
    return Want(transfer_id, *stamp, wire.layout_fingerprint, tuple(chain.from_iterable(runs)))


def _ready_to_wire(message: Ready, wire: handoff_pb2.HandoffReady) -> None:
    wire.ack = message.ack
    wire.first_block = message.first_block
    wire.position_runs.extend(_runs_to_wire(message.blocks.positions))
    wire.blocks.extend(message.blocks.blocks)
    if any(message.blocks.digests):
        wire.digests.extend(message.blocks.digests)
    wire.last = message.last
    wire.token_ids.extend(message.token_ids)


def _ready_from_wire(transfer_id: TransferId, stamp: tuple[int, int], wire: handoff_pb2.HandoffReady) -> Ready:
    _require(wire.ack > 0, "ack is missing")
    positions = tuple(chain.from_iterable(_runs_from_wire(wire.position_runs)))
    blocks, digests = tuple(wire.blocks), tuple(wire.digests) or (0,) * len(wire.blocks)
    _require(
        len(positions) == len(blocks) == len(digests),
        f"a READY has {len(positions)} positions, {len(blocks)} blocks and {len(digests)} digests, must have as many "
        "of each",
    )
    _require(wire.last or not wire.token_ids, "token_ids must come with the last READY only")
    num_tokens = len(wire.token_ids)
    _require(num_tokens <= MAX_POSITIONS, f"{num_tokens} token_ids are more than {MAX_POSITIONS}")
    return Ready(
        transfer_id,
        *stamp,
        ack=wire.ack,
        first_block=wire.first_block,
        blocks=OfferedBlocks(positions, blocks, digests),
        last=wire.last,
        token_ids=tuple(wire.token_ids),
    )


def _heartbeat_from_wire(stamp: tuple[int, int], wire: handoff_pb2.HandoffHeartbeat) -> Heartbeat:
    _require(len(wire.entries) <= MAX_ENTRIES, f"{len(wire.entries)} heartbeat entries are more than {MAX_ENTRIES}")
    ack = _ack_from_wire(wire)
    entries = tuple(
        HeartbeatEntry(decode_transfer_id(entry.transfer_id), entry.num_ready, entry.num_unplaced, entry.num_verified)
        for entry in wire.entries
    )
    return Heartbeat(*stamp, ack, entries)


def _ack_from_wire(wire: handoff_pb2.HandoffHeartbeat | handoff_pb2.HandoffPing) -> int | None:
    _require(not wire.HasField("ack") or wire.ack > 0, "ack must be at least 1, is 0")
    return wire.ack if wire.HasField("ack") else None
