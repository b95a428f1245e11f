"""An open offer names no reader: the first agent with its transfer id binds it, and no other one reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.handoff import Abort, AbortReason, Bind, Heartbeat, HeartbeatEntry, OwnerState, Release, Want
from kv_transfer.protocol.events import MessageReceived, PullCompleted, PullFailed
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair, address


def test_a_second_reader_with_the_ticket_is_refused_and_the_first_one_does_not_notice() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.reserve_pull(binds=True)
    pair.deliver_all()
    thief = address("thief", 33)
    pair.event(pair.owner, MessageReceived("thief", Bind(ID, 33, 1, thief)))
    (refusal,) = pair.lose_mail()
    assert refusal.receiver == "thief"
    assert isinstance(refusal.message, Abort)
    assert refusal.message.reason is AbortReason.UNKNOWN_TRANSFER
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1
    pair.event(pair.owner, MessageReceived("thief", Want(ID, 33, 2, LAYOUT.fingerprint(), (0, 1))))
    assert pair.mail == [], "the thief learns of no block"
    pair.event(pair.owner, MessageReceived("thief", Release(ID, 33, 3, None)))
    assert pair.num_leases() == 2, "the thief freed the blocks"
    pair.start_pull([0, 1])
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)


def test_without_a_bind_a_want_brings_nothing() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.pull([0, 1])
    pair.deliver_all()
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1
    assert not pair.puller.reads


def test_a_lost_bind_is_repeated_with_the_next_heartbeat() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.pull([0, 1], binds=True)
    assert any(isinstance(mail.message, Bind) for mail in pair.lose_mail())
    pair.wait(CONFIG.heartbeat_s + 0.01)
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)


def test_a_bound_offer_gets_no_second_bind_and_lives_by_heartbeats() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.reserve_pull(binds=True)  # waits for room
    sent: list[object] = []
    for _ in range(12):
        pair.wait(CONFIG.heartbeat_s, deliver=False)
        sent += [mail.message for mail in pair.mail]
        pair.deliver_all()
    assert sum(isinstance(message, Bind) for message in sent) == 2, "one before and one with the first heartbeat"
    assert pair.time > CONFIG.lease_s
    assert pair.num_leases() == 2
    pair.start_pull([0, 1])
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)


def test_an_offer_without_a_reader_expires_a_lease_after_its_prompt() -> None:
    pair = Pair()
    pair.offer([0], last=False, is_open=True)
    pair.wait(3 * CONFIG.lease_s)
    assert pair.owner.offer_state(ID) is OwnerState.OFFERED, "the prompt is still computed"
    pair.add_ready([1], last=True)
    pair.wait(CONFIG.lease_s - 0.01)
    assert pair.num_leases() == 2
    pair.wait(0.02)
    assert pair.offer_result().state is OwnerState.EXPIRED
    assert pair.num_leases() == 0


def test_a_reader_that_comes_too_late_is_told_so_at_once() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.wait(CONFIG.lease_s)
    pair.reserve_pull(binds=True)
    pair.deliver_all()
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert result.reason is AbortReason.LEASE_EXPIRED


@pytest.mark.parametrize("sender", ["thief", "puller"])
def test_a_bind_counts_only_from_the_agent_that_it_names(sender: str) -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.event(pair.owner, MessageReceived(sender, Bind(ID, 33, 1, address("another", 33))))
    assert pair.owner.links == []
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1


def test_a_guessed_ticket_makes_the_owner_connect_to_nobody() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.event(pair.owner, MessageReceived("thief", Bind(ID + 1, 33, 1, address("thief", 33))))
    assert (pair.owner.links, pair.mail) == ([], [])
    assert pair.owner.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == 1


def test_the_ticket_of_an_offer_with_a_reader_cannot_be_bound() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.owner.links.clear()
    pair.event(pair.owner, MessageReceived("thief", Bind(ID, 33, 1, address("thief", 33))))
    assert (pair.owner.links, pair.mail) == ([], [])


def test_a_reader_of_another_model_is_refused_by_the_field_and_the_next_one_may_bind() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    other = address("other", 33, layout=replace(LAYOUT, model="another"))
    pair.event(pair.owner, MessageReceived("other", Bind(ID, 33, 1, other)))
    (refusal,) = pair.lose_mail()
    assert isinstance(refusal.message, Abort)
    assert refusal.message.reason is AbortReason.LAYOUT_MISMATCH
    assert "model" in refusal.message.detail
    pair.pull([0, 1], binds=True)
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)


def test_a_reader_that_dies_after_its_bind_costs_one_lease() -> None:
    pair = Pair()
    pair.offer([0, 1], is_open=True)
    pair.wait(CONFIG.lease_s / 2)
    pair.reserve_pull(binds=True)
    pair.deliver_all()
    pair.wait(CONFIG.lease_s - 0.01, deliver=False)
    assert pair.num_leases() == 2
    pair.wait(0.02, deliver=False)
    assert pair.offer_result().state is OwnerState.EXPIRED
    assert pair.num_leases() == 0


def test_a_heartbeat_for_an_offer_without_a_reader_is_dropped() -> None:
    pair = Pair()
    pair.offer([0], is_open=True)
    pair.do(pair.owner, pair.owner.machine.offer, ID + 1, pair.puller.address)  # so that the owner knows the sender
    pair.event(pair.owner, MessageReceived("puller", Heartbeat(22, 1, None, (HeartbeatEntry(ID, 0),))))
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1
