"""The events and actions of a TransferMachine.

    worker machine --offer, add_ready, reserve_pull, ...--> TransferMachine --results-----> worker machine
    agent          --events-------------------------------> TransferMachine --AgentAction-> agent

A worker machine calls the TransferMachine synchronously and gets a list of actions. It handles the results
(`TransferResult`) itself and passes the other actions to its shell, which gives them to the agent. The shell passes the
agent's events to `TransferMachine.handle`.

The agent and the simulator's agent guarantee:
  - `ComputeDigests`: compute the digest of each block before the block's lease ends;
  - `SendMessage` of a READY: fill in the digest of every block, unless digests are off; keep the order of the READYs;
  - `StartRead`: exactly one `ReadFinished` or `ReadFailed`, also after `PeerLost` and `Disconnect`, and only once
    nothing writes into the target blocks any more; one `ReadTimedOut` before it where `timeout_s` was not enough;
  - `Connect` or `SendMessage` that fails for good: one `PeerLost`;
  - `ProbePath`: exactly one `PathProbed` or `ProbeFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.handoff import AbortReason, AgentAddress, HandoffMessage, OwnerState, PullerState, TransferId
from core.machine import Tick
from core.paths import Lane, PathStatus, PeerJoined, PeerLeft

# ---- events: from the agent


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: str  # name of the sending agent, as the transport knows it
    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class ReadFinished:
    """All blocks of a read are in place."""

    read_id: int
    digests: tuple[int, ...]  # of the target blocks, in the order of the read; empty where digests are off
    seconds: float  # since the read began, or since the read before it from this peer ended


@dataclass(frozen=True, slots=True)
class ReadTimedOut:
    """A read was cancelled and may still write, for as long as transport, peer and link allow."""

    read_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read has ended without all its bytes, and writes no more."""

    read_id: int
    reason: AbortReason  # READ_FAILED or PEER_LOST
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer is gone. `died`: the peer's process is known to have ended."""

    peer: str
    detail: str = ""
    died: bool = False


@dataclass(frozen=True, slots=True)
class PathProbed:
    """A probe has read its bytes. `seen`: the lane that the transport names, or TCP or RDMA where a network device has
    counted the bytes."""

    peer: str
    num_bytes: int
    seconds: float
    seen: Lane


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    peer: str
    detail: str


PathEvent = PeerJoined | PeerLeft | PathProbed | ProbeFailed
TransferEvent = MessageReceived | ReadFinished | ReadTimedOut | ReadFailed | PeerLost | PathEvent | Tick


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """The agent has failed, so peers can no longer read the pool. The worker stops; the machine gets no such event."""

    detail: str


AgentEvent = (
    MessageReceived | ReadFinished | ReadTimedOut | ReadFailed | PeerLost | PathProbed | ProbeFailed | AgentFailed
)

# ---- actions: for the agent


@dataclass(frozen=True, slots=True)
class Connect:
    peer: AgentAddress


@dataclass(frozen=True, slots=True)
class Disconnect:
    peer: str


@dataclass(frozen=True, slots=True)
class SendMessage:
    peer: str
    message: HandoffMessage


@dataclass(frozen=True, slots=True)
class StartRead:
    read_id: int  # never used twice by one machine
    transfer_id: TransferId
    peer: str
    sources: tuple[int, ...]  # blocks of the peer, rising
    targets: tuple[int, ...]  # a block of ours for each
    timeout_s: float
    pieces: tuple[int, ...] = ()  # where layouts differ: the piece (kv_transfer/protocol/plan.py) that each pair moves

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source block, target block) each."""
        return tuple(zip(self.sources, self.targets, strict=True))


@dataclass(frozen=True, slots=True)
class ComputeDigests:
    """The blocks are leased for an offer, and do not change until the lease ends."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbePath:
    """Read `num_bytes` of the bytes that the peer keeps for probes, and time the read."""

    peer: str
    num_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class LogPath:
    """The state of a path has changed."""

    path: PathStatus


AgentAction = Connect | Disconnect | SendMessage | StartRead | ComputeDigests | ProbePath | LogPath

# ---- results: for the worker machine around it


@dataclass(frozen=True, slots=True)
class PullStats:
    num_blocks: int
    num_bytes: int
    num_reads: int
    num_blocks_reread: int  # after a digest that did not match
    total_s: float  # from reserve_pull
    read_s: float  # the time during which reads from this peer were in flight, as the agent measured it
    exposed_s: float  # after the owner's last READY: not hidden behind the prefill
    owner: str = ""  # name of its agent
    lane: str = ""  # of the path, as measured; empty = not measured


@dataclass(frozen=True, slots=True)
class TargetsNeeded:
    """The owner has announced blocks for these positions, which have no target yet. The worker answers with one or
    more calls of `Puller.add_targets`, at any later time."""

    transfer_id: TransferId
    positions: tuple[int, ...]  # each position once for each pull
    is_last: bool = False  # no others follow


@dataclass(frozen=True, slots=True)
class PullCompleted:
    """Every target block holds the owner's bytes, verified under a lease that covered all reads."""

    transfer_id: TransferId
    token_ids: tuple[int, ...]  # those after the tokens that we know; all but the last one are computed
    stats: PullStats


@dataclass(frozen=True, slots=True)
class PullGivenUp:
    """The pull will fail. Its reads may still write into their targets; `PullFailed` follows when they have ended."""

    transfer_id: TransferId
    reason: AbortReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The target blocks hold no valid KV, and no read of ours writes into them any more."""

    transfer_id: TransferId
    state: PullerState  # FAILED or CANCELLED
    reason: AbortReason
    detail: str = ""


PullEnded = PullCompleted | PullFailed  # exactly one for each `reserve_pull`


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """No block of the offer is leased any more; exactly one for each offer. `reason` is None after a complete pull."""

    transfer_id: TransferId
    state: OwnerState  # RELEASED, EXPIRED or ABORTED
    reason: AbortReason | None
    is_released: bool = False  # by a RELEASE of the puller: else the pull may have completed


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The puller has read and verified every block that the offer has announced, and the offer has not ended."""

    transfer_id: TransferId


TransferResult = TargetsNeeded | PullEnded | PullGivenUp | OfferEnded | CaughtUp
TransferAction = AgentAction | TransferResult
Actions = list[TransferAction]
