"""Leases that end and lost peers: nothing stays leased, and no byte counts that was not leased during its read."""

from dataclasses import replace

from core.handoff import Abort, AbortReason, Heartbeat, OwnerState, PullerState
from core.machine import Tick
from kv_transfer.protocol.events import Connect, Disconnect, MessageReceived, PeerLost, PullFailed
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_ends import assert_completed, assert_failed, assert_freed
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Mail, Pair, Side, address

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
    assert pair.puller.pull_state(ID) is PullerState.VERIFYING
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
    assert pair.puller.pull_state(ID) is PullerState.VERIFYING
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


# ---- peers come and go


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


def test_an_owner_restarted_under_its_name_is_another_one() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.deliver_all()
    restarted = address("owner", 12)
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 1, restarted)
    assert pair.puller.links == [Connect(pair.owner.address), Disconnect("owner"), Connect(restarted)]
    pair.fail_read(pair.puller, 0, AbortReason.PEER_LOST)
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert (result.transfer_id, result.reason) == (ID, AbortReason.PEER_LOST)
    old = Abort(1, 11, 10_000, AbortReason.CANCELLED)  # the old incarnation knows nothing of the new transfer
    pair.event(pair.puller, MessageReceived("owner", old))
    assert pair.puller.pull_state(1) is PullerState.RESERVED
    assert pair.puller.machine.counters.dropped[Drop.FOREIGN] == 1


def test_a_restarted_owner_does_not_know_the_old_transfers() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.owner = pair.sides["owner"] = Side(address("owner", 12), 0.0, CONFIG)
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address)
    pair.wait(5 * CONFIG.heartbeat_s)
    assert_failed(pair, AbortReason.PEER_LOST)  # the puller drops the answers of another incarnation
