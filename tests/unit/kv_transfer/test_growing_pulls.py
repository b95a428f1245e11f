"""A pull of a sequence that grows: blocks come as they fill, a heartbeat tells what is verified, and the last READY has
all tokens that the puller does not know."""

from __future__ import annotations

from core.handoff import AbortReason, Heartbeat, OwnerState, PullerState
from core.machine import Tick
from kv_transfer.protocol.events import OfferEnded, PeerLost, PullCompleted, PullFailed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair

NUM_KNOWN = 10  # tokens, in blocks of 4


class GrowingPair(Pair):
    """The puller wants five blocks, of which the owner has two full ones."""

    def __init__(self) -> None:
        super().__init__()
        self.do(self.owner, self.owner.machine.offer, ID, self.puller.address)
        self.add_ready([0, 1], last=False)
        self.reserve_pull()
        machine, now = self.puller.machine, self.now(self.puller)
        self.act(self.puller, machine.puller.start(ID, range(5), now, 20, NUM_KNOWN))

    def place(self) -> None:
        """Give a target to each announced block, and read until nothing is left to do."""
        while self.mail or self.puller.reads or self.puller.needed.get(ID):
            self.deliver_all()
            needed = self.puller.needed.pop(ID, [])
            if needed and ID in self.puller.machine.puller.pulls:
                self.add_targets(self.puller.targets(needed))
            for read_id in list(self.puller.reads):
                self.end_read(self.puller, read_id)

    def end_with(self, positions: list[int], *token_ids: int) -> None:
        blocks = self.owner.computed_blocks(positions)
        self.do(self.owner, self.owner.machine.owner.add_ready, ID, blocks, True, token_ids)

    @property
    def num_caught_up(self) -> int:
        return len(self.owner.caught_up)


def test_the_owner_learns_at_once_that_all_its_blocks_are_verified() -> None:
    pair = GrowingPair()
    pair.place()
    assert pair.time == 0.0
    assert pair.num_caught_up == 1
    pair.add_ready([2], last=False)
    pair.place()
    assert pair.num_caught_up == 2


def test_fewer_blocks_than_wanted_complete_the_pull_and_bring_all_tokens() -> None:
    pair = GrowingPair()
    pair.place()
    pair.end_with([2], 11, 12, 13)
    pair.place()
    result = pair.pull_result()
    assert isinstance(result, PullCompleted)
    assert result.token_ids == (11, 12, 13)
    assert result.stats.num_blocks == 3
    (ended,) = [result for result in pair.owner.results if isinstance(result, OfferEnded)]
    assert (ended.state, ended.reason, ended.is_released) == (OwnerState.RELEASED, None, True)
    assert pair.num_leases() == 0


def test_a_puller_that_knows_all_tokens_needs_no_block_of_the_newest_one() -> None:
    pair = GrowingPair()
    pair.place()
    pair.end_with([2])
    pair.place()
    result = pair.pull_result()
    assert isinstance(result, PullCompleted)
    assert result.token_ids == ()


def test_more_tokens_than_wanted_blocks_fail_the_pull() -> None:
    pair = GrowingPair()
    pair.place()
    pair.end_with([2, 3, 4], *range(12))
    pair.place()
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert result.reason is AbortReason.READ_FAILED


def test_a_last_ready_that_lacks_a_block_fails_the_pull() -> None:
    pair = GrowingPair()
    pair.place()
    pair.end_with([], 11, 12, 13)
    pair.place()
    assert isinstance(pair.pull_result(), PullFailed)


def test_lost_news_come_again_with_the_next_heartbeat() -> None:
    pair = GrowingPair()
    pair.deliver_all()
    pair.add_targets(pair.puller.targets(pair.puller.needed.pop(ID)))
    for read_id in list(pair.puller.reads):
        pair.end_read(pair.puller, read_id)
    assert any(isinstance(mail.message, Heartbeat) for mail in pair.lose_mail())
    assert pair.num_caught_up == 0
    pair.wait(CONFIG.heartbeat_s)
    assert pair.num_caught_up == 1


def test_news_without_an_answer_are_no_silence_of_the_owner() -> None:
    pair = GrowingPair()
    for position in (2, 3, 4):
        pair.place()
        pair.add_ready([position], last=False)
    pair.deliver_all()
    pair.add_targets(pair.puller.targets(pair.puller.needed.pop(ID)))
    for read_id in list(pair.puller.reads):
        pair.end_read(pair.puller, read_id)
    pair.lose_mail()
    pair.time += CONFIG.heartbeat_s
    pair.event(pair.puller, Tick())
    assert pair.puller.pull_state(ID) is PullerState.WANTING


def test_a_complete_pull_counts_as_such_although_the_owner_had_lost_the_puller() -> None:
    """Only the RELEASE says that the puller has everything."""
    pair = GrowingPair()
    pair.place()
    pair.end_with([2], 11, 12, 13)
    while not any(isinstance(result, PullCompleted) for result in pair.puller.results):
        mail = pair.mail.pop(0) if pair.mail else None
        if mail is not None:
            pair.deliver(mail)
        needed = pair.puller.needed.pop(ID, [])
        if needed:
            pair.add_targets(pair.puller.targets(needed))
        for read_id in list(pair.puller.reads):
            pair.end_read(pair.puller, read_id)
    pair.event(pair.owner, PeerLost("puller", "reset"))
    pair.deliver_all()
    (ended,) = [result for result in pair.owner.results if isinstance(result, OfferEnded)]
    assert (ended.state, ended.reason, ended.is_released) == (OwnerState.RELEASED, None, True)
