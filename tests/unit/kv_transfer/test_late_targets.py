"""A pull gets its target blocks when the owner has announced theirs."""

from __future__ import annotations

import pytest

from core.handoff import AbortReason, Heartbeat, PullerState
from core.scheduling.block_pool import Column
from tests.unit.kv_transfer.transfer_ends import assert_completed, assert_failed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair


def wanting(num_positions: int) -> Pair:
    """A pull without a target, whose WANT has arrived."""
    pair = Pair()
    pair.offer([], last=False)
    pair.reserve_pull()
    pair.do(pair.puller, pair.puller.machine.puller.start, ID, range(num_positions))
    pair.deliver_all()
    return pair


def give(pair: Pair, positions: list[int]) -> dict[int, int]:
    targets = pair.puller.targets(positions)
    pair.add_targets(targets)
    return targets


def incoming(pair: Pair) -> int:
    return pair.puller.pool.ledger()[Column.INCOMING]


def test_an_announcement_asks_for_targets_and_nothing_is_read_without() -> None:
    pair = wanting(4)
    assert pair.puller.needed == {}
    pair.add_ready([0, 1], last=False)
    pair.deliver_all()
    assert pair.puller.needed == {ID: [0, 1]}
    assert not pair.puller.reads
    assert pair.puller.pull_state(ID) is PullerState.WANTING
    assert incoming(pair) == 0


def test_targets_may_come_in_any_portions() -> None:
    pair = wanting(4)
    pair.add_ready([0, 1, 2], last=False)
    pair.deliver_all()
    targets = give(pair, [1])
    pair.run()
    targets |= give(pair, [0, 2])
    pair.run()
    assert pair.puller.pull_state(ID) is PullerState.WANTING
    pair.add_ready([3], last=True)
    pair.deliver_all()
    assert pair.puller.needed == {ID: [0, 1, 2, 3]}
    targets |= give(pair, [3])
    pair.run()
    assert_completed(pair)
    assert {position: pair.puller.content[block] for position, block in targets.items()} == {
        position: 100 + position for position in range(4)
    }


def test_a_position_is_asked_for_once_even_if_its_ready_is_repeated() -> None:
    pair = wanting(2)
    pair.add_ready([0, 1], last=True)
    repeated = list(pair.mail)
    pair.deliver_all()
    for mail in repeated:
        pair.deliver(mail)
    pair.wait(CONFIG.lease_s)
    assert pair.puller.needed == {ID: [0, 1]}
    give(pair, [0, 1])
    pair.run()
    assert_completed(pair)


def test_a_pull_that_lacks_targets_keeps_its_lease_and_tells_the_owner() -> None:
    pair = wanting(2)
    pair.add_ready([0, 1], last=True)
    pair.deliver_all()
    assert pair.owner.machine.starved_offers() == []
    pair.wait(5 * CONFIG.lease_s)
    assert pair.num_leases() == 2
    assert pair.owner.machine.starved_offers() == [ID]
    give(pair, [0, 1])
    pair.wait(CONFIG.lease_s / 2)
    assert pair.owner.machine.starved_offers() == []
    pair.run()
    assert_completed(pair)


@pytest.mark.parametrize("given", [[], [0]])
def test_a_pull_that_lacks_targets_can_be_given_up(given: list[int]) -> None:
    pair = wanting(2)
    pair.add_ready([0, 1], last=True)
    pair.deliver_all()
    give(pair, given)
    pair.cancel_pull()
    for read_id in list(pair.puller.reads):
        pair.end_read(pair.puller, read_id)
    assert_failed(pair, AbortReason.CANCELLED, PullerState.CANCELLED)
    assert incoming(pair) == len(given), "the worker frees the targets"


def test_an_abort_ends_a_pull_that_lacks_targets() -> None:
    pair = wanting(2)
    pair.add_ready([0, 1], last=True)
    pair.deliver_all()
    pair.abort_offer()
    pair.deliver_all()
    assert_failed(pair, AbortReason.PREFILL_FAILED)


def test_a_heartbeat_counts_announced_blocks_without_a_target() -> None:
    pair = wanting(3)
    pair.add_ready([0, 1, 2], last=True)
    pair.deliver_all()
    give(pair, [1])
    pair.wait(CONFIG.lease_s / 6, deliver=False)
    (beat,) = [mail.message for mail in pair.mail if isinstance(mail.message, Heartbeat)]
    assert (beat.entries[0].num_ready, beat.entries[0].num_unplaced) == (3, 2)
