"""Hand-offs where something goes wrong: each ends typed, once, with nothing leased and nothing written afterwards."""

from dataclasses import replace

import pytest

from core.block_pool import Column
from core.config import TransferConfig
from core.handoff import (
    Abort,
    AbortReason,
    AgentAddress,
    HandoffMessage,
    Heartbeat,
    OfferedBlocks,
    OwnerState,
    PullerState,
    Ready,
    Release,
    Want,
)
from core.machine import Tick
from kv_transfer import puller
from kv_transfer.events import Connect, Disconnect, MessageReceived, PeerLost, PullCompleted, PullFailed, PullGivenUp
from kv_transfer.peers import Drop
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Mail, Pair, Side, address


def assert_failed(pair: Pair, reason: AbortReason, state: PullerState = PullerState.FAILED) -> None:
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert (result.reason, result.state) == (reason, state)
    assert not pair.puller.machine.alive


def assert_freed(pair: Pair, state: OwnerState, reason: AbortReason | None) -> None:
    ended = pair.offer_result()
    assert (ended.state, ended.reason) == (state, reason)
    assert pair.num_leases() == 0
    assert not pair.owner.machine.alive


def assert_completed(pair: Pair) -> None:
    assert isinstance(pair.pull_result(), PullCompleted)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, None)


def lose(pair: Pair, kind: type[HandoffMessage]) -> None:
    """Take all mail of one kind away, and prove that there was some."""
    lost = [mail for mail in pair.mail if isinstance(mail.message, kind)]
    assert lost, f"no {kind.__name__} was under way"
    pair.mail = [mail for mail in pair.mail if not isinstance(mail.message, kind)]


# ---- messages get lost, doubled, reordered


def test_a_lost_want_is_repeated() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    lose(pair, Want)
    pair.wait(CONFIG.heartbeat_s)
    pair.run()
    assert_completed(pair)


def test_a_want_lost_after_heartbeats_were_answered_is_repeated() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.reserve_pull()
    pair.wait(2 * CONFIG.heartbeat_s)
    pair.start_pull([0, 1])
    lose(pair, Want)
    pair.wait(CONFIG.heartbeat_s)
    pair.run()
    assert_completed(pair)


def test_lost_readys_are_repeated_after_a_heartbeat() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1, 2])
    pair.run()
    pair.add_ready([1], last=False)
    pair.add_ready([2], last=True)
    lose(pair, Ready)
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


def test_readys_in_the_wrong_order_are_put_right() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1, 2])
    pair.run()
    pair.add_ready([1], last=False)
    pair.add_ready([2], last=True)
    pair.mail.reverse()
    pair.run()
    assert pair.puller.machine.counters.dropped[Drop.GAP] == 1
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


def test_a_lost_release_frees_the_blocks_at_the_end_of_the_lease() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    pair.end_read(pair.puller, 0)
    lose(pair, Release)
    assert isinstance(pair.pull_result(), PullCompleted)
    pair.wait(CONFIG.lease_s - 0.1)
    assert pair.num_leases() == 1
    pair.wait(0.2)
    assert_freed(pair, OwnerState.EXPIRED, AbortReason.LEASE_EXPIRED)


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


def test_a_stranger_cannot_release_or_read_along() -> None:
    pair = Pair()
    pair.offer([0])
    pair.event(pair.owner, MessageReceived("stranger", Release(ID, 33, 5, None)))
    pair.event(pair.owner, MessageReceived("stranger", Want(ID, 33, 6, LAYOUT.fingerprint(), (0,))))
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 2
    assert not pair.mail
    pair.pull([0])
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
    for bad in ((7, 0, 0), (0, 999, 0), (0, -1, 0)):
        pair = Pair()
        pair.pull([0, 1])
        ready = Ready(ID, 11, 50, 1, 0, OfferedBlocks.of([bad]), False)
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
    pair.offer([0, 1, 2])
    targets = pair.pull([0, 1, 2])
    assert len(targets) == 3
    assert_failed(pair, AbortReason.READ_FAILED)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, AbortReason.READ_FAILED)


# ---- leases


def test_a_silent_puller_loses_its_lease_once() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.wait(CONFIG.lease_s + 0.1)
    assert_freed(pair, OwnerState.EXPIRED, AbortReason.LEASE_EXPIRED)
    assert pair.owner.machine.counters.offers[OwnerState.EXPIRED.value] == 1
    pair.event(pair.owner, Tick())
    assert len(pair.owner.results) == 1


def read_across_the_end_of_the_lease(pair: Pair) -> None:
    """A read ends, and only after the owner has let the block go and written something else into it."""
    blocks = pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    pair.owner.pool.release([block for _, block in blocks])
    pair.wait(2 * CONFIG.heartbeat_s, deliver=False)
    pair.lose_mail()
    pair.time += CONFIG.lease_s
    pair.event(pair.owner, Tick())
    assert_freed(pair, OwnerState.EXPIRED, AbortReason.LEASE_EXPIRED)
    pair.owner.content[blocks[0][1]] = -1
    pair.end_read(pair.puller, 0)


def test_bytes_read_after_the_lease_ended_are_not_trusted() -> None:
    pair = Pair(digests=False)
    read_across_the_end_of_the_lease(pair)
    assert pair.puller.machine.pull_state(ID) is PullerState.VERIFYING
    pair.deliver_all()  # the heartbeat that asks, and the answer
    assert_failed(pair, AbortReason.LEASE_EXPIRED)


