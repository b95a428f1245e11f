"""The words of a KV hand-off: what owner and puller say to each other, and the states either may be in.

    owner (prefill):  COMPUTING -> OFFERED -> RELEASED | EXPIRED | ABORTED
    puller (decode):  RESERVED -> WANTING -> READING -> VERIFYING -> COMPLETE | FAILED | CANCELLED

Terminal states are final. A message is trusted only if protocol version, transfer id, sender's incarnation and counter
all fit; anything else is late, doubled or foreign and is dropped and counted. The wire form is protos/handoff.proto.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from core.kv_layout import KVLayout

PROTOCOL_VERSION = 2

TransferId = int  # 128 random bits: a ticket, known to the router and the two workers it gave it to


class OwnerState(Enum):
    COMPUTING = "computing"  # nothing is offered yet
    OFFERED = "offered"  # at least one block may be read
    RELEASED = "released"
    EXPIRED = "expired"  # the reader gave no sign of life for a whole lease
    ABORTED = "aborted"


class PullerState(Enum):
    RESERVED = "reserved"  # waits for target blocks; heartbeats keep the offer alive
    WANTING = "wanting"  # asked; no block is ready yet, or all ready ones have been read
    READING = "reading"  # at least one read is in flight
    VERIFYING = "verifying"  # everything is read; the lease is confirmed before a byte is trusted
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


OWNER_STEPS: dict[OwnerState, frozenset[OwnerState]] = {
    OwnerState.COMPUTING: frozenset({OwnerState.OFFERED, OwnerState.RELEASED, OwnerState.EXPIRED, OwnerState.ABORTED}),
    OwnerState.OFFERED: frozenset({OwnerState.RELEASED, OwnerState.EXPIRED, OwnerState.ABORTED}),
    OwnerState.RELEASED: frozenset(),
    OwnerState.EXPIRED: frozenset(),
    OwnerState.ABORTED: frozenset(),
}

PULLER_STEPS: dict[PullerState, frozenset[PullerState]] = {
    PullerState.RESERVED: frozenset({PullerState.WANTING, PullerState.FAILED, PullerState.CANCELLED}),
    PullerState.WANTING: frozenset(
        {PullerState.READING, PullerState.VERIFYING, PullerState.FAILED, PullerState.CANCELLED}
    ),
    PullerState.READING: frozenset(
        {PullerState.WANTING, PullerState.VERIFYING, PullerState.FAILED, PullerState.CANCELLED}
    ),
    PullerState.VERIFYING: frozenset({PullerState.COMPLETE, PullerState.FAILED, PullerState.CANCELLED}),
    PullerState.COMPLETE: frozenset(),
    PullerState.FAILED: frozenset(),
    PullerState.CANCELLED: frozenset(),
}

# In order of a transfer's life: what `num_transfers` is made of.
LIVE_STATES: tuple[OwnerState | PullerState, ...] = (
    *(state for state, steps in OWNER_STEPS.items() if steps),
    *(state for state, steps in PULLER_STEPS.items() if steps),
)


class AbortReason(Enum):
    """Why a hand-off ended without its blocks being used."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    LEASE_EXPIRED = "lease_expired"
    UNKNOWN_TRANSFER = "unknown_transfer"
    LAYOUT_MISMATCH = "layout_mismatch"
    DIGEST_MISMATCH = "digest_mismatch"
    READ_FAILED = "read_failed"
    PEER_LOST = "peer_lost"
    PREFILL_FAILED = "prefill_failed"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an agent's pool is, as far as it matters to the speed of a path. 0 = not known."""

    machine: str = ""  # the same for two processes exactly if they run on one machine, in one network namespace
    on_gpu: bool = False  # the pool lies in a GPU's memory
    memory_bytes_per_s: float = 0.0  # how fast the agent copies within its machine's memory
    link_bytes_per_s: float = 0.0  # of its fastest network device


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """All a peer needs to talk to a transfer agent and to read its pool.

    `name` contains the incarnation, so a restarted worker is another agent and old messages cannot match.
    """

    name: str
    incarnation: int  # random 64 bits, new at each start
    metadata: bytes  # the transport's own: connection info and memory keys
    pool_base: int  # address of block 0
    num_blocks: int
    layout: KVLayout
    lease_s: float  # it keeps a block it has offered this long after the last sign of life of the reader
    probe_bytes: int = 0  # behind the last block: of no content, so that peers may read it at any time to measure
    location: Location = Location()


class OfferedBlock(NamedTuple):
    position: int  # index of the block in its sequence
    block: int  # id in the owner's pool
    digest: int  # XXH3_64 of the block's bytes; 0 where digests are off


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """Many of them, as columns: a thousand rows are cut, compared and sent in microseconds, without an object for each.

    Raises `ValueError` where the columns are not of one length.
    """

    positions: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.positions) == len(self.blocks) == len(self.digests):
            raise ValueError(
                f"{len(self.positions)} positions, but {len(self.blocks)} blocks and {len(self.digests)} digests"
            )

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> OfferedBlocks:
        """From (position, block, digest) each."""
        columns = tuple(zip(*rows, strict=True))
        return cls(*columns) if columns else cls()

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[OfferedBlock]:
        return map(OfferedBlock, self.positions, self.blocks, self.digests)

    def cut(self, first: int, end: int | None = None) -> OfferedBlocks:
        """Rows [first, end)."""
        return OfferedBlocks(self.positions[first:end], self.blocks[first:end], self.digests[first:end])

    def by_block(self) -> OfferedBlocks:
        """The same rows in order of their blocks."""
        if all(map(operator.le, self.blocks, self.blocks[1:])):
            return self
        order = operator.itemgetter(*sorted(range(len(self)), key=self.blocks.__getitem__))
        return OfferedBlocks(order(self.positions), order(self.blocks), order(self.digests))


@dataclass(frozen=True, slots=True)
class Want:
    """Puller: these positions I lack."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    layout_fingerprint: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Owner: these blocks are readable. The last one carries the first token and ends the list.

    `first_block` counts the wanted blocks announced in earlier READYs: a gap or an overlap is seen. `ack` is the
    counter of the newest message received from the puller, so it knows from when on the lease runs at least.
    """

    transfer_id: TransferId
    incarnation: int
    counter: int
    ack: int
    first_block: int
    blocks: OfferedBlocks
    last: bool
    first_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatEntry:
    transfer_id: TransferId
    num_ready: int  # wanted blocks the puller has heard of; the owner repeats READYs that were lost


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Puller to owner: these transfers live on. Owner to puller, with `ack` set: these leases are renewed."""

    incarnation: int
    counter: int
    ack: int | None
    entries: tuple[HeartbeatEntry, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Puller: read and verified (`reason` is None) or given up; the owner may free the blocks."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    reason: AbortReason | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Either side: this hand-off is over. A puller answers with RELEASE once its reads have ended."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    reason: AbortReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """Puller, outside any transfer: are you there? With `ack`, the counter of a PING: the owner's answer."""

    incarnation: int
    counter: int
    ack: int | None


HandoffMessage = Want | Ready | Heartbeat | Release | Abort | Ping
