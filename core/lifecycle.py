"""The stages of a request's life: one list, used by router, workers, spans and the simulator.

The router walks a request through TOKENIZE -> QUEUE -> PREFILL -> DECODE; a worker walks its sequence through
QUEUE -> (TRANSFER | PREFILL) -> DECODE. `NEXT_STAGES` is the law; docs/lifecycle.md is drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    TOKENIZE = "tokenize"  # text to token ids, validation
    QUEUE = "queue"  # waiting to be admitted
    PREFILL = "prefill"  # computing the prompt, up to the first token
    TRANSFER = "transfer"  # KV blocks on their way to the decode worker
    DECODE = "decode"  # from the first token to the last
    FINISHED = "finished"  # one FinishReason; final


NEXT_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.TOKENIZE: frozenset({Stage.QUEUE, Stage.FINISHED}),
    Stage.QUEUE: frozenset({Stage.PREFILL, Stage.TRANSFER, Stage.FINISHED}),
    Stage.PREFILL: frozenset({Stage.DECODE, Stage.QUEUE, Stage.FINISHED}),
    Stage.TRANSFER: frozenset({Stage.DECODE}),
    Stage.DECODE: frozenset({Stage.QUEUE, Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a sequence ended; exactly one per sequence."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ERROR = "error"  # aborted, or its step failed; the client sees the gRPC status of the call instead
    HANDOFF = "handoff"  # a prefill worker's sequence ended with its first token; never seen by a client


class RequestPath(Enum):
    """Which way a request took through the pools."""

    DISAGGREGATED = "disaggregated"  # prefill on one worker, decode on another
    LOCAL = "local"  # the decode worker prefilled, on purpose
    RECOMPUTED = "recomputed"  # a hand-off or a worker failed and the prompt was computed again
    MIGRATED = "migrated"  # a draining worker handed the running sequence to a peer; no worker does it yet


class ServiceRole(Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    LOST = "lost"


class StageError(AssertionError):
    """A stage followed another that it may not follow: our bug."""


@dataclass(slots=True)
class Timeline:
    """Where the time went: the stages a request has passed, in order, each with when it was entered."""

    stage: Stage
    entered_at: float
    history: list[tuple[Stage, float, float]] = field(default_factory=list)  # (stage, start, end), oldest first

    def enter(self, stage: Stage, now: float) -> None:
        if stage not in NEXT_STAGES[self.stage]:
            raise StageError(f"{self.stage.name} -> {stage.name} is not a step of the life cycle")
        self.history.append((self.stage, self.entered_at, now))
        self.stage, self.entered_at = stage, now

    def seconds_in(self, stage: Stage) -> float:
        return sum(end - start for passed, start, end in self.history if passed is stage)
