"""A simulated router process: it drives the production machine, its links to the workers, and its clients.

The process may die. The next one starts at the same address with an empty machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, assert_never

from core.config import RouterConfig
from core.errors import TandemError, TransferFailed
from core.lifecycle import ServiceRole
from core.paths import PeerJoined, PeerLeft
from core.request import Request
from core.scheduling.worker_load import CallId
from decode_worker.events import DecodeArrived, HandoffArrived, MoveArrived, ResumeArrived
from prefill_worker.machine import OfferWithdrawn, PrefillArrived
from router.requests import events
from router.requests.machine import RouterMachine
from router.routing.question import Policy
from simulator.shells.worker_shell import Asked
from simulator.virtual.machine_timer import MachineTimer
from simulator.virtual.memory import EOS_TOKEN_IDS
from simulator.virtual.world import World
from worker.prefixes import PrefixRequested

Refuse = Callable[[TandemError], None]
Arrived = Callable[[float], PrefillArrived | DecodeArrived]  # takes the time at the worker


class Clients(Protocol):
    """What the clients of a router see."""

    def dispatched(self, dispatch_id: str, worker_id: str) -> None: ...

    def delivered(self, deliver: events.Deliver) -> bool:
        """Returns whether a stop string matches now."""

    def finished(self, request_id: str, outcome: events.Outcome) -> None: ...

    def failed(self, request_id: str, error: TandemError) -> None: ...

    def refused(self, request_id: str, error: TandemError) -> None: ...


class Links(Protocol):
    """The connections of a router to its workers."""

    @property
    def open_calls(self) -> Iterable[str]:
        """Dispatch ids of the Prefill and Decode calls that the router waits for."""
        ...

    def call(self, dispatch_id: str, worker_id: str, number: int, role: ServiceRole, arrived: Arrived) -> None: ...

    def ask(self, worker_id: str, event: Asked, refuse: Refuse) -> None: ...

    def cancel(self, dispatch_id: str, only: str = "") -> None: ...

    def update_peers(self, worker_id: str, changes: Sequence[PeerJoined | PeerLeft]) -> None: ...


class RouterShell:
    """`new_policy` is called at each start; None = the production policy. Set `links` before the first event."""

    links: Links

    def __init__(
        self,
        name: str,
        world: World,
        config: RouterConfig,
        clients: Clients,
        new_policy: Callable[[], Policy] | None = None,
    ) -> None:
        self.name = name
        self._world, self._config, self._clients, self._new_policy = world, config, clients, new_policy
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        """A process that knows nothing of an earlier one."""
        self._num_starts += 1
        self.machine = RouterMachine(
            self._config,
            new_ticket=partial(self._world.random.getrandbits, 128),
            eos_token_ids=EOS_TOKEN_IDS,
            router_id=self.name if self._num_starts == 1 else f"{self.name}-{self._num_starts}",
            policy=None if self._new_policy is None else self._new_policy(),
        )
        self.alive = True
        self.draining = False  # it takes no new request
        self._timer = MachineTimer(self._world, self.machine, self.post)

    @property
    def serves(self) -> bool:
        return self.alive and not self.draining

    @property
    def is_idle(self) -> bool:
        return not self.machine.view.num_queued and not self.machine.view.num_in_flight

    def die(self) -> None:
        """kill -9. The owner of the process breaks its connections."""
        self.alive = False
        self._timer.stop()

    def post(self, event: Any) -> None:
        if not self.alive:
            return
        for action in self.machine.handle(event, self._world.now):
            self._perform(action)
        if self._world.is_checked:
            self.machine.check()
            self.machine.check_calls(self.links.open_calls)
        self._timer.update()

    def arrive(
        self, request: Request, timeout_s: float, others: Sequence[Request] = (), delivered: tuple[int, ...] = ()
    ) -> None:
        """A client sends a request, with the requests of its further choices, or with the tokens that it has."""
        self._world.note(f"client: {request.request_id}, {len(request.token_ids)} tokens in, {len(delivered)} out")
        now = self._world.now
        try:
            self.post(events.RequestArrived(request, now, now + timeout_s, tuple(others), delivered))
        except TandemError as error:
            self.machine.check()
            for choice in (request, *others):
                self._clients.refused(choice.request_id, error)

    def _perform(self, action: events.RouterAction) -> None:
        note, router_id = self._world.note, self.machine.router_id
        match action:
            case events.StartPrefill(dispatch_id, worker_id, request, transfer_id, reader, timeout_s, number, prefix):
                note(f"router: prefill {dispatch_id} on {worker_id}")
                self._clients.dispatched(dispatch_id, worker_id)
                call_id = CallId(router_id, number)
                self.links.call(
                    dispatch_id, worker_id, number, ServiceRole.PREFILL,
                    lambda clock: PrefillArrived(request, transfer_id, reader, clock + timeout_s, call_id, prefix),
                )  # fmt: skip
            case events.StartDecode(dispatch_id, worker_id, request, source, timeout_s, number, _, is_move, prefix):
                how = "moved" if is_move else "pulled" if source else "prefilled"
                note(f"router: decode {dispatch_id} on {worker_id}, {how} there")
                self._clients.dispatched(dispatch_id, worker_id)
                call_id = CallId(router_id, number)
                self.links.call(
                    dispatch_id, worker_id, number, ServiceRole.DECODE,
                    lambda clock: DecodeArrived(request, source, clock + timeout_s, call_id, is_move, prefix),
                )  # fmt: skip
            case events.OfferPrefix(dispatch_id, worker_id, ticket, reader, token_ids, salt, limit_s):
                note(f"router: {worker_id} gives {len(token_ids)} tokens to {reader.name} for {dispatch_id}")
                self._world.counts["prefix asked of a peer"] += 1
                asked = PrefixRequested(ticket, reader, token_ids, salt, limit_s)
                self.links.ask(worker_id, asked, lambda e: self.post(events.PrefixRefused(dispatch_id, worker_id, e)))
            case events.WithdrawOffer(dispatch_id, worker_id, transfer_id):
                note(f"router: {worker_id} has no reader for {dispatch_id}")
                self.links.ask(worker_id, OfferWithdrawn(transfer_id), lambda _: None)
            case events.HandOver(dispatch_id, worker_id, transfer_id, handoff):
                note(f"router: hand-off of {dispatch_id} to {worker_id}")
                handed_over = HandoffArrived(transfer_id, handoff)
                self.links.ask(worker_id, handed_over, lambda e: self._fail_hand_over(dispatch_id, e))
            case events.StartMove(dispatch_id, source_id, worker_id, transfer_id, reader, num_tokens):
                note(f"router: move {source_id} to {dispatch_id}")
                arrived = MoveArrived(source_id, transfer_id, reader, num_tokens)
                self.links.ask(worker_id, arrived, lambda e: self.post(events.MoveRefused(dispatch_id, e)))
            case events.ResumeSequence(dispatch_id, worker_id, transfer_id):
                note(f"router: resume {dispatch_id}")
                self._world.counts["resumed by the router"] += 1
                self.links.ask(worker_id, ResumeArrived(dispatch_id, transfer_id), lambda _: None)
            case events.CancelDispatch(dispatch_id, worker_id):
                self.links.cancel(dispatch_id, worker_id)
            case events.UpdatePeers(worker_id, changes):
                self.links.update_peers(worker_id, changes)
            case events.Deliver(request_id, index, token_ids):
                note(f"client: {request_id} gets {len(token_ids)} tokens from {index} on")
                if self._clients.delivered(action):
                    self._world.after(0.0, lambda: self.post(events.StopMatched(request_id)))
            case events.Finish(request_id, outcome):
                note(f"client: {request_id} finished, {outcome.finish_reason.value}, {outcome.path.value}")
                self._clients.finished(request_id, outcome)
            case events.Fail(request_id, error, _):
                note(f"client: {request_id} failed, {type(error).__name__}: {error}")
                self._clients.failed(request_id, error)
            case _:
                assert_never(action)

    def _fail_hand_over(self, dispatch_id: str, error: TandemError) -> None:
        self._world.marks.add(f"failed hand-off of {dispatch_id}")
        self.links.cancel(dispatch_id)
        self.post(events.DecodeReturned(dispatch_id, TransferFailed(f"the hand-off was not taken: {error}")))
