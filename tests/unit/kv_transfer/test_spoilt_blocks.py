"""A digest belongs to what a block was computed with: it is kept once, and tells when the cached bytes have changed."""

from __future__ import annotations

from core.handoff import AbortReason, OwnerState, PullerState
from kv_transfer.events import BlocksChecked, CacheChecked, PullFailed
from tests.support.cached_blocks import match, register_prefix
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair, digest

SECOND = ID + 1


def offer_again(pair: Pair, blocks: list[tuple[int, int]], check: bool = True) -> None:
    """Another prompt begins with the same blocks, which are still in the owner's cache."""
    pair.owner.pool.share([block for _, block in blocks])
    pair.do(pair.owner, pair.owner.machine.offer, SECOND, pair.puller.address)
    if check:
        pair.act(pair.owner, pair.owner.machine.check_cached(SECOND, [block for _, block in blocks]))
    pair.do(pair.owner, pair.owner.machine.add_ready, SECOND, blocks, True, 42)


def pull_again(pair: Pair, positions: list[int]) -> None:
    pair.do(pair.puller, pair.puller.machine.reserve_pull, SECOND, pair.owner.address)
    pair.do(pair.puller, pair.puller.machine.start_pull, SECOND, pair.puller.targets(positions))


def after_a_first_hand_off() -> tuple[Pair, list[tuple[int, int]]]:
    pair = Pair()
    blocks = pair.offer([0, 1, 2])
    register_prefix(pair.owner.pool, [block for _, block in blocks], [1000, 1001, 1002])
    pair.pull([0, 1, 2])
    pair.run()
    pair.owner.pool.release([block for _, block in blocks])
    pair.owner.results.clear()
    pair.puller.results.clear()
    return pair, blocks


def test_a_digest_is_kept_when_blocks_are_offered_and_not_again_while_they_stay() -> None:
    pair, blocks = after_a_first_hand_off()
    kept = dict(pair.owner.kept)
    assert kept == {block: digest(100 + position) for position, block in blocks}
    pair.owner.content[blocks[0][1]] = 7
    offer_again(pair, blocks)
    assert pair.owner.kept == kept


def test_a_block_that_holds_something_else_gets_another_digest() -> None:
    pair, blocks = after_a_first_hand_off()
    everything = pair.owner.pool.allocate(pair.owner.pool.num_blocks)  # evicts
    assert everything is not None
    pair.owner.pool.release(everything)
    pair.owner.content[blocks[0][1]] = 7
    pair.owner.pool.allocate(pair.owner.pool.num_blocks)
    pair.do(pair.owner, pair.owner.machine.offer, SECOND, pair.puller.address)
    pair.do(pair.owner, pair.owner.machine.add_ready, SECOND, [(0, blocks[0][1])], True, 42)
    assert pair.owner.kept[blocks[0][1]] == digest(7)


def test_a_cached_block_that_has_changed_is_found_by_the_check_and_distrusted() -> None:
    pair, blocks = after_a_first_hand_off()
    pair.owner.content[blocks[1][1]] = 7
    offer_again(pair, blocks)
    assert not pair.owner.machine.is_checked(SECOND)
    pair.answer_checks(pair.owner)
    assert pair.owner.machine.is_checked(SECOND)
    assert CacheChecked(SECOND, 1) in pair.owner.results
    assert pair.offer_result().reason is AbortReason.DIGEST_MISMATCH
    assert not pair.owner.pool.known_hashes(), "what follows a spoilt block was computed from it"
    assert pair.owner.machine.counters.num_spoilt_blocks == 1


def test_without_a_check_the_reader_finds_it_by_the_digest_that_was_kept() -> None:
    pair, blocks = after_a_first_hand_off()
    pair.owner.content[blocks[1][1]] = 7
    offer_again(pair, blocks, check=False)
    pull_again(pair, [0, 1, 2])
    pair.run()
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert (result.state, result.reason) == (PullerState.FAILED, AbortReason.DIGEST_MISMATCH)
    assert not pair.owner.pool.known_hashes()


def test_where_the_release_of_a_mismatch_is_lost_the_next_check_finds_the_block() -> None:
    pair, blocks = after_a_first_hand_off()
    pair.owner.content[blocks[1][1]] = 7
    offer_again(pair, blocks, check=False)
    pull_again(pair, [0, 1, 2])
    while pair.puller.reads or any(mail.receiver == "puller" for mail in pair.mail) or not pair.puller.results:
        pair.deliver_all()
        for read_id in list(pair.puller.reads):
            pair.end_read(pair.puller, read_id)
    assert len(pair.lose_mail()) == 1, "the RELEASE"
    pair.owner.pool.release([block for _, block in blocks])
    pair.wait(CONFIG.lease_s + 1)
    assert pair.offer_result().state is OwnerState.EXPIRED
    assert len(pair.owner.pool.known_hashes()) == 3, "the owner has not heard of it"
    pair.owner.pool.share([block for _, block in blocks])
    pair.do(pair.owner, pair.owner.machine.offer, SECOND + 1, pair.puller.address)
    pair.act(pair.owner, pair.owner.machine.check_cached(SECOND + 1, [block for _, block in blocks]))
    pair.answer_checks(pair.owner)
    assert blocks[1][1] not in match(pair.owner.pool, [1000, 1001, 1002])


def test_an_answer_about_what_a_block_no_longer_holds_is_passed_over() -> None:
    pair, blocks = after_a_first_hand_off()
    offer_again(pair, blocks)
    (check,) = pair.owner.checks
    earlier = tuple((block, content - 1) for block, content in check.blocks)
    pair.event(pair.owner, BlocksChecked(SECOND, earlier))
    assert CacheChecked(SECOND, 0) in pair.owner.results
    assert len(pair.owner.pool.known_hashes()) == 3