def test_a_late_read_is_trusted_once_the_owner_confirms_the_lease() -> None:
    pair = Pair(digests=False)
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    lost = 0
    while pair.time < 1.1 * CONFIG.lease_s:  # heartbeats arrive, their answers do not
        pair.wait(CONFIG.heartbeat_s, deliver=False)
        for mail in pair.lose_mail():
            if mail.receiver == "owner":
                pair.deliver(mail)
        answers = pair.lose_mail()
        lost += len(answers)
        if lost % 3 == 2:
            for mail in answers:  # one of three arrives, or the owner would count as lost
                if isinstance(mail.message, Heartbeat):
                    pair.deliver(Mail(mail.sender, mail.receiver, replace(mail.message, ack=1)))
    pair.end_read(pair.puller, 0)
    assert pair.puller.machine.pull_state(ID) is PullerState.VERIFYING
    pair.deliver_all()
    assert_completed(pair)


def test_three_heartbeats_without_an_answer_mean_the_owner_is_lost() -> None:
    pair = Pair()
    pair.pull([0])
    for _ in range(3):
        pair.wait(CONFIG.heartbeat_s, deliver=False)
        assert not pair.puller.results
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    assert_failed(pair, AbortReason.PEER_LOST)


def test_an_owner_that_never_got_the_offer_says_so_after_a_grace() -> None:
    pair = Pair()
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address)  # so that it knows the puller
    pair.pull([0])
    pair.deliver_all()
    pair.wait(CONFIG.lease_s / 2 - 0.1)
    assert not pair.puller.results
    pair.wait(0.2)
    assert_failed(pair, AbortReason.UNKNOWN_TRANSFER)


def test_an_offer_that_comes_after_the_puller_gave_up_ends_at_once() -> None:
    pair = Pair()
    pair.pull([0])
    pair.deliver_all()
    pair.cancel_pull()
    pair.deliver_all()
    pair.do(pair.owner, pair.owner.machine.offer, ID, pair.puller.address)
    assert_freed(pair, OwnerState.RELEASED, AbortReason.CANCELLED)
    pair.add_ready([0], last=True)
    assert pair.num_leases() == 0


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
    assert pair.puller.machine.pull_state(ID) is PullerState.VERIFYING
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
    pair.pull([0, 1, 2])
    pair.deliver_all()
    pair.owner.content[blocks[1]] = -1
    pair.run()
    assert_failed(pair, AbortReason.DIGEST_MISMATCH)
    assert pair.puller.machine.counters.num_digest_mismatches == CONFIG.max_read_attempts
    assert_freed(pair, OwnerState.RELEASED, AbortReason.DIGEST_MISMATCH)


# ---- peers come and go


def test_a_lost_owner_fails_its_pulls_after_their_reads() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    pair.event(pair.puller, PeerLost("owner", "connection reset"))
    assert not pair.puller.results
    pair.fail_read(pair.puller, 0, AbortReason.PEER_LOST)
    assert_failed(pair, AbortReason.PEER_LOST)
    assert not pair.mail, "there is nobody to send a RELEASE to"


def test_a_puller_whose_connection_broke_may_still_read_until_its_lease_ends() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.deliver_all()
    pair.event(pair.owner, PeerLost("puller"))
    assert pair.num_leases() == 1
    pair.time += CONFIG.lease_s
    pair.event(pair.owner, Tick())
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PEER_LOST)


def test_a_puller_known_to_be_dead_loses_its_lease_at_once() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.deliver_all()
    pair.event(pair.owner, PeerLost("puller", died=True))
    assert_freed(pair, OwnerState.ABORTED, AbortReason.PEER_LOST)


def test_a_lost_peer_is_connected_again_for_the_next_transfer() -> None:
    pair = Pair()
    pair.event(pair.owner, PeerLost("puller"))
    pair.offer([0])
    pair.pull([0])
    pair.event(pair.owner, PeerLost("puller"))
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address)
    assert pair.owner.links == [Connect(pair.puller.address)] * 2


@pytest.fixture
def restarted() -> AgentAddress:
    return address("owner", 12)


def test_an_owner_restarted_under_its_name_is_another_one(restarted: AgentAddress) -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 1, restarted)
    assert pair.puller.links == [Connect(pair.owner.address), Disconnect("owner"), Connect(restarted)]
    pair.fail_read(pair.puller, 0, AbortReason.PEER_LOST)
    assert_failed_but_one_goes_on(pair)


def assert_failed_but_one_goes_on(pair: Pair) -> None:
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert (result.transfer_id, result.reason) == (ID, AbortReason.PEER_LOST)
    assert pair.puller.machine.pull_state(1) is PullerState.RESERVED
    old = Abort(1, 11, 10_000, AbortReason.CANCELLED)  # the old incarnation knows nothing of the new transfer
    pair.event(pair.puller, MessageReceived("owner", old))
    assert pair.puller.machine.pull_state(1) is PullerState.RESERVED
    assert pair.puller.machine.counters.dropped[Drop.FOREIGN] == 1


def test_a_restarted_owner_does_not_know_the_old_transfers() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.owner = pair.sides["owner"] = Side(address("owner", 12), 0.0, CONFIG)
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address)
    pair.wait(5 * CONFIG.heartbeat_s)
    assert_failed(pair, AbortReason.PEER_LOST)  # its answers are of another incarnation, so they count for nothing
