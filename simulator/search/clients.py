"""The clients of all routers. Most of them resume: after the death of a router, they send the request to the next one
that serves, with the tokens that they have, as tandem_client does.

    open at a router --> lost --> pause --> open at the next router ... ended, for the oracle once

Each call of a request has an id of its own: `r7`, then `r7~1`, `r7~2`, ... The oracle knows the request by the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from core.errors import QueueFull, RequestCancelled, TandemError
from core.request import Request
from core.scheduling.sequence import Sequence as RunningSequence
from router.requests.events import ClientCancelled, Deliver, Outcome
from simulator.search.checks import Oracle
from simulator.search.scenario import ClientRequest
from simulator.shells.router_shell import RouterShell
from simulator.virtual.calls import first_id
from simulator.virtual.memory import EOS_TOKEN_IDS
from simulator.virtual.world import World

MAX_ATTEMPTS = 10  # without a new token, as tandem_client.RESUME
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended for its client."""

    client: ClientRequest
    request: Request  # of the first call
    deadline: float
    router: int  # place of its router
    call_id: str  # of the current call
    num_calls: int = 1
    num_failed: int = 0  # calls since the last new token
    token_ids: list[int] = field(default_factory=list)
    has_stopped: bool = False  # its text has a stop string
    is_lost: bool = False  # no router has it now

    @property
    def is_complete(self) -> bool:
        """The tokens are the whole answer; only the last message is missing."""
        if self.has_stopped or not self.token_ids:
            return self.has_stopped
        token_ids = [*self.request.token_ids, *self.token_ids]
        ended = RunningSequence(self.request, 0, token_ids=token_ids)
        return ended.finish_reason_after(token_ids[-1], EOS_TOKEN_IDS) is not None


class ResumingClients:
    """Stands between the routers and the oracle. Set `routers` before the first request."""

    routers: Sequence[RouterShell]

    def __init__(self, world: World, oracle: Oracle) -> None:
        self._world, self._oracle = world, oracle
        self._open: dict[str, _Open] = {}  # by first id

    def arrive(self, client: ClientRequest, router: int) -> None:
        self._oracle.expect(client)
        deadline = self._world.now + client.timeout_s
        for request in client.choices:
            self._open[request.request_id] = _Open(client, request, deadline, router, request.request_id)
        if self.routers[router].serves:
            self.routers[router].arrive(client.request, client.timeout_s, client.others)
        else:
            self._lose([self._open[request.request_id] for request in client.choices])

    def cancel(self, client: ClientRequest) -> None:
        """Cancel every choice of the call in turn, as `RouterShell.close` of the router does."""
        names = [choice.request_id for choice in client.choices]
        for name in [name for name in names if self._oracle.cancelled(name)]:
            found = self._open.get(name)
            if found is None:
                continue
            if found.is_lost:
                self.failed(name, RequestCancelled("while no router had it"))
            else:
                self.routers[found.router].post(ClientCancelled(found.call_id))

    # ---- router deaths

    def lose_router(self, router: int) -> None:
        """The connection of every request that is open at this router breaks."""
        self._lose([found for found in self._open.values() if found.router == router and not found.is_lost])

    def _lose(self, lost: Sequence[_Open]) -> None:
        for found in lost:
            found.is_lost = True
            if found.client.resumes:
                self._pause(found)
            else:
                self._give_up(found)

    def _pause(self, found: _Open) -> None:
        found.num_failed += 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (found.num_failed - 1))
        if found.num_failed >= MAX_ATTEMPTS or self._world.now + pause_s >= found.deadline:
            self._give_up(found)
        else:
            self._world.after(pause_s, partial(self._resume, found))

    def _give_up(self, found: _Open) -> None:
        del self._open[found.request.request_id]
        self._oracle.lost(found.request.request_id)

    def _resume(self, found: _Open) -> None:
        name = found.request.request_id
        if self._open.get(name) is not found or not found.is_lost:
            return  # cancelled meanwhile
        if found.is_complete:
            del self._open[name]
            self._oracle.completed(name)
        else:
            others = range(found.router + 1, found.router + 1 + len(self.routers))
            serving = [
                number for number in (other % len(self.routers) for other in others) if self.routers[number].serves
            ]
            if serving:
                found.router = serving[0]
                self._send_again(found)
            else:
                self._pause(found)

    def _send_again(self, found: _Open) -> None:
        found.call_id, found.is_lost = f"{found.request.request_id}~{found.num_calls}", False
        found.num_calls += 1
        self._world.counts["resumed"] += bool(found.token_ids)
        request = replace(found.request, request_id=found.call_id)
        timeout_s = found.deadline - self._world.now
        self.routers[found.router].arrive(request, timeout_s, delivered=tuple(found.token_ids))

    # ---- what the routers tell

    def dispatched(self, dispatch_id: str, worker_id: str) -> None:
        self._oracle.dispatched(dispatch_id, worker_id)

    def delivered(self, deliver: Deliver) -> bool:
        found = self._open.get(first_id(deliver.request_id))
        if found is not None:
            found.token_ids += deliver.token_ids
            found.num_failed = 0
        stops = self._oracle.delivered(deliver)
        if found is not None:
            found.has_stopped = found.has_stopped or stops
        return stops

    def finished(self, request_id: str, outcome: Outcome) -> None:
        self._open.pop(first_id(request_id), None)
        self._oracle.finished(request_id, outcome)

    def failed(self, request_id: str, error: TandemError) -> None:
        if not self._tries_again(request_id, error):
            self._open.pop(first_id(request_id), None)
            self._oracle.failed(request_id, error)

    def refused(self, request_id: str, error: TandemError) -> None:
        if not self._tries_again(request_id, error):
            del self._open[first_id(request_id)]
            self._oracle.refused(request_id, error)

    def _tries_again(self, request_id: str, error: TandemError) -> bool:
        """A resumed choice may be one without tokens of a call that has some: its router does not know."""
        found = self._open.get(first_id(request_id))
        if found is None or found.num_calls == 1 or not isinstance(error, QueueFull):
            return False
        found.is_lost = True
        self._pause(found)
        return True
