"""A puller's reactions to its owner's messages and silence; its requests and its counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import TransferConfig
from core.errors import TransferFailed
from core.handoff import Abort, AbortReason, Heartbeat, OfferedBlocks, Ready, Want
from core.scheduling.block_pool import BlockPool
from kv_transfer.protocol import puller
from kv_transfer.protocol.events import (
    MessageReceived,
    PeerLost,
    PullCompleted,
    PullFailed,
    SendMessage,
    StartRead,
    TargetsNeeded,
)
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_ends import assert_completed, assert_failed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair, address


def known_to_its_owner() -> Pair:
    """The owner has met the puller by another transfer, and answers its heartbeats."""
    pair = Pair()
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address)
    return pair


def test_a_reserved_pull_that_its_owner_never_hears_of_is_given_up_after_half_a_lease() -> None:
    pair = known_to_its_owner()
    pair.reserve_pull()
    pair.wait(CONFIG.lease_s / 2)
    assert not pair.puller.results
    pair.wait(CONFIG.heartbeat_s)
    assert_failed(pair, AbortReason.UNKNOWN_TRANSFER)


def test_an_owner_that_has_forgotten_the_transfer_is_not_waited_for() -> None:
    pair = Pair(TransferConfig(lease_s=12.0, max_transfers=1))
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.abort_offer()
    pair.event(pair.owner, PeerLost("puller", died=True))
    for other in (1, 2):
        pair.do(pair.owner, pair.owner.machine.offer, other, pair.puller.address)
        pair.act(pair.owner, pair.owner.machine.owner.abort(other, AbortReason.CANCELLED))
    pair.lose_mail()
    pair.wait(CONFIG.heartbeat_s)
    assert_failed(pair, AbortReason.UNKNOWN_TRANSFER)


def test_a_pull_without_reads_ends_at_once_when_its_owner_is_lost() -> None:
    pair = Pair()
    pair.reserve_pull()
    pair.event(pair.puller, PeerLost("owner", "connection reset"))
    assert_failed(pair, AbortReason.PEER_LOST)
    failed = pair.pull_result()
    assert isinstance(failed, PullFailed)
    assert failed.detail == "connection reset"


def test_an_owner_that_gives_no_detail_is_named_as_the_one_who_ended_it() -> None:
    for detail, said in (("", "the owner ended it"), ("no room", "no room")):
        pair = Pair()
        pair.offer([0], last=False)
        pair.pull([0, 1])
        pair.run()
        pair.act(pair.owner, pair.owner.machine.owner.abort(ID, AbortReason.OVERLOADED))
        (mail,) = pair.lose_mail()
        assert isinstance(mail.message, Abort)
        pair.deliver(replace(mail, message=replace(mail.message, detail=detail)))
        failed = pair.pull_result()
        assert isinstance(failed, PullFailed)
        assert failed.detail == said


def test_an_answer_that_comes_twice_counts_once_and_the_first_word_of_an_owner_may_be_one() -> None:
    pair = known_to_its_owner()
    pair.lose_mail()
    pair.reserve_pull()
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    pair.deliver(pair.mail.pop())
    (answer,) = [mail for mail in pair.lose_mail() if isinstance(mail.message, Heartbeat)]
    pair.deliver(answer)
    assert pair.puller.machine.counters.dropped[Drop.OLD] == 0
    pair.deliver(answer)
    assert pair.puller.machine.counters.dropped[Drop.OLD] == 1


def test_a_last_ready_that_is_repeated_does_not_make_the_transfer_look_shorter() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.deliver(pair.mail.pop(0))
    (ready,) = pair.lose_mail()
    assert isinstance(ready.message, Ready)
    pair.deliver(ready)
    pair.time += 1.0
    again = replace(ready.message, counter=ready.message.counter + 1)
    pair.deliver(replace(ready, message=again))
    pair.time += 1.0
    pair.end_read(pair.puller, 0)
    pair.run()
    result = pair.pull_result()
    assert isinstance(result, PullCompleted)
    assert result.stats.exposed_s == 2.0
    assert_completed(pair)


def test_bytes_are_counted_as_they_are_read() -> None:
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.pull([0, 1, 2])
    pair.run()
    assert pair.puller.machine.counters.num_bytes_read == 3 * LAYOUT.block_bytes


def test_a_want_may_list_as_many_blocks_as_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "MAX_POSITIONS", 2)
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.run()
    assert_completed(pair)


def test_from_an_owner_with_smaller_blocks_the_puller_wants_the_pieces_that_the_sequence_fills() -> None:
    pool = BlockPool(8)
    ours = address("puller", 22, num_blocks=8, layout=replace(LAYOUT, block_size=2 * LAYOUT.block_size))
    machine = TransferMachine(CONFIG, pool, ours)
    machine.reserve_pull(ID, address("owner", 11), 0.0)
    targets = pool.reserve(2)
    assert targets is not None
    num_tokens = 4 * LAYOUT.block_size + 1
    actions = machine.puller.start(ID, (1, 2), 0.0, num_tokens)  # the puller has position 0
    (want,) = [action.message for action in actions if isinstance(action, SendMessage)]
    assert isinstance(want, Want)
    assert want.positions == (2, 3, 4), "the sixth piece would lie behind the end"
    blocks = OfferedBlocks.of((position, 20 + position, 0) for position in want.positions)
    needed = machine.handle(MessageReceived("owner", Ready(ID, 11, 1, want.counter, 0, blocks, True, 42)), 0.0)
    assert needed == [TargetsNeeded(ID, (1, 2))]
    (read,) = machine.puller.add_targets(ID, dict(enumerate(targets, 1)), 0.0)
    assert isinstance(read, StartRead)
    assert (read.sources, read.targets) == ((22, 23, 24), (targets[0], targets[0], targets[1]))
    assert read.pieces == (2, 3, 4)


def test_of_an_owner_with_blocks_like_ours_whole_blocks_are_read() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.deliver_all()
    (read,) = pair.puller.reads.values()
    assert read.pieces == ()


def test_ends_are_remembered_so_that_no_id_is_pulled_twice_and_the_oldest_is_forgotten_first() -> None:
    pair = Pair(TransferConfig(max_transfers=2, lease_s=12.0))
    for transfer_id in (1, 2, 3):
        pair.do(pair.puller, pair.puller.machine.reserve_pull, transfer_id, pair.owner.address)
        pair.do(pair.puller, pair.puller.machine.puller.cancel, transfer_id, AbortReason.CANCELLED)
    for transfer_id in (2, 3):
        with pytest.raises(TransferFailed, match="pulled before"):
            pair.puller.machine.reserve_pull(transfer_id, pair.owner.address, 1000.0)
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 1, pair.owner.address)
