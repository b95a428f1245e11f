"""The stages of a request, as router, workers, spans and the simulator use them.

In the router a request passes TOKENIZE -> QUEUE -> PREFILL -> DECODE; in a worker, a sequence passes
QUEUE -> (TRANSFER | PREFILL) -> DECODE -> MOVE. `NEXT_STAGES` holds every allowed step; docs/lifecycle.md is generated
from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    TOKENIZE = "tokenize"  # text to token ids, validation
    QUEUE = "queue"  # waiting for admission
    PREFILL = "prefill"  # computing the prompt, up to the first token
    TRANSFER = "transfer"  # copying KV blocks to the decode worker
    DECODE = "decode"  # from the first token to the last
    MOVE = "move"  # paused while another decode worker takes over
    FINISHED = "finished"  # one FinishReason; final


NEXT_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.TOKENIZE: frozenset({Stage.QUEUE, Stage.FINISHED}),
    Stage.QUEUE: frozenset({Stage.PREFILL, Stage.TRANSFER, Stage.FINISHED}),
    Stage.PREFILL: frozenset({Stage.DECODE, Stage.QUEUE, Stage.FINISHED}),
    Stage.TRANSFER: frozenset({Stage.DECODE}),
    Stage.DECODE: frozenset({Stage.QUEUE, Stage.MOVE, Stage.FINISHED}),
    Stage.MOVE: frozenset({Stage.DECODE, Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """The reason of a sequence's end; exactly one per sequence."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # the sequence has max_tokens, or fills the context
    ERROR = "error"  # aborted, or its step failed; the client sees the gRPC status of the call instead
    HANDOFF = "handoff"  # goes on at another worker; clients never see this reason


class RequestPath(Enum):
    """The workers that computed a request."""

    DISAGGREGATED = "disaggregated"  # prefill on one worker, decode on another
    LOCAL = "local"  # prefill and decode on the decode worker, by the router's choice
    RECOMPUTED = "recomputed"  # a hand-off or a worker failed, and the prompt was computed again
    MIGRATED = "migrated"  # moved to another decode worker with its KV, and nothing was computed again


class MoveReason(Enum):
    """Why a decode worker asks that a running sequence go on at another one."""

    DRAIN = "drain"
    ROOM = "room"  # it will run short of blocks, and would preempt the sequence


class ServiceRole(Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # finishes its requests and refuses new ones
    LOST = "lost"


class StageError(AssertionError):
    """A step that is not in `NEXT_STAGES`: a bug in Tandem."""


@dataclass(slots=True)
class Timeline:
    """The stages of one request, in order, with their start and end times."""

    stage: Stage
    entered_at: float
    history: list[tuple[Stage, float, float]] = field(default_factory=list)  # (stage, start, end), oldest first

    def enter(self, stage: Stage, now: float) -> None:
        if stage not in NEXT_STAGES[self.stage]:
            raise StageError(f"{self.stage.name} -> {stage.name} is not a step of the life cycle")
        self.history.append((self.stage, self.entered_at, now))
        self.stage, self.entered_at = stage, now

    @property
    def begun_at(self) -> float:
        return self.history[0][1] if self.history else self.entered_at

    def seconds_in(self, stage: Stage) -> float:
        return sum(end - start for passed, start, end in self.history if passed is stage)
