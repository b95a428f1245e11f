"""The links of a router to its workers: without faults (`StreamLinks`), or over a network on which they break.

A breakable link carries the report stream, the token stream and the calls, as router/links/worker_link.py does in
production. A broken stream is opened again at once. A report of a worker that the machine had counted as lost opens a
new stream. A decode worker reports only after its token stream is open. The supervisor of a fleet publishes the workers
to which there are links (`set_workers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.errors import DeadlineExceeded, TandemError, TokenStreamEnded, WorkerUnavailable
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PeerJoined, PeerLeft
from core.service import Endpoint
from decode_worker.events import HandoffArrived
from router.requests import events
from simulator.shells.router_shell import Arrived, Refuse, RouterShell
from simulator.shells.worker_shell import Asked, WorkerShell
from simulator.virtual.calls import Call, CallState
from simulator.virtual.line import Line, independent_line
from simulator.virtual.network import Network
from simulator.virtual.world import SimulationError, World

RECONNECT_S = 0.3
CONNECT_TIMEOUT_S = 2.0
LOST_ANSWERS = 0.1  # of hand-offs


class StreamLinks:
    """One stream in each direction between a router and each worker. Nothing is lost."""

    open_calls = ()  # not known

    def __init__(self, world: World, router: RouterShell, workers: Mapping[str, WorkerShell], delay_s: float) -> None:
        self._workers, self._router, name = workers, router, router.name
        self._to_worker = {key: independent_line(world, name, key, delay_s) for key in workers}
        self._to_router = {key: independent_line(world, key, name, delay_s) for key in workers}
        self._tokens = {key: self._new_call(f"tokens of {name}", key) for key in workers}
        for key, worker in workers.items():
            worker.token_streams[self._tokens[key].call_id] = self._tokens[key]
            self._tokens[key].reply = partial(self._send_event, key)
            worker.subscribe(name, partial(self._send_event, key))

    def _new_call(self, call_id: str, worker_id: str) -> Call:
        return Call(call_id, worker_id, self._to_worker[worker_id], self._to_router[worker_id])

    def _send_event(self, worker_id: str, event: Any) -> None:
        self._to_router[worker_id].send(partial(self._router.post, event))

    def _answer(self, call: Call, worker: WorkerShell, result: Any) -> None:
        self._send_event(call.worker_id, worker.returned(call, result))

    def call(self, dispatch_id: str, worker_id: str, number: int, role: ServiceRole, arrived: Arrived) -> None:
        worker, call = self._workers[worker_id], self._new_call(dispatch_id, worker_id)
        call.role, call.number = role, number
        call.tokens = self._tokens[worker_id] if role is ServiceRole.DECODE else None
        call.reply = partial(self._answer, call, worker)
        call.to_worker.send(partial(worker.accept, call, arrived))

    def ask(self, worker_id: str, event: Asked, refuse: Refuse) -> None:
        worker, line = self._workers[worker_id], self._to_router[worker_id]
        answer = lambda error: line.send(partial(refuse, error))  # noqa: E731
        self._to_worker[worker_id].send(partial(worker.ask, event, answer))

    def cancel(self, dispatch_id: str, only: str = "") -> None:
        for worker_id, worker in self._workers.items():
            if not only or only == worker_id:
                self._to_worker[worker_id].send(partial(worker.cancel, dispatch_id))

    def update_peers(self, worker_id: str, changes: Sequence[PeerJoined | PeerLeft]) -> None:
        for change in changes:
            self._to_worker[worker_id].send(partial(self._workers[worker_id].post, change))


@dataclass(frozen=True, slots=True, eq=False)
class _ReportStream:
    opened_at: float


@dataclass(slots=True, eq=False)
class _Link:
    endpoint: Endpoint  # as published last


class BreakableLinks:
    """`fleet` maps a worker id to the newest incarnation of the worker, dead or alive."""

    def __init__(self, world: World, router: RouterShell, network: Network, fleet: Mapping[str, WorkerShell]) -> None:
        self._world, self._router, self._network, self._fleet = world, router, network, fleet
        self._links: dict[str, _Link] = {}  # by worker id
        self._calls: dict[tuple[str, str], Call] = {}  # (dispatch id, worker id) -> open here
        self._streams: dict[str, _ReportStream] = {}  # by worker id
        self._token_streams: dict[str, Call] = {}  # open here, by worker id
        self._peer_lines: dict[str, Line] = {}  # by name of the worker

    @property
    def open_calls(self) -> list[str]:
        return [dispatch_id for dispatch_id, _ in self._calls]

    def close(self) -> None:
        """Each connection to a worker breaks."""
        for worker_id in self._links:
            self._close_link(worker_id)

    def _close_link(self, worker_id: str) -> None:
        """Its calls and streams end, and nothing of them is posted."""
        for key in [key for key in self._calls if key[1] == worker_id]:
            self._give_up(self._calls.pop(key))
        tokens = self._token_streams.get(worker_id)
        if tokens is not None:
            self._end_tokens(tokens)
        self._streams.pop(worker_id, None)

    def set_workers(self, endpoints: Iterable[Endpoint]) -> None:
        """The supervisor has published these workers. Acts as a `RouterShell.set_workers` that reads no last words."""
        wanted, post = {endpoint.service_id: endpoint for endpoint in endpoints}, self._router.post
        for endpoint in wanted.values():
            if endpoint.draining:
                post(events.WorkerLeaves(endpoint.service_id))
        gone = [
            worker_id
            for worker_id, link in self._links.items()
            if worker_id not in wanted or link.endpoint.has_switched(wanted[worker_id])
        ]
        for worker_id in gone:
            self._streams.pop(worker_id, None)
        for worker_id in gone:
            post(events.WorkerLost(worker_id, "the supervisor removed the worker, or gave it another role"))
        for worker_id in gone:
            self._close_link(worker_id)
            del self._links[worker_id]
        for worker_id, endpoint in wanted.items():
            if worker_id in self._links:
                self._links[worker_id].endpoint = endpoint
            else:
                self._links[worker_id] = link = _Link(endpoint)
                self._keep_connected(worker_id, link)

    def _linked(self, worker_id: str) -> WorkerShell:
        """Raises `SimulationError` without a link to this worker."""
        if worker_id not in self._links:
            raise SimulationError(f"{self._router.name} has no link to {worker_id}")
        return self._fleet[worker_id]

    def _new_call(self, call_id: str, worker_id: str) -> Call:
        name, network = self._router.name, self._network
        return Call(call_id, worker_id, network.line(name, worker_id), network.line(worker_id, name))

    def update_peers(self, worker_id: str, changes: Sequence[PeerJoined | PeerLeft]) -> None:
        node = self._linked(worker_id)
        line = self._peer_lines.setdefault(node.name, self._network.line(self._router.name, worker_id))
        for change in changes:
            line.send(partial(node.post, change))

    # ---- calls

    def call(self, dispatch_id: str, worker_id: str, number: int, role: ServiceRole, arrived: Arrived) -> None:
        """Raises `SimulationError` for a call of a decode worker without an open token stream."""
        node, tokens = self._linked(worker_id), None
        if role is ServiceRole.DECODE:
            tokens = self._token_streams.get(worker_id)
            if tokens is None:
                raise SimulationError(f"{dispatch_id} was sent to {worker_id}, which has no token stream")
        call = self._new_call(dispatch_id, worker_id)
        call.role, call.number, call.tokens = role, number, tokens
        call.reply = partial(self._on_answer, call, node)
        self._calls[(dispatch_id, worker_id)] = call

        def deliver() -> None:
            if call.caller is CallState.ENDED and self._world.chance(0.5):
                self._world.counts["cancelled on its way"] += 1  # gRPC may drop it, or start its handler
            elif node.alive:
                node.accept(call, arrived)
            elif not node.silent:
                self._on_broken(call)

        call.to_worker.send(deliver)

    def ask(self, worker_id: str, event: Asked, refuse: Refuse) -> None:
        """Reliable while the worker lives, but the answer of a hand-off may be lost. A dead worker refuses."""
        node = self._linked(worker_id)
        back = self._network.line(worker_id, self._router.name)

        def answer(error: TandemError) -> None:
            back.send(partial(refuse, error))

        if isinstance(event, HandoffArrived) and self._world.chance(LOST_ANSWERS):
            self._world.counts["hand-off without an answer"] += 1
            after_s = min(CONNECT_TIMEOUT_S, self._world.random.expovariate(1 / RECONNECT_S))
            self._world.after(after_s, partial(refuse, DeadlineExceeded("no answer")))

        def deliver() -> None:
            if node.alive:
                node.ask(event, answer)
            elif not node.silent:
                answer(WorkerUnavailable(f"{worker_id}: connection reset"))

        self._network.line(self._router.name, worker_id).send(deliver)

    def cancel(self, dispatch_id: str, only: str = "") -> None:
        for key in [key for key in self._calls if key[0] == dispatch_id and only in ("", key[1])]:
            self._give_up(self._calls.pop(key))

    def _give_up(self, call: Call) -> None:
        call.caller = CallState.ENDED
        node = self._fleet[call.worker_id]

        def deliver() -> None:
            if node.alive:
                node.cancel(call.call_id)

        call.to_worker.send(deliver)

    def _on_answer(self, call: Call, node: WorkerShell, result: Any) -> None:
        """Deliver an answer to the router after a delay. The answers of a killed worker may be lost."""

        def deliver() -> None:
            if not self._arrives(call, node):
                return
            if isinstance(result, TokenStreamEnded) and call.tokens is not None:
                self._on_tokens_broken(call.tokens)  # the stream itself may bring its end later
                if call.caller is not CallState.OPEN:
                    return
            self._close(call)
            self._router.post(node.returned(call, result))

        call.to_router.send(deliver)

    def _arrives(self, call: Call, node: WorkerShell) -> bool:
        """Whether a message of this call or stream reaches the router."""
        if call.caller is not CallState.OPEN or call.cut:
            return False
        if node.killed and self._world.chance(0.5):
            self._world.counts["cut short"] += 1
            call.cut = True
        return not call.cut

    def _on_broken(self, call: Call) -> None:
        if call.caller is CallState.OPEN:
            self._close(call)
            error = WorkerUnavailable(f"{call.worker_id}: connection reset")
            self._router.post(self._fleet[call.worker_id].returned(call, error))

    def _close(self, call: Call) -> None:
        call.caller = CallState.ENDED
        self._calls.pop((call.call_id, call.worker_id), None)

    # ---- token streams

    def _open_tokens(self, worker_id: str, then: Callable[[], None]) -> None:
        """Open a token stream unless one is open, and call `then` when it is open. A lost attempt calls nothing."""
        node, known = self._fleet[worker_id], self._token_streams.get(worker_id)
        if known is not None and node.token_streams.get(known.call_id) is not None:
            then()
            return
        stream = self._new_call(f"tokens of {self._router.name} {self._world.num_events}", worker_id)

        def receive(message: events.StepTokens | TokenStreamEnded | None) -> None:
            if not self._router.alive or not self._arrives(stream, node):
                return
            if isinstance(message, TokenStreamEnded):
                self._on_tokens_broken(stream)
            elif message is not None:
                self._router.post(message)
            else:
                self._token_streams[worker_id] = stream
                then()

        def reply(message: events.StepTokens | TokenStreamEnded | None) -> None:
            stream.to_router.send(partial(receive, message))

        def arrive() -> None:
            if node.alive and not node.stopped and not node.is_prefill and stream.caller is CallState.OPEN:
                node.token_streams[stream.call_id] = stream
                reply(None)  # the first message says that the stream is open

        stream.reply = reply
        stream.to_worker.send(arrive)

    def break_tokens(self, worker_id: str) -> None:
        """The token stream of this worker breaks. Each end notices in its own time."""
        stream = self._token_streams.get(worker_id)
        if stream is None:
            return
        stream.is_broken = True
        self._world.counts["loses its token stream"] += 1
        self._world.trouble(worker_id, until=math.inf, router=self._router.name)  # until the worker has joined again
        delay_s = self._network.delay(worker_id, self._router.name)
        self._world.after(delay_s, partial(self._on_tokens_broken, stream))
        self._end_at_worker(stream)

    def _end_tokens(self, stream: Call) -> None:
        stream.caller = CallState.ENDED
        if self._token_streams.get(stream.worker_id) is stream:
            del self._token_streams[stream.worker_id]
        self._end_at_worker(stream)

    def _end_at_worker(self, stream: Call) -> None:
        node = self._fleet[stream.worker_id]

        def deliver() -> None:
            if node.alive:
                node.close_tokens(stream)

        stream.to_worker.send(deliver)

    def _on_tokens_broken(self, stream: Call) -> None:
        worker_id = stream.worker_id
        if self._token_streams.get(worker_id) is not stream:
            return
        self._end_tokens(stream)
        self._streams.pop(worker_id, None)  # the machine gets no event of the worker before its next snapshot
        self._router.post(events.TokenStreamLost(worker_id, "connection reset"))
        self.subscribe(worker_id)

    # ---- report streams

    def _keep_connected(self, worker_id: str, link: _Link) -> None:
        """Open a report stream to this worker, now and whenever the machine does not know the worker."""
        if self._links.get(worker_id) is not link:
            return
        node, router = self._fleet[worker_id], self._router
        if router.alive and node.alive and not node.stopped and router.machine.workers.get(worker_id) is None:
            stream = self._streams.get(worker_id)
            if stream is None or self._world.now - stream.opened_at > CONNECT_TIMEOUT_S:
                self.subscribe(worker_id)
        self._world.after(RECONNECT_S, partial(self._keep_connected, worker_id, link))

    def subscribe(self, worker_id: str) -> None:
        """Open a new report stream. Reports still on the way in the old stream are dropped."""
        if not self._router.alive or worker_id not in self._links:
            return
        node, stream, name = self._fleet[worker_id], _ReportStream(self._world.now), self._router.name
        self._streams[worker_id] = stream
        line = self._network.line(worker_id, name)

        def send(event: events.WorkerJoined | events.WorkerReported) -> None:
            line.send(partial(self._on_report, worker_id, stream, event))

        def open_stream() -> None:
            if not node.alive or node.stopped:
                self._streams.pop(worker_id, None)  # `_keep_connected` opens another
            elif self._streams.get(worker_id) is stream:
                node.subscribe(name, send)

        def watch() -> None:
            self._world.after(self._network.delay(name, worker_id), open_stream)

        if self._links[worker_id].endpoint.role is ServiceRole.PREFILL:
            watch()
        else:
            self._open_tokens(worker_id, watch)

    def _on_report(
        self, worker_id: str, stream: _ReportStream, event: events.WorkerJoined | events.WorkerReported
    ) -> None:
        if self._streams.get(worker_id) is not stream:
            return
        if isinstance(event, events.WorkerReported) and self._router.machine.workers.get(worker_id) is None:
            del self._streams[worker_id]  # a worker counted as lost reports again
            self.subscribe(worker_id)
            return
        if isinstance(event, events.WorkerJoined):
            if event.role is not self._links[worker_id].endpoint.role:
                del self._streams[worker_id]  # the supervisor will publish the role
                self._router.post(events.WorkerLost(worker_id, f"it serves as {event.role.value} worker now"))
                return
            self._note_joined(worker_id, event)
        self._router.post(event)

    def _note_joined(self, worker_id: str, joined: events.WorkerJoined) -> None:
        """Until now, the router may have sent requests to a dead incarnation, or could not send any."""
        current, tokens = self._fleet[worker_id], self._token_streams.get(worker_id)
        serves = current.alive and joined.agent == current.address and joined.load.state is WorkerState.SERVING
        if serves and (tokens is None or not tokens.is_broken):
            self._world.end_trouble(worker_id, self._router.name)

    def notice_death(self, node: WorkerShell) -> None:
        """Break the connections to a process that has ended."""
        for call in [call for call in self._calls.values() if node.calls.get(call.call_id) is call]:
            call.to_router.send(partial(self._on_broken, call))
        worker_id = node.spec.worker_id
        if self._fleet[worker_id] is node:
            self._streams.pop(worker_id, None)
            self._token_streams.pop(worker_id, None)
            self._router.post(events.WorkerLost(worker_id, "its process has ended"))
