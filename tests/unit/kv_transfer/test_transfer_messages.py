"""Messages that are lost, doubled, reordered, foreign or nonsense: a hand-off ends right, or typed and once."""

from dataclasses import replace

import pytest

from core.config import TransferConfig
from core.handoff import Abort, AbortReason, HandoffMessage, OfferedBlocks, OwnerState, Ready, Release, Want
from kv_transfer.protocol import puller
from kv_transfer.protocol.events import MessageReceived
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_ends import assert_completed, assert_failed, assert_freed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Mail, Pair


def lose(pair: Pair, kind: type[HandoffMessage]) -> None:
    """Take all mail of one kind away, and prove that there was some."""
    lost = [mail for mail in pair.mail if isinstance(mail.message, kind)]
    assert lost, f"no {kind.__name__} was under way"
    pair.mail = [mail for mail in pair.mail if not isinstance(mail.message, kind)]


# ---- messages get lost, doubled, reordered


@pytest.mark.parametrize("lost", [True, False])
def test_readys_that_are_lost_or_come_in_the_wrong_order_are_repeated_after_a_heartbeat(lost: bool) -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1, 2])
    pair.run()
    pair.add_ready([1], last=False)
    pair.add_ready([2], last=True)
    if lost:
        lose(pair, Ready)
    pair.mail.reverse()
    pair.run()
    assert pair.puller.machine.counters.dropped[Drop.GAP] == (not lost)
    pair.wait(CONFIG.heartbeat_s)
    pair.run()
    assert_completed(pair)
    assert pair.owner.machine.counters.num_ready_repeated == 1


def test_a_lost_last_ready_without_blocks_is_repeated() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0])
    pair.run()
    pair.add_ready([], last=True)
    lose(pair, Ready)
    pair.wait(2 * CONFIG.heartbeat_s)
    pair.run()
    assert_completed(pair)


def test_doubled_messages_do_nothing_twice() -> None:
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.pull([0, 1, 2])
    while pair.mail or pair.puller.reads:
        doubled = [mail for mail in pair.lose_mail() for _ in range(2)]
        for mail in doubled:
            pair.deliver(mail)
        for read_id in list(pair.puller.reads):
            pair.end_read(pair.puller, read_id)
    assert_completed(pair)
    assert pair.owner.machine.counters.dropped[Drop.OLD] == 1  # the WANT
    assert pair.owner.machine.counters.dropped[Drop.LATE] == 1  # the RELEASE
    assert pair.puller.machine.counters.dropped[Drop.OLD] == 1  # the READY


def test_a_lost_abort_is_repeated_when_the_puller_goes_on_asking() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.abort_offer()
    lose(pair, Abort)
    pair.wait(CONFIG.heartbeat_s)
    assert_failed(pair, AbortReason.PREFILL_FAILED)
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PREFILL_FAILED)


# ---- messages that are not for us


def foreign(message: HandoffMessage) -> HandoffMessage:
    return replace(message, incarnation=99, counter=message.counter + 1000)


def test_messages_of_another_incarnation_are_dropped() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    for mail in pair.lose_mail():
        pair.deliver(Mail(mail.sender, mail.receiver, foreign(mail.message)))
    pair.deliver(Mail("puller", "owner", Release(ID, 99, 1000, None)))
    pair.deliver(Mail("owner", "puller", Abort(ID, 99, 1000, AbortReason.CANCELLED)))
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 2  # heartbeat and RELEASE
    assert pair.puller.machine.counters.dropped[Drop.FOREIGN] == 1
    assert pair.num_leases() == 1
    pair.add_ready([1], last=True)
    pair.run()
    assert_completed(pair)


def test_messages_for_unknown_transfers_are_bounded_and_dropped() -> None:
    pair = Pair(TransferConfig(max_transfers=3, lease_s=12.0))
    for number in range(5):
        pair.event(pair.owner, MessageReceived("stranger", Want(number, 33, 1 + number, 0, ())))
    assert pair.owner.machine.counters.dropped[Drop.TABLE_FULL] == 2
    pair.wait(6.0)
    assert pair.owner.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == 3
    assert pair.owner.machine.next_deadline() is None


def test_an_owner_that_announces_nonsense_fails_the_pull() -> None:
    unwanted, outside, below, twice = (
        [(7, 0, 0)],
        [(0, 3, 0), (1, 32, 0)],
        [(0, -1, 0), (1, 3, 0)],
        [(0, 3, 0), (0, 4, 0)],
    )
    for bad in (unwanted, outside, below, twice):
        pair = Pair()
        pair.pull([0, 1])
        ready = Ready(ID, 11, 50, 1, 0, OfferedBlocks.of(bad), False)
        pair.event(pair.puller, MessageReceived("owner", ready))
        assert_failed(pair, AbortReason.READ_FAILED)


def test_an_owner_that_ends_too_early_fails_the_pull() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0, 1])
    pair.deliver_all()
    assert_failed(pair, AbortReason.PREFILL_FAILED)
    assert_freed(pair, OwnerState.RELEASED, AbortReason.PREFILL_FAILED)


def test_a_want_with_another_layout_is_answered_with_an_abort() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    (want,) = [mail.message for mail in pair.lose_mail()]
    assert isinstance(want, Want)
    pair.event(pair.owner, MessageReceived("puller", replace(want, layout_fingerprint=1)))
    assert_freed(pair, OwnerState.ABORTED, AbortReason.LAYOUT_MISMATCH)
    pair.deliver_all()
    assert_failed(pair, AbortReason.LAYOUT_MISMATCH)


def test_a_pull_of_more_blocks_than_a_want_can_list_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "MAX_POSITIONS", 2)
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.run()
    assert_completed(pair)
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.reserve_pull()
    pair.do(pair.puller, pair.puller.machine.puller.start, ID, [0, 1, 2])
    assert_failed(pair, AbortReason.READ_FAILED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.READ_FAILED)


def test_a_want_that_comes_before_its_offer_waits_for_it() -> None:
    pair = Pair()
    pair.pull([0, 1])
    pair.deliver_all()
    pair.wait(CONFIG.lease_s / 4)
    pair.offer([0, 1])
    pair.run()
    assert_completed(pair)
