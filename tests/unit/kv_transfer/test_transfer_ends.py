"""Hand-offs that are given up, and reads that fail: nothing is written after the end, and nothing stays leased."""

from core.block_hash import FullBlock
from core.handoff import AbortReason, OwnerState, PullerState
from core.machine import Tick
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import PullCompleted, PullGivenUp
from tests.unit.kv_transfer.transfer_ends import assert_completed, assert_failed, assert_freed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair

# ---- giving up


def test_a_pull_cancelled_while_reserved_releases_the_offer() -> None:
    pair = Pair()
    pair.offer([0])
    pair.reserve_pull()
    pair.cancel_pull()
    assert_failed(pair, AbortReason.CANCELLED, PullerState.CANCELLED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.CANCELLED)


def test_a_pull_cancelled_while_wanting_releases_the_offer() -> None:
    pair = Pair()
    pair.offer([], last=False)
    pair.pull([0])
    pair.run()
    pair.cancel_pull()
    assert_failed(pair, AbortReason.CANCELLED, PullerState.CANCELLED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.CANCELLED)


def test_a_pull_cancelled_while_reading_ends_only_after_all_its_reads() -> None:
    pair = Pair()
    pair.offer(list(range(8)))
    pair.pull(list(range(8)))
    pair.deliver_all()
    assert len(pair.puller.reads) == 2
    pair.cancel_pull()
    pair.cancel_pull()
    pair.end_read(pair.puller, 0)
    assert not pair.puller.results
    assert not pair.mail
    pair.fail_read(pair.puller, 1)
    assert_failed(pair, AbortReason.CANCELLED, PullerState.CANCELLED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.CANCELLED)


def test_a_read_that_times_out_gives_the_pull_up_at_once_and_keeps_its_targets_until_it_ends() -> None:
    pair = Pair()
    pair.offer(list(range(8)))
    targets = pair.pull(list(range(8)))
    pair.deliver_all()
    pair.time_out_read(pair.puller, 0)
    pair.time_out_read(pair.puller, 1)
    assert pair.puller.given_up == [PullGivenUp(ID, AbortReason.READ_FAILED, "no end in time")]
    pair.wait(3 * CONFIG.lease_s)
    assert not pair.puller.results
    assert {pair.puller.pool.column_of(block) for block in targets.values()} == {Column.INCOMING}
    assert pair.num_leases() == 0, "it has renewed the lease no more, so the owner ended it"
    pair.end_read(pair.puller, 0)
    pair.fail_read(pair.puller, 1)
    assert_failed(pair, AbortReason.READ_FAILED)


def test_a_pull_cancelled_while_verifying_ends_at_once() -> None:
    pair = Pair(digests=False)
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    pair.wait(2 * CONFIG.heartbeat_s, deliver=False)
    pair.time += CONFIG.lease_s
    pair.end_read(pair.puller, 0)
    assert pair.puller.pull_state(ID) is PullerState.VERIFYING
    pair.cancel_pull()
    assert_failed(pair, AbortReason.CANCELLED, PullerState.CANCELLED)


def test_an_offer_aborted_before_anything_was_announced_ends_at_once() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.abort_offer()
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PREFILL_FAILED)


def test_an_offer_aborted_before_the_puller_knew_it_is_told_when_it_asks() -> None:
    pair = Pair()
    pair.offer([], last=False)
    pair.abort_offer()
    pair.deliver_all()
    pair.pull([0])
    pair.deliver_all()
    assert_failed(pair, AbortReason.PREFILL_FAILED)


def test_an_aborted_offer_keeps_its_blocks_until_the_puller_has_stopped_reading() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.deliver_all()
    pair.abort_offer()
    pair.deliver_all()
    pair.add_ready([1], last=True)
    assert pair.num_leases() == 1
    assert not pair.owner.results
    pair.end_read(pair.puller, 0)
    assert_failed(pair, AbortReason.PREFILL_FAILED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PREFILL_FAILED)


def test_an_aborted_offer_whose_puller_is_silent_ends_with_its_lease() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.deliver_all()
    pair.abort_offer()
    pair.lose_mail()
    pair.time += CONFIG.lease_s
    pair.event(pair.owner, Tick())
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PREFILL_FAILED)


# ---- reads that fail


def test_a_failed_read_fails_the_pull_after_the_other_reads() -> None:
    pair = Pair()
    pair.offer(list(range(8)))
    pair.pull(list(range(8)))
    pair.deliver_all()
    pair.fail_read(pair.puller, 0)
    assert not pair.puller.results
    pair.end_read(pair.puller, 1)
    assert_failed(pair, AbortReason.READ_FAILED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.READ_FAILED)


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
    assert_completed(pair)
    result = pair.pull_result()
    assert isinstance(result, PullCompleted)
    assert result.stats.num_blocks_reread == 1


def test_a_digest_that_stays_wrong_fails_the_pull() -> None:
    pair = Pair()
    blocks = dict(pair.offer([0, 1, 2]))
    assert pair.owner.pool.register(blocks[1], FullBlock(5, b""), "") is not None
    pair.pull([0, 1, 2])
    pair.deliver_all()
    pair.owner.content[blocks[1]] = -1
    pair.run()
    assert_failed(pair, AbortReason.DIGEST_MISMATCH)
    assert pair.puller.machine.counters.num_digest_mismatches == CONFIG.max_read_attempts
    assert_freed(pair, OwnerState.RELEASED, AbortReason.DIGEST_MISMATCH)
    assert pair.owner.pool.registered_hashes() == [], "the prefix cache serves the corrupt block"
