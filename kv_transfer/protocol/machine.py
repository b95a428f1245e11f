"""TransferMachine: all hand-offs of one worker, offered and pulled.

A worker machine contains it and calls it synchronously. Any worker can offer, and any worker can pull. `offer` and
`reserve_pull` begin a transfer; `owner` and `puller` take the later commands. Each of these methods returns actions
(kv_transfer/protocol/events.py). The worker machine handles `PullEnded` and `OfferEnded` and passes the other actions
to the agent.

Target blocks belong to the worker: it reserves them in the BlockPool before `Puller.add_targets`, and after `PullEnded`
(never before) it makes them HELD or frees them. Leases belong to the owner half: `Owner.add_ready` takes them, and only
the end of the offer returns them, whatever happens to the sequence that held the blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from core.config import TransferConfig
from core.handoff import (
    Abort,
    AgentAddress,
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
from kv_transfer.protocol.leasing_pool import LeasingPool
from kv_transfer.protocol.owner import Owner
from kv_transfer.protocol.paths import Paths
from kv_transfer.protocol.peers import Peers, TransferCounters, short_name
from kv_transfer.protocol.puller import Puller


class TransferMachine:
    def __init__(
        self, config: TransferConfig, pool: LeasingPool, address: AgentAddress, vocab_size: int = 1 << 32
    ) -> None:
        """`vocab_size`: of the model whose tokens owners send."""
        self.address = address
        self._peers = Peers(address)
        self.owner = Owner(config, pool, self._peers)
        self._paths = Paths(config, self._peers)
        self.puller = Puller(config, pool, self._peers, self._paths, vocab_size)

    # ---- new transfers, which connect to their peer

    def offer(
        self, transfer_id: TransferId, peer: AgentAddress, deadline: float, now: float, is_of_cache: bool = False
    ) -> Actions:
        """Make an offer to `peer`, which is aborted at `deadline` (time of the machine), read or not.

        Raises `LayoutMismatch`, `QueueFull`, or `TransferFailed` where the id is not new.

        A message of the puller may have arrived before, so `OfferEnded` may be among the actions.
        """
        self.owner.refuse_offer(transfer_id, peer)
        return self._connect(peer, now) + self.owner.offer(transfer_id, peer, deadline, now, is_of_cache)

    def reserve_pull(self, transfer_id: TransferId, owner: AgentAddress, now: float) -> Actions:
        """Renew the lease of the owner's offer until the worker has room.

        Raises `LayoutMismatch`, `QueueFull`, or `TransferFailed` where the id is not new.
        """
        self.puller.refuse_pull(transfer_id, owner)
        connecting = self._connect(owner, now)
        self.puller.reserve(transfer_id, owner, now)
        return connecting

    # ---- the Machine contract

    def handle(self, event: TransferEvent, now: float) -> Actions:
        match event:
            case MessageReceived(peer, message):
                return self._on_message(peer, message, now)
            case ReadFinished():
                return self.puller.on_read_finished(event, now)
            case ReadTimedOut():
                return self.puller.on_read_timed_out(event, now)
            case ReadFailed():
                return self.puller.on_read_failed(event, now)
            case PeerLost(peer, detail, died):
                return self._on_peer_lost(peer, detail, died, now)
            case PeerJoined(peer, is_owner):
                if not is_owner:
                    return self._connect(peer, now)
                return self._disconnect_old(peer, now) + self._paths.watch(peer, self._in_use(), now)
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
        return min(self.owner.deadlines() + self.puller.deadlines() + self._paths.deadlines(), default=None)

    def check(self) -> None:
        self._peers.check()
        self._paths.check()
        self.owner.check()
        self.puller.check()

    # ---- the view of the worker

    @property
    def alive(self) -> bool:
        """Whether any transfer is alive, so that the agent polls often."""
        return bool(self.owner.offers or self.puller.pulls)

    @property
    def num_alive(self) -> int:
        return len(self.owner.offers) + len(self.puller.pulls)

    def num_by_state(self) -> Counter[OwnerState | PullerState]:
        """Live transfers; sums to `num_alive`."""
        counts: Counter[OwnerState | PullerState] = Counter(offer.state for offer in self.owner.offers.values())
        counts.update(pull.state for pull in self.puller.pulls.values())
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
        offer = self.owner.offers.get(transfer_id)
        return offer is not None and offer.wanted is not None

    def num_leased(self, transfer_id: TransferId) -> int:
        """Blocks that this offer leases."""
        offer = self.owner.offers.get(transfer_id)
        return 0 if offer is None else len(offer.leased)

    def starved_offers(self) -> list[TransferId]:
        """Offers with leased blocks for which their pullers have no room: those with a WANT first, oldest first.

        An abort frees the blocks of an offer without a WANT at once. The puller's RELEASE frees those of the others,
        after its reads.
        """
        starved = [offer for offer in self.owner.offers.values() if offer.starved]
        return [offer.transfer_id for offer in sorted(starved, key=lambda offer: offer.wanted is None)]

    def claims(self) -> list[Claim]:
        """The leased blocks of every live offer, then the target blocks of every live pull, oldest first."""
        offers = [
            Claim(short_name(o.transfer_id), o.state, tuple(o.leased.values()), o.created_at, o.peer.name)
            for o in self.owner.offers.values()
        ]
        pulls = [
            Claim(short_name(p.transfer_id), p.state, tuple(p.targets.values()), p.created_at, p.owner.name)
            for p in self.puller.pulls.values()
        ]
        return offers + pulls

    # ---- inside

    def _on_message(self, sender: str, message: HandoffMessage, now: float) -> Actions:
        match message:
            case Ping():
                return self._paths.on_ping(sender, message, self._in_use(), now)
            case Want():
                return self.owner.on_want(sender, message, now)
            case Release():
                return self.owner.on_release(sender, message, now)
            case Ready():
                return self.puller.on_ready(sender, message, now)
            case Heartbeat(ack=None):
                return self.owner.on_heartbeat(sender, message, now)
            case Heartbeat():
                return self.puller.on_answer(sender, message, now)
            case Abort():
                return self.puller.on_abort(sender, message, now)
            case _:
                assert_never(message)

    def _on_tick(self, now: float) -> Actions:
        actions = self.owner.on_tick(now) + self.puller.on_tick(now)
        measured, silent = self._paths.on_tick(now, self._in_use())
        actions += measured
        for name in silent:
            actions += [Disconnect(name), *self._on_peer_lost(name, "no PING was answered", False, now)]
        return actions

    def _connect(self, peer: AgentAddress, now: float) -> Actions:
        return self._disconnect_old(peer, now) + self._peers.connect(peer, self._in_use())

    def _disconnect_old(self, peer: AgentAddress, now: float) -> Actions:
        """Disconnect from another incarnation of the peer, and watch the path to it no longer."""
        actions: Actions = []
        known = self._peers.address_of(peer.name)
        if known is not None and known.incarnation != peer.incarnation:
            # The newer of the two incarnations is not known, so no lease ends early.
            lost = self._on_peer_lost(peer.name, "restarted as another incarnation", False, now)
            actions = [Disconnect(peer.name), *lost]
        self._paths.forget_other(peer)
        return actions

    def _in_use(self) -> set[str]:
        """Peers that a live transfer needs."""
        in_use = {offer.peer.name for offer in self.owner.offers.values()}
        return in_use | {pull.owner.name for pull in self.puller.pulls.values()}

    def _on_peer_lost(self, name: str, detail: str, died: bool, now: float) -> Actions:
        self._peers.forget(name)
        actions = self._paths.on_peer_lost(name, detail, now)
        return actions + self.owner.on_peer_lost(name, died) + self.puller.on_peer_lost(name, detail, now)
