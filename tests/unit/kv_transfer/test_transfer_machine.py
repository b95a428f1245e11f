"""Hand-offs where all goes well, and what the machine refuses."""

from dataclasses import replace
from typing import Any, cast

import pytest

from core.config import TransferConfig
from core.errors import LayoutMismatch, MemoryMismatch, QueueFull, TransferFailed
from core.handoff import AbortReason, DevicePath, OwnerState, PoolAccess, PullerState, Ready, Want
from core.paths import PathState, PeerJoined
from core.scheduling.block_pool import Column
from kv_transfer.protocol import owner
from kv_transfer.protocol.events import Connect, PullCompleted
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair, Side, address


def assert_pulled(pair: Pair, targets: dict[int, int]) -> PullCompleted:
    """The pull completed with the owner's bytes, and nothing is leased any more."""
    result = pair.pull_result()
    assert isinstance(result, PullCompleted)
    assert result.first_token_id == 42
    assert {position: pair.puller.content[block] for position, block in targets.items()} == {
        position: 100 + position for position in targets
    }
    assert pair.offer_result().state is OwnerState.RELEASED
    assert pair.offer_result().reason is None
    assert pair.num_leases() == 0
    assert not pair.owner.machine.alive
    assert not pair.puller.machine.alive
    assert pair.owner.machine.next_deadline() is None
    assert pair.puller.machine.next_deadline() is None
    return result


def test_a_pull_gets_the_owners_bytes_and_frees_them() -> None:
    pair = Pair()
    pair.offer(list(range(6)))
    targets = pair.pull(list(range(6)))
    pair.run()
    stats = assert_pulled(pair, targets).stats
    assert (stats.num_blocks, stats.num_bytes, stats.num_reads) == (6, 6 * LAYOUT.block_bytes, 2)


def test_blocks_are_pulled_while_later_ones_are_still_computed() -> None:
    pair = Pair()
    targets = pair.pull([0, 1, 2, 3, 4])
    pair.offer([0, 1], last=False)
    pair.run()
    assert len(pair.puller.machine.puller.pulls[ID].verified) == 2
    assert pair.puller.pull_state(ID) is PullerState.WANTING
    pair.add_ready([2, 3], last=False)
    pair.run()
    pair.add_ready([4], last=True)
    pair.run()
    assert_pulled(pair, targets)


def test_blocks_the_puller_does_not_want_are_unleased_when_its_want_comes() -> None:
    pair = Pair()
    blocks = dict(pair.offer([0, 1, 2, 3]))
    assert pair.num_leases() == 4
    targets = pair.pull([2, 3])
    pair.deliver_all()
    assert [pair.owner.pool.num_leases(blocks[position]) for position in range(4)] == [0, 0, 1, 1]
    pair.run()
    assert_pulled(pair, targets)


def test_a_pull_of_nothing_gets_the_first_token() -> None:
    pair = Pair()
    pair.offer([0, 1])
    targets = pair.pull([])
    pair.run()
    assert assert_pulled(pair, targets).stats.num_reads == 0


def test_a_last_announcement_without_blocks_completes_the_pull() -> None:
    pair = Pair()
    pair.offer([0, 1], last=False)
    targets = pair.pull([0, 1])
    pair.run()
    pair.add_ready([], last=True)
    pair.run()
    assert_pulled(pair, targets)


def test_a_want_that_comes_before_its_offer_waits_for_it() -> None:
    pair = Pair()
    targets = pair.pull([0, 1])
    pair.deliver_all()
    pair.wait(CONFIG.lease_s / 4)
    pair.offer([0, 1])
    pair.run()
    assert_pulled(pair, targets)


def test_a_reserved_pull_keeps_the_offer_alive_for_many_leases() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.reserve_pull()
    pair.wait(5 * CONFIG.lease_s)
    assert pair.owner.offer_state(ID) is OwnerState.OFFERED
    targets = pair.start_pull([0, 1])
    pair.run()
    assert_pulled(pair, targets)


def test_a_slow_owner_is_waited_for_over_many_leases() -> None:
    pair = Pair()
    pair.offer([], last=False)
    targets = pair.pull([0])
    pair.wait(5 * CONFIG.lease_s)
    pair.add_ready([0], last=True)
    pair.run()
    assert_pulled(pair, targets)


