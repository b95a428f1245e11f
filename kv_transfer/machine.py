"""TransferMachine: one worker's hand-offs, offered and pulled, decided in one place.

It lives inside a worker machine, which calls it synchronously: any worker can offer, any worker can pull. Every method
returns actions (kv_transfer/events.py). The worker keeps `PullEnded` and `OfferEnded`; the rest goes to the agent.

Target blocks belong to the worker: it reserves them in the BlockPool before `start_pull`, and after `PullEnded` (never
before) it makes them HELD or gives them back. Leases belong to this machine: `add_ready` takes them, and only the end
of the offer returns them, whatever happens to the sequence that held the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from core.block_pool import BlockPool
from core.config import TransferConfig
from core.handoff import (
    Abort,
    AbortReason,
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
from core.ledger import Claim
from core.machine import Tick
from core.paths import PathStatus, PeerJoined, PeerLeft
from kv_transfer.events import (
    Disconnect,
    MessageReceived,
    PathProbed,
    PeerLost,
    ProbeFailed,
    ReadFailed,
    ReadFinished,
    ReadTimedOut,
    TransferAction,
    TransferEvent,
)
from kv_transfer.owner import Owner
from kv_transfer.paths import Paths
from kv_transfer.peers import Peers, TransferCounters, short_name
from kv_transfer.puller import Puller


class TransferMachine:
    def __init__(self, config: TransferConfig, pool: BlockPool, address: AgentAddress) -> None:
        self.address = address
        self._peers = Peers(address)
        self._owner = Owner(config, pool, self._peers)
        self._paths = Paths(config, self._peers)
        self._puller = Puller(config, pool, self._peers, self._paths)

    # ---- offering

    def offer(self, transfer_id: TransferId, peer: AgentAddress, now: float) -> list[TransferAction]:
        """Announce that blocks for `peer` will come. Raises `LayoutMismatch`, `QueueFull`, or
        `TransferFailed` where the id is not new.

        A message of the puller may have been waiting for this, so `OfferEnded` may be among the actions.
        """
        self._owner.refuse_offer(transfer_id, peer)
        self._meet(peer, now)
        self._owner.offer(transfer_id, peer, now)
        return self._peers.take_actions()

    def add_ready(
        self,
        transfer_id: TransferId,
        blocks: Iterable[tuple[int, int]],
        last: bool,
        first_token_id: int | None,
        now: float,
    ) -> list[TransferAction]:
        """Offer `blocks`, (position, block id) each, which their sequence holds and nobody writes to any more.

        `last` ends the list, and `first_token_id` goes with it. A position offered before is passed over, so a sequence
        that was preempted and recomputed may offer all its blocks again. Does nothing once the offer has ended.
        """
        self._owner.add_ready(transfer_id, blocks, last, first_token_id, now)
        return self._peers.take_actions()

    def abort_offer(self, transfer_id: TransferId, reason: AbortReason) -> list[TransferAction]:
        """Tell the puller to stop. `OfferEnded` comes now if nothing was announced, else with its RELEASE or at the end
        of the lease."""
        self._owner.abort(transfer_id, reason)
        return self._peers.take_actions()

    # ---- pulling

    def reserve_pull(self, transfer_id: TransferId, owner: AgentAddress, now: float) -> list[TransferAction]:
        """Keep the owner's offer alive while target blocks are waited for. Raises `LayoutMismatch`, `QueueFull`, or
        `TransferFailed` where the id is not new."""
        self._puller.refuse_pull(transfer_id, owner)
        self._meet(owner, now)
        self._puller.reserve(transfer_id, owner, now)
        return self._peers.take_actions()

    def start_pull(
        self, transfer_id: TransferId, targets: Mapping[int, int], now: float, num_tokens: int | None = None
    ) -> list[TransferAction]:
        """Pull into `targets`: position -> INCOMING block id. Empty where only the first token is wanted.

        Where the owner's blocks are smaller than ours it may have none for the end of our last one: `num_tokens`, the
        length of the sequence, says what there is to want.
        """
        self._puller.start(transfer_id, targets, now, num_tokens)
        return self._peers.take_actions()

    def cancel_pull(self, transfer_id: TransferId, reason: AbortReason, now: float) -> list[TransferAction]:
        """Give up. `PullFailed` comes once our reads have ended. Does nothing where the pull has ended already."""
        self._puller.cancel(transfer_id, reason, now)
        return self._peers.take_actions()

    # ---- the Machine contract

    def handle(self, event: TransferEvent, now: float) -> list[TransferAction]:
        match event:
            case MessageReceived(peer, message):
                self._on_message(peer, message, now)
            case ReadFinished():
                self._puller.on_read_finished(event, now)
            case ReadTimedOut():
                self._puller.on_read_timed_out(event, now)
            case ReadFailed():
                self._puller.on_read_failed(event, now)
            case PeerLost(peer, detail, died):
                self._lose(peer, detail, died, now)
            case PeerJoined(peer, is_owner=True):
                self._forget_old(peer, now)
                self._act(self._paths.watch(peer, self._in_use(), now))
            case PeerJoined(peer):
                self._meet(peer, now)
            case PeerLeft(name):
                self._act(self._paths.forget(name, self._in_use()))
            case PathProbed():
                self._act(self._paths.on_probed(event, now))
            case ProbeFailed():
                self._act(self._paths.on_probe_failed(event, now))
            case Tick():
                self._owner.on_tick(now)
                self._puller.on_tick(now)
                actions, silent = self._paths.on_tick(now, self._in_use())
                self._act(actions)
                for name in silent:
                    self._peers.act(Disconnect(name))
                    self._lose(name, "no PING was answered", False, now)
        return self._peers.take_actions()

    def next_deadline(self) -> float | None:
        return min(self._owner.deadlines() + self._puller.deadlines() + self._paths.deadlines(), default=None)

    def check(self) -> None:
        self._peers.check()
        self._paths.check()
        self._owner.check()
        self._puller.check()
        assert not self._peers.take_actions(), "actions were decided and not returned"

    # ---- asking

    @property
    def alive(self) -> bool:
        """Whether any transfer is under way, so that the agent should look for messages often."""
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
        """Over which we read, as each was when it last changed."""
        return self._paths.statuses()

    @property
    def counters(self) -> TransferCounters:
        return self._peers.counters

    def offer_state(self, transfer_id: TransferId) -> OwnerState | None:
        """None where there is no such offer, or none any more."""
        offer = self._owner.offers.get(transfer_id)
        return None if offer is None else offer.state

    def is_wanted(self, transfer_id: TransferId) -> bool:
        """Whether a puller has asked for this offer: it has reserved the blocks to pull into."""
        offer = self._owner.offers.get(transfer_id)
        return offer is not None and offer.wanted is not None

    def num_leased(self, transfer_id: TransferId) -> int:
        """Blocks that this offer keeps from being used again."""
        offer = self._owner.offers.get(transfer_id)
        return 0 if offer is None else len(offer.leased)

    def unwanted_offers(self) -> list[TransferId]:
        """Offers with leased blocks that no puller has asked for, oldest first; aborting one frees them at once."""
        return [offer.transfer_id for offer in self._owner.offers.values() if offer.leased and offer.wanted is None]

    def pull_state(self, transfer_id: TransferId) -> PullerState | None:
        pull = self._puller.pulls.get(transfer_id)
        return None if pull is None else pull.state

    def claims(self) -> list[Claim]:
        """The leased blocks of every live offer, then the target blocks of every live pull, oldest first."""
        offers = [
            Claim(short_name(o.transfer_id), o.state, tuple(o.leased.values()), o.created_at, o.peer.name)
            for o in self._owner.offers.values()
        ]
        pulls = [
            Claim(short_name(p.transfer_id), p.state, tuple(p.targets.values()), p.created_at, p.owner.name)
            for p in self._puller.pulls.values()
        ]
        return offers + pulls

    # ---- inside

    def _act(self, actions: Iterable[TransferAction]) -> None:
        for action in actions:
            self._peers.act(action)

    def _on_message(self, sender: str, message: HandoffMessage, now: float) -> None:
        match message:
            case Ping():
                self._act(self._paths.on_ping(sender, message, self._in_use(), now))
            case Want():
                self._owner.on_want(sender, message, now)
            case Release():
                self._owner.on_release(sender, message, now)
            case Ready():
                self._puller.on_ready(sender, message, now)
            case Heartbeat(ack=None):
                self._owner.on_heartbeat(sender, message, now)
            case Heartbeat():
                self._puller.on_answer(sender, message, now)
            case Abort(transfer_id=transfer_id) if transfer_id in self._owner.offers:
                self._owner.on_abort(sender, message)
            case Abort():  # of a pull; or of an offer that has ended, which is counted there and changes nothing
                self._puller.on_abort(sender, message, now)

    def _meet(self, peer: AgentAddress, now: float) -> None:
        self._forget_old(peer, now)
        self._act(self._peers.meet(peer, self._in_use()))

    def _forget_old(self, peer: AgentAddress, now: float) -> None:
        known = self._peers.address_of(peer.name)
        if known is not None and known.incarnation != peer.incarnation:
            # Restarted under its old name. Which of the two is newer we cannot tell, so no lease is cut short.
            self._peers.act(Disconnect(peer.name))
            self._lose(peer.name, "restarted as another incarnation", False, now)

    def _in_use(self) -> set[str]:
        """Peers that a live transfer needs."""
        in_use = {offer.peer.name for offer in self._owner.offers.values()}
        return in_use | {pull.owner.name for pull in self._puller.pulls.values()}

    def _lose(self, name: str, detail: str, died: bool, now: float) -> None:
        self._peers.forget(name)
        self._act(self._paths.on_peer_lost(name, detail, now))
        self._owner.on_peer_lost(name, died)
        self._puller.on_peer_lost(name, detail, now)
