"""The requests of a replay, as their clients see them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import TandemError
from core.request import Request
from router.requests import events
from simulator.virtual.world import World


@dataclass(slots=True)
class Served:
    request_id: str
    num_prompt_tokens: int
    router: str
    arrived_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between tokens
    end: events.Outcome | TandemError | None = None

    @property
    def outcome(self) -> events.Outcome | None:
        return self.end if isinstance(self.end, events.Outcome) else None

    @property
    def tpot_s(self) -> float:
        return (self.last_token_at - self.first_token_at) / max(1, self.num_tokens - 1)

    def take(self, num_tokens: int, now: float) -> None:
        """Tokens that arrive together."""
        if self.num_tokens:
            self.gaps_s.append(now - self.last_token_at)
        else:
            self.first_token_at = now
        self.gaps_s.extend((0.0,) * (num_tokens - 1))
        self.last_token_at = now
        self.num_tokens += num_tokens


class ServedRequests:
    """The clients of a replay. No client cancels a request, and none has a stop string."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[str, Served] = {}
        self._ended: set[str] = set()
        self._then: dict[str, Callable[[], None]] = {}  # by the request whose end they wait for
        self.all: list[Served] = []  # by arrival

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def expect(self, request: Request, router: str) -> None:
        """Record the arrival of a request at this router."""
        served = Served(request.request_id, request.num_prompt_tokens, router, self._world.now)
        self._open[request.request_id] = served
        self.all.append(served)

    def after(self, request_id: str, call: Callable[[], None]) -> None:
        """Call once when this request, which may arrive later, has ended. At most one call waits for it."""
        if request_id in self._ended:
            call()
        else:
            self._then[request_id] = call

    def dispatched(self, dispatch_id: str, worker_id: str) -> None:
        pass

    def delivered(self, deliver: events.Deliver) -> bool:
        self._open[deliver.request_id].take(len(deliver.token_ids), self._world.now)
        return False

    def finished(self, request_id: str, outcome: events.Outcome) -> None:
        self._end(request_id, outcome)

    def failed(self, request_id: str, error: TandemError) -> None:
        self._end(request_id, error)

    def refused(self, request_id: str, error: TandemError) -> None:
        self._end(request_id, error)

    def _end(self, request_id: str, end: events.Outcome | TandemError) -> None:
        self._open.pop(request_id).end = end
        self._ended.add(request_id)
        if request_id in self._then:
            self._world.after(0.0, self._then.pop(request_id))
