"""What a vLLM worker is told, and what its machine asks for in return."""

from __future__ import annotations

from dataclasses import dataclass

from core.machine import Tick
from core.paths import PeerJoined, PeerLeft
from decode_worker.events import (
    AskToMove,
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeFailed,
    EmitTokens,
    HandedOver,
    HandoffArrived,
    MoveArrived,
    ResumeArrived,
)
from prefill_worker.machine import OfferWithdrawn, PrefillArrived, PrefillCancelled, PrefillDone, PrefillFailed
from vllm_worker.engine import EngineReport, EngineTransfer, Prompt
from vllm_worker.handshakes import ShakeHands
from vllm_worker.moves import MoveOut, Stay
from worker.core import ConfigChanged, DrainRequested
from worker.prefixes import PrefixRequested


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute a request."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request of the engine early."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GivePrefix:
    """See `Engine.give_prefix`."""

    transfer: EngineTransfer
    token_ids: tuple[int, ...]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The engine is dead or hangs: end this process, and the engine with it."""

    detail: str


VllmEvent = (
    PrefillArrived
    | PrefillCancelled
    | OfferWithdrawn
    | DecodeArrived
    | DecodeCancelled
    | HandoffArrived
    | MoveArrived
    | ResumeArrived
    | PrefixRequested
    | EngineReport
    | ConfigChanged
    | DrainRequested
    | PeerJoined
    | PeerLeft
    | Tick
)
VllmAction = (
    Submit
    | Abort
    | MoveOut
    | Stay
    | GivePrefix
    | ShakeHands
    | Fail
    | PrefillDone
    | PrefillFailed
    | EmitTokens
    | AskToMove
    | HandedOver
    | DecodeDone
    | DecodeFailed
)
