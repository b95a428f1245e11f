"""The words of transcripts for the actions of a TransferMachine. A transfer is named by its id."""

from __future__ import annotations

from typing import assert_never

from core.handoff import Abort, HandoffMessage, Heartbeat, Ping, Ready, Release, Want
from kv_transfer.protocol import events
from tests.support.transcripts import counts, runs


def seen_transfer(action: events.TransferAction) -> str:
    match action:
        case events.SendMessage(_, message):
            return seen_message(message)
        case events.StartRead(transfer_id=transfer_id, sources=sources):
            return f"read {transfer_id}: {runs(sources)}"
        case events.ComputeDigests(blocks):
            return f"digests {len(blocks)}"
        case events.Connect(peer):
            return f"connect {peer.name}"
        case events.Disconnect(peer):
            return f"disconnect {peer}"
        case events.ProbePath(peer, num_bytes, _):
            return f"probe {peer} {num_bytes} bytes"
        case events.LogPath(path):
            return f"path {path.peer} {path.state.value}"
        case events.TargetsNeeded(transfer_id, positions, is_last):
            return " ".join([f"targets {transfer_id}: {runs(positions)}", *["last"] * is_last])
        case events.PullCompleted(transfer_id, token_ids, stats):
            return f"completed {transfer_id} {stats.num_blocks} blocks, tokens {runs(token_ids) or 'none'}"
        case events.PullGivenUp(transfer_id, reason, detail):
            return f"given up {transfer_id} {reason.value} ({detail})".removesuffix(" ()")
        case events.PullFailed(transfer_id, state, reason, detail):
            return f"{state.value} {transfer_id} {reason.value} ({detail})".removesuffix(" ()")
        case events.OfferEnded(transfer_id, state, reason, is_released):
            words = [f"offer {transfer_id} {state.value}", "" if reason is None else reason.value]
            return " ".join(word for word in (*words, "by RELEASE" * is_released) if word)
        case events.CaughtUp(transfer_id):
            return f"caught up {transfer_id}"
        case _:
            assert_never(action)


def seen_message(message: HandoffMessage) -> str:
    match message:
        case Want(transfer_id, positions=positions):
            return f"want {transfer_id}: {runs(positions)}".removesuffix(" ")
        case Ready(transfer_id, blocks=blocks, last=last, token_ids=tokens):
            words = [f"ready {transfer_id}:", runs(blocks.positions), *["last"] * last, runs(tokens)]
            return " ".join(word for word in words if word)
        case Heartbeat(ack=None, entries=entries):
            return "heartbeat " + ", ".join(
                " ".join(
                    [
                        f"{entry.transfer_id}: ready {entry.num_ready}",
                        *counts([("unplaced", entry.num_unplaced), ("verified", entry.num_verified)]),
                    ]
                )
                for entry in entries
            )
        case Heartbeat(entries=entries):
            return " ".join(["heartbeat answered", *(str(entry.transfer_id) for entry in entries)])
        case Release(transfer_id, reason=reason):
            return " ".join([f"release {transfer_id}", *([] if reason is None else [reason.value])])
        case Abort(transfer_id, reason=reason, detail=detail):
            return " ".join([f"abort {transfer_id} {reason.value}", *[f"({detail})"] * bool(detail)])
        case Ping(ack=ack):
            return "ping" if ack is None else "ping answered"
        case _:
            assert_never(message)
