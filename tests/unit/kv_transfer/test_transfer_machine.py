"""What a machine refuses, the connections to its peers, and the names of transfers."""

from dataclasses import replace
from typing import Any, cast

import pytest

from core.config import TransferConfig
from core.errors import MemoryMismatch, QueueFull, TransferFailed
from core.handoff import AbortReason, DevicePath, OwnerState, PoolAccess, PullerState
from core.paths import PathState, PeerJoined
from kv_transfer.protocol.events import Connect, PullCompleted
from kv_transfer.protocol.peers import short_name, transfer_name
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair, Side, address


def test_one_heartbeat_serves_all_pulls_from_an_owner() -> None:
    pair = Pair()
    for transfer_id in (1, 2, 3):
        pair.do(pair.owner, pair.owner.machine.offer, transfer_id, pair.puller.address)
        pair.do(pair.puller, pair.puller.machine.reserve_pull, transfer_id, pair.owner.address)
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    (heartbeat,) = [mail.message for mail in pair.mail]
    assert [entry.transfer_id for entry in heartbeat.entries] == [1, 2, 3]  # type: ignore[union-attr]


def test_idle_peers_above_the_limit_are_disconnected() -> None:
    pair = Pair()
    for number in range(80):
        pair.do(pair.owner, pair.owner.machine.offer, number, address(f"peer{number}", number + 1))
        pair.act(pair.owner, pair.owner.machine.owner.abort(number, AbortReason.CANCELLED))
    connected = {link.peer.name for link in pair.owner.links if isinstance(link, Connect)}
    gone = [link.peer for link in pair.owner.links if not isinstance(link, Connect)]
    assert len(connected) - len(gone) == 64
    assert gone[0] == "peer0"


def test_pools_in_memories_without_a_path_are_refused_by_name_on_both_sides() -> None:
    pair = Pair()
    on_device = replace(address("owner", 11), access=PoolAccess(1, frozenset({DevicePath.MAPPED})))
    with pytest.raises(MemoryMismatch, match="CUDA device 1 to a pool in host memory"):
        pair.puller.machine.reserve_pull(ID, on_device, 0.0)
    with pytest.raises(MemoryMismatch, match="host memory to a pool in the memory of CUDA device 1"):
        pair.owner.machine.offer(ID, replace(on_device, name="puller"), 0.0)
    for side in (pair.owner, pair.puller):
        side.machine.check()
        assert not side.machine.alive
    pair.puller.machine.handle(PeerJoined(on_device, is_owner=True), 0.0)
    (path,) = pair.puller.machine.paths
    assert path.state is PathState.REFUSED
    assert "device_path" in path.detail


def test_more_transfers_than_the_limit_are_refused() -> None:
    pair = Pair(TransferConfig(max_transfers=1))
    pair.offer([0])
    pair.reserve_pull()
    with pytest.raises(QueueFull):
        pair.owner.machine.offer(1, pair.puller.address, 0.0)
    with pytest.raises(QueueFull):
        pair.puller.machine.reserve_pull(1, pair.owner.address, 0.0)


def test_a_puller_follows_the_lease_of_its_owner() -> None:
    """Not by its own: the two may be configured apart, as while a fleet is being restarted."""
    pair = Pair()
    short = TransferConfig(lease_s=CONFIG.lease_s / 4)
    pair.owner = pair.sides["owner"] = Side(address("owner", 11, lease_s=short.lease_s), 0.0, short)
    pair.offer([0])
    pair.reserve_pull()
    pair.wait(5 * CONFIG.lease_s)
    assert pair.owner.offer_state(ID) is OwnerState.OFFERED
    targets = pair.start_pull([0])
    pair.deliver_all()
    pair.wait(2 * short.heartbeat_s, deliver=False)
    pair.lose_mail()
    pair.time += short.lease_s  # the owner lets go; a puller that went by its own lease would not know
    (read_id,) = pair.puller.reads
    pair.end_read(pair.puller, read_id)
    assert targets
    assert pair.puller.pull_state(ID) is PullerState.VERIFYING


def test_an_event_that_no_case_handles_is_an_error() -> None:
    with pytest.raises(AssertionError):
        Pair().owner.machine.handle(cast(Any, object()), 0.0)


def test_a_transfer_id_is_for_one_offer_and_one_pull_also_after_both_have_ended() -> None:
    pair = Pair()
    pair.offer([0, 1])
    with pytest.raises(TransferFailed, match="was offered before"):
        pair.owner.machine.offer(ID, pair.puller.address, pair.now(pair.owner))
    pair.pull([0, 1])
    with pytest.raises(TransferFailed, match="was pulled before"):
        pair.puller.machine.reserve_pull(ID, pair.owner.address, pair.now(pair.puller))
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)
    with pytest.raises(TransferFailed, match="was offered before"):
        pair.owner.machine.offer(ID, pair.puller.address, pair.now(pair.owner))
    with pytest.raises(TransferFailed, match="was pulled before"):
        pair.puller.machine.reserve_pull(ID, pair.owner.address, pair.now(pair.puller))


def test_messages_to_people_never_hold_a_whole_transfer_id() -> None:
    ticket = 0x0123456789ABCDEF0123456789ABCDEF
    assert short_name(ticket) == "01234567"
    assert transfer_name(ticket) == "transfer 01234567"
    pair = Pair()
    pair.do(pair.owner, pair.owner.machine.offer, ticket, pair.puller.address)
    with pytest.raises(TransferFailed) as refused:
        pair.owner.machine.offer(ticket, pair.puller.address, 0.0)
    assert f"{ticket:032x}" not in str(refused.value)


def test_a_machine_counts_its_live_transfers_and_claims_their_blocks() -> None:
    pair = Pair()
    machine = pair.owner.machine
    pair.act(pair.owner, machine.reserve_pull(ID + 1, pair.puller.address, 0.0))
    assert machine.alive
    blocks = pair.offer([0, 1], last=False)
    assert machine.num_alive == 2
    assert machine.num_by_state() == {OwnerState.OFFERED: 1, PullerState.RESERVED: 1}
    offered, pulled = machine.claims()
    assert (offered.state, offered.blocks) == (OwnerState.OFFERED, tuple(block for _, block in blocks))
    assert (pulled.state, pulled.blocks) == (PullerState.RESERVED, ())
