"""The puller's half: its WANTs, targets, reads and counters, and what ends a pull."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from core.block_hash import FullBlock
from core.config import TransferConfig
from core.errors import TransferFailed
from core.handoff import AbortReason, OfferedBlocks, OwnerState, PullerState, Ready, Want
from core.scheduling.block_pool import BlockPool
from kv_transfer.protocol.events import MessageReceived, PeerLost, PullFailed, SendMessage, StartRead, TargetsNeeded
from kv_transfer.protocol.machine import TransferMachine
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair, address


def known_to_its_owner() -> Pair:
    """The owner has met the puller by another transfer, and answers its heartbeats."""
    pair = Pair()
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address, math.inf)
    return pair


@pytest.mark.parametrize(("wants", "within_s"), [(True, 0.1), (False, CONFIG.heartbeat_s)])
def test_a_pull_that_its_owner_does_not_know_fails_after_half_a_lease(wants: bool, within_s: float) -> None:
    pair = known_to_its_owner()
    pair.pull([0]) if wants else pair.reserve_pull()
    pair.deliver_all()
    pair.wait(CONFIG.lease_s / 2 - 0.1 * wants)
    assert not pair.puller.results
    pair.wait(within_s)
    pair.assert_failed(AbortReason.UNKNOWN_TRANSFER)


def test_a_pull_fails_at_once_if_its_owner_has_forgotten_the_transfer() -> None:
    pair = Pair(TransferConfig(lease_s=12.0, max_transfers=1))
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.abort_offer()
    pair.event(pair.owner, PeerLost("puller", died=True))
    for other in (1, 2):
        pair.do(pair.owner, pair.owner.machine.offer, other, pair.puller.address, math.inf)
        pair.abort_offer(other)
    pair.lose_mail()
    pair.wait(CONFIG.heartbeat_s)
    pair.assert_failed(AbortReason.UNKNOWN_TRANSFER)


def test_a_pull_that_its_owner_aborts_has_the_owners_detail_or_names_the_owner() -> None:
    for detail, said in (("", "the owner ended it"), ("no room", "no room")):
        pair = Pair()
        pair.offer([0], last=False)
        pair.pull([0, 1])
        pair.run()
        pair.act(pair.owner, pair.owner.machine.owner.abort(ID, AbortReason.OVERLOADED, detail))
        pair.run()
        failed = pair.pull_result()
        assert isinstance(failed, PullFailed)
        assert failed.detail == said


def test_a_repeated_last_ready_does_not_shorten_the_exposed_time() -> None:
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
    assert pair.stats().exposed_s == 2.0
    pair.assert_completed()


def test_reads_are_counted_and_timed() -> None:
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.pull([0, 1, 2])
    pair.deliver_all()
    pair.time += 2.0
    pair.run()
    counters, stats = pair.puller.machine.counters, pair.stats()
    assert (counters.num_bytes_read, counters.num_reads) == (3 * LAYOUT.block_bytes, 1)
    assert (counters.read_seconds, counters.pulls["complete"]) == (pair.read_seconds, 1)
    assert (stats.num_blocks, stats.num_bytes, stats.num_reads) == (3, 3 * LAYOUT.block_bytes, 1)
    assert (stats.read_s, stats.total_s, stats.exposed_s) == (pair.read_seconds, 2.0, 2.0)


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
    first = Ready(ID, 11, 1, want.counter, 0, blocks.cut(0, 1), False)
    assert machine.handle(MessageReceived("owner", first), 0.0) == [TargetsNeeded(ID, (1,))]
    others = Ready(ID, 11, 2, want.counter, 0, blocks, True, (42,))
    assert machine.handle(MessageReceived("owner", others), 0.0) == [TargetsNeeded(ID, (2,), is_last=True)], (
        "each position once"
    )
    reads = machine.puller.add_targets(ID, dict(enumerate(targets, 1)), 0.0)
    moved = [(r.pieces, r.sources, r.targets) for r in reads if isinstance(r, StartRead)]
    assert moved == [((2,), (22,), (targets[0],)), ((3, 4), (23, 24), (targets[0], targets[1]))]


def test_a_lost_owner_fails_its_own_pulls_alone_and_each_owner_gets_its_own_heartbeats() -> None:
    pair = Pair()
    pair.reserve_pull()
    pair.time += 1.0
    other = replace(pair.owner.address, name="other", incarnation=33)
    pair.do(pair.puller, pair.puller.machine.reserve_pull, ID + 1, other)
    pair.wait(CONFIG.heartbeat_s - 0.5, deliver=False)
    assert [mail.receiver for mail in pair.lose_mail()] == ["owner"]
    pair.event(pair.puller, PeerLost("other"))
    assert [result.transfer_id for result in pair.puller.results] == [ID + 1]


def test_an_answer_to_a_heartbeat_before_the_pull_does_not_end_the_pull() -> None:
    pair = known_to_its_owner()
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 1, pair.owner.address)
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    pair.deliver(pair.mail.pop())
    (late,) = pair.lose_mail()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    pair.deliver(late)
    assert pair.puller.pull_state(ID) is PullerState.WANTING


def test_blocks_whose_owner_sends_no_digests_are_accepted() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.deliver(pair.mail.pop(0))
    (ready,) = pair.lose_mail()
    assert isinstance(ready.message, Ready)
    blocks = replace(ready.message.blocks, digests=(0, 0))
    pair.deliver(replace(ready, message=replace(ready.message, blocks=blocks)))
    pair.run()
    pair.assert_completed()


@pytest.mark.parametrize(("token_id", "is_known"), [(41, True), (42, False)])
def test_a_token_outside_the_vocabulary_fails_the_pull_and_reaches_no_sequence(token_id: int, is_known: bool) -> None:
    """A step that computes it would fail, with every sequence in it."""
    machine = TransferMachine(CONFIG, BlockPool(8), address("puller", 22), vocab_size=42)
    machine.reserve_pull(ID, address("owner", 11), 0.0)
    machine.puller.start(ID, (0,), 0.0)
    ready = Ready(ID, 11, 1, 1, 0, OfferedBlocks.of([(0, 20, 0)]), True, (token_id,))
    failed = [each for each in machine.handle(MessageReceived("owner", ready), 0.0) if isinstance(each, PullFailed)]
    assert (not failed) == is_known
    assert all("token id 42, outside the vocabulary [0, 42)" in each.detail for each in failed)


def test_no_id_is_pulled_twice_until_the_table_forgets_the_oldest_end() -> None:
    pair = Pair(TransferConfig(max_transfers=2, lease_s=12.0))
    for transfer_id in (1, 2, 3):
        pair.do(pair.puller, pair.puller.machine.reserve_pull, transfer_id, pair.owner.address)
        pair.do(pair.puller, pair.puller.machine.puller.cancel, transfer_id, AbortReason.CANCELLED)
    for transfer_id in (2, 3):
        with pytest.raises(TransferFailed, match="pulled before"):
            pair.puller.machine.reserve_pull(transfer_id, pair.owner.address, 1000.0)
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 1, pair.owner.address)


def test_a_block_with_a_wrong_digest_is_read_again() -> None:
    pair = Pair()
    blocks = dict(pair.offer([0, 1, 2]))
    pair.pull([0, 1, 2])
    pair.deliver_all()
    pair.owner.content[blocks[1]] = -1  # as if a byte had flipped on the way
    pair.end_read(pair.puller, 0)
    (again,) = pair.puller.reads.values()
    assert [source for source, _ in again.pairs] == [blocks[1]]
    pair.owner.content[blocks[1]] = 101
    pair.run()
    pair.assert_completed()
    assert pair.stats().num_blocks_reread == 1


def test_a_digest_that_stays_wrong_fails_the_pull() -> None:
    pair = Pair()
    blocks = dict(pair.offer([0, 1, 2]))
    assert pair.owner.pool.register(blocks[1], FullBlock(5, b""), "") is not None
    pair.pull([0, 1, 2])
    pair.deliver_all()
    pair.owner.content[blocks[1]] = -1
    pair.run()
    pair.assert_failed(AbortReason.DIGEST_MISMATCH)
    assert pair.puller.machine.counters.num_digest_mismatches == CONFIG.max_read_attempts
    pair.assert_freed(OwnerState.RELEASED, AbortReason.DIGEST_MISMATCH)
    assert pair.owner.pool.registered_hashes() == [], "the prefix cache serves the corrupt block"
