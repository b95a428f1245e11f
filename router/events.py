"""What enters and leaves the router's machine.

A *dispatch* is one attempt at a request: one decode call and, on the disaggregated path, one prefill call at the same
time. Its id names both calls; results of an earlier dispatch are recognised by it and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import TandemError
from core.handoff import AgentAddress, TransferId
from core.lifecycle import FinishReason, RequestPath, ServiceRole, Timeline
from core.machine import Tick
from core.paths import PeerJoined, PeerLeft
from core.request import Request
from core.step import SampledToken
from core.worker_load import WorkerLoad
from router.policy import Candidate

IndexedTokens = tuple[tuple[int, SampledToken], ...]  # (index in the output, token)

# ---- events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """All choices of a call are admitted or refused together; the `others` start when the first has its first token,
    for then they find their prompt cached."""

    request: Request
    arrived_at: float  # before it was tokenized
    deadline: float
    others: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The text of the tokens delivered so far holds a stop string."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new worker, or the fresh snapshot of a known one."""

    worker_id: str
    role: ServiceRole
    agent: AgentAddress
    cached_blocks: tuple[int, ...]
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker_id: str
    load: WorkerLoad
    block_changes: tuple[tuple[int, bool], ...] = ()  # (sequence hash, True = stored, False = removed), in order


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class PrefillResult:
    index: int  # of the token in the output
    token: SampledToken
    finish_reason: FinishReason | None  # None: the sequence goes on
    cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class PrefillReturned:
    dispatch_id: str
    result: PrefillResult | TandemError


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    dispatch_id: str
    tokens: IndexedTokens


@dataclass(frozen=True, slots=True)
class DecodeResult:
    finish_reason: FinishReason
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    transfer_exposed_s: float
    transferred_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeReturned:
    dispatch_id: str
    result: DecodeResult | TandemError


RouterEvent = (
    RequestArrived
    | ClientCancelled
    | StopMatched
    | WorkerJoined
    | WorkerReported
    | WorkerLost
    | PrefillReturned
    | DecodeTokens
    | DecodeReturned
    | Tick
)

# ---- actions


@dataclass(frozen=True, slots=True)
class StartPrefill:
    dispatch_id: str
    worker_id: str
    request: Request
    transfer_id: TransferId
    reader: AgentAddress
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StartDecode:
    dispatch_id: str
    worker_id: str
    request: Request
    source: tuple[TransferId, AgentAddress] | None  # None: compute the prompt there
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelDispatch:
    """End both calls of a dispatch; those that have ended already stay as they are."""

    dispatch_id: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client, in order, each index once."""

    request_id: str
    index: int  # of the first of them
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything the final message says."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int
    path: RequestPath
    attempts: int
    timeline: Timeline
    candidate: Candidate
    first_token_s: float  # from arrival
    prefill: PrefillResult | None
    decode: DecodeResult | None


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fail:
    request_id: str
    error: TandemError
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """Tell a worker which of its peers have joined or left."""

    worker_id: str
    changes: tuple[PeerJoined | PeerLeft, ...]


RouterAction = StartPrefill | StartDecode | CancelDispatch | UpdatePeers | Deliver | Finish | Fail
