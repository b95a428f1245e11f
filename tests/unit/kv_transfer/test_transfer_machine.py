"""What a machine refuses, the connections to its peers, and the names of transfers."""

from dataclasses import replace
from typing import Any, cast

import pytest

from core.config import TransferConfig
from core.errors import MemoryMismatch, QueueFull
from core.handoff import AbortReason, DevicePath, PoolAccess
from core.paths import PathState, PeerJoined
from kv_transfer.protocol.events import Connect
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair, address


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


def test_an_event_that_no_case_handles_is_an_error() -> None:
    with pytest.raises(AssertionError):
        Pair().owner.machine.handle(cast(Any, object()), 0.0)
