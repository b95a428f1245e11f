"""TransferMachine: all hand-offs of one worker, offered and pulled.

It lives inside a worker machine, which calls it synchronously. Any worker can offer, and any worker can pull. Every
method returns actions (kv_transfer/protocol/events.py). The worker machine handles `PullEnded` and `OfferEnded`; the
rest goes to the agent.

Target blocks belong to the worker: it reserves them in the BlockPool before `add_targets`, and after `PullEnded` (never
before) it makes them HELD or frees them. Leases belong to this machine: `add_ready` takes them, and only the end of the
offer returns them, whatever happens to the sequence that held the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import assert_never

from core.config import TransferConfig
from core.handoff import (
    Abort,
    AbortReason,
    AgentAddress,
    Bind,
    HandoffMessage,
    Heartbeat,
    OwnerState,
    Ping,
    PullerState,
    Ready,
    Release,
    TransferId,
    Want,
)
from core.machine import Tick
from core.paths import PathStatus, PeerJoined, PeerLeft
from core.scheduling.block_pool import BlockPool
from core.scheduling.ledger import Claim
from kv_transfer.protocol.events import (
    Actions,
    Disconnect,
    MessageReceived,
    PathProbed,
    PeerLost,
    ProbeFailed,
    ReadFailed,
    ReadFinished,
    ReadTimedOut,
    TransferEvent,
)
from kv_transfer.protocol.owner import Owner
from kv_transfer.protocol.paths import Paths
from kv_transfer.protocol.peers import Peers, TransferCounters, short_name
from kv_transfer.protocol.puller import Puller


class TransferMachine:
    def __init__(self, config: TransferConfig, pool: BlockPool, address: AgentAddress) -> None:
        self.address = address
        self._peers = Peers(address)
        self._owner = Owner(config, pool, self._peers)
        self._paths = Paths(config, self._peers)
        self._puller = Puller(config, pool, self._peers, self._paths)

    # ---- offering

    def offer(self, transfer_id: TransferId, peer: AgentAddress | None, now: float) -> Actions:
        """Announce that blocks for `peer` will come; None: for the first peer that binds the offer.

        Raises `LayoutMismatch`, `QueueFull`, or `TransferFailed` where the id is not new.

        A message of the puller may have arrived before, so `OfferEnded` may be among the actions.
        """
        self._owner.refuse_offer(transfer_id, peer)
        met = [] if peer is None else self._meet(peer, now)
        return met + self._owner.offer(transfer_id, peer, now)

    def add_ready(
        self,
        transfer_id: TransferId,
        blocks: Iterable[tuple[int, int]],
        last: bool,
        first_token_id: int | None,
        now: float,
    ) -> Actions:
        """Offer `blocks`, (position, block id) each, which their sequence holds and nobody writes to any more.

        `last` ends the list, and `first_token_id` goes with it. A position offered before is skipped, so a sequence
        that was preempted and recomputed may offer all its blocks again. Does nothing once the offer has ended.
        """
        return self._owner.add_ready(transfer_id, blocks, last, first_token_id, now)

    def abort_offer(self, transfer_id: TransferId, reason: AbortReason) -> Actions:
        """Tell the puller to stop. `OfferEnded` comes now if nothing was announced, else with its RELEASE or at the end
        of the lease."""
        return self._owner.abort(transfer_id, reason)

    # ---- pulling

    def reserve_pull(self, transfer_id: TransferId, owner: AgentAddress, now: float, binds: bool = False) -> Actions:
        """Keep the owner's offer alive until the worker has room. `binds`: the offer names no reader.

        Raises `LayoutMismatch`, `QueueFull`, or `TransferFailed` where the id is not new.
        """
        self._puller.refuse_pull(transfer_id, owner)
        return self._meet(owner, now) + self._puller.reserve(transfer_id, owner, now, binds)

    def start_pull(
        self, transfer_id: TransferId, positions: Iterable[int], now: float, num_tokens: int | None = None
    ) -> Actions:
        """Ask the owner for these positions. Empty where only the first token is wanted.

        Where the owner's blocks are smaller than ours it may have none for the end of our last one: `num_tokens`, the
        length of the sequence, says how many pieces there are.
        """
        return self._puller.start(transfer_id, positions, now, num_tokens)

    def add_targets(self, transfer_id: TransferId, targets: Mapping[int, int], now: float) -> Actions:
        """Read into `targets`, position -> INCOMING block id, what is announced or will be. The pull must be wanting,
        and not given up."""
        return self._puller.add_targets(transfer_id, targets, now)

    def cancel_pull(self, transfer_id: TransferId, reason: AbortReason, now: float) -> Actions:
        """Give up. `PullFailed` comes once our reads have ended. Does nothing where the pull has ended already."""
        return self._puller.cancel(transfer_id, reason, now)

    # ---- the Machine contract

    def handle(self, event: TransferEvent, now: float) -> Actions:
        match event:
            case MessageReceived(peer, message):
                return self._on_message(peer, message, now)
            case ReadFinished():
                return self._puller.on_read_finished(event, now)
            case ReadTimedOut():
                return self._puller.on_read_timed_out(event, now)
            case ReadFailed():
                return self._puller.on_read_failed(event, now)
            case PeerLost(peer, detail, died):
                return self._lose(peer, detail, died, now)
            case PeerJoined(peer, is_owner):
                if not is_owner:
                    return self._meet(peer, now)
                return self._forget_old(peer, now) + self._paths.watch(peer, self._in_use(), now)
            case PeerLeft(name):
                return self._paths.forget(name, self._in_use())
            case PathProbed():
                return self._paths.on_probed(event, now)
            case ProbeFailed():
                return self._paths.on_probe_failed(event, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        return min(self._owner.deadlines() + self._puller.deadlines() + self._paths.deadlines(), default=None)

    def check(self) -> None:
        self._peers.check()
        self._paths.check()
        self._owner.check()
        self._puller.check()

    # ---- asking

    @property
    def alive(self) -> bool:
        """Whether any transfer is alive, so that the agent polls often."""
        return bool(self._owner.offers or self._puller.pulls)

    @property
    def num_alive(self) -> int:
        return len(self._owner.offers) + len(self._puller.pulls)

    def num_by_state(self) -> Counter[OwnerState | PullerState]:
        """Live transfers; sums to `num_alive`."""
        counts: Counter[OwnerState | PullerState] = Counter(offer.state for offer in self._owner.offers.values())
        counts.update(pull.state for pull in self._puller.pulls.values())
        return counts

    @property
    def paths(self) -> tuple[PathStatus, ...]:
        """Paths over which we read, each as it was when it last changed."""
        return self._paths.statuses()

    @property
    def counters(self) -> TransferCounters:
        return self._peers.counters

    def is_wanted(self, transfer_id: TransferId) -> bool:
        """Whether the WANT for this offer has come: the puller's worker had room for it, and may hold blocks for it."""
        offer = self._owner.offers.get(transfer_id)
        return offer is not None and offer.wanted is not None

    def num_leased(self, transfer_id: TransferId) -> int:
        """Blocks that this offer leases."""
        offer = self._owner.offers.get(transfer_id)
        return 0 if offer is None else len(offer.leased)

    def starved_offers(self) -> list[TransferId]:
        """Offers with leased blocks for which their pullers have no room: those with a WANT first, oldest first.

        Without a WANT, an abort frees the blocks at once; else the puller's RELEASE does, after its reads.
        """
        starved = [offer for offer in self._owner.offers.values() if offer.starved]
        return [offer.transfer_id for offer in sorted(starved, key=lambda offer: offer.wanted is None)]

    def claims(self) -> list[Claim]:
        """The leased blocks of every live offer, then the target blocks of every live pull, oldest first."""
        offers = [
            Claim(short_name(o.transfer_id), o.state, tuple(o.leased.values()), o.created_at, o.reader_name)
            for o in self._owner.offers.values()
        ]
        pulls = [
            Claim(short_name(p.transfer_id), p.state, tuple(p.targets.values()), p.created_at, p.owner.name)
            for p in self._puller.pulls.values()
        ]
        return offers + pulls

    # ---- inside

    def _on_message(self, sender: str, message: HandoffMessage, now: float) -> Actions:
        match message:
            case Bind():
                if not self._owner.admits(sender, message):
                    return []
                return self._meet(message.reader, now) + self._owner.on_bind(message, now)
            case Ping():
                return self._paths.on_ping(sender, message, self._in_use(), now)
            case Want():
                return self._owner.on_want(sender, message, now)
            case Release():
                return self._owner.on_release(sender, message, now)
            case Ready():
                return self._puller.on_ready(sender, message, now)
            case Heartbeat(ack=None):
                return self._owner.on_heartbeat(sender, message, now)
            case Heartbeat():
                return self._puller.on_answer(sender, message, now)
            case Abort(transfer_id=transfer_id) if transfer_id in self._owner.offers:
                return self._owner.on_abort(sender, message)
            case Abort():  # of a pull; the puller drops and counts one for an ended offer
                return self._puller.on_abort(sender, message, now)
            case _:
                assert_never(message)

    def _on_tick(self, now: float) -> Actions:
        actions = self._owner.on_tick(now) + self._puller.on_tick(now)
        measured, silent = self._paths.on_tick(now, self._in_use())
        actions += measured
        for name in silent:
            actions += [Disconnect(name), *self._lose(name, "no PING was answered", False, now)]
        return actions

    def _meet(self, peer: AgentAddress, now: float) -> Actions:
        return self._forget_old(peer, now) + self._peers.meet(peer, self._in_use())

    def _forget_old(self, peer: AgentAddress, now: float) -> Actions:
        known = self._peers.address_of(peer.name)
        if known is None or known.incarnation == peer.incarnation:
            return []
        # Restarted under its old name. Nothing says which of the two is newer, so no lease ends early.
        return [Disconnect(peer.name), *self._lose(peer.name, "restarted as another incarnation", False, now)]

    def _in_use(self) -> set[str]:
        """Peers that a live transfer needs."""
        in_use = {offer.peer.name for offer in self._owner.offers.values() if offer.peer}
        return in_use | {pull.owner.name for pull in self._puller.pulls.values()}

    def _lose(self, name: str, detail: str, died: bool, now: float) -> Actions:
        self._peers.forget(name)
        actions = self._paths.on_peer_lost(name, detail, now)
        return actions + self._owner.on_peer_lost(name, died) + self._puller.on_peer_lost(name, detail, now)
