"""Hand-off messages on the wire: whole both ways, and strict about everything else."""

from __future__ import annotations

import pytest

from core.config import MAX_TRANSFERS
from core.errors import InvalidRequest
from core.handoff import PROTOCOL_VERSION, Abort, AbortReason, Heartbeat, HeartbeatEntry, OfferedBlocks, Ready, Release
from protos import codec, handoff_pb2
from protos.handoff_codec import MAX_DETAIL_CHARS, MAX_MESSAGE_BYTES, MalformedMessage, decode, encode


def envelope(**fields: object) -> handoff_pb2.HandoffEnvelope:
    """A good RELEASE, but for `fields`."""
    good: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "incarnation": 1,
        "counter": 1,
        "transfer_id": bytes(16),
        "release": handoff_pb2.HandoffRelease(),
    }
    return handoff_pb2.HandoffEnvelope(**{**good, **fields})  # type: ignore[arg-type]


WANT = handoff_pb2.HandoffWant
READY = handoff_pb2.HandoffReady
HEARTBEAT = handoff_pb2.HandoffHeartbeat
NAMELESS = handoff_pb2.HandoffHeartbeatEntry()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "version"),
        ({"version": 0}, "version"),
        ({"incarnation": 0}, "incarnation"),
        ({"counter": 0}, "counter"),
        ({"transfer_id": bytes(15)}, "transfer_id"),
        ({"transfer_id": b""}, "transfer_id"),
        ({"release": None}, "body"),
        ({"release": None, "want": WANT(position_runs=[2, 1, 1, 1])}, "rise"),
        ({"release": None, "want": WANT(position_runs=[1, 2, 2, 1])}, "rise"),
        ({"release": None, "want": WANT(position_runs=[0, 40_000, 50_000, 40_000])}, "80000 positions are more than"),
        ({"release": None, "want": WANT(position_runs=[0, 2**32 - 1])}, "4294967295 positions are more than"),
        ({"release": None, "want": WANT(position_runs=[2**32 - 1, 2])}, "32 bits"),
        ({"release": None, "want": WANT(position_runs=[1, 0])}, "runs"),
        ({"release": None, "want": WANT(position_runs=[1, 1, 3])}, "runs"),
        ({"release": None, "ready": READY()}, "ack"),
        ({"release": None, "ready": READY(ack=1, position_runs=[3, 2], blocks=[1])}, "2 positions"),
        ({"release": None, "ready": READY(ack=1, position_runs=[3, 2], blocks=[1, 2], digests=[1])}, "2 positions"),
        ({"release": None, "ready": READY(ack=1, token_ids=[1])}, "token_ids"),
        ({"release": None, "abort": handoff_pb2.HandoffAbort()}, "reason"),
        ({"release": None, "abort": handoff_pb2.HandoffAbort(reason=99)}, "reason"),  # type: ignore[arg-type]
        ({"release": None, "heartbeat": HEARTBEAT()}, "transfer_id"),
        ({"release": None, "heartbeat": HEARTBEAT(ack=0), "transfer_id": b""}, "ack"),
        ({"release": None, "heartbeat": HEARTBEAT(entries=[NAMELESS]), "transfer_id": b""}, "transfer_id"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, object], complaint: str) -> None:
    assert decode(envelope().SerializeToString()) == Release(0, 1, 1, None)
    with pytest.raises(MalformedMessage, match=complaint):
        decode(envelope(**fields).SerializeToString())


def test_neighbours_and_digests_that_nobody_computed_take_no_room() -> None:
    def ready(num_blocks: int) -> bytes:
        return encode(Ready(1, 1, 1, 1, 0, OfferedBlocks.of((n, 0, 0) for n in range(500, 500 + num_blocks)), False))

    assert len(ready(60)) == len(ready(20)) + 40  # the ids of the blocks


def test_oversized_messages_are_refused_both_ways() -> None:
    with pytest.raises(MalformedMessage, match="bytes"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))
    blocks = OfferedBlocks.of([(2**32 - 1, 2**32 - 1, 2**64 - 1)] * 60_000)
    with pytest.raises(MalformedMessage, match="bytes"):
        encode(Ready(1, 1, 1, 1, 0, blocks, False))


def test_a_heartbeat_for_as_many_transfers_as_can_be_configured_arrives() -> None:
    entries = tuple(HeartbeatEntry(2**128 - 1 - number, 2**32 - 1) for number in range(MAX_TRANSFERS))
    heartbeat = Heartbeat(2**64 - 1, 2**64 - 1, 2**64 - 1, entries)
    assert decode(encode(heartbeat)) == heartbeat


def test_a_long_detail_is_cut() -> None:
    message = decode(encode(Abort(1, 1, 1, AbortReason.CANCELLED, "x" * 5000)))
    assert isinstance(message, Abort)
    assert message.detail == "x" * MAX_DETAIL_CHARS


def test_every_reason_has_its_number_on_the_wire() -> None:
    numbers = {decode(encode(Release(1, 1, 1, reason))) for reason in AbortReason}
    assert len(numbers) == len(AbortReason) == len(handoff_pb2.HandoffAbortReason.keys()) - 1


def test_a_transfer_id_has_the_same_bytes_in_a_notification_and_in_a_call_to_a_worker() -> None:
    transfer_id = 0x0102
    notified = handoff_pb2.HandoffEnvelope.FromString(encode(Release(transfer_id, 1, 1, None))).transfer_id
    assert notified == bytes(14) + b"\1\2"
    assert codec.decode_transfer_id(notified) == transfer_id
    with pytest.raises(InvalidRequest, match="transfer_id"):
        codec.decode_transfer_id(bytes(15))
