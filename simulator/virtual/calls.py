"""The calls of routers to workers: streams, each in order in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from core.lifecycle import ServiceRole
from simulator.virtual.line import Line
from simulator.virtual.world import SimulationError


def first_id(request_id: str) -> str:
    """The id of the first call of a request, of which `request_id` is a call."""
    return request_id.partition("~")[0]


class CallState(Enum):
    OPEN = "open"
    ENDED = "ended"  # by its answer, an error or a cancel


def _not_connected(result: Any) -> None:
    raise SimulationError(f"a worker answers {result} to a call that is not connected")


@dataclass(slots=True, eq=False)
class Call:
    """One gRPC call, or one token stream. Messages of different calls overtake each other."""

    call_id: str
    worker_id: str
    to_worker: Line
    to_router: Line
    reply: Callable[[Any], None] = _not_connected  # sends an answer, or the tokens of a stream
    caller: CallState = CallState.OPEN
    cut: bool = False  # the last answers were lost when the worker died
    is_broken: bool = False  # a token stream; its ends notice later
    role: ServiceRole = ServiceRole.PREFILL  # of the worker that can answer
    number: int = 0  # of a decode call
    tokens: Call | None = None  # the StreamTokens call of a decode call
    num_tokens: int = 0  # of a decode call, put on the token stream
