"""What a machine refuses, the connections to its peers, restarts of an owner, and leases that are confirmed late."""

from dataclasses import replace
from typing import Any, cast

import pytest

from core.config import TransferConfig
from core.errors import QueueFull
from core.handoff import Abort, AbortReason, Heartbeat, PullerState
from kv_transfer.protocol.events import Connect, Disconnect, MessageReceived, PeerLost, PullFailed
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Mail, Pair, Side, address, assert_completed, assert_failed


def test_idle_peers_above_the_limit_are_disconnected() -> None:
    pair = Pair()
    for number in range(80):
        pair.do(pair.owner, pair.owner.machine.offer, number, address(f"peer{number}", number + 1))
        pair.act(pair.owner, pair.owner.machine.owner.abort(number, AbortReason.CANCELLED))
    connected = {link.peer.name for link in pair.owner.links if isinstance(link, Connect)}
    gone = [link.peer for link in pair.owner.links if not isinstance(link, Connect)]
    assert len(connected) - len(gone) == 64
    assert gone[0] == "peer0"


def test_more_transfers_than_the_limit_are_refused() -> None:
    pair = Pair(TransferConfig(max_transfers=1))
    pair.offer([0])
    pair.reserve_pull()
    with pytest.raises(QueueFull):
        pair.owner.machine.offer(1, pair.puller.address, 0.0)
    with pytest.raises(QueueFull):
        pair.puller.machine.reserve_pull(1, pair.owner.address, 0.0)


def test_an_event_that_no_case_handles_is_an_error() -> None:
    with pytest.raises(AssertionError):
        Pair().owner.machine.handle(cast(Any, object()), 0.0)


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
