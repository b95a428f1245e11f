"""Between core.handoff's messages and bytes. Nothing else knows both.

Decoding trusts nothing: what is not exactly one well-formed message of this version, within the limits below, raises
`MalformedMessage`. So does encoding what is too large; it does not look at the rest.
"""

from __future__ import annotations

import operator

from google.protobuf.message import DecodeError

from core.config import MAX_TRANSFERS
from core.errors import ErrorCode, TandemError
from core.handoff import (
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

MAX_MESSAGE_BYTES = 1 << 20
MAX_POSITIONS = 1 << 16  # of a WANT or a READY: 1 M tokens in blocks of 16
MAX_ENTRIES = MAX_TRANSFERS  # of a heartbeat
MAX_DETAIL_CHARS = 1024
_TRANSFER_ID_BYTES = 16

_REASON_TO_WIRE: dict[AbortReason, handoff_pb2.HandoffAbortReason] = {
    reason: getattr(handoff_pb2, f"HANDOFF_ABORT_REASON_{reason.name}") for reason in AbortReason
}
_REASON_FROM_WIRE: dict[int, AbortReason] = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


class MalformedMessage(TandemError, ValueError):
    """Bytes that are no message of this protocol."""

    code = ErrorCode.INVALID_ARGUMENT


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedMessage(message)


def encode(message: HandoffMessage) -> bytes:
    envelope = handoff_pb2.HandoffEnvelope(
        version=PROTOCOL_VERSION, incarnation=message.incarnation, counter=message.counter
    )
    if not isinstance(message, Heartbeat | Ping):
        envelope.transfer_id = _id_to_wire(message.transfer_id)
    match message:
        case Want():
            envelope.want.SetInParent()
            envelope.want.layout_fingerprint = message.layout_fingerprint
            envelope.want.positions.extend(message.positions)
        case Ready():
            envelope.ready.CopyFrom(_ready_to_wire(message))
        case Heartbeat():
            envelope.heartbeat.SetInParent()
            if message.ack is not None:
                envelope.heartbeat.ack = message.ack
            for entry in message.entries:
                envelope.heartbeat.entries.add(transfer_id=_id_to_wire(entry.transfer_id), num_ready=entry.num_ready)
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
    payload = envelope.SerializeToString()
    _require(len(payload) <= MAX_MESSAGE_BYTES, f"{len(payload)} bytes are more than {MAX_MESSAGE_BYTES}")
    return payload


def decode(payload: bytes) -> HandoffMessage:
    """The message in `payload`. Raises `MalformedMessage`."""
    _require(len(payload) <= MAX_MESSAGE_BYTES, f"{len(payload)} bytes are more than {MAX_MESSAGE_BYTES}")
    try:
        envelope = handoff_pb2.HandoffEnvelope.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage(f"not a HandoffEnvelope: {error}") from error
    _require(envelope.version == PROTOCOL_VERSION, f"version {envelope.version}, expected {PROTOCOL_VERSION}")
    _require(envelope.incarnation > 0, "incarnation is missing")
    _require(envelope.counter > 0, "counter is missing")
    stamp = (envelope.incarnation, envelope.counter)
    kind = envelope.WhichOneof("body")
    if kind == "heartbeat":
        _require(not envelope.transfer_id, "transfer_id in a heartbeat")
        return _heartbeat_from_wire(stamp, envelope.heartbeat)
    if kind == "ping":
        _require(not envelope.transfer_id, "transfer_id in a ping")
        return Ping(*stamp, _ack_from_wire(envelope.ping))
    transfer_id = _id_from_wire(envelope.transfer_id)
    match kind:
        case "want":
            return _want_from_wire(transfer_id, stamp, envelope.want)
        case "ready":
            return _ready_from_wire(transfer_id, stamp, envelope.ready)
        case "release":
            wire = envelope.release.reason
            return Release(transfer_id, *stamp, None if wire == 0 else _reason_from_wire(wire))
        case "abort":
            _require(len(envelope.abort.detail) <= MAX_DETAIL_CHARS, "detail is too long")
            return Abort(transfer_id, *stamp, _reason_from_wire(envelope.abort.reason), envelope.abort.detail)
    raise MalformedMessage("body is missing")


def _id_to_wire(transfer_id: TransferId) -> bytes:
    _require(0 <= transfer_id < 1 << 128, "transfer_id is not 128 bits")
    return transfer_id.to_bytes(_TRANSFER_ID_BYTES, "big")


def _id_from_wire(wire: bytes) -> TransferId:
    _require(len(wire) == _TRANSFER_ID_BYTES, f"transfer_id has {len(wire)} bytes, not {_TRANSFER_ID_BYTES}")
    return int.from_bytes(wire, "big")


def _reason_from_wire(wire: int) -> AbortReason:
    _require(wire in _REASON_FROM_WIRE, f"abort reason {wire} is unknown")
    return _REASON_FROM_WIRE[wire]


def _want_from_wire(transfer_id: TransferId, stamp: tuple[int, int], wire: handoff_pb2.HandoffWant) -> Want:
    positions = tuple(wire.positions)
    _require(len(positions) <= MAX_POSITIONS, f"{len(positions)} positions are more than {MAX_POSITIONS}")
    _require(all(map(operator.lt, positions, positions[1:])), "positions do not rise")
    return Want(transfer_id, *stamp, wire.layout_fingerprint, positions)


def _ready_to_wire(message: Ready) -> handoff_pb2.HandoffReady:
    return handoff_pb2.HandoffReady(
        ack=message.ack,
        first_block=message.first_block,
        positions=message.blocks.positions,
        blocks=message.blocks.blocks,
        digests=message.blocks.digests,
        last=message.last,
        first_token_id=message.first_token_id,
    )


def _ready_from_wire(transfer_id: TransferId, stamp: tuple[int, int], wire: handoff_pb2.HandoffReady) -> Ready:
    _require(wire.ack > 0, "ack is missing")
    lengths = {len(wire.positions), len(wire.blocks), len(wire.digests)}
    _require(len(lengths) == 1, f"{len(wire.positions)} positions, but {sorted(lengths)} blocks and digests")
    _require(max(lengths) <= MAX_POSITIONS, f"{len(wire.positions)} blocks are more than {MAX_POSITIONS}")
    _require(wire.last or not wire.HasField("first_token_id"), "first_token_id before the last READY")
    return Ready(
        transfer_id,
        *stamp,
        ack=wire.ack,
        first_block=wire.first_block,
        blocks=OfferedBlocks(tuple(wire.positions), tuple(wire.blocks), tuple(wire.digests)),
        last=wire.last,
        first_token_id=wire.first_token_id if wire.HasField("first_token_id") else None,
    )


def _heartbeat_from_wire(stamp: tuple[int, int], wire: handoff_pb2.HandoffHeartbeat) -> Heartbeat:
    _require(len(wire.entries) <= MAX_ENTRIES, f"{len(wire.entries)} entries are more than {MAX_ENTRIES}")
    ack = _ack_from_wire(wire)
    entries = tuple(HeartbeatEntry(_id_from_wire(entry.transfer_id), entry.num_ready) for entry in wire.entries)
    return Heartbeat(*stamp, ack, entries)


def _ack_from_wire(wire: handoff_pb2.HandoffHeartbeat | handoff_pb2.HandoffPing) -> int | None:
    _require(not wire.HasField("ack") or wire.ack > 0, "ack is 0")
    return wire.ack if wire.HasField("ack") else None
