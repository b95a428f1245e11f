"""Two TransferMachines, their pools and the mail between them, all in the hands of a test.

Nothing moves by itself: the test delivers mail, ends reads and lets time pass. The bytes of a block are one integer.
The two clocks differ by 1000 s, so a machine that compared them would show it. After each event both machines check
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from core.config import TransferConfig
from core.handoff import AbortReason, AgentAddress, HandoffMessage, OwnerState, PullerState, Ready, TransferId
from core.kv_layout import KVLayout
from core.machine import Tick
from core.scheduling.block_pool import BlockPool, Column
from kv_transfer.protocol import events
from kv_transfer.protocol.machine import TransferMachine

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
CONFIG = TransferConfig(lease_s=12.0, max_blocks_per_read=4, max_reads_in_flight=2)
ID = 0xABCDEF
MAX_TICKS = 10_000  # of one wait


def address(
    name: str, incarnation: int, num_blocks: int = 32, layout: KVLayout = LAYOUT, lease_s: float = CONFIG.lease_s
) -> AgentAddress:
    return AgentAddress(name, incarnation, b"", 0, num_blocks, layout, lease_s)


def digest(content: int) -> int:
    return content * 7919 + 1


class Side:
    def __init__(self, address: AgentAddress, clock_offset: float, config: TransferConfig) -> None:
        self.name = address.name
        self.clock_offset = clock_offset
        self.pool = BlockPool(address.num_blocks)
        self.machine = TransferMachine(config, self.pool, address)
        self.content: dict[int, int] = {}  # block -> its bytes
        self.digests: dict[int, int] = {}  # of offered blocks
        self.reads: dict[int, events.StartRead] = {}  # in flight
        self.links: list[events.Connect | events.Disconnect] = []
        self.results: list[Any] = []  # PullCompleted, PullFailed, OfferEnded
        self.caught_up: list[tuple[TransferId, frozenset[int]]] = []  # offer, positions announced then
        self.given_up: list[events.PullGivenUp] = []
        self.needed: dict[TransferId, list[int]] = {}  # positions of all TargetsNeeded, by transfer

    @property
    def address(self) -> AgentAddress:
        return self.machine.address

    def pull_state(self, transfer_id: TransferId) -> PullerState:
        return self.machine.puller.pulls[transfer_id].state

    def computed_blocks(self, positions: list[int]) -> list[tuple[int, int]]:
        """Blocks of a sequence that has been prefilled: (position, block), each holding 100 + position."""
        blocks = self.pool.allocate(len(positions))
        assert blocks is not None
        for position, block in zip(positions, blocks, strict=True):
            self.content[block] = 100 + position
        return list(zip(positions, blocks, strict=True))

    def targets(self, positions: list[int]) -> dict[int, int]:
        blocks = self.pool.reserve(len(positions))
        assert blocks is not None
        return dict(zip(positions, blocks, strict=True))


@dataclass(frozen=True)
class Mail:
    sender: str
    receiver: str
    message: HandoffMessage


class Pair:
    def __init__(self, config: TransferConfig = CONFIG, digests: bool = True, num_blocks: int = 32) -> None:
        self.time = 0.0
        self.digests = digests
        self.read_seconds = 0.01
        self.owner = Side(address("owner", 11, num_blocks, lease_s=config.lease_s), 0.0, config)
        self.puller = Side(address("puller", 22, num_blocks, lease_s=config.lease_s), 1000.0, config)
        self.sides = {"owner": self.owner, "puller": self.puller}
        self.mail: list[Mail] = []

    # ---- what a test does

    def do(self, side: Side, call: Callable[..., list[events.TransferAction]], *args: object) -> None:
        """Call a method of a side's machine; the side's clock is the last argument."""
        self.act(side, call(*args, self.now(side)))

    def event(self, side: Side, event: events.TransferEvent) -> None:
        self.do(side, side.machine.handle, event)

    def offer(self, positions: list[int], last: bool = True, deadline: float = math.inf) -> list[tuple[int, int]]:
        self.do(self.owner, self.owner.machine.offer, ID, self.puller.address, deadline)
        return self.add_ready(positions, last)

    def add_ready(self, positions: list[int], last: bool) -> list[tuple[int, int]]:
        blocks = self.owner.computed_blocks(positions)
        self.do(self.owner, self.owner.machine.owner.add_ready, ID, blocks, last, (42,) if last else ())
        return blocks

    def reserve_pull(self) -> None:
        machine = self.puller.machine
        self.act(self.puller, machine.reserve_pull(ID, self.owner.address, self.now(self.puller)))

    def pull(self, positions: list[int]) -> dict[int, int]:
        self.reserve_pull()
        return self.start_pull(positions)

    def start_pull(self, positions: list[int]) -> dict[int, int]:
        targets = self.puller.targets(positions)
        self.do(self.puller, self.puller.machine.puller.start, ID, targets)
        self.add_targets(targets)
        return targets

    def add_targets(self, targets: dict[int, int]) -> None:
        self.do(self.puller, self.puller.machine.puller.add_targets, ID, targets)

    def cancel_pull(self) -> None:
        self.do(self.puller, self.puller.machine.puller.cancel, ID, AbortReason.CANCELLED)

    def abort_offer(self, transfer_id: TransferId = ID) -> None:
        self.act(self.owner, self.owner.machine.owner.abort(transfer_id, AbortReason.PREFILL_FAILED))

    def deliver(self, mail: Mail) -> None:
        self.event(self.sides[mail.receiver], events.MessageReceived(mail.sender, mail.message))

    def deliver_all(self) -> None:
        while self.mail:
            self.deliver(self.mail.pop(0))

    def lose_mail(self) -> list[Mail]:
        lost, self.mail = self.mail, []
        return lost

    def end_read(self, side: Side, read_id: int) -> None:
        """All bytes of a read arrive at this moment."""
        read = side.reads.pop(read_id)
        source = self.sides[read.peer]
        for source_block, target in read.pairs:
            assert side.pool.column_of(target) is Column.INCOMING, "a read writes into a block that is somebody else's"
            side.content[target] = source.content[source_block]
        digests = tuple(digest(side.content[target]) for _, target in read.pairs) if self.digests else ()
        self.event(side, events.ReadFinished(read_id, digests, self.read_seconds))

    def fail_read(self, side: Side, read_id: int, reason: AbortReason = AbortReason.READ_FAILED) -> None:
        del side.reads[read_id]
        self.event(side, events.ReadFailed(read_id, reason, "the test said so"))

    def time_out_read(self, side: Side, read_id: int) -> None:
        """It is cancelled, and still in flight."""
        self.event(side, events.ReadTimedOut(read_id, "no end in time"))

    def run(self) -> None:
        """Deliver and read until nothing is left to do."""
        while self.mail or self.puller.reads:
            self.deliver_all()
            for read_id in list(self.puller.reads):
                self.end_read(self.puller, read_id)

    def wait(self, seconds: float, deliver: bool = True) -> None:
        """Let time pass, with every Tick that is due on the way."""
        end = self.time + seconds
        for _ in range(MAX_TICKS):
            due = {
                side.name: deadline - side.clock_offset
                for side in self.sides.values()
                if (deadline := side.machine.next_deadline()) is not None
            }
            self.time = max(self.time, min([end, *due.values()]))
            for name, at in due.items():
                if at <= self.time:
                    self.event(self.sides[name], Tick())
            if deliver:
                self.deliver_all()
            if self.time >= end and not any(at <= end for at in due.values()):
                return
        raise AssertionError("a machine asks for the same tick for ever")

    def now(self, side: Side) -> float:
        return self.time + side.clock_offset

    # ---- what a test asks

    def pull_result(self) -> events.PullCompleted | events.PullFailed:
        (result,) = [result for result in self.puller.results if not isinstance(result, events.OfferEnded)]
        return result

    def stats(self) -> events.PullStats:
        """Of the pull, which is complete."""
        result = self.pull_result()
        assert isinstance(result, events.PullCompleted)
        return result.stats

    def offer_result(self) -> events.OfferEnded:
        (result,) = [result for result in self.owner.results if isinstance(result, events.OfferEnded)]
        return result

    def num_leases(self) -> int:
        return sum(self.owner.pool.num_leases(block) for block in range(self.owner.pool.num_blocks))

    # ---- how the hand-off has ended

    def assert_failed(self, reason: AbortReason) -> None:
        result = self.pull_result()
        assert isinstance(result, events.PullFailed)
        assert (result.reason, result.state) == (reason, PullerState.FAILED)
        assert not self.puller.machine.alive

    def assert_freed(self, state: OwnerState, reason: AbortReason | None) -> None:
        ended = self.offer_result()
        assert (ended.state, ended.reason) == (state, reason)
        assert self.num_leases() == 0
        assert not self.owner.machine.alive

    def assert_completed(self) -> None:
        assert self.stats()
        self.deliver_all()
        self.assert_freed(OwnerState.RELEASED, None)
        assert all(side.machine.next_deadline() is None for side in self.sides.values())

    # ---- inside

    def act(self, side: Side, actions: list[events.TransferAction]) -> None:
        for action in actions:
            match action:
                case events.SendMessage(peer, message):
                    self.mail.append(Mail(side.name, peer, self._with_digests(side, message)))
                case events.StartRead():
                    side.reads[action.read_id] = action
                case events.ComputeDigests(blocks):
                    side.digests.update((block, digest(side.content[block])) for block in blocks)
                case events.Connect() | events.Disconnect():
                    side.links.append(action)
                case events.LogPath():
                    pass
                case events.PullGivenUp():
                    side.given_up.append(action)
                case events.TargetsNeeded(transfer_id, positions):
                    side.needed.setdefault(transfer_id, []).extend(positions)
                case events.CaughtUp(transfer_id):
                    announced = frozenset(side.machine.owner.offers[transfer_id].announced_pieces)
                    side.caught_up.append((transfer_id, announced))
                case _:
                    side.results.append(action)
        for each in self.sides.values():
            each.machine.check()
            each.pool.check()

    def _with_digests(self, side: Side, message: HandoffMessage) -> HandoffMessage:
        if not isinstance(message, Ready) or not self.digests:
            return message
        digests = tuple(side.digests[block] for block in message.blocks.blocks)
        return replace(message, blocks=replace(message.blocks, digests=digests))
