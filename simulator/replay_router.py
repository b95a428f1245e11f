"""A router in a replay: the production machine, its calls and report streams, and a record of what each client gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from core.config import RouterConfig
from core.errors import TandemError
from core.machine import Tick
from core.request import Request
from core.worker_load import CallId
from decode_worker.machine import DecodeArrived
from prefill_worker.machine import PrefillArrived
from router import events
from router.machine import RouterMachine
from simulator.network import Network
from simulator.node import TIMER_LATENESS_S
from simulator.replay_worker import ReplayWorker
from simulator.world import World


@dataclass(slots=True)
class Served:
    """One request, as its client sees it."""

    request: Request
    router: str
    arrived_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    end: events.Outcome | TandemError | None = None

    @property
    def outcome(self) -> events.Outcome | None:
        return self.end if isinstance(self.end, events.Outcome) else None

    @property
    def tpot_s(self) -> float:
        return (self.last_token_at - self.first_token_at) / max(1, self.num_tokens - 1)


class ReplayRouter:
    def __init__(
        self,
        name: str,
        world: World,
        network: Network,
        config: RouterConfig,
        workers: Mapping[str, ReplayWorker],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called at the end of each request."""
        self.name = name
        self.machine = RouterMachine(config, lambda: world.random.getrandbits(128), router_id=name)
        self._world, self._network, self._workers, self._config = world, network, workers, config
        self._on_end = on_end
        self._served: dict[str, Served] = {}  # by request id
        self._timer_at: float | None = None
        self._paths = {
            worker.worker_id: partial(self._send, worker.worker_id, name, self.post) for worker in workers.values()
        }
        for worker in workers.values():
            worker.subscribe(self._paths[worker.worker_id])

    # ---- the driver

    def post(self, event: Any) -> None:
        for action in self.machine.handle(event, self._world.now):
            self._perform(action)
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._set_timer(deadline)

    def _set_timer(self, deadline: float) -> None:
        self._timer_at = deadline
        self._world.at(deadline + TIMER_LATENESS_S, lambda: self._on_timer(deadline))

    def _on_timer(self, planned: float) -> None:
        if planned == self._timer_at:
            self._timer_at = None
            self.post(Tick())  # a machine acts only on deadlines that have passed

    # ---- clients

    def arrive(self, request: Request) -> Served:
        now = self._world.now
        served = self._served[request.request_id] = Served(request, self.name, now)
        try:
            self.post(events.RequestArrived(request, now, now + self._config.default_timeout_s))
        except TandemError as error:
            self._end(served, error)
        return served

    # ---- acting

    def _perform(self, action: events.RouterAction) -> None:
        now = self._world.now
        match action:
            case events.StartPrefill(_, worker_id, request, transfer_id, reader, timeout_s, number):
                call = CallId(self.name, number)
                self._call(worker_id, PrefillArrived(request, transfer_id, reader, now + timeout_s, call))
            case events.StartDecode(_, worker_id, request, source, timeout_s, number):
                call = CallId(self.name, number)
                self._call(worker_id, DecodeArrived(request, source, now + timeout_s, call))
            case events.CancelDispatch(dispatch_id):
                for worker_id, worker in self._workers.items():
                    self._send(self.name, worker_id, worker.cancel, dispatch_id)
            case events.UpdatePeers(worker_id, changes):
                for change in changes:
                    self._send(self.name, worker_id, self._workers[worker_id].post, change)
            case events.Deliver(request_id, _, token_ids, _):
                served = self._served[request_id]
                served.first_token_at = served.first_token_at or now
                served.last_token_at = now
                served.num_tokens += len(token_ids)
            case events.Finish(request_id, outcome):
                self._end(self._served.pop(request_id), outcome)
            case events.Fail(request_id, error, _):
                self._end(self._served.pop(request_id), error)
            case _:
                assert_never(action)

    def _end(self, served: Served, end: events.Outcome | TandemError) -> None:
        served.end = end
        self._on_end()

    def _call(self, worker_id: str, arrived: PrefillArrived | DecodeArrived) -> None:
        accept = partial(self._workers[worker_id].accept, caller=self._paths[worker_id])
        self._send(self.name, worker_id, accept, arrived)

    def _send(self, source: str, target: str, deliver: Any, message: Any) -> None:
        """Deliver a message after the delay of the network. The messages of a connection stay in order."""
        arrives_at = self._network.in_order((source, target), self._network.delay(source, target))
        self._world.at(arrives_at, partial(deliver, message))
