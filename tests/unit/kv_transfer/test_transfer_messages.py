"""Messages that are foreign or nonsense: they are dropped and counted, or end the hand-off, typed."""

from dataclasses import replace

import pytest

from core.config import TransferConfig
from core.handoff import Abort, AbortReason, HandoffMessage, OfferedBlocks, OwnerState, Ready, Release, Want
from kv_transfer.protocol import puller
from kv_transfer.protocol.events import MessageReceived
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Mail, Pair, assert_completed, assert_failed, assert_freed


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
