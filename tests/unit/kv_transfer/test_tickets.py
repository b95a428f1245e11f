"""A ticket opens one offer, for one reader, for as long as its lease lives; then it is worth nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import TransferFailed
from core.handoff import Abort, AbortReason, Heartbeat, HeartbeatEntry, OwnerState, Ready, Release, TransferId, Want
from kv_transfer.protocol.events import MessageReceived, PullCompleted
from kv_transfer.protocol.peers import Drop, short_name, transfer_name
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair, address

# (name, incarnation) of senders that are not the reader the offer was made for.
OTHERS = {"another agent": ("thief", 33), "its old self": ("puller", 21), "the owner": ("owner", 11)}


def want(transfer_id: TransferId = ID, incarnation: int = 22, counter: int = 1000) -> Want:
    return Want(transfer_id, incarnation, counter, LAYOUT.fingerprint(), (0, 1))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_ticket_in_other_hands_than_the_announced_reader_s_brings_nothing(other: tuple[str, int]) -> None:
    name, incarnation = other
    pair = Pair()
    pair.offer([0, 1])
    pair.event(pair.owner, MessageReceived(name, want(incarnation=incarnation)))
    assert pair.mail == [], "neither READY nor a word about the blocks"
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1
    pair.pull([0, 1])
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_ticket_in_other_hands_can_neither_free_the_blocks_nor_keep_them(other: tuple[str, int]) -> None:
    name, incarnation = other
    pair = Pair()
    pair.offer([0, 1])
    for letter in (
        Release(ID, incarnation, 1000, None),
        Abort(ID, incarnation, 1001, AbortReason.CANCELLED),
        Heartbeat(incarnation, 1002, None, (HeartbeatEntry(ID, 0),)),
    ):
        pair.event(pair.owner, MessageReceived(name, letter))
    assert pair.num_leases() == 2
    assert pair.owner.offer_state(ID) is OwnerState.OFFERED
    pair.wait(CONFIG.lease_s, deliver=False)
    assert pair.offer_result().state is OwnerState.EXPIRED, "the stranger's heartbeat renewed it"
    assert pair.num_leases() == 0


def test_a_reader_known_from_another_offer_cannot_use_this_one_s_ticket() -> None:
    pair = Pair()
    pair.offer([0, 1])
    other_reader, other_id = address("reader-2", 44), ID + 1
    pair.do(pair.owner, pair.owner.machine.offer, other_id, other_reader)
    pair.event(pair.owner, MessageReceived("reader-2", want(incarnation=44)))
    assert pair.mail == []
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1


def test_a_guessed_ticket_opens_nothing() -> None:
    pair = Pair()
    pair.offer([0, 1])
    for guess in (0, ID + 1, ID ^ (1 << 127)):
        pair.event(pair.owner, MessageReceived("puller", want(guess)))
    pair.wait(CONFIG.lease_s / 2, deliver=False)
    assert not any(isinstance(mail.message, Ready) for mail in pair.mail)
    assert pair.owner.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == 3


def test_a_ticket_is_for_one_offer_and_one_pull_also_after_both_have_ended() -> None:
    pair = Pair()
    pair.offer([0, 1])
    with pytest.raises(TransferFailed, match="was offered before"):
        pair.owner.machine.offer(ID, pair.puller.address, pair.now(pair.owner))
    pair.pull([0, 1])
    with pytest.raises(TransferFailed, match="was pulled before"):
        pair.puller.machine.reserve_pull(ID, pair.owner.address, pair.now(pair.puller))
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)
    with pytest.raises(TransferFailed, match="was offered before"):
        pair.owner.machine.offer(ID, pair.puller.address, pair.now(pair.owner))
    with pytest.raises(TransferFailed, match="was pulled before"):
        pair.puller.machine.reserve_pull(ID, pair.owner.address, pair.now(pair.puller))


def test_a_used_ticket_brings_no_second_reading() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.run()
    pair.event(pair.owner, MessageReceived("puller", want(counter=5000)))
    (answer,) = pair.mail
    assert isinstance(answer.message, Abort)


def test_a_ticket_ends_with_its_lease() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.wait(CONFIG.lease_s - 0.01, deliver=False)
    assert pair.num_leases() == 2
    pair.wait(0.01, deliver=False)
    assert pair.offer_result().state is OwnerState.EXPIRED
    assert pair.num_leases() == 0
    pair.event(pair.owner, MessageReceived("puller", want()))
    (answer,) = pair.mail
    assert isinstance(answer.message, Abort)
    assert answer.message.reason is AbortReason.LEASE_EXPIRED


def test_the_right_reader_with_another_layout_is_refused_by_name() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.event(pair.owner, MessageReceived("puller", replace(want(), layout_fingerprint=1)))
    (answer,) = pair.mail
    assert isinstance(answer.message, Abort)
    assert answer.message.reason is AbortReason.LAYOUT_MISMATCH


def test_what_people_read_never_holds_a_whole_ticket() -> None:
    ticket = 0x0123456789ABCDEF0123456789ABCDEF
    assert short_name(ticket) == "01234567"
    assert transfer_name(ticket) == "transfer 01234567"
    pair = Pair()
    pair.do(pair.owner, pair.owner.machine.offer, ticket, pair.puller.address)
    with pytest.raises(TransferFailed) as refused:
        pair.owner.machine.offer(ticket, pair.puller.address, 0.0)
    assert f"{ticket:032x}" not in str(refused.value)
