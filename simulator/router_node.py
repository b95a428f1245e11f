"""The simulated router process: it drives the production machine, its connections to workers, and the clients.

The process may die. The next one starts at the same address with an empty machine.

A connection carries the report stream, the token stream and the calls, as router/links/worker_link.py does in
production. A broken stream is opened again at once. A report of a worker that the machine had counted as lost opens a
new stream. A decode worker reports only after its token stream is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from core.config import RouterConfig
from core.errors import TandemError, TokenStreamEnded, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.paths import PeerJoined, PeerLeft
from core.scheduling.worker_load import CallId
from decode_worker.machine import DecodeArrived
from prefill_worker.machine import PrefillArrived
from router.requests import events
from router.requests.machine import RouterMachine
from simulator.checks import Oracle
from simulator.machine_timer import MachineTimer
from simulator.memory import EOS_TOKEN_IDS
from simulator.network import Call, CallState, Network
from simulator.node import WorkerNode
from simulator.scenario import ClientRequest
from simulator.world import SimulationError, World

ROUTER = "router"
RECONNECT_S = 0.3
CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _ReportStream:
    opened_at: float


class RouterNode:
    """`fleet` maps a worker id to the newest incarnation of the worker, dead or alive."""

    def __init__(
        self, world: World, network: Network, config: RouterConfig, oracle: Oracle, fleet: dict[str, WorkerNode]
    ) -> None:
        self._world, self._network, self._oracle, self._fleet = world, network, oracle, fleet
        self._config = config
        self._num_starts = 0
        self.start()
        self._calls: dict[tuple[str, str], Call] = {}  # (dispatch id, worker id) -> open here
        self._streams: dict[str, _ReportStream] = {}  # by worker id
        self._token_streams: dict[str, Call] = {}  # open here, by worker id
        self._stop_after: dict[str, int] = {}  # request id -> output tokens after which a stop string matches

    def start(self) -> None:
        """A process that knows nothing of an earlier one."""
        self._num_starts += 1
        router_id = f"{ROUTER}-{self._num_starts}"
        self.machine = RouterMachine(
            self._config, lambda: self._world.random.getrandbits(128), EOS_TOKEN_IDS, router_id
        )
        self.alive = True
        self._timer = MachineTimer(self._world, self.machine, self.post)

    def die(self) -> None:
        """kill -9: each connection to a client or a worker breaks."""
        self.alive = False
        self._timer.stop()
        self._oracle.lose_router()
        for call in self._calls.values():
            self._give_up(call)
        for tokens in list(self._token_streams.values()):
            self._end_tokens(tokens)
        self._calls.clear()
        self._streams.clear()
        self._stop_after.clear()

    # ---- the driver

    def post(self, event: Any) -> None:
        if not self.alive:
            return
        actions = self.machine.handle(event, self._world.now)
        for action in actions:
            self._perform(action)
        self.machine.check()
        self._timer.update()

    # ---- clients

    def arrive(self, client: ClientRequest) -> None:
        request, now = client.request, self._world.now
        self._oracle.expect(client, now)
        if not self.alive:
            self._oracle.lose_router()
            return
        if client.stop_after is not None:
            self._stop_after[request.request_id] = client.stop_after
        self._world.note(f"client: {request.request_id}, {len(request.token_ids)} tokens in")
        try:
            self.post(events.RequestArrived(request, now, now + client.timeout_s, client.others))
        except TandemError as error:
            self.machine.check()
            for choice in client.choices:
                self._oracle.refused(choice.request_id, error)

    def cancel(self, client: ClientRequest) -> None:
        """Cancel every choice of the call in turn, as `RouterShell.close` does."""
        cancelled = [choice.request_id for choice in client.choices if self._oracle.cancelled(choice.request_id)]
        for request_id in cancelled:
            if not self._oracle.has_ended(request_id):
                self.post(events.ClientCancelled(request_id))

    # ---- acting

    def _perform(self, action: events.RouterAction) -> None:
        match action:
            case events.StartPrefill(dispatch_id, worker_id, request, transfer_id, reader, timeout_s, number):
                call_id = CallId(self.machine.router_id, number)
                self._world.note(f"router: prefill {dispatch_id} on {worker_id}")
                self._oracle.dispatched(dispatch_id, worker_id)
                self._call(
                    Call(dispatch_id, worker_id),
                    lambda clock: PrefillArrived(request, transfer_id, reader, clock + timeout_s, call_id),
                )
            case events.StartDecode(dispatch_id, worker_id, request, source, timeout_s, number):
                call_id = CallId(self.machine.router_id, number)
                self._world.note(f"router: decode {dispatch_id} on {worker_id}{'' if source else ', prefilled there'}")
                self._oracle.dispatched(dispatch_id, worker_id)
                tokens = self._token_streams.get(worker_id)
                if tokens is None:
                    raise SimulationError(f"{dispatch_id} was sent to {worker_id}, which has no token stream")
                call = Call(dispatch_id, worker_id, number=number, tokens=tokens)
                self._call(call, lambda clock: DecodeArrived(request, source, clock + timeout_s, call_id))
            case events.UpdatePeers(worker_id, changes):
                self._update_peers(self._fleet[worker_id], changes)
            case events.CancelDispatch(dispatch_id):
                for key in [key for key in self._calls if key[0] == dispatch_id]:
                    self._give_up(self._calls.pop(key))
            case events.Deliver(request_id, index, token_ids):
                self._world.note(f"client: {request_id} gets {len(token_ids)} tokens from {index} on")
                num_delivered = self._oracle.delivered(action)
                if num_delivered >= self._stop_after.get(request_id, num_delivered + 1):
                    del self._stop_after[request_id]
                    self._oracle.stop_matched(request_id)
                    self._world.after(0.0, lambda: self.post(events.StopMatched(request_id)))
            case events.Finish(request_id, outcome):
                self._world.note(f"client: {request_id} finished, {outcome.finish_reason.value}, {outcome.path.value}")
                self._oracle.finished(request_id, outcome, self._world.now)
            case events.Fail(request_id, error, _):
                self._world.note(f"client: {request_id} failed, {type(error).__name__}: {error}")
                self._oracle.failed(request_id, error, self._world.now)
            case _:
                assert_never(action)

    def _update_peers(self, node: WorkerNode, changes: tuple[PeerJoined | PeerLeft, ...]) -> None:
        line = (f"peer updates to {node.agent.name}", "")
        for change in changes:
            arrives_at = self._network.in_order(line, self._network.delay(ROUTER, node.spec.worker_id))
            self._world.at(arrives_at, partial(node.post, change))

    # ---- calls

    def _call(self, call: Call, arrived: Callable[[float], PrefillArrived | DecodeArrived]) -> None:
        self._calls[(call.call_id, call.worker_id)] = call
        node = self._fleet[call.worker_id]

        def deliver() -> None:
            if node.alive:
                node.answer = self._on_answer
                node.accept(call, arrived(node.clock))
            elif not node.silent:
                self._on_broken(call)

        call.travel(self._world, self._network, ROUTER, call.worker_id, deliver)

    def _give_up(self, call: Call) -> None:
        call.caller = CallState.ENDED
        node = self._fleet[call.worker_id]

        def deliver() -> None:
            if node.alive and call.call_id in node.calls:
                node.cancel(call)

        call.travel(self._world, self._network, ROUTER, call.worker_id, deliver)

    def _on_answer(self, node: WorkerNode, call: Call, result: Any) -> None:
        """Deliver an answer to the router after a delay. The answers of a killed worker may be lost."""

        def deliver() -> None:
            if call.caller is not CallState.OPEN or call.cut:
                return
            if node.killed and self._world.chance(0.5):
                self._world.counts["cut short"] += 1
                call.cut = True
                return
            if isinstance(result, TokenStreamEnded) and call.tokens is not None:
                self._on_tokens_broken(call.tokens)  # the stream itself may bring its end later
                if call.caller is not CallState.OPEN:
                    return
            self._close(call)
            is_prefill = isinstance(result, events.PrefillResult) or node.address.name.startswith("prefill")
            self.post((events.PrefillReturned if is_prefill else events.DecodeReturned)(call.call_id, result))

        call.travel(self._world, self._network, call.worker_id, ROUTER, deliver)

    def _on_broken(self, call: Call) -> None:
        if call.caller is CallState.OPEN:
            self._close(call)
            error = WorkerUnavailable(f"{call.worker_id}: connection reset")
            is_prefill = call.worker_id.startswith("prefill")
            self.post((events.PrefillReturned if is_prefill else events.DecodeReturned)(call.call_id, error))

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
        stream = Call(f"tokens {self._world.num_events}", worker_id)

        def send(_: WorkerNode, message: events.StepTokens) -> None:
            stream.travel(self._world, self._network, worker_id, ROUTER, partial(receive, message))

        def receive(message: events.StepTokens) -> None:
            if stream.caller is not CallState.OPEN or stream.cut or not self.alive:
                return
            if node.killed and self._world.chance(0.5):
                self._world.counts["cut short"] += 1
                stream.cut = True
            elif message.calls:
                self.post(message)
            else:
                self._token_streams[worker_id] = stream
                then()

        def arrive() -> None:
            if node.alive and not node.stopped and stream.caller is CallState.OPEN:
                node.open_tokens(stream, send)

        stream.travel(self._world, self._network, ROUTER, worker_id, arrive)

    def break_tokens(self, worker_id: str) -> None:
        """The token stream of this worker breaks. Each end notices in its own time."""
        stream = self._token_streams.get(worker_id)
        if stream is None:
            return
        stream.worker = CallState.ENDED
        self._world.counts["loses its token stream"] += 1
        self._world.trouble(worker_id, until=math.inf)  # until the worker has joined again
        self._world.after(self._network.delay(worker_id, ROUTER), partial(self._on_tokens_broken, stream))
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

        stream.travel(self._world, self._network, ROUTER, stream.worker_id, deliver)

    def _on_tokens_broken(self, stream: Call) -> None:
        worker_id = stream.worker_id
        if self._token_streams.get(worker_id) is not stream:
            return
        self._end_tokens(stream)
        self._streams.pop(worker_id, None)  # the machine gets no event of the worker before its next snapshot
        self.post(events.TokenStreamLost(worker_id, "connection reset"))
        self.subscribe(worker_id)

    # ---- report streams

    def keep_connected(self, worker_id: str) -> None:
        """Open a report stream to this worker, now and whenever the machine does not know the worker."""
        node = self._fleet[worker_id]
        if self.alive and node.alive and not node.stopped and self.machine.workers.get(worker_id) is None:
            stream = self._streams.get(worker_id)
            if stream is None or self._world.now - stream.opened_at > CONNECT_TIMEOUT_S:
                self.subscribe(worker_id)
        self._world.after(RECONNECT_S, lambda: self.keep_connected(worker_id))

    def subscribe(self, worker_id: str) -> None:
        """Open a new report stream. Reports still on the way in the old stream are dropped."""
        if not self.alive:
            return
        node, stream = self._fleet[worker_id], _ReportStream(self._world.now)
        self._streams[worker_id] = stream
        line = (f"{node.agent.name} reports", str(self._world.num_events))

        def send(event: Any) -> None:
            self._world.at(self._network.in_order(line, self._network.delay(worker_id, ROUTER)), lambda: receive(event))

        def receive(event: Any) -> None:
            if self._streams.get(worker_id) is not stream:
                return
            if isinstance(event, events.WorkerReported) and self.machine.workers.get(worker_id) is None:
                del self._streams[worker_id]  # a worker counted as lost reports again
                self.subscribe(worker_id)
                return
            current, tokens = self._fleet[worker_id], self._token_streams.get(worker_id)
            is_joined = isinstance(event, events.WorkerJoined) and event.agent == current.address and current.alive
            if is_joined and (tokens is None or tokens.worker is CallState.OPEN):
                self._world.end_trouble(worker_id)  # until now, the router sent requests to a dead incarnation
            self.post(event)

        def open_stream() -> None:
            if not node.alive or node.stopped:
                self._streams.pop(worker_id, None)  # `keep_connected` opens another
            elif self._streams.get(worker_id) is stream:
                send(node.snapshot())
                node.subscriber = send

        def watch() -> None:
            self._world.after(self._network.delay(ROUTER, worker_id), open_stream)

        if node.spec.role is ServiceRole.DECODE:
            self._open_tokens(worker_id, watch)
        else:
            watch()

    def notice_death(self, node: WorkerNode) -> None:
        """Break the connections to a process that has ended."""
        for call in [call for call in self._calls.values() if node.calls.get(call.call_id) is call]:
            call.travel(self._world, self._network, call.worker_id, ROUTER, partial(self._on_broken, call))
        if self._fleet[node.spec.worker_id] is node:
            self._streams.pop(node.spec.worker_id, None)
            self._token_streams.pop(node.spec.worker_id, None)
            self.post(events.WorkerLost(node.spec.worker_id, "its process has ended"))
