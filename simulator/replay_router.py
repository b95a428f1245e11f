"""A router in a replay: the production machine, its calls and report streams, and a record of what each client gets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from core.errors import TandemError
from core.request import Request
from core.scheduling.worker_load import CallId
from decode_worker.machine import DecodeArrived
from prefill_worker.machine import PrefillArrived
from router.requests import events
from router.requests.machine import RouterMachine
from simulator.machine_timer import MachineTimer
from simulator.replay_config import ReplayConfig
from simulator.replay_worker import ReplayWorker
from simulator.stream import Stream
from simulator.world import World


@dataclass(slots=True)
class Served:
    """One request, as its client sees it."""

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


class ReplayRouter:
    def __init__(
        self,
        name: str,
        world: World,
        config: ReplayConfig,
        workers: Mapping[str, ReplayWorker],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called at the end of each request."""
        self.name = name
        self._world, self._workers, self._config = world, workers, config.router
        policy = None if config.new_policy is None else config.new_policy()
        new_ticket = partial(world.random.getrandbits, 128)
        self.machine = RouterMachine(config.router, new_ticket, router_id=name, policy=policy)
        self._on_end = on_end
        self._served: dict[str, Served] = {}  # open requests, by id
        self._timer = MachineTimer(world, self.machine, self.post)
        self._to_workers = {
            worker_id: Stream(world, name, worker_id, config.message_delay_s, worker.post)
            for worker_id, worker in workers.items()
        }
        self._from_workers = {
            worker_id: Stream(world, worker_id, name, config.message_delay_s, self.post) for worker_id in workers
        }
        for worker_id, worker in workers.items():
            worker.subscribe(self._from_workers[worker_id])

    # ---- the driver

    def post(self, event: Any) -> None:
        now = self._world.now
        for action in self.machine.handle(event, now):
            self._perform(action, now)
        self._timer.update()

    # ---- clients

    def arrive(self, request: Request) -> Served:
        request_id, now = request.request_id, self._world.now
        served = self._served[request_id] = Served(request_id, request.num_prompt_tokens, self.name, now)
        try:
            self.post(events.RequestArrived(request, now, now + self._config.default_timeout_s))
        except TandemError as error:
            self._end(request_id, error)
        return served

    # ---- acting

    def _perform(self, action: events.RouterAction, now: float) -> None:
        match action:
            case events.StartPrefill(_, worker_id, request, transfer_id, reader, timeout_s, number):
                call = CallId(self.name, number)
                self._call(worker_id, PrefillArrived(request, transfer_id, reader, now + timeout_s, call))
            case events.StartDecode(_, worker_id, request, source, timeout_s, number):
                call = CallId(self.name, number)
                self._call(worker_id, DecodeArrived(request, source, now + timeout_s, call))
            case events.CancelDispatch(dispatch_id):
                for worker_id, worker in self._workers.items():
                    self._to_workers[worker_id].send(dispatch_id, worker.cancel)
            case events.UpdatePeers(worker_id, changes):
                for change in changes:
                    self._to_workers[worker_id].send(change)
            case events.Deliver(request_id, _, token_ids, _):
                self._served[request_id].take(len(token_ids), now)
            case events.Finish(request_id, outcome):
                self._end(request_id, outcome)
            case events.Fail(request_id, error, _):
                self._end(request_id, error)
            case _:
                assert_never(action)

    def _end(self, request_id: str, end: events.Outcome | TandemError) -> None:
        self._served.pop(request_id).end = end
        self._on_end()

    def _call(self, worker_id: str, arrived: PrefillArrived | DecodeArrived) -> None:
        accept = partial(self._workers[worker_id].accept, caller=self._from_workers[worker_id])
        self._to_workers[worker_id].send(arrived, accept)
