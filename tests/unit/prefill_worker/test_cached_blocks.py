"""A prefill worker that takes a prompt's beginning from its cache: checked, and given out only where it is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.block_hash import sequence_hashes
from core.errors import DeadlineExceeded, RequestCancelled, TransferFailed
from core.handoff import Abort, AbortReason, Ready
from kv_transfer.events import BlocksChecked, CheckBlocks, KeepDigests
from prefill_worker.machine import PrefillCancelled, PrefillDone, PrefillFailed
from tests.support.driven_worker import BLOCK_SIZE, request
from tests.unit.prefill_worker.driven_prefill import Prefill


def after_a_cached_prefix(wanted: bool = True) -> Prefill:
    """ "b" begins with two blocks that "a" has left in the cache, and is being computed."""
    worker = Prefill()
    worker.arrive(request("a", 8))
    worker.want(0, 1)
    worker.finish_step()
    worker.release()
    worker.arrive(request("b", 12), ticket=2)
    if wanted:
        worker.want(0, 1, 2, ticket=2)
    assert worker.chunks() == [("b", 8, 4)]
    return worker


def test_what_was_computed_is_noted_once_and_checked_when_it_is_used_again() -> None:
    worker = after_a_cached_prefix()
    computed = worker.of(KeepDigests)[0].blocks
    check = worker.only(CheckBlocks)
    assert (check.transfer_id, [block for block, _ in check.blocks]) == (2, list(computed))
    worker.finish_step()
    assert not set(worker.of(KeepDigests)[1].blocks) & set(computed)


def test_the_first_token_waits_for_the_check_of_the_blocks_it_was_computed_from() -> None:
    worker = after_a_cached_prefix()
    worker.finish_step()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a"]
    assert not worker.machine.idle
    worker.check_cached()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b"]


def test_a_check_that_is_back_first_costs_nothing() -> None:
    worker = after_a_cached_prefix()
    worker.check_cached()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a"]
    worker.finish_step()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b"]


@pytest.mark.parametrize("step_first", [True, False])
def test_spoilt_blocks_end_the_call_and_nobody_finds_them_or_what_came_of_them(step_first: bool) -> None:
    worker = after_a_cached_prefix()
    (spoilt, *_) = worker.only(CheckBlocks).blocks
    if step_first:
        worker.finish_step()
    worker.check_cached(spoilt[0])
    failed = worker.only(PrefillFailed)
    assert (failed.request_id, type(failed.error)) == ("b", TransferFailed)
    assert worker.sent(Abort)[-1].reason is AbortReason.DIGEST_MISMATCH
    if not step_first:
        worker.finish_step()
    worker.release(ticket=2, reason=AbortReason.DIGEST_MISMATCH)
    assert worker.machine.idle
    assert worker.ledger == {}
    assert not worker.pool.known_hashes(), "the second block was not spoilt, but is distrusted with its sequence"
    worker.arrive(request("c", 12), ticket=3)
    assert worker.chunks() == [("c", 0, 8)], "computed from the beginning"
    assert len(worker.of(PrefillDone)) == 1


def test_blocks_whose_reader_has_given_up_are_noted_all_the_same() -> None:
    """They are in the cache for the next request, and a byte of theirs may change as well as any other."""
    worker = Prefill()
    worker.arrive(request("a", 12))
    worker.want(0, 1, 2)
    worker.release(reason=AbortReason.CANCELLED)
    worker.run_until_idle()
    assert sum(len(keep.blocks) for keep in worker.of(KeepDigests)) == 3
    worker.arrive(request("b", 16), ticket=2)
    assert len(worker.only(CheckBlocks).blocks) == 3


def reader_gives_up(worker: Prefill) -> None:
    worker.release(ticket=2, reason=AbortReason.CANCELLED)


def call_is_cancelled(worker: Prefill) -> None:
    worker.post(PrefillCancelled("b"))


@pytest.mark.parametrize("end", [reader_gives_up, call_is_cancelled])
@pytest.mark.parametrize("step_first", [True, False])
def test_what_came_of_spoilt_blocks_is_not_found_though_its_hand_off_had_ended(
    end: Callable[[Prefill], None], step_first: bool
) -> None:
    worker = after_a_cached_prefix(wanted=False)
    (spoilt, *_) = worker.only(CheckBlocks).blocks
    if step_first:
        worker.finish_step()
    end(worker)
    if not step_first:
        worker.finish_step()
    worker.check_cached(spoilt[0])
    assert worker.machine.idle
    assert len(worker.of(PrefillDone)) == 1
    left = request("c", 12)  # what "b" computed is its last block
    assert sequence_hashes(left.token_ids, BLOCK_SIZE)[2] not in worker.pool.known_hashes()


def test_blocks_under_check_are_used_for_nothing_else() -> None:
    """Or the answer would be of other bytes, and the token that waits for it would be taken for right."""
    worker = Prefill(num_blocks=6)
    worker.arrive(request("a", 8))
    worker.finish_step()
    worker.release()
    worker.arrive(request("b", 12), ticket=2)
    worker.finish_step()
    worker.release(ticket=2)
    worker.arrive(request("c", 24, first=40), ticket=3)
    worker.run_until_idle()
    (spoilt, *_) = asked = worker.only(CheckBlocks).blocks
    assert [(block, worker.pool.content_of(block)) for block, _ in asked] == list(asked)
    assert worker.ledger["held"] == 6
    worker.post(BlocksChecked(2, (spoilt,)))
    assert [failed.request_id for failed in worker.of(PrefillFailed)] == ["b"]
    worker.run_until_idle()
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "c"]
    worker.release(ticket=3)
    assert worker.machine.idle
    assert worker.ledger == {}


def test_blocks_that_two_prompts_have_checked_wait_for_both_answers() -> None:
    worker = after_a_cached_prefix()
    worker.finish_step()
    worker.release(ticket=2)
    worker.arrive(request("c", 11), ticket=3)
    worker.finish_step()
    worker.release(ticket=3)
    first, second = worker.of(CheckBlocks)
    assert (first.blocks, second.blocks) == (first.blocks, first.blocks)
    for check, num_held in ((first, 2), (second, 0)):
        worker.post(BlocksChecked(check.transfer_id, ()))
        assert worker.ledger.get("held", 0) == num_held
    assert [done.request_id for done in worker.of(PrefillDone)] == ["a", "b", "c"]


def test_a_prompt_that_was_preempted_is_checked_again_and_waits_for_every_answer() -> None:
    worker = Prefill(num_blocks=6)
    worker.arrive(request("a", 8))
    worker.want(0, 1)
    worker.finish_step()
    worker.release()
    worker.arrive(request("x", 8, first=40), ticket=3)
    worker.finish_step()
    worker.arrive(request("b", 20), ticket=2)
    worker.want(0, 1, 2, 3, 4, ticket=2)
    worker.run_until_idle()
    assert worker.chunks() == [], "its last block is missing: x's reader keeps two"
    sequence = worker.core.scheduler.get("b")
    assert sequence is not None
    worker.core.scheduler._preempt(sequence)
    worker.release(ticket=3)
    assert worker.chunks() == [("b", 16, 4)]
    worker.finish_step()
    first, second = worker.of(CheckBlocks)
    assert (len(first.blocks), len(second.blocks)) == (2, 4)
    for check, num_done in ((first, 2), (second, 3)):
        worker.post(BlocksChecked(check.transfer_id, ()))
        assert len(worker.of(PrefillDone)) == num_done
    worker.release(ticket=2)
    assert worker.ledger == {}


def test_a_call_that_is_cancelled_while_it_waits_for_its_check_ends_once() -> None:
    worker = after_a_cached_prefix()
    worker.finish_step()
    worker.post(PrefillCancelled("b"))
    assert type(worker.only(PrefillFailed).error) is RequestCancelled
    worker.check_cached()
    assert len(worker.of(PrefillDone)) == 1


def test_the_deadline_ends_a_call_that_waits_for_its_check() -> None:
    worker = after_a_cached_prefix()
    worker.finish_step()
    worker.pass_time(61.0)
    assert type(worker.only(PrefillFailed).error) is DeadlineExceeded


def test_a_preempted_prompt_goes_on_offering_where_it_was() -> None:
    worker = Prefill(num_blocks=6)
    worker.arrive(request("x", 8, first=30), ticket=2)
    worker.run_until_idle()
    worker.arrive(request("a", 20))
    worker.want(0, 1, 2, 3, 4)
    worker.run_until_idle()
    assert worker.offered() == [0, 1, 2, 3], "the last block is missing: x's reader keeps two"
    sequence = worker.core.scheduler.get("a")
    assert sequence is not None
    worker.core.scheduler._preempt(sequence)
    assert worker.ledger == {"leased": 6}, "what was announced stays readable"
    worker.release(ticket=2)
    assert worker.chunks() == [("a", 16, 4)], "its own leased blocks are its cached prefix"
    worker.finish_step()
    assert worker.offered() == [0, 1, 2, 3, 4], "each position once"
    assert worker.sent(Ready)[-1].last
