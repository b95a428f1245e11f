"""How words travel: notifications that get lost, doubled and late, and calls that are streams until they break.

    notification   per pair in order, except for copies; lost or doubled by chance; nobody tells the sender
    call           reliable and in order in both directions; breaks when the worker dies; a cancel travels, too

Each pair of machines has its own base delay and every message its own jitter, so words of different peers overtake each
other freely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from core.handoff import HandoffMessage
from simulator.world import World


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    delay_s: float = 0.0005  # a typical one
    slow_pair_share: float = 0.0  # of pairs, whose delay is SLOWNESS times longer
    loss: float = 0.0  # of notifications
    doubling: float = 0.0


SLOWNESS = 25.0


class Network:
    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self._world = world
        self.faults = faults
        self._base_delay: dict[tuple[str, str], float] = {}
        self._arrives_last: dict[tuple[str, str], float] = {}

    def delay(self, source: str, target: str) -> float:
        pair = (source, target)
        if pair not in self._base_delay:
            is_slow = self._world.chance(self.faults.slow_pair_share)
            self._base_delay[pair] = self.faults.delay_s * (SLOWNESS if is_slow else 1.0)
        return self._base_delay[pair] * self._world.random.uniform(0.5, 2.5)

    def notify(self, source: str, target: str, message: HandoffMessage, deliver: Callable[[], None]) -> None:
        """Carry one hand-off message, perhaps."""
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
        self._world.at(self.in_order((source, target), self.delay(source, target)), deliver)
        if self._base_delay[(source, target)] > self.faults.delay_s:
            self._world.trouble(source, target)

    def in_order(self, stream: tuple[str, str], delay_s: float) -> float:
        """When something that now enters `stream` comes out of it."""
        when = max(self._world.now + delay_s, self._arrives_last.get(stream, 0.0))
        self._arrives_last[stream] = when
        return when


class CallState(Enum):
    OPEN = "open"
    ENDED = "ended"  # by its answer, an error, or because the caller gave up


@dataclass(slots=True, eq=False)
class Call:
    """One gRPC call, as both ends see it."""

    call_id: str
    worker_id: str
    caller: CallState = CallState.OPEN
    worker: CallState = CallState.OPEN
    cut: bool = False  # what the worker said last died with it
    _arrives_last: dict[str, float] = field(default_factory=dict)

    def travel(self, world: World, network: Network, source: str, target: str, deliver: Callable[[], None]) -> None:
        """One message of the stream; order is kept per direction."""
        when = max(world.now + network.delay(source, target), self._arrives_last.get(target, 0.0))
        self._arrives_last[target] = when
        world.at(when, deliver)