def test_a_preempted_sequence_may_offer_all_its_blocks_again() -> None:
    pair = Pair()
    first = pair.offer([0, 1], last=False)
    targets = pair.pull([0, 1, 2])
    pair.run()
    pair.owner.pool.release([block for _, block in first])
    again = pair.add_ready([0, 1, 2], last=True)
    assert [pair.owner.pool.num_leases(block) for _, block in again] == [0, 0, 1]
    pair.run()
    assert_pulled(pair, targets)


def test_a_lease_outlives_the_sequence_that_held_the_blocks() -> None:
    pair = Pair()
    blocks = [block for _, block in pair.offer([0, 1, 2])]
    pair.owner.pool.release(blocks)
    assert pair.owner.pool.ledger()[Column.LEASED] == 3
    targets = pair.pull([0, 1, 2])
    pair.run()
    assert_pulled(pair, targets)
    assert pair.owner.pool.ledger()[Column.FREE] == 32


def test_reads_are_bounded_in_size_and_number_and_sorted_by_source() -> None:
    pair = Pair()
    pair.offer(list(range(20)))
    pair.pull(list(range(20)))
    pair.deliver_all()
    reads = list(pair.puller.reads.values())
    assert [len(read.pairs) for read in reads] == [CONFIG.max_blocks_per_read] * CONFIG.max_reads_in_flight
    assert all(list(read.pairs) == sorted(read.pairs) for read in reads)
    expected_s = 4 * LAYOUT.block_bytes / CONFIG.min_bytes_per_s + CONFIG.read_grace_s
    assert reads[0].timeout_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("num_blocks", "digests", "expected"),
    [
        (3500, True, [64, 256, 1024, 2048, 108]),
        (320, True, [64, 256]),
        (2048, False, [2048]),
        (2049, False, [2048, 1]),
    ],
)
def test_many_blocks_are_announced_in_messages_that_grow_for_digests_and_are_bounded(
    num_blocks: int, digests: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "FIRST_READY_BYTES", 64 * LAYOUT.block_bytes)
    pair = Pair(TransferConfig(max_blocks_per_read=256, verify_digests=digests), digests, num_blocks=3500)
    pair.offer(list(range(num_blocks)))
    targets = pair.pull(list(range(num_blocks)))
    while any(isinstance(mail.message, Want) for mail in pair.mail):
        pair.deliver(pair.mail.pop(0))
    sizes = [len(mail.message.blocks) for mail in pair.mail if isinstance(mail.message, Ready)]
    assert sizes == expected
    pair.run()
    assert_pulled(pair, targets)


def test_each_peer_is_connected_once() -> None:
    pair = Pair()
    for transfer_id in (1, 2, 3):
        pair.do(pair.owner, pair.owner.machine.offer, transfer_id, pair.puller.address)
        pair.do(pair.puller, pair.puller.machine.reserve_pull, transfer_id, pair.owner.address)
    assert pair.owner.links == [Connect(pair.puller.address)]
    assert pair.puller.links == [Connect(pair.owner.address)]


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


def test_other_layouts_are_refused_and_leave_no_trace() -> None:
    pair = Pair()
    other = address("owner", 11, layout=replace(LAYOUT, block_size=8, model="n"))
    with pytest.raises(LayoutMismatch) as caught:
        pair.puller.machine.reserve_pull(ID, other, 0.0)
    assert caught.value.differences == {"model": ("m", "n")}  # a block size that is twice ours can be translated
    pair.puller.machine.check()
    assert not pair.puller.machine.alive


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


def test_a_transfer_id_is_used_once() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    pair.run()
    with pytest.raises(TransferFailed):
        pair.owner.machine.offer(ID, pair.puller.address, 0.0)
    with pytest.raises(TransferFailed):
        pair.puller.machine.reserve_pull(ID, pair.owner.address, 0.0)


def test_more_transfers_than_the_limit_are_refused() -> None:
    pair = Pair(TransferConfig(max_transfers=1))
    pair.offer([0])
    pair.reserve_pull()
    with pytest.raises(QueueFull):
        pair.owner.machine.offer(1, pair.puller.address, 0.0)
    with pytest.raises(QueueFull):
        pair.puller.machine.reserve_pull(1, pair.owner.address, 0.0)


def test_a_puller_beats_and_trusts_by_the_lease_of_its_owner() -> None:
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
