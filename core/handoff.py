"""The messages of a KV hand-off between owner and puller, and the states of both sides.

    owner:   COMPUTING -> OFFERED -> RELEASED | EXPIRED | ABORTED
    puller:  RESERVED -> WANTING -> READING -> VERIFYING -> COMPLETE | FAILED | CANCELLED

No step leaves a terminal state. A receiver takes a message only if the protocol version, the transfer id, the
incarnation of the sender and the counter match. It drops and counts every other message, as late, repeated or foreign.
The wire format is protos/handoff.proto.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from core.kv_layout import KVLayout

PROTOCOL_VERSION = 6

MAX_NAME_CHARS = 256  # characters in the name of a transfer agent; beyond: its address and its messages are refused
MAX_POSITIONS = 1 << 16  # in a WANT or a READY: 1 M tokens in blocks of 16

TransferId = int  # 128 random bits, known only to the router and the two workers of the transfer


class OwnerState(Enum):
    COMPUTING = "computing"  # no block is offered yet
    OFFERED = "offered"  # the puller may read at least one block
    RELEASED = "released"
    EXPIRED = "expired"  # the puller sent nothing for a whole lease
    ABORTED = "aborted"

    # Each decoded report hashes the states, and Enum.__hash__ is slow Python code.
    __hash__ = object.__hash__


class PullerState(Enum):
    RESERVED = "reserved"  # waits until the worker has room; heartbeats renew the lease
    WANTING = "wanting"  # WANT is sent, and every block announced so far is read or waits for a target block
    READING = "reading"  # at least one read is in flight
    VERIFYING = "verifying"  # every block is read; the puller waits for proof that the lease covered the reads
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__


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

# The states that `num_transfers` counts, in the order of a transfer.
LIVE_STATES: tuple[OwnerState | PullerState, ...] = (
    *(state for state, steps in OWNER_STEPS.items() if steps),
    *(state for state, steps in PULLER_STEPS.items() if steps),
)


class AbortReason(Enum):
    """Why a hand-off ended before its blocks were used."""

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
    """The place of an agent's pool, as needed to estimate the speed of a path. 0 = not known."""

    machine: str = ""  # equal for two processes if and only if they share a machine and a network namespace
    on_gpu: bool = False  # the pool is in GPU memory
    memory_bytes_per_s: float = 0.0  # speed of a copy in the memory that holds the pool
    link_bytes_per_s: float = 0.0  # of the fastest network device
    gpu: str = ""  # UUID of the GPU that holds the pool


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Everything that a peer needs to send messages to a transfer agent, and to read its pool.

    `name` contains the incarnation: a restarted worker is a new agent, and old messages do not match.
    """

    name: str
    incarnation: int  # random 64 bits, new at each start
    metadata: bytes  # of the transport: connection info and memory keys
    pool_base: int  # address of block 0
    num_blocks: int
    layout: KVLayout
    lease_s: float  # the agent keeps an offered block for this long after the puller's last message
    probe_bytes: int = 0  # behind the last block, without content: peers read them to measure the path
    location: Location = Location()
    device: int | None = None  # CUDA device of the pool, as the owner's process numbers it; None = host memory
    protocol_version: int = PROTOCOL_VERSION  # of the hand-off, as the agent speaks it; 0 = older than this field

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, with those for probes."""
        return self.num_blocks * self.layout.block_bytes + self.probe_bytes


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A peer that offers the cached blocks of a prefix, for a worker that would have to compute it."""

    transfer_id: TransferId
    agent: AgentAddress  # of the peer
    num_tokens: int  # of the prefix, as the router knows it; the peer may have fewer
    limit_s: float  # after this time, the worker computes what it does not have


class OfferedBlock(NamedTuple):
    position: int  # index of the block in its sequence
    block: int  # id in the owner's pool
    digest: int  # XXH3_64 of the block's bytes; 0 if digests are off


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """Rows of `OfferedBlock` as columns: slicing, comparing and sending 1,000 rows takes microseconds.

    Raises `ValueError` if the columns differ in length.
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
        """From rows of (position, block, digest)."""
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
        """The same rows, sorted by block."""
        if all(map(operator.le, self.blocks, self.blocks[1:])):
            return self
        order = operator.itemgetter(*sorted(range(len(self)), key=self.blocks.__getitem__))
        return OfferedBlocks(order(self.positions), order(self.blocks), order(self.digests))


@dataclass(frozen=True, slots=True)
class Want:
    """From the puller: the positions that it needs."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    layout_fingerprint: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """From the owner: readable blocks. The READY with `last` ends the list and carries the tokens that the puller
    lacks.

    `first_block` is the number of wanted blocks in earlier READYs, which shows the puller a gap or an overlap. `ack` is
    the counter of the newest message from the puller: the lease started no earlier than the puller sent that message.
    """

    transfer_id: TransferId
    incarnation: int
    counter: int
    ack: int
    first_block: int
    blocks: OfferedBlocks
    last: bool
    token_ids: tuple[int, ...] = ()  # those after the tokens that the puller knows; with `last` only


@dataclass(frozen=True, slots=True)
class HeartbeatEntry:
    transfer_id: TransferId
    num_ready: int  # wanted blocks in the READYs that the puller has received; the owner repeats lost READYs
    num_unplaced: int = 0  # those for which the puller has no target block yet
    num_verified: int = 0  # those that the puller has read and verified


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Puller to owner: keep the leases of these transfers. Owner to puller, with `ack`: these leases are renewed."""

    incarnation: int
    counter: int
    ack: int | None
    entries: tuple[HeartbeatEntry, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """From the puller: it has read and verified the blocks (no `reason`), or gave up. The owner may free the blocks."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    reason: AbortReason | None


@dataclass(frozen=True, slots=True)
class Abort:
    """From either side: the hand-off is over. A puller answers with RELEASE once its reads have ended."""

    transfer_id: TransferId
    incarnation: int
    counter: int
    reason: AbortReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """From the puller, outside any transfer: asks for an answer. The owner's answer has `ack`, the PING's counter."""

    incarnation: int
    counter: int
    ack: int | None


HandoffMessage = Want | Ready | Heartbeat | Release | Abort | Ping
