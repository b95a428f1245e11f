"""The transfers of one vLLM engine: the owner and the puller of our protocol, between vLLM's scheduler and the agent.

    engine's thread --commands--> EngineTransfers --AgentAction--> agent
                    <--outcomes, LentBlocks.freed--'  <--AgentEvent--'

    OfferBegun -> BlocksComputed ... -> BlocksComputed(last)        or OfferCancelled; a move may end before the last
    OfferBegun(of cache) -> BlocksComputed(last)
    PullBegun -> TargetsGiven -> one outcome                        or PullCancelled -> one outcome

Each `PullBegun` has exactly one outcome, whatever happens. After it, no read writes into the targets. vLLM allocates
the blocks of a whole prompt at once, so a pull gets all of its targets before the owner announces a block.

The commands go one way: whatever is refused ends as a failed outcome, or gives the lent blocks back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from core.config import TransferConfig
from core.errors import LayoutMismatch, TandemError
from core.handoff import AbortReason, AgentAddress, PullerState, TransferId
from core.machine import Tick
from core.scheduling.ledger import Claim
from decode_worker import move_asks
from kv_transfer.protocol.events import (
    Actions,
    AgentAction,
    AgentEvent,
    AgentFailed,
    CaughtUp,
    OfferEnded,
    PullCompleted,
    PullEnded,
    PullFailed,
    PullGivenUp,
    TargetsNeeded,
)
from kv_transfer.protocol.machine import TransferMachine
from vllm_worker.kv.lent_blocks import LentBlocks


@dataclass(frozen=True, slots=True)
class OfferBegun:
    """A prompt will be computed for this reader, or a running request moves to it."""

    transfer_id: TransferId
    reader: AgentAddress
    deadline: float
    is_move: bool = False  # the reader has ROOM_WAIT_S to come, or another one may
    is_of_cache: bool = False  # the reader may never come


@dataclass(frozen=True, slots=True)
class BlocksComputed:
    """More blocks of an offer, (position, block) each. The engine has taken a reference for each of them.

    Nothing writes to them any more. `is_last` carries `token_ids`, those that the reader lacks.
    """

    transfer_id: TransferId
    blocks: tuple[tuple[int, int], ...]
    is_last: bool = False
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OfferCancelled:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PullBegun:
    """A request waits for the blocks of this owner."""

    transfer_id: TransferId
    owner: AgentAddress
    limit_s: float = math.inf  # afterwards the engine computes what has not come


@dataclass(frozen=True, slots=True)
class TargetsGiven:
    """The engine has allocated the blocks: position -> block, for those that it has not cached."""

    transfer_id: TransferId
    targets: Mapping[int, int]
    num_tokens: int | None = None  # of a request that its owner still decodes: at most; None: all are known
    num_known_tokens: int | None = None  # of it
    may_be_short: bool = False  # the first blocks are of use without the others


@dataclass(frozen=True, slots=True)
class PullCancelled:
    transfer_id: TransferId


Command = OfferBegun | BlocksComputed | OfferCancelled | PullBegun | TargetsGiven | PullCancelled
EngineTransferEvent = Command | AgentEvent | Tick


class EngineTransfers:
    """`outcomes`, `caught_up`, `ended_offers` and `claims` are for the engine's thread, like the queues of `blocks`."""

    def __init__(self, config: TransferConfig, address: AgentAddress, vocab_size: int) -> None:
        self.blocks = LentBlocks()
        self.transfers = TransferMachine(config, self.blocks, address, vocab_size)
        self.outcomes: deque[PullEnded] = deque()
        self.caught_up: deque[TransferId] = deque()  # offers whose readers have all blocks so far
        self.ended_offers: deque[TransferId] = deque()
        self.claims: tuple[Claim, ...] = ()
        self._want_by: dict[TransferId, float] = {}  # of moves whose readers may not have come yet
        self._targets: dict[TransferId, tuple[int, ...]] = {}
        self._late_at: dict[TransferId, float] = {}  # of pulls with a limit

    def handle(self, event: EngineTransferEvent, now: float) -> list[AgentAction]:
        """An `AgentFailed` never arrives here: it ends the engine."""
        actions = self._handle(event, now)
        self.claims = tuple(self.transfers.claims())
        return actions

    def _handle(self, event: EngineTransferEvent, now: float) -> list[AgentAction]:
        match event:
            case OfferBegun():
                return self._begin_offer(event, now)
            case BlocksComputed(transfer_id, blocks, is_last, token_ids):
                self.blocks.lend(block for _, block in blocks)
                actions = self.transfers.owner.add_ready(transfer_id, blocks, is_last, token_ids, now)
                self.blocks.return_spare()
                return self._apply(actions)
            case OfferCancelled(transfer_id):
                return self._apply(self.transfers.owner.abort(transfer_id, AbortReason.PREFILL_FAILED))
            case PullBegun():
                return self._begin_pull(event, now)
            case TargetsGiven():
                return self._apply(self._give_targets(event, now))
            case PullCancelled(transfer_id):
                return self._apply(self.transfers.puller.cancel(transfer_id, AbortReason.CANCELLED, now))
            case AgentFailed():
                raise AssertionError("the shell ends the engine")
            case Tick():
                return self._apply(self.transfers.handle(event, now) + self._end_unwanted(now) + self._end_late(now))
            case _:
                return self._apply(self.transfers.handle(event, now))

    def next_deadline(self) -> float | None:
        known = [self.transfers.next_deadline(), *self._want_by.values(), *self._late_at.values()]
        return min((when for when in known if when is not None), default=None)

    def _begin_offer(self, begun: OfferBegun, now: float) -> list[AgentAction]:
        """A refused offer is none: the blocks come back, and the reader's WANT stays without an answer."""
        transfer_id = begun.transfer_id
        try:
            self._refuse_other_layout(begun.reader)
            actions = self.transfers.offer(transfer_id, begun.reader, begun.deadline, now, begun.is_of_cache)
        except TandemError:
            self.ended_offers.append(transfer_id)
            return []
        if begun.is_move:
            self._want_by[transfer_id] = now + move_asks.ROOM_WAIT_S
        return self._apply(actions)

    def _end_unwanted(self, now: float) -> Actions:
        """The engines of these readers have no room."""
        actions: Actions = []
        for transfer_id in [transfer_id for transfer_id, until in self._want_by.items() if now >= until]:
            del self._want_by[transfer_id]
            if not self.transfers.is_wanted(transfer_id):
                actions += self.transfers.owner.abort(transfer_id, AbortReason.OVERLOADED, "no room in time")
        return actions

    def _begin_pull(self, begun: PullBegun, now: float) -> list[AgentAction]:
        transfer_id = begun.transfer_id
        try:
            self._refuse_other_layout(begun.owner)
            actions = self.transfers.reserve_pull(transfer_id, begun.owner, now)
            if begun.limit_s < math.inf:
                self._late_at[transfer_id] = now + begun.limit_s
            return self._apply(actions)
        except TandemError as error:
            reason = AbortReason.LAYOUT_MISMATCH if isinstance(error, LayoutMismatch) else AbortReason.OVERLOADED
            self.outcomes.append(PullFailed(transfer_id, PullerState.FAILED, reason, str(error)))
            return []

    def _end_late(self, now: float) -> Actions:
        actions: Actions = []
        for transfer_id in [transfer_id for transfer_id, until in self._late_at.items() if now >= until]:
            del self._late_at[transfer_id]
            actions += self.transfers.puller.cancel(transfer_id, AbortReason.DEADLINE, now)
        return actions

    def _refuse_other_layout(self, peer: AgentAddress) -> None:
        """The blocks of vLLM move whole: only vLLM knows the order of their bytes."""
        if differences := self.transfers.address.layout.differences(peer.layout):
            raise LayoutMismatch(differences)

    def _give_targets(self, given: TargetsGiven, now: float) -> Actions:
        """Nothing to do if the pull has failed meanwhile: its outcome is there.

        A request that moves may get more tokens than it has targets for: this engine computes those again.
        """
        puller, transfer_id, targets = self.transfers.puller, given.transfer_id, given.targets
        if transfer_id not in puller.pulls:
            return []
        self._targets[transfer_id] = tuple(targets.values())
        self.blocks.begin_incoming(targets.values())
        most, known = given.num_tokens, given.num_known_tokens
        num_new = 1 if most is None or known is None else most - known
        actions = puller.start(
            transfer_id, targets, now, most, known, max_new_tokens=num_new, may_be_short=given.may_be_short
        )
        if transfer_id in puller.pulls:
            actions += puller.add_targets(transfer_id, targets, now)
        return actions

    def _apply(self, actions: Actions) -> list[AgentAction]:
        """Keep the results, and return what the agent must do."""
        for_agent: list[AgentAction] = []
        for action in actions:
            match action:
                case PullCompleted(transfer_id) | PullFailed(transfer_id):
                    self.blocks.end_incoming(self._targets.pop(transfer_id, ()))
                    self._late_at.pop(transfer_id, None)
                    self.outcomes.append(action)
                case TargetsNeeded():
                    raise AssertionError("every position has its target before it is announced")
                case CaughtUp(transfer_id):
                    self.caught_up.append(transfer_id)
                case OfferEnded(transfer_id):
                    self._want_by.pop(transfer_id, None)
                    self.ended_offers.append(transfer_id)
                case PullGivenUp():
                    pass  # the outcome follows
                case _:
                    for_agent.append(action)
        return for_agent

    def check(self) -> None:
        self.transfers.check()
        assert self._targets.keys() <= self.transfers.puller.pulls.keys()
        assert self._late_at.keys() <= self.transfers.puller.pulls.keys()
        assert self._want_by.keys() <= self.transfers.owner.offers.keys()


# ---- for the engine's thread

Item = TypeVar("Item")


class Transfers(Protocol):
    """`TransferThread`."""

    machine: EngineTransfers
    failure: str

    def post(self, command: Command) -> None: ...

    def wait_for_news(self, timeout_s: float) -> None: ...


def taken(queue: deque[Item]) -> list[Item]:
    """What is in a deque now; another thread may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
