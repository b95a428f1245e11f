"""The events that DecodeMachine takes, and the actions that it returns. vllm_worker/ shares those of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.errors import TandemError
from core.handoff import AgentAddress, PrefixSource, TransferId
from core.lifecycle import FinishReason, MoveReason, Timeline
from core.machine import Tick
from core.request import Request
from core.scheduling.worker_load import NO_CALL, CallId
from core.step import TokenEvent
from kv_transfer.protocol.events import AgentAction, PullStats, TransferEvent
from worker.call_record import CallRecord
from worker.core import ConfigChanged, DrainRequested, RunStep, StepFailed, StepFinished
from worker.prefixes import PrefixRequested, PulledPrefix
from worker.tier.events import TierAction, TierEvent

# ---- events


@dataclass(frozen=True, slots=True)
class DecodeArrived:
    request: Request
    source: tuple[TransferId, AgentAddress] | None  # None: compute the prompt here
    deadline: float
    call: CallId = NO_CALL
    is_move: bool = False  # the source still generates tokens of the sequence
    prefix: PrefixSource | None = None  # without a source: a peer that has cached what this worker has not


@dataclass(frozen=True, slots=True)
class DecodeCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffArrived:
    """The transfer's parameters from the engine of the prefill worker. Only for engines that move blocks themselves."""

    transfer_id: TransferId
    handoff: bytes


@dataclass(frozen=True, slots=True)
class MoveArrived:
    """The router has found a worker that reads the KV of a running sequence."""

    request_id: str
    transfer_id: TransferId
    reader: AgentAddress
    num_tokens: int  # of the sequence, that the reader knows


@dataclass(frozen=True, slots=True)
class ResumeArrived:
    """The router has ended the call of the reader, and has accepted no token of it."""

    request_id: str
    transfer_id: TransferId


DecodeEvent = (
    DecodeArrived
    | DecodeCancelled
    | HandoffArrived
    | MoveArrived
    | ResumeArrived
    | StepFinished
    | StepFailed
    | ConfigChanged
    | DrainRequested
    | PrefixRequested
    | TransferEvent
    | TierEvent
    | Tick
)


# ---- actions


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """New tokens of any number of calls: of one step, or the first token of a pulled sequence."""

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class DecodeDone:
    request_id: str
    finish_reason: FinishReason
    cached_tokens: int
    timeline: Timeline
    pull: PullStats | None  # None: the prompt was computed here
    kv_block_seconds: float = 0.0  # of the sequence, from the reservation of its blocks
    num_skipped_blocks: int = 0  # of the prompt, not pulled because the prefix cache had them
    num_prompt_tokens: int = 0  # of the call: with tokens that another worker generated
    num_blocks: int = 0  # of the sequence
    num_preemptions: int = 0
    num_drafts: int = 0  # guessed tokens that steps have computed
    num_right_drafts: int = 0  # ... and that were right
    num_recomputed_tokens: int = 0
    moved_bytes: int = 0  # that the reader of a move lacked
    prefix: PulledPrefix | None = None  # from a peer
    record: CallRecord = field(default_factory=CallRecord)


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    request_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class AskToMove:
    """Ask the routers to move these calls to another worker."""

    request_ids: tuple[str, ...]
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The tokens of the output from `first_index` on come from the reader alone. The owner and the reader say so."""

    request_id: str
    first_index: int


DecodeAction = RunStep | EmitTokens | DecodeDone | DecodeFailed | AskToMove | HandedOver | AgentAction | TierAction
