"""Two TransferMachines in any interleaving, with messages that are lost, repeated and reordered.

Both sides offer and pull. Targets come before their blocks are announced, or later, or never. Sequences end, are
preempted and recomputed; freed blocks are overwritten; reads end late or fail; peers are lost; time passes. The content
of a block is one integer. Digests are off, so only the leases keep a puller from using overwritten blocks. The machines
check themselves after each event. At the end no message arrives any more; then every pull has ended exactly once, and
every block is free.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import TransferConfig
from core.handoff import Abort, AbortReason, OwnerState, PullerState, Ready, Release, TransferId, Want
from core.machine import Tick
from core.paths import PeerLeft
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import OfferEnded, PeerLost, PullCompleted, PullFailed
from tests.unit.kv_transfer.transfer_pair import Mail, Pair, Side

CONFIG = TransferConfig(lease_s=12.0, max_blocks_per_read=2, max_reads_in_flight=2, max_transfers=8)
TROUBLES = ["preempt", "cancel", "abort", "break", "sleep"]
STEPS = ["offer", "reserve_pull", "start_pull"]

T = TypeVar("T")


def chosen(things: Iterable[T], pick: int) -> T:
    listed = list(things)
    return listed[pick % len(listed)]


@dataclass
class Transfer:
    transfer_id: TransferId
    owner: Side
    puller: Side
    num_blocks: int
    num_cached: int  # leading blocks in the puller's prefix cache
    deadline: float  # of the request, on the owner's clock
    reserved: bool = False
    started: bool = False
    offered: bool = False
    sequence: list[int] = field(default_factory=list)  # blocks of the owner's sequence, by position
    last: bool = False
    targets: dict[int, int] = field(default_factory=dict)
    given_up: bool = False
    pull_results: list[PullCompleted | PullFailed] = field(default_factory=list)
    offer_results: list[OfferEnded] = field(default_factory=list)

    def content(self, position: int) -> int:
        return self.transfer_id * 1000 + position


class TwoMachines:
    def __init__(self) -> None:
        self.pair = Pair(CONFIG, digests=False, num_blocks=24)
        self.transfers: dict[TransferId, Transfer] = {}
        self.num_garbage = 0
        self.must_end_at: dict[TransferId, float] = {}  # offers, on the owner's clock

    # ---- transfers

    def a_request_comes(
        self, num_blocks: int, num_cached: int, backwards: bool, order: list[str], late: int, within: float
    ) -> None:
        """The router calls both sides in any order. The first `late` of the three steps come later."""
        sides = (self.pair.puller, self.pair.owner) if backwards else (self.pair.owner, self.pair.puller)
        transfer_id = len(self.transfers) + 1
        deadline = self.pair.now(sides[0]) + within
        transfer = Transfer(transfer_id, *sides, num_blocks, min(num_cached, num_blocks), deadline)
        self.transfers[transfer_id] = transfer
        for step in order[late:]:
            getattr(self, step)(transfer)

    def offer(self, transfer: Transfer) -> None:
        if not transfer.offered:
            transfer.offered = True
            owner, reader = transfer.owner, transfer.puller.address
            self.pair.do(owner, owner.machine.offer, transfer.transfer_id, reader, transfer.deadline)

    def reserve_pull(self, transfer: Transfer) -> None:
        if not transfer.reserved:
            transfer.reserved = True
            puller = transfer.puller
            now = self.pair.now(puller)
            self.pair.act(puller, puller.machine.reserve_pull(transfer.transfer_id, transfer.owner.address, now))

    def start_pull(self, transfer: Transfer) -> None:
        self.reserve_pull(transfer)
        self.take_results()
        if transfer.started or transfer.pull_results:
            return
        transfer.started = True
        puller, positions = transfer.puller, range(transfer.num_cached, transfer.num_blocks)
        self.pair.do(puller, puller.machine.puller.start, transfer.transfer_id, positions)

    def targets_come(self, pick: int, count: int, early: bool) -> None:
        """For announced positions, or also for others."""
        self.take_results()
        open_ones = [t for t in self.transfers.values() if t.started and not t.pull_results and not t.given_up]
        if not open_ones:
            return
        transfer = chosen(open_ones, pick)
        needed = transfer.puller.needed.get(transfer.transfer_id, [])
        assert len(needed) == len(set(needed)), "a target was asked for twice"
        known = range(transfer.num_cached, transfer.num_blocks) if early else needed
        positions = [position for position in known if position not in transfer.targets][:count]
        blocks = transfer.puller.pool.reserve(len(positions))
        if not blocks:
            return
        targets = dict(zip(positions, blocks, strict=True))
        transfer.targets |= targets
        self.pair.do(transfer.puller, transfer.puller.machine.puller.add_targets, transfer.transfer_id, targets)

    def compute_a_chunk(self, pick: int, num_new: int, all_again: bool) -> None:
        computing = [transfer for transfer in self.transfers.values() if transfer.offered and not transfer.last]
        if not computing:
            return
        transfer = chosen(computing, pick)
        start = len(transfer.sequence)
        end = min(start + num_new, transfer.num_blocks)
        blocks = transfer.owner.pool.allocate(end - start)
        if blocks is None:
            return
        for position, block in enumerate(blocks, start):
            transfer.owner.content[block] = transfer.content(position)
        transfer.sequence += blocks
        transfer.last = end == transfer.num_blocks
        new = list(enumerate(transfer.sequence))[0 if all_again else start :]
        tokens = (42,) if transfer.last else ()
        machine = transfer.owner.machine
        self.pair.do(transfer.owner, machine.owner.add_ready, transfer.transfer_id, new, transfer.last, tokens)
        if transfer.last:
            self.end_sequence(transfer)

    def trouble(self, pick: int, kind: str) -> None:
        transfer = chosen(self.transfers.values(), pick)
        owner, puller = transfer.owner, transfer.puller
        if kind == "preempt" and not transfer.last:
            self.end_sequence(transfer)
        elif kind == "cancel":
            self.pair.do(puller, puller.machine.puller.cancel, transfer.transfer_id, AbortReason.CANCELLED)
        elif kind == "abort":
            self.pair.act(owner, owner.machine.owner.abort(transfer.transfer_id, AbortReason.PREFILL_FAILED))
        elif kind == "break":
            self.pair.event(owner, PeerLost(puller.name))
        elif kind == "sleep":  # the puller's process stops for longer than a lease, and then continues
            self.pair.time += CONFIG.lease_s + 1
            self.pair.event(owner, Tick())
            self.overwrite_free_blocks(owner, 24)

    # ---- the environment

    def mail_flows(self, count: int) -> None:
        for mail in self.pair.mail[:count]:
            self.pair.mail.remove(mail)
            self.pair.deliver(mail)

    def mail_moves(self, pick: int, fate: str) -> None:
        index = pick % len(self.pair.mail)
        mail = self.pair.mail[index] if fate == "double" else self.pair.mail.pop(index)
        if fate != "lose":
            self.pair.deliver(mail)

    def a_read_ends(self, pick: int, end: str) -> None:
        reads = [(side, read_id) for side in self.pair.sides.values() for read_id in side.reads]
        side, read_id = chosen(reads, pick)
        if end == "late":  # the read times out, and ends in another call of this rule
            self.pair.time_out_read(side, read_id)
        else:
            (self.pair.fail_read if end == "broken" else self.pair.end_read)(side, read_id)

    def overwrite_free_blocks(self, side: Side, count: int) -> None:
        blocks = side.pool.allocate(min(count, side.pool.num_available)) or []
        for block in blocks:
            self.num_garbage += 1
            side.content[block] = -self.num_garbage
        side.pool.release(blocks)

    # ---- the workers, and the invariants

    def num_under_way(self) -> int:
        return sum(not (transfer.pull_results and transfer.offer_results) for transfer in self.transfers.values())

    def end_sequence(self, transfer: Transfer) -> None:
        transfer.owner.pool.release(transfer.sequence)
        transfer.sequence = []

    def take_results(self) -> None:
        for side in self.pair.sides.values():
            for given_up in side.given_up:
                transfer = self.transfers[given_up.transfer_id]
                assert not transfer.given_up, "a pull was given up twice"
                transfer.given_up = True
            side.given_up.clear()
            for transfer_id, announced in side.caught_up:
                self.puller_caught_up(side, self.transfers[transfer_id], announced)
            side.caught_up.clear()
            for result in side.results:
                transfer = self.transfers[result.transfer_id]
                if isinstance(result, OfferEnded):
                    assert side is transfer.owner
                    transfer.offer_results.append(result)
                else:
                    assert side is transfer.puller
                    transfer.pull_results.append(result)
                    self.pull_ended(transfer, result)
            side.results.clear()

    def no_puller_holds_an_offer_for_longer_than_its_request(self) -> None:
        """It ends a lease after its deadline or after its abort at the latest, whatever the puller says."""
        for transfer_id, transfer in self.transfers.items():
            machine, now = transfer.owner.machine, self.pair.now(transfer.owner)
            offer = machine.owner.offers.get(transfer_id)
            if offer is None:
                continue
            end = self.must_end_at.get(transfer_id, max(now, transfer.deadline) + CONFIG.lease_s)
            next_deadline = machine.next_deadline()
            assert next_deadline is not None
            if next_deadline <= now:  # the Tick is late: the process sleeps
                end = max(end, now + CONFIG.lease_s)
            elif offer.aborting is not None:
                end = min(end, now + CONFIG.lease_s)
            self.must_end_at[transfer_id] = end
            assert now <= end, f"the offer of transfer {transfer_id} is held {now - end:.1f} s too long"

    def puller_caught_up(self, owner: Side, transfer: Transfer, announced: frozenset[int]) -> None:
        assert owner is transfer.owner
        assert not transfer.offer_results, "a puller caught up with an offer that had ended"
        if not transfer.pull_results:  # else the targets have been freed since
            for position in announced:
                content = transfer.puller.content[transfer.targets[position]]
                assert content == transfer.content(position), "caught up with wrong content"

    def pull_ended(self, transfer: Transfer, result: PullCompleted | PullFailed) -> None:
        assert len(transfer.pull_results) == 1, "a pull ended twice"
        targets = list(transfer.targets.values())
        written = {target for read in transfer.puller.reads.values() for _, target in read.pairs}
        assert not written.intersection(targets), "a read still writes into the targets of a pull that ended"
        if isinstance(result, PullFailed):
            assert result.state in (PullerState.FAILED, PullerState.CANCELLED)
            transfer.puller.pool.cancel_reservation(targets)
            return
        assert not transfer.given_up, "a pull completed after it was given up"
        assert result.token_ids == (42,)
        assert transfer.targets.keys() == set(range(transfer.num_cached, transfer.num_blocks))
        for position, block in transfer.targets.items():
            assert transfer.puller.content[block] == transfer.content(position), "completed with wrong content"
        transfer.puller.pool.arrive(targets)
        transfer.puller.pool.release(targets)

    def teardown(self) -> None:
        self.pair.lose_mail()
        for side in self.pair.sides.values():
            for read_id in list(side.reads):
                self.pair.fail_read(side, read_id)
        for transfer in self.transfers.values():
            self.end_sequence(transfer)
        self.take_results()
        for _ in range(3):  # no message arrives
            self.pair.wait(CONFIG.lease_s, deliver=False)
            self.pair.lose_mail()
        self.take_results()
        for transfer in self.transfers.values():
            assert len(transfer.pull_results) == transfer.reserved
            assert len(transfer.offer_results) == transfer.offered
            assert all(isinstance(ended.state, OwnerState) for ended in transfer.offer_results)
        for side in self.pair.sides.values():
            side.machine.check()
            side.pool.check()
            assert not side.machine.alive
            for peer in self.pair.sides:
                self.pair.event(side, PeerLeft(peer))
            assert side.machine.next_deadline() is None
            assert side.pool.ledger()[Column.FREE] == side.pool.num_blocks


def walk(seed: int, num_steps: int = 120) -> TwoMachines:
    """Apply the rules, with weights that let most transfers get far before a fault."""
    rng = random.Random(seed)
    world = TwoMachines()
    pick = rng.randrange
    for _ in range(num_steps):
        kind = rng.choices(["request", "late", "chunk", "flow", "mail", "read", "time", "other", "trouble", "targets"],
                            [3, 2, 8, 8, 2, 9, 3, 2, 1, 12])[0]  # fmt: skip
        if kind == "request" and world.num_under_way() < 4:
            late = rng.choice([0, 0, 0, 1, 2])
            within = rng.choice([math.inf, math.inf, 30.0, 5.0])
            world.a_request_comes(pick(6) + 1, pick(4), rng.random() < 0.5, rng.sample(STEPS, 3), late, within)
        elif kind == "late" and world.num_under_way():
            transfer = chosen(world.transfers.values(), pick(1000))
            getattr(world, rng.choice(STEPS))(transfer)
        elif kind == "targets" and world.num_under_way():
            world.targets_come(pick(1000), pick(6) + 1, rng.random() < 0.2)
        elif kind == "chunk" and world.num_under_way():
            world.compute_a_chunk(pick(1000), pick(6) + 1, rng.random() < 0.5)
        elif kind == "flow":
            world.mail_flows(pick(10) + 1)
        elif kind == "mail" and world.pair.mail:
            world.mail_moves(pick(4), rng.choice(["arrive", "double", "lose"]))
        elif kind == "read" and any(side.reads for side in world.pair.sides.values()):
            world.a_read_ends(pick(1000), rng.choices(["well", "broken", "late"], [96, 2, 2])[0])
        elif kind == "time":
            world.pair.wait(rng.choice([0.1, 0.5, 2.0, 5.0]), deliver=rng.random() < 0.9)
        elif kind == "other":
            world.overwrite_free_blocks(world.pair.puller if rng.random() < 0.5 else world.pair.owner, pick(24) + 1)
        elif kind == "trouble" and world.num_under_way():
            world.trouble(pick(1000), rng.choice(TROUBLES))
        world.take_results()
        world.no_puller_holds_an_offer_for_longer_than_its_request()
    return world


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_interleaving(seed: int) -> None:
    walk(seed).teardown()


def test_these_walks_complete_and_fail_many_pulls() -> None:
    ended: Counter[str] = Counter()
    for seed in range(40):
        world = walk(seed)
        world.teardown()
        for transfer in world.transfers.values():
            ended.update(type(result).__name__ for result in transfer.pull_results)
    assert ended["PullCompleted"] > 60
    assert ended["PullFailed"] > 60


NUM_COPIES = 5  # of each WANT


def ask_on(world: TwoMachines, seconds: float) -> int:
    """Pullers hear no ABORT, send no RELEASE, and repeat each WANT. Returns how many WANTs were repeated."""
    wants: dict[TransferId, Mail] = {}
    pair, end, counter = world.pair, world.pair.time + seconds, 1_000_000
    while pair.time < end:
        pair.wait(1.0, deliver=False)
        heard = [mail for mail in pair.lose_mail() if not isinstance(mail.message, Abort | Release)]
        for mail in heard:
            pair.deliver(mail)
            if isinstance(mail.message, Want):
                wants[mail.message.transfer_id] = mail
        sent = pair.lose_mail()
        for mail in wants.values():
            for _ in range(NUM_COPIES):
                counter += 1
                pair.deliver(replace(mail, message=replace(mail.message, counter=counter)))
        repeated = Counter(mail.message.transfer_id for mail in pair.mail if isinstance(mail.message, Ready))
        assert max(repeated.values(), default=0) <= 1, "a WANT that repeats another at once is answered again"
        pair.mail += sent
        world.no_puller_holds_an_offer_for_longer_than_its_request()
    return counter - 1_000_000


def test_a_puller_that_asks_on_holds_no_block_for_long_and_costs_one_answer_for_many_questions() -> None:
    num_repeated = 0
    for seed in range(40):
        world = walk(seed, num_steps=40)
        num_repeated += ask_on(world, 30.0 + 2 * CONFIG.lease_s)
        alive = [
            transfer_id for side in world.pair.sides.values() for transfer_id in side.machine.owner.offers
            if not math.isinf(world.transfers[transfer_id].deadline)
        ]  # fmt: skip
        assert not alive
        world.teardown()
    assert num_repeated > 1000
