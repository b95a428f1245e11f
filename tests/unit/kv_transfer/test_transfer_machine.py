"""Both halves of a transfer: refusals, peers, restarts, leases, answers of the owner, messages that are nonsense."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from core.config import TransferConfig
from core.errors import LayoutMismatch, QueueFull
from core.handoff import (
    MAX_POSITIONS,
    Abort,
    AbortReason,
    Heartbeat,
    HeartbeatEntry,
    OfferedBlocks,
    OwnerState,
    PullerState,
    Ready,
    Release,
    Want,
)
from core.machine import Tick
from core.scheduling.block_pool import BlockPool
from kv_transfer.protocol import owner, puller
from kv_transfer.protocol.events import ComputeDigests, Connect, Disconnect, MessageReceived, PeerLost, PullFailed
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.protocol.owner import MAX_EARLY_BLOCKS
from kv_transfer.protocol.peers import Drop
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Mail, Pair, Side, address


def test_idle_peers_above_the_limit_are_disconnected() -> None:
    pair = Pair()
    for number in range(1040):
        pair.do(pair.owner, pair.owner.machine.offer, number, address(f"peer{number}", number + 1), math.inf)
        pair.abort_offer(number)
    connected = {link.peer.name for link in pair.owner.links if isinstance(link, Connect)}
    gone = [link.peer for link in pair.owner.links if not isinstance(link, Connect)]
    assert len(connected) - len(gone) == 1024
    assert gone[0] == "peer0"


def test_more_transfers_than_the_limit_are_refused() -> None:
    pair = Pair(TransferConfig(max_transfers=1))
    pair.offer([0])
    assert pair.owner.machine.num_by_state() == {OwnerState.OFFERED: 1}
    pair.reserve_pull()
    with pytest.raises(QueueFull):
        pair.owner.machine.offer(1, pair.puller.address, math.inf, 0.0)
    with pytest.raises(QueueFull):
        pair.puller.machine.reserve_pull(1, pair.owner.address, 0.0)


def test_the_claims_of_both_sides_name_the_peer_and_too_little_of_the_transfer_for_a_ticket() -> None:
    pair = Pair()
    pair.offer([0, 1])
    pair.reserve_pull()
    ((offer,), (pull,)) = (side.machine.claims() for side in (pair.owner, pair.puller))
    assert (offer.state, offer.peer, len(offer.blocks)) == (OwnerState.OFFERED, "puller", 2)
    assert (pull.state, pull.peer, pull.blocks) == (PullerState.RESERVED, "owner", ())
    assert offer.name == pull.name == f"{ID:032x}"[:8]


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
    pair.assert_completed()


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
    pair.do(pair.owner, pair.owner.machine.offer, 1, pair.puller.address, math.inf)
    pair.wait(5 * CONFIG.heartbeat_s)
    pair.assert_failed(AbortReason.PEER_LOST)  # the puller drops the answers of another incarnation


def offer(pair: Pair, transfer_id: int) -> None:
    pair.do(pair.owner, pair.owner.machine.offer, transfer_id, pair.puller.address, math.inf)


def ask(pair: Pair, transfer_id: int, counter: int) -> list[object]:
    """The answers to a WANT of the puller."""
    pair.lose_mail()
    want = Want(transfer_id, 22, counter, LAYOUT.fingerprint(), (0,))
    pair.event(pair.owner, MessageReceived("puller", want))
    return [mail.message for mail in pair.lose_mail()]


def test_a_want_for_an_aborted_offer_is_answered_with_the_abort_again() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    assert isinstance(ask(pair, ID, 1)[0], Ready)
    pair.abort_offer()
    assert pair.owner.machine.alive, "the blocks may still be read"
    (answer,) = ask(pair, ID, 2)
    assert isinstance(answer, Abort)
    assert answer.reason is AbortReason.PREFILL_FAILED


def test_a_want_for_an_ended_offer_is_answered_until_the_table_forgets_the_oldest_end() -> None:
    pair = Pair(TransferConfig(max_transfers=2, lease_s=12.0))
    pair.do(pair.puller, pair.puller.machine.reserve_pull, 9, pair.owner.address)
    pair.wait(CONFIG.heartbeat_s)  # the owner has met the puller
    for transfer_id in (1, 2, 3):
        offer(pair, transfer_id)
        pair.abort_offer(transfer_id)
    assert ask(pair, 1, 101) == [], "it may be on its way to us"
    for transfer_id in (2, 3):
        (answer,) = ask(pair, transfer_id, 200 + transfer_id)
        assert isinstance(answer, Abort)
        assert (answer.transfer_id, answer.reason) == (transfer_id, AbortReason.PREFILL_FAILED)
    assert pair.owner.machine.counters.dropped[Drop.LATE] == 2


def test_an_abort_for_an_unknown_pull_is_counted_and_not_kept() -> None:
    pair = Pair()
    pair.event(pair.puller, MessageReceived("owner", Abort(ID, 11, 1, AbortReason.CANCELLED)))
    assert pair.puller.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == 1
    assert pair.puller.machine.next_deadline() is None


def test_an_agent_with_another_layout_is_refused_by_both_sides_and_not_connected_to() -> None:
    pair = Pair()
    other = replace(LAYOUT, block_size=8, model="n")  # a block size that is twice ours can be translated
    with pytest.raises(LayoutMismatch):
        pair.owner.machine.offer(ID, replace(pair.puller.address, layout=other), math.inf, 0.0)
    with pytest.raises(LayoutMismatch) as refused:
        pair.puller.machine.reserve_pull(ID, replace(pair.owner.address, layout=other), 0.0)
    assert refused.value.differences == {"model": ("m", "n")}
    offer(pair, ID)
    pair.reserve_pull()
    assert pair.owner.links == [Connect(pair.puller.address)]
    assert pair.puller.links == [Connect(pair.owner.address)]


def test_a_lost_puller_ends_its_own_offers_alone_and_at_once_if_it_cannot_have_read() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    other = replace(pair.puller.address, name="other", incarnation=33)
    pair.do(pair.owner, pair.owner.machine.offer, ID + 1, other, math.inf)
    pair.event(pair.owner, PeerLost("puller"))
    ended = pair.offer_result()
    assert (ended.transfer_id, ended.state, ended.reason) == (ID, OwnerState.ABORTED, AbortReason.PEER_LOST)
    assert pair.num_leases() == 0


@pytest.mark.parametrize(
    ("verify", "device", "pieces", "computed", "sizes"),
    [
        (True, None, 1, True, [2, 7]),
        (True, None, 1, True, [2, 8, 32, 128, 512, 2048, 770]),
        (False, None, 1, False, [2048]),
        (False, None, 1, False, [2048, 1]),
        (True, None, 2, False, [2, 8, 9]),  # the agent hashes pieces when it sends their READY
        (True, 0, 1, True, [2, 7]),
        (True, 0, 2, False, [19]),
    ],
)
def test_blocks_are_hashed_ahead_if_whole_and_announced_in_growing_readys_if_hashed_and_in_bounded_ones(
    verify: bool, device: int | None, pieces: int, computed: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "FIRST_READY_BYTES", 2 * LAYOUT.block_bytes)
    num_blocks = (sum(sizes) + 1) // pieces
    pool = BlockPool(num_blocks)
    here = replace(address("owner", 11), device=device)
    machine = TransferMachine(replace(CONFIG, verify_digests=verify), pool, here)
    layout = replace(LAYOUT, block_size=LAYOUT.block_size // pieces)
    machine.offer(ID, replace(address("puller", 22, layout=layout), device=device), math.inf, 0.0)
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    actions = machine.owner.add_ready(ID, list(enumerate(blocks)), True, (42,), 0.0)
    assert actions == ([ComputeDigests(tuple(blocks))] if computed else [])
    want = Want(ID, 22, 1, layout.fingerprint(), tuple(range(1, num_blocks * pieces)))  # the puller has the first piece
    sent = [send.message.blocks for send in machine.handle(MessageReceived("puller", want), 0.0)]  # type: ignore[union-attr]
    assert [len(offered) for offered in sent] == sizes
    announced = [(piece, block) for offered in sent for piece, block, _ in offered]
    assert announced == [(piece, blocks[piece // pieces]) for piece in want.positions]


def test_a_heartbeat_renews_no_lease_of_another_reader() -> None:
    pair = Pair()
    pair.offer([0])
    other = replace(pair.puller.address, name="other", incarnation=33)
    pair.do(pair.owner, pair.owner.machine.offer, ID + 1, other, math.inf)
    pair.wait(CONFIG.lease_s / 2)
    entries = (HeartbeatEntry(ID, 0), HeartbeatEntry(ID + 1, 0))
    pair.event(pair.owner, MessageReceived("other", Heartbeat(33, 1, None, entries)))
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 1
    (answer,) = [mail.message for mail in pair.lose_mail() if isinstance(mail.message, Heartbeat)]
    assert [entry.transfer_id for entry in answer.entries] == [ID + 1]
    pair.wait(CONFIG.lease_s / 2 + 0.1)
    ended = pair.offer_result()
    assert (ended.transfer_id, ended.state) == (ID, OwnerState.EXPIRED)


def test_messages_of_another_incarnation_are_dropped() -> None:
    pair = Pair()
    pair.offer([0], last=False)
    pair.pull([0, 1])
    pair.run()
    pair.wait(CONFIG.heartbeat_s, deliver=False)
    for mail in pair.lose_mail():
        foreign = replace(mail.message, incarnation=99, counter=mail.message.counter + 1000)
        pair.deliver(replace(mail, message=foreign))
    pair.deliver(Mail("puller", "owner", Release(ID, 99, 1000, None)))
    pair.deliver(Mail("owner", "puller", Abort(ID, 99, 1000, AbortReason.CANCELLED)))
    assert pair.owner.machine.counters.dropped[Drop.FOREIGN] == 2  # heartbeat and RELEASE
    assert pair.puller.machine.counters.dropped[Drop.FOREIGN] == 1
    assert pair.num_leases() == 1
    pair.add_ready([1], last=True)
    pair.run()
    pair.assert_completed()


def test_messages_for_unknown_transfers_are_bounded_and_dropped() -> None:
    pair = Pair(TransferConfig(max_transfers=3, lease_s=12.0))
    for number in range(5):
        pair.event(pair.owner, MessageReceived("stranger", Want(number, 33, 1 + number, 0, ())))
    pair.event(pair.owner, Tick())
    assert pair.owner.machine.counters.dropped == {Drop.TABLE_FULL: 2}
    pair.wait(6.0)
    assert pair.owner.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == 3
    assert pair.owner.machine.next_deadline() is None


def test_the_blocks_that_early_wants_name_are_bounded() -> None:
    """48 bytes of a stranger name 65,536 blocks: a thousand such messages took 2.5 GiB."""
    pair, most = Pair(TransferConfig(lease_s=12.0)), MAX_EARLY_BLOCKS // MAX_POSITIONS
    for number in range(most + 3):
        want = Want(number, 33, 1 + number, 0, tuple(range(MAX_POSITIONS)))
        pair.event(pair.owner, MessageReceived("stranger", want))
    assert pair.owner.machine.counters.dropped[Drop.TABLE_FULL] == 3
    pair.wait(6.0)
    assert pair.owner.machine.counters.dropped[Drop.UNKNOWN_TRANSFER] == most


def announced(pair: Pair, rows: list[tuple[int, int, int]], token_ids: tuple[int, ...] = (), counter: int = 50) -> None:
    """A READY with these positions, blocks and digests arrives. With tokens, it is the last."""
    ready = Ready(ID, 11, counter, 1, 0, OfferedBlocks.of(rows), bool(token_ids), token_ids)
    pair.event(pair.puller, MessageReceived("owner", ready))


def test_an_owner_that_announces_nonsense_fails_the_pull() -> None:
    unwanted, outside, below = [(7, 0, 0)], [(0, 3, 0), (1, 32, 0)], [(0, -1, 0), (1, 3, 0)]
    for bad in (unwanted, outside, below, [(0, 3, 0), (0, 4, 0)]):  # the last one: twice
        pair = Pair()
        pair.pull([0, 1])
        announced(pair, bad)
        pair.assert_failed(AbortReason.READ_FAILED)


def test_an_owner_whose_last_readys_differ_fails_the_pull() -> None:
    pair = Pair()
    pair.owner.content = dict.fromkeys(range(pair.owner.pool.num_blocks), 1)
    pair.pull([0])
    announced(pair, [(0, 3, 0)], (42,))
    announced(pair, [(0, 3, 0)], (43,), counter=51)
    pair.run()
    pair.assert_failed(AbortReason.READ_FAILED)


def test_an_owner_that_announces_more_blocks_than_its_sequence_fills_fails_the_pull() -> None:
    """A sequence that grows during the pull has 4 tokens for each block. It had 2, and 5 came: they fill 2 blocks."""
    pair = Pair()
    pair.owner.content = dict.fromkeys(range(pair.owner.pool.num_blocks), 1)
    pair.reserve_pull()
    start, positions = pair.puller.machine.puller.start, [0, 1, 2]
    pair.act(pair.puller, start(ID, positions, pair.now(pair.puller), 12, 2))
    pair.add_targets(pair.puller.targets(positions))
    announced(pair, [(position, 3 + position, 0) for position in positions], (1, 2, 3, 4, 5))
    pair.run()
    pair.assert_failed(AbortReason.READ_FAILED)


def test_a_want_with_another_layout_is_answered_with_an_abort() -> None:
    pair = Pair()
    pair.offer([0])
    pair.pull([0])
    (want,) = [mail.message for mail in pair.lose_mail()]
    assert isinstance(want, Want)
    pair.event(pair.owner, MessageReceived("puller", replace(want, layout_fingerprint=1)))
    pair.assert_freed(OwnerState.ABORTED, AbortReason.LAYOUT_MISMATCH)
    pair.deliver_all()
    pair.assert_failed(AbortReason.LAYOUT_MISMATCH)


def test_a_pull_of_more_blocks_than_a_want_can_list_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "MAX_POSITIONS", 2)
    pair = Pair()
    pair.offer([0, 1])
    pair.pull([0, 1])
    pair.run()
    pair.assert_completed()
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.reserve_pull()
    pair.do(pair.puller, pair.puller.machine.puller.start, ID, [0, 1, 2])
    pair.assert_failed(AbortReason.READ_FAILED)
    pair.deliver_all()
    pair.assert_freed(OwnerState.RELEASED, AbortReason.READ_FAILED)
