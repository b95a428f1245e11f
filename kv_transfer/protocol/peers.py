"""Known peers, the counter of our messages, and totals: shared by the owner, the puller and the paths of one agent.

Every message carries our incarnation and a counter that only rises, so a receiver recognises late, doubled and foreign
messages. `accept` is the receiving half of this law.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from core.handoff import Abort, AgentAddress, HandoffMessage, Heartbeat, Ready, Release, TransferId, Want
from kv_transfer.protocol.events import Actions, Connect, Disconnect, SendMessage

# nixl keeps up to two sockets of a connection on both sides until one process ends, closed or not, so a connection that
# is closed and made again costs more than one that stays.
MAX_IDLE_PEERS = 1024  # connections to peers without a live transfer; beyond: the least recently used closes

TransferMessage = Want | Ready | Release | Abort


class Drop(Enum):
    """Why a message was dropped."""

    FOREIGN = "foreign"  # not from the transfer's peer, or from another incarnation of that peer
    OLD = "old"  # doubled, or overtaken by a newer one
    LATE = "late"  # the transfer has ended
    UNKNOWN_PEER = "unknown_peer"
    UNKNOWN_TRANSFER = "unknown_transfer"
    GAP = "gap"  # an earlier READY is missing; the owner repeats both of them
    UNEXPECTED = "unexpected"  # impossible in the transfer's state
    TABLE_FULL = "table_full"  # no room for a message that came before its offer
    UNSENT = "unsent"  # our own, to a peer that is gone


@dataclass(slots=True)
class TransferCounters:
    """Totals since the start, for metrics."""

    dropped: Counter[Drop] = field(default_factory=Counter)
    offers: Counter[str] = field(default_factory=Counter)  # ended, by OwnerState.value
    pulls: Counter[str] = field(default_factory=Counter)  # ended, by PullerState.value
    num_reads: int = 0
    num_bytes_read: int = 0
    read_seconds: float = 0.0  # of finished reads, of pulls that have ended
    num_digest_mismatches: int = 0
    num_ready_repeated: int = 0


@dataclass(slots=True)
class _KnownPeer:
    address: AgentAddress
    newest_heartbeat: int = 0  # counter of the newest heartbeat that the peer sent as a puller


class Peers:
    def __init__(self, address: AgentAddress) -> None:
        self.address = address
        self.counters = TransferCounters()
        self._peers: OrderedDict[str, _KnownPeer] = OrderedDict()  # by name, least recently used first
        self._counter = 0

    # ---- sending

    def stamp(self) -> tuple[int, int]:
        """(incarnation, counter) of the next message."""
        self._counter += 1
        return self.address.incarnation, self._counter

    def send(self, peer: AgentAddress, message: HandoffMessage) -> Actions:
        """Empty where the peer is gone."""
        if self.knows(peer.name, peer.incarnation):
            return [SendMessage(peer.name, message)]
        self.drop(Drop.UNSENT)
        return []

    # ---- receiving

    def drop(self, why: Drop) -> None:
        self.counters.dropped[why] += 1

    def accept(self, peer: AgentAddress, newest: int, sender: str, message: TransferMessage) -> bool:
        """Whether `message` is from `peer` and newer than counter `newest`; counts a message that is not."""
        if (sender, message.incarnation) != (peer.name, peer.incarnation):
            self.drop(Drop.FOREIGN)
            return False
        if message.counter <= newest:
            self.drop(Drop.OLD)
            return False
        return True

    def accept_heartbeat(self, sender: str, heartbeat: Heartbeat) -> bool:
        """`accept`, for the heartbeat of a puller."""
        peer = self._peers.get(sender)
        if peer is None:
            self.drop(Drop.UNKNOWN_PEER)
        elif heartbeat.incarnation != peer.address.incarnation:
            self.drop(Drop.FOREIGN)
        elif heartbeat.counter <= peer.newest_heartbeat:
            self.drop(Drop.OLD)
        else:
            peer.newest_heartbeat = heartbeat.counter
            return True
        return False

    # ---- knowing

    def knows(self, name: str, incarnation: int) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.address.incarnation == incarnation

    def address_of(self, name: str) -> AgentAddress | None:
        peer = self._peers.get(name)
        return None if peer is None else peer.address

    def connect(self, address: AgentAddress, in_use: Container[str]) -> Actions:
        """Connect to a peer that is not connected yet. Above the limit, disconnect from the least recently used peers
        that are not `in_use`."""
        if address.name in self._peers:
            assert self.knows(address.name, address.incarnation), f"{address.name}: forget its old incarnation first"
            self._peers.move_to_end(address.name)
            return []
        idle = [name for name in self._peers if name not in in_use]
        evicted = idle[: max(0, len(idle) + 1 - MAX_IDLE_PEERS)]
        for name in evicted:
            self.forget(name)
        self._peers[address.name] = _KnownPeer(address)
        return [*map(Disconnect, evicted), Connect(address)]

    def forget(self, name: str) -> None:
        self._peers.pop(name, None)

    def check(self) -> None:
        assert all(name == peer.address.name for name, peer in self._peers.items())


def short_name(transfer_id: TransferId) -> str:
    """The first 8 of 32 hex digits: enough to tell transfers apart, too few to serve as a ticket."""
    return f"{transfer_id:032x}"[:8]


def transfer_name(transfer_id: TransferId) -> str:
    """For error messages, which may reach the client."""
    return f"transfer {short_name(transfer_id)}"
