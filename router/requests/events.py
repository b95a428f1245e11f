"""The events that RouterMachine takes, and the actions that it returns.

A *dispatch* is one attempt to serve a request: one decode call and, on the disaggregated path, one prefill call at the
same time. Both calls carry the dispatch id, by which the machine drops the results of an earlier dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.config import RouterConfig
from core.errors import TandemError
from core.handoff import AgentAddress, PrefixSource, TransferId
from core.lifecycle import FinishReason, MoveReason, RequestPath, ServiceRole, Stage, Timeline
from core.machine import Tick
from core.paths import PathStatus, PeerJoined, PeerLeft
from core.request import Request
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.step import SampledToken
from router.routing.question import Candidate

# ---- events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """One call, whose choices are admitted or refused together. The choices in `others` start when the decode worker of
    `request` has sent a token, and so has the KV of their common prompt."""

    request: Request
    arrived_at: float  # before tokenizing
    deadline: float
    others: tuple[Request, ...] = ()
    delivered: tuple[int, ...] = ()  # by another router: the first tokens of the output, which do not end it
    num_following: int = 0  # choices of later calls, which are of use only together with this one

    def __post_init__(self) -> None:
        assert not (self.others and self.delivered), "each choice is resumed by itself"


@dataclass(frozen=True, slots=True)
class ClientCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The text of the delivered tokens contains a stop string."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The snapshot of a new worker, or a fresh snapshot of a known worker."""

    worker_id: str
    role: ServiceRole
    agent: AgentAddress
    cached_blocks: tuple[int, ...]
    load: WorkerLoad
    paths: tuple[PathStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReported:
    worker_id: str
    changes: WorkerChanges


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """The worker will drain: it gets no new call."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    detail: str


class WorkerStage(NamedTuple):
    """One stage of a call, as the worker measured it."""

    name: str  # of a span
    start_s: float  # since the arrival of the call at the worker
    duration_s: float
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    index: int  # of the token in the output
    token: SampledToken
    finish_reason: FinishReason | None  # None: the sequence continues on the decode worker
    cached_tokens: int
    queue_s: float
    prefill_s: float
    stages: tuple[WorkerStage, ...] = ()
    kv_block_seconds: float = 0.0
    read_tokens: int | None = None  # of the prompt, read from a peer that had cached them; None: it began no read
    read_bytes: int = 0  # of KV
    handoff: bytes = b""  # for the engine of the decode worker; empty if the workers move the blocks


@dataclass(frozen=True, slots=True)
class PrefillReturned:
    dispatch_id: str
    result: PrefillResult | TandemError


class MoveNotice(NamedTuple):
    """A notice of a decode worker about a move of one of its calls."""

    call: int
    first_index: int | None  # None: it asks for a move. Else tokens from here on come from the target of the move
    reason: MoveReason = MoveReason.DRAIN  # of a request for a move


@dataclass(frozen=True, slots=True)
class MoveRefused:
    """The source of a move cannot begin it."""

    dispatch_id: str  # of the target
    error: TandemError


@dataclass(frozen=True, slots=True)
class PrefixRefused:
    """The source of a prefix makes no offer, or is gone."""

    dispatch_id: str  # of the reader
    worker_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one or more steps of a decode worker, in columns: entry i of each column belongs to token i."""

    calls: Sequence[int]  # StartDecode.call
    indexes: Sequence[int]  # in the output
    token_ids: Sequence[int]
    logprobs: Mapping[int, SampledToken]  # place in the columns -> the token with its log-probabilities
    moves: Sequence[MoveNotice] = ()  # behind the tokens


@dataclass(frozen=True, slots=True)
class TokenStreamLost:
    """The token stream of a decode worker broke. `WorkerJoined` follows after the next stream is open."""

    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class DecodeResult:
    finish_reason: FinishReason  # HANDOFF: another worker has copied the sequence and goes on with it
    num_tokens: int  # that the worker has put on the token stream; some may not have arrived yet
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    transfer_exposed_s: float
    transferred_bytes: int
    stages: tuple[WorkerStage, ...] = ()
    kv_block_seconds: float = 0.0
    num_moved_blocks: int = 0
    num_skipped_blocks: int = 0
    drafted_tokens: int = 0  # guesses that the worker computed
    accepted_drafts: int = 0  # ... and that were right
    recomputed_tokens: int = 0  # on this worker
    read_tokens: int | None = None  # of the prompt, read from a peer that had cached them; None: it began no read
    read_bytes: int = 0  # of KV


@dataclass(frozen=True, slots=True)
class DecodeReturned:
    dispatch_id: str
    result: DecodeResult | TandemError


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """Live options have changed."""

    config: RouterConfig


@dataclass(frozen=True, slots=True)
class StartExpected:
    """The planner brings a worker when a request waits."""

    start_s: float  # until it serves; 0 = none comes


RouterEvent = (
    RequestArrived
    | ClientCancelled
    | StopMatched
    | WorkerJoined
    | WorkerReported
    | WorkerLeaves
    | WorkerLost
    | PrefillReturned
    | StepTokens
    | TokenStreamLost
    | MoveRefused
    | PrefixRefused
    | DecodeReturned
    | ConfigChanged
    | StartExpected
    | Tick
)

# ---- actions


class Promise(NamedTuple):
    """The router's prediction at dispatch."""

    ttft_s: float  # from the arrival of the request
    tpot_s: float  # a step of the decode worker with its sequences and this one, without prompts
    path: RequestPath


@dataclass(frozen=True, slots=True)
class StartPrefill:
    dispatch_id: str
    worker_id: str
    request: Request
    transfer_id: TransferId
    reader: AgentAddress
    timeout_s: float
    call: int  # number of the call; the machine numbers all calls in the order in which they start
    prefix: PrefixSource | None = None  # a peer that has cached what the worker has not


@dataclass(frozen=True, slots=True)
class StartDecode:
    dispatch_id: str
    worker_id: str
    request: Request
    source: tuple[TransferId, AgentAddress] | None  # None: the decode worker computes the prompt
    timeout_s: float
    call: int
    promise: Promise | None = None  # for the client
    is_move: bool = False  # the source is a decode worker that still generates tokens
    prefix: PrefixSource | None = None  # as for a prefill worker; without a source only


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Tell a worker who reads the prefix that it has cached. A failure costs the reader's call time only."""

    dispatch_id: str
    worker_id: str
    transfer_id: TransferId
    reader: AgentAddress
    token_ids: tuple[int, ...]  # of the prefix
    cache_salt: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class StartMove:
    """Tell the source of a move who reads its sequence."""

    dispatch_id: str  # of the target
    source_id: str  # dispatch id of the source
    worker_id: str
    transfer_id: TransferId
    reader: AgentAddress
    num_tokens: int  # that the target knows


@dataclass(frozen=True, slots=True)
class ResumeSequence:
    """Tell the source of a move that the router has ended the call of the target and accepted no token of it."""

    dispatch_id: str
    worker_id: str
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class HandOver:
    """Bring the hand-off of the prefill worker's engine to the decode worker."""

    dispatch_id: str
    worker_id: str
    transfer_id: TransferId
    handoff: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """Tell a prefill worker that no decode worker will read its offer."""

    dispatch_id: str
    worker_id: str
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class CancelDispatch:
    """Cancel the open calls of a dispatch, or of them the one to a worker."""

    dispatch_id: str
    worker_id: str = ""


class Deliver(NamedTuple):
    """New tokens for the client, in order, each index once. A tuple, because each step makes one for every request."""

    request_id: str
    first_index: int  # of the first token, in the output
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...]  # one for each token if the request has log-probabilities, else empty


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to serve a request, after its end."""

    number: int  # from 1
    candidate: Candidate
    compared: Sequence[Candidate]  # with `candidate`, in no order
    started_at: float
    ended_at: float
    prefill: PrefillResult | None  # None: the call did not return a result
    decode: DecodeResult | None
    error_code: str = ""  # of the call that failed, else empty
    error: str = ""


def predicted_prefill_s(candidate: Candidate, timeline: Timeline) -> float:
    """Computing a prompt whose worker has not answered."""
    return min(candidate.prefill_s, timeline.seconds_in(Stage.PREFILL))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The content of the last message of a choice."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int
    path: RequestPath
    attempts: int
    timeline: Timeline
    candidate: Candidate
    first_token_s: float  # from arrival
    predicted_first_token_s: float  # the same, as predicted at the last dispatch before it
    prefill: PrefillResult | None
    decode: DecodeResult | None
    promise: Promise | None = None  # of the last dispatch
    kv_block_seconds: float = 0.0  # on all workers, over all attempts
    slo_itl_s: float = 0.0  # wanted time between tokens; 0 = none
    num_moves: int = 0  # to other decode workers
    num_resumed_tokens: int = 0  # of the output, delivered by another router
    recomputed_tokens: int = 0  # of prompt and output
    read_tokens: int = 0  # of the prompt, read from `candidate.read.source`

    @property
    def prefill_s(self) -> float:
        """Computing the prompt: as its worker says, else as predicted."""
        computed = self.prefill if self.candidate.prefill_worker else self.decode
        return predicted_prefill_s(self.candidate, self.timeline) if computed is None else computed.prefill_s

    @property
    def transferred_bytes(self) -> int:
        """KV that moved between workers: hand-offs, moves, and the prefix of a peer."""
        computed = self.prefill or self.decode
        pulled = 0 if self.decode is None else self.decode.transferred_bytes
        return pulled + (0 if computed is None else computed.read_bytes)

    @property
    def num_gaps(self) -> int:
        """Between the tokens that this router has delivered."""
        return max(0, self.num_output_tokens - self.num_resumed_tokens - 1)

    @property
    def gap_s(self) -> float:
        """Mean time of each later token; 0 without one."""
        return self.timeline.seconds_in(Stage.DECODE) / self.num_gaps if self.num_gaps else 0.0

    @property
    def within_itl(self) -> bool:
        """The tokens came at the wanted pace of their worker."""
        return not self.slo_itl_s or self.gap_s <= self.slo_itl_s


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: str
    outcome: Outcome
    attempts: tuple[Attempt, ...] = ()  # the newest ones


@dataclass(frozen=True, slots=True)
class Fail:
    request_id: str
    error: TandemError
    timeline: Timeline
    attempts: tuple[Attempt, ...] = ()  # the newest ones


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """Tell a worker which peers have joined or left."""

    worker_id: str
    changes: tuple[PeerJoined | PeerLeft, ...]


# A call to the worker `worker_id`.
WorkerCall = StartPrefill | StartDecode | OfferPrefix | StartMove | ResumeSequence | HandOver | WithdrawOffer
RouterAction = WorkerCall | CancelDispatch | UpdatePeers | Deliver | Finish | Fail
