"""The owner's half of a hand-off: lease blocks, announce them, free them exactly once.

    COMPUTING --first block--> OFFERED --RELEASE--> RELEASED
        `----------------------------+--lease_s without a sign of the puller--> EXPIRED
                                     `--abort or deadline, then RELEASE or end of lease--> ABORTED

The owner leases a block when it offers the block. It unleases the positions that the puller does not want when the WANT
arrives, and all others when the offer ends. No offer ends while the puller may still read: an aborted offer with
announced blocks ends with the RELEASE or with its lease. A puller with a broken connection may still read, so a broken
connection ends no lease; only the proven death of the puller's process does. At the deadline of its request an offer is
aborted, and nothing renews the lease of an aborted offer.

Messages get lost. A READY counts the blocks announced before it, a heartbeat counts the blocks that arrived, and the
owner repeats the missing ones. The owner keeps a message that arrives before its offer for half a lease. It answers a
WANT for an ended offer with the reason of the end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.config import TransferConfig
from core.errors import QueueFull, TransferFailed
from core.handoff import (
    OWNER_STEPS,
    Abort,
    AbortReason,
    AgentAddress,
    Heartbeat,
    HeartbeatEntry,
    OwnerState,
    Ready,
    Release,
    TransferId,
    Want,
)
from kv_transfer.protocol.events import Actions, CaughtUp, ComputeDigests, OfferEnded
from kv_transfer.protocol.leasing_pool import LeasingPool
from kv_transfer.protocol.offer import Offer
from kv_transfer.protocol.peers import Drop, Peers, transfer_name
from kv_transfer.protocol.plan import TransferPlan

# The puller reads the blocks of one READY while the owner's agent computes the digests of the next. The first READY is
# small, so that reads begin early. Each later READY is four times as large, because each READY and each read costs the
# puller time. Without digests, one READY has all blocks.
FIRST_READY_BYTES = 33_554_432
READY_GROWTH = 4
MAX_BLOCKS_PER_READY = 2048  # blocks in a READY; beyond: several messages
# Limit: blocks in the WANTs that an owner keeps before their offers; beyond: dropped, counted; the puller repeats them
MAX_EARLY_BLOCKS = 262_144


@dataclass(frozen=True, slots=True)
class _EarlyMessage:
    """A message that arrived before its offer."""

    sender: str
    message: Want | Release
    arrived_at: float


class Owner:
    def __init__(self, config: TransferConfig, pool: LeasingPool, peers: Peers) -> None:
        self.config = config
        self.pool = pool
        self.offers: dict[TransferId, Offer] = {}  # alive
        self._peers = peers
        self._ended: OrderedDict[TransferId, AbortReason] = OrderedDict()  # why; the answer to a late WANT
        self._early: dict[TransferId, _EarlyMessage] = {}
        self._hashed: set[int] = set()  # cached blocks whose digest was asked for in a lease that goes on

    # ---- commands of the worker

    def refuse_offer(self, transfer_id: TransferId, peer: AgentAddress) -> None:
        """Raise `LayoutMismatch`; `TransferFailed` where the id was used before; `QueueFull` without room."""
        self._plan_for(peer)
        if transfer_id in self.offers or transfer_id in self._ended:
            raise TransferFailed(f"{transfer_name(transfer_id)} was offered before")
        if len(self.offers) >= self.config.max_transfers:
            raise QueueFull(f"{len(self.offers)} transfers are offered already (max_transfers)")

    def offer(
        self, transfer_id: TransferId, peer: AgentAddress, deadline: float, now: float, is_of_cache: bool
    ) -> Actions:
        """Call `TransferMachine.offer` instead, which also connects to the peer."""
        plan = self._plan_for(peer)
        self.offers[transfer_id] = Offer(transfer_id, peer, plan, now, now, deadline, is_of_cache)
        early = self._early.pop(transfer_id, None)
        if early is None:
            return []
        if isinstance(early.message, Want):
            return self.on_want(early.sender, early.message, now)
        return self.on_release(early.sender, early.message, now)

    def add_ready(
        self,
        transfer_id: TransferId,
        blocks: Iterable[tuple[int, int]],
        last: bool,
        token_ids: tuple[int, ...],
        now: float,
    ) -> Actions:
        """Offer `blocks`, (position, block id) each. Their sequence holds them, and nothing writes to them any more.

        `last` ends the list and carries `token_ids`, those that the puller lacks. The owner skips a position that it
        has offered before, so a sequence that was preempted and recomputed may offer all its blocks again. Does nothing
        after the offer's end.
        """
        offer = self.offers.get(transfer_id)
        if offer is None or offer.aborting is not None or offer.last:
            return []
        wanted = {
            position: block
            for position, block in blocks
            if position not in offer.leased and (offer.wanted is None or position in offer.wanted)
        }
        self.pool.lease(wanted.values())
        offer.leased |= wanted
        if wanted and offer.state is OwnerState.COMPUTING:
            offer.step(OwnerState.OFFERED)
        if last:
            offer.last, offer.token_ids, offer.num_before_last = True, token_ids, offer.num_announced
        actions: Actions = []
        if wanted and not (offer.is_of_cache and offer.wanted is None):
            actions += self._compute_digests(offer, wanted.values())
        if offer.wanted is not None and (wanted or last):
            num_announced = offer.num_announced
            offer.announce(wanted)
            actions += self._announce(offer, num_announced, now)
        return actions

    def abort(self, transfer_id: TransferId, reason: AbortReason, detail: str = "") -> Actions:
        """Tell the puller to stop. `OfferEnded` follows at once if no block was announced, else with the RELEASE or at
        the end of the lease."""
        offer = self.offers.get(transfer_id)
        if offer is None or offer.aborting is not None:
            return []
        offer.aborting, offer.detail = reason, detail
        actions = self._send_abort(offer.peer, transfer_id, reason, detail)
        if not offer.may_be_read:
            actions += self._end(offer, OwnerState.ABORTED, reason)
        return actions

    def withdraw(self, transfer_id: TransferId) -> Actions:
        """No puller will come: abort the offer, and refuse one that follows."""
        if transfer_id not in self.offers:
            self._note_ended(transfer_id, self._ended.get(transfer_id, AbortReason.CANCELLED))
        return self.abort(transfer_id, AbortReason.CANCELLED)

    # ---- from the puller

    def on_want(self, sender: str, want: Want, now: float) -> Actions:
        offer, actions = self._offer_for(sender, want, now)
        if offer is None:
            return actions
        if offer.aborting is not None:
            return self._send_abort(offer.peer, offer.transfer_id, offer.aborting, offer.detail)
        offer.renew(want.counter, now)
        if want.layout_fingerprint != offer.peer.layout.fingerprint():
            return self.abort(offer.transfer_id, AbortReason.LAYOUT_MISMATCH, "KV layouts differ in their fingerprints")
        if now - offer.want_answered_at < self._repeated_after_s:
            return []
        offer.want_answered_at = now
        actions = []
        if offer.wanted is None:
            wanted = offer.want(want.positions)
            self._unlease(offer, [position for position in offer.leased if position not in wanted])
            if offer.is_of_cache:
                actions += self._compute_digests(offer, offer.leased.values())
            offer.announce(offer.leased)
        return actions + self._announce(offer, 0, now)  # a puller repeats its WANT only while it has received no READY

    def on_heartbeat(self, sender: str, heartbeat: Heartbeat, now: float) -> Actions:
        if not self._peers.accept_heartbeat(sender, heartbeat):
            return []
        peer = self._peers.address_of(sender)
        assert peer is not None
        actions: Actions = []
        renewed = []
        for entry in heartbeat.entries:
            offer = self.offers.get(entry.transfer_id)
            if offer is None:
                if entry.transfer_id in self._ended:
                    actions += self._send_abort(peer, entry.transfer_id, self._ended[entry.transfer_id])
            elif (offer.peer.name, offer.peer.incarnation) != (sender, heartbeat.incarnation):
                self._peers.drop(Drop.FOREIGN)
            elif offer.aborting is not None:  # its puller has missed the ABORT
                actions += self._send_abort(peer, offer.transfer_id, offer.aborting, offer.detail)
            else:
                offer.renew(heartbeat.counter, now)
                offer.num_unplaced = entry.num_unplaced
                if offer.is_caught_up_by(entry.num_verified):
                    actions.append(CaughtUp(offer.transfer_id))
                renewed.append(HeartbeatEntry(entry.transfer_id, offer.num_announced))
                actions += self._repeat_lost(offer, entry.num_ready, now)
        answer = Heartbeat(*self._peers.stamp(), heartbeat.counter, tuple(renewed))
        return actions + self._peers.send(peer, answer)

    def on_release(self, sender: str, release: Release, now: float) -> Actions:
        offer, actions = self._offer_for(sender, release, now)
        if offer is None:
            return actions
        if release.reason is AbortReason.DIGEST_MISMATCH:
            self.pool.invalidate(offer.leased.values())  # the prefix cache must not serve them again
        if offer.aborting is not None and release.reason is not None:
            return self._end(offer, OwnerState.ABORTED, offer.aborting, is_released=True)
        return self._end(offer, OwnerState.RELEASED, release.reason, is_released=True)

    def on_peer_lost(self, name: str, died: bool) -> Actions:
        actions: Actions = []
        for offer in [offer for offer in self.offers.values() if offer.peer.name == name]:
            offer.aborting = offer.aborting or AbortReason.PEER_LOST
            if died or not offer.may_be_read:
                actions += self._end(offer, OwnerState.ABORTED, offer.aborting)
        return actions

    # ---- time

    def on_tick(self, now: float) -> Actions:
        actions: Actions = []
        for offer in [offer for offer in self.offers.values() if now >= offer.ends_at(self.config.lease_s)]:
            if now < offer.renewed_at + self.config.lease_s:
                actions += self.abort(offer.transfer_id, AbortReason.DEADLINE, "not read in time")
            elif offer.aborting is not None:
                actions += self._end(offer, OwnerState.ABORTED, offer.aborting)
            else:
                actions += self._end(offer, OwnerState.EXPIRED, AbortReason.LEASE_EXPIRED)
        for transfer_id, early in list(self._early.items()):
            if now >= early.arrived_at + self._early_kept_s:
                del self._early[transfer_id]
                self._peers.drop(Drop.UNKNOWN_TRANSFER)
                peer = self._peers.address_of(early.sender)
                if peer is not None and isinstance(early.message, Want):
                    actions += self._send_abort(peer, transfer_id, AbortReason.UNKNOWN_TRANSFER)
        return actions

    def deadlines(self) -> list[float]:
        offers = [offer.ends_at(self.config.lease_s) for offer in self.offers.values()]
        return offers + [early.arrived_at + self._early_kept_s for early in self._early.values()]

    @property
    def _early_kept_s(self) -> float:
        # The router calls both workers at once, so an offer is made within half a lease or never.
        return self.config.lease_s / 2

    @property
    def _repeated_after_s(self) -> float:
        # A puller that lacks a READY says so once a heartbeat. Its message is small, and our answer is not.
        return self.config.heartbeat_s / 2

    # ---- inside

    def _offer_for(self, sender: str, message: Want | Release, now: float) -> tuple[Offer | None, Actions]:
        """The live offer of a message. Without one, the owner keeps, answers (the actions) or drops the message."""
        offer = self.offers.get(message.transfer_id)
        if offer is None:
            return None, self._handle_unoffered(sender, message, now)
        if not self._peers.accept(offer.peer, offer.newest, sender, message):
            return None, []
        offer.newest = message.counter
        return offer, []

    def _handle_unoffered(self, sender: str, message: Want | Release, now: float) -> Actions:
        ended_by = self._ended.get(message.transfer_id)
        if ended_by is not None:
            self._peers.drop(Drop.LATE)
            peer = self._peers.address_of(sender)
            if peer is None or not isinstance(message, Want):
                return []
            return self._send_abort(peer, message.transfer_id, ended_by)
        kept = self._early.get(message.transfer_id)
        if kept is not None and message.counter <= kept.message.counter:
            return []
        is_full = kept is None and len(self._early) >= self.config.max_transfers
        if is_full or self._num_early_blocks(message) > MAX_EARLY_BLOCKS:
            self._peers.drop(Drop.TABLE_FULL)
        else:
            arrived_at = now if kept is None else kept.arrived_at
            self._early[message.transfer_id] = _EarlyMessage(sender, message, arrived_at)
        return []

    def _num_early_blocks(self, message: Want | Release) -> int:
        """With this message, which takes the place of one of its transfer."""
        others = (early.message for name, early in self._early.items() if name != message.transfer_id)
        return sum(map(_num_blocks, others), _num_blocks(message))

    def _announce(self, offer: Offer, first_block: int, now: float) -> Actions:
        """READYs for all announced blocks from `first_block` on. There is at least one: it acknowledges the WANT."""
        actions: Actions = []
        total, start = offer.num_announced, first_block
        count = MAX_BLOCKS_PER_READY
        if self._has_digests(offer):
            count = max(1, min(FIRST_READY_BYTES // self._peers.address.layout.block_bytes, count))
        while start == first_block or start < total:
            end = min(start + count, total)
            last = offer.last and end == total
            ready = Ready(
                offer.transfer_id,
                *self._peers.stamp(),
                ack=offer.renewed_by,
                first_block=start,
                blocks=offer.announced(start, end),
                last=last,
                token_ids=offer.token_ids if last else (),
            )
            actions += self._peers.send(offer.peer, ready)
            start, count = start + count, min(READY_GROWTH * count, MAX_BLOCKS_PER_READY)
        offer.ready_sent_at = now
        return actions

    def _repeat_lost(self, offer: Offer, num_received: int, now: float) -> Actions:
        """Repeat the READYs that a puller lacks, as its heartbeat says."""
        if (
            offer.wanted is None
            or offer.has_reached(num_received)
            or now - offer.ready_sent_at < self._repeated_after_s
        ):
            return []
        self._peers.counters.num_ready_repeated += 1
        return self._announce(offer, min(num_received, offer.num_announced), now)

    def _send_abort(
        self, peer: AgentAddress, transfer_id: TransferId, reason: AbortReason, detail: str = ""
    ) -> Actions:
        return self._peers.send(peer, Abort(transfer_id, *self._peers.stamp(), reason, detail))

    def _compute_digests(self, offer: Offer, blocks: Iterable[int]) -> Actions:
        """A cached block does not change while it is leased, so one digest serves all its offers."""
        if not (offer.plan.moves_whole_blocks and self._has_digests(offer)):
            return []
        new = tuple([block for block in blocks if block not in self._hashed])
        if offer.is_of_cache:
            self._hashed.update(new)
        return [ComputeDigests(new)] if new else []

    def _has_digests(self, offer: Offer) -> bool:
        """A device has digests of whole blocks only."""
        on_host = self._peers.address.device is None
        return self.config.verify_digests and (on_host or offer.plan.moves_whole_blocks)

    def _plan_for(self, peer: AgentAddress) -> TransferPlan:
        """Raises `LayoutMismatch` for a peer that cannot read our pool."""
        return TransferPlan(self._peers.address.layout, peer.layout)

    def _unlease(self, offer: Offer, positions: Sequence[int]) -> None:
        blocks = [offer.leased.pop(position) for position in positions]
        self.pool.unlease(blocks)
        self._hashed.difference_update([block for block in blocks if not self.pool.num_leases(block)])

    def _end(
        self, offer: Offer, state: OwnerState, reason: AbortReason | None, *, is_released: bool = False
    ) -> Actions:
        """End an offer and free its blocks. Every offer ends here, once."""
        offer.step(state)
        self._unlease(offer, list(offer.leased))
        del self.offers[offer.transfer_id]
        self._note_ended(offer.transfer_id, reason or AbortReason.UNKNOWN_TRANSFER)
        self._peers.counters.offers[state.value] += 1
        return [OfferEnded(offer.transfer_id, state, reason, is_released)]

    def _note_ended(self, transfer_id: TransferId, reason: AbortReason) -> None:
        self._ended[transfer_id] = reason
        while len(self._ended) > self.config.max_transfers:
            self._ended.popitem(last=False)

    def check(self) -> None:
        """The leases of the offers are the leases of the pool, block for block; tables are bounded."""
        leases: Counter[int] = Counter()
        for transfer_id, offer in self.offers.items():
            assert transfer_id == offer.transfer_id
            assert OWNER_STEPS[offer.state], "an ended offer is still in the table"
            leases.update(offer.leased.values())
            if offer.wanted is None:
                assert not offer.may_be_read
            else:
                assert offer.leased.keys() <= offer.wanted
                announced = zip(offer.announced_pieces, offer.announced_blocks, strict=True)
                assert {piece // offer.plan.source_parts: block for piece, block in announced} == offer.leased
        in_pool = self.pool.leases()
        assert self._hashed <= in_pool.keys()
        assert in_pool == leases, f"blocks and leases in the pool or in the offers: {in_pool.items() ^ leases.items()}"
        assert not self.offers.keys() & self._ended.keys()
        assert not self.offers.keys() & self._early.keys()
        assert max(len(self.offers), len(self._ended), len(self._early)) <= self.config.max_transfers


def _num_blocks(message: Want | Release) -> int:
    """As numbers in memory; a message names them as runs, 48 bytes of which name 65,536."""
    return len(message.positions) if isinstance(message, Want) else 0
