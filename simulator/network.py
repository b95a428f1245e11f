"""The simulated network: it carries notifications, which may be lost, doubled or late, and calls, which are streams.

    notification   in order per pair, except for doubled copies; lost or doubled at random, unknown to the sender
    call           reliable, in order in both directions, with cancels; breaks when the worker dies

Each pair of machines has a base delay, and each message a random delay. So messages of different pairs arrive in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from core.handoff import HandoffMessage
from core.lifecycle import ServiceRole
from simulator.line import LONGEST, SHORTEST, Line
from simulator.world import SimulationError, World

if TYPE_CHECKING:
    from simulator.worker_shell import WorkerShell


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    delay_s: float = 0.0005  # typical
    slow_pair_share: float = 0.0  # share of pairs with a delay SLOWNESS times as long
    loss: float = 0.0  # probability for a notification
    doubling: float = 0.0  # likewise


SLOWNESS = 25.0


class Network:
    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self._world = world
        self.faults = faults
        self._base_delay: dict[tuple[str, str], float] = {}
        self._lines: dict[tuple[str, str], Line] = {}  # of notifications

    def line(self, source: str, target: str) -> Line:
        return Line(self._world, partial(self.delay, source, target))

    def delay(self, source: str, target: str) -> float:
        pair = (source, target)
        if pair not in self._base_delay:
            is_slow = self._world.chance(self.faults.slow_pair_share)
            self._base_delay[pair] = self.faults.delay_s * (SLOWNESS if is_slow else 1.0)
        return self._base_delay[pair] * self._world.random.uniform(SHORTEST, LONGEST)

    def notify(self, source: str, target: str, message: HandoffMessage, deliver: Callable[[], None]) -> None:
        """Send one hand-off message, unless it gets lost."""
        kind = type(message).__name__.upper()
        if self._world.chance(self.faults.loss):
            self._world.counts["lost notification"] += 1
            self._world.note(f"{source} -> {target}: {kind} is lost")
            self._world.trouble(source, target)
            return
        if self._world.chance(self.faults.doubling):
            self._world.counts["doubled notification"] += 1
            late = self._world.now + 10 * self.delay(source, target)
            self._world.at(late, deliver)
        line = self._lines.setdefault((source, target), self.line(source, target))
        line.send(deliver)
        if self._base_delay[(source, target)] > self.faults.delay_s:
            self._world.trouble(source, target)


def first_id(request_id: str) -> str:
    """The id of the first call of a request, of which `request_id` is a call."""
    return request_id.partition("~")[0]


class CallState(Enum):
    OPEN = "open"
    ENDED = "ended"  # by its answer, an error or a cancel


def _not_connected(worker: WorkerShell, result: Any) -> None:
    raise SimulationError(f"{worker.spec.worker_id} answers {result}, but is not connected")


@dataclass(slots=True, eq=False)
class Call:
    """One gRPC call, or one token stream. Messages of different calls overtake each other."""

    call_id: str
    worker_id: str
    to_worker: Line
    to_router: Line
    reply: Callable[[WorkerShell, Any], None] = _not_connected  # sends an answer, or the tokens of a stream
    caller: CallState = CallState.OPEN
    cut: bool = False  # the last answers were lost when the worker died
    is_broken: bool = False  # a token stream; its ends notice later
    role: ServiceRole = ServiceRole.PREFILL  # of the worker that can answer
    number: int = 0  # of a decode call
    tokens: Call | None = None  # the StreamTokens call of a decode call
    num_tokens: int = 0  # of a decode call, put on the token stream
