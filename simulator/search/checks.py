"""The oracle checks what every client receives, and what is left at the end of a simulation.

1. Each token index is delivered once, in order, with a token that a worker generates after those delivered before.
2. Each request ends once: it finishes with all its tokens, or fails with an error that a fault explains.
3. No request ends after its deadline.
   Nor does the death of a router end the request of a client that resumes.
4. A request moves at most once for each drain, and without other faults a drain has nothing computed again.
5. Without faults, no lease expires: each offer is read, withdrawn, or aborted at its deadline.
6. At the end, no worker has a held, leased or incoming block, and the router has no open request.

simulator/shells/authorship.py checks who computes the tokens, simulator/shells/fairness.py checks each machine after
its events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutOfDeviceMemory,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from core.handoff import OwnerState
from core.lifecycle import FinishReason, ServiceRole
from core.paths import PathState
from core.request import Request
from router.requests.events import Deliver, Outcome
from router.requests.machine import RouterMachine
from router.requests.moves import MAX_ROOM_MOVES
from router.requests.routed_request import request_id_of
from simulator.search.scenario import ClientRequest, Scenario
from simulator.shells.worker_shell import WorkerShell
from simulator.virtual.calls import first_id
from simulator.virtual.memory import Continuation
from simulator.virtual.world import SimulationError, World

TOLERANCE_S = 0.001  # of a timer after a deadline


@dataclass(slots=True)
class _CallRecord:
    """The common state of one call's choices. Choices without a delivered token end together."""

    client: ClientRequest
    arrived_at: float
    num_delivered: int = 0
    dispatches: set[str] = field(default_factory=set)
    newest: dict[str, dict[str, float]] = field(default_factory=dict)  # request id -> last worker -> time

    def dispatched(self, dispatch_id: str, worker_id: str, now: float) -> None:
        request_id = first_id(request_id_of(dispatch_id))
        if dispatch_id not in self.dispatches:
            self.newest[request_id] = {}
        self.dispatches.add(dispatch_id)
        self.newest[request_id][worker_id] = now


@dataclass(slots=True)
class _Expected:
    call: _CallRecord
    request: Request
    deadline: float
    continuation: Continuation
    num_delivered: int = 0
    ended: bool = False
    cancelled: bool = False
    stop_matched: bool = False


class Oracle:
    """Raises `SimulationError` at the first broken rule."""

    def __init__(self, world: World, scenario: Scenario, fleet: Mapping[str, WorkerShell]) -> None:
        """`fleet` has every worker so far, dead or alive."""
        self._world, self._scenario, self._fleet = world, scenario, fleet
        self._requests: dict[str, _Expected] = {}
        self._num_roundings = 1 + max(spec.rounding for spec in scenario.workers)
        self.num_drains = 0  # so far

    @property
    def num_open(self) -> int:
        return sum(not expected.ended for expected in self._requests.values())

    def _fail(self, request_id: str, message: str) -> SimulationError:
        return SimulationError(f"seed {self._world.seed}, {self._world.now:.6f} s, {request_id}: {message}")

    # ---- what the client does

    def expect(self, client: ClientRequest) -> None:
        now = self._world.now
        call = _CallRecord(client, now)
        for request in client.choices:
            self._expect(call, request, now)

    def _expect(self, call: _CallRecord, request: Request, now: float) -> None:
        request_id, deadline = request.request_id, now + call.client.timeout_s
        continuation = Continuation(request, self._num_roundings)
        self._requests[request_id] = expected = _Expected(call, request, deadline, continuation)

        def must_have_ended() -> None:
            if not expected.ended:
                raise self._fail(request_id, "has not ended by its deadline")

        self._world.at(deadline + TOLERANCE_S, must_have_ended)

    def cancelled(self, request_id: str) -> bool:
        """Record a cancel. Returns whether the request was still open."""
        expected = self._requests[request_id]
        expected.cancelled = not expected.ended
        return expected.cancelled

    def has_ended(self, request_id: str) -> bool:
        return self._requests[request_id].ended

    def dispatched(self, dispatch_id: str, worker_id: str) -> None:
        self._requests[first_id(request_id_of(dispatch_id))].call.dispatched(dispatch_id, worker_id, self._world.now)

    # ---- what the client receives

    def delivered(self, deliver: Deliver) -> bool:
        """Returns whether a stop string matches now. The one of a call belongs to its first choice."""
        request_id, index, got = deliver.request_id, deliver.first_index, list(deliver.token_ids)
        expected = self._requests[first_id(request_id)]
        if expected.ended:
            raise self._fail(request_id, "received tokens after its end")
        if index != expected.num_delivered or not got:
            raise self._fail(request_id, f"received tokens from index {index}, but {expected.num_delivered} is next")
        for place, token_id in enumerate(got, index):
            allowed = expected.continuation.allowed()
            if token_id not in allowed or expected.continuation.finish_reason is not None:
                raise self._fail(request_id, f"got {token_id} at {place}, but one of {allowed} is right")
            expected.continuation.take(token_id)
        wants_logprobs = expected.request.sampling.num_logprobs is not None
        if [token.token_id for token in deliver.logprobs] != (got if wants_logprobs else []):
            raise self._fail(request_id, f"got the log-probabilities of other tokens: {deliver.logprobs}")
        if any(token.logprob is None for token in deliver.logprobs):
            raise self._fail(request_id, "asked for log-probabilities and got a token without")
        expected.num_delivered += len(got)
        expected.call.num_delivered += len(got)
        client = expected.call.client
        if client.stop_after is None or expected.request is not client.request or expected.stop_matched:
            return False
        expected.stop_matched = expected.num_delivered >= client.stop_after
        return expected.stop_matched

    def finished(self, request_id: str, outcome: Outcome) -> None:
        expected = self._end(request_id)
        if outcome.num_output_tokens != expected.num_delivered:
            raise self._fail(
                request_id, f"usage counts {outcome.num_output_tokens} tokens, {expected.num_delivered} were delivered"
            )
        complete = outcome.finish_reason is expected.continuation.finish_reason
        stopped = expected.stop_matched and outcome.finish_reason is FinishReason.STOP
        if not complete and not stopped:
            raise self._fail(request_id, f"finished by {outcome.finish_reason} after {expected.num_delivered} tokens")
        if outcome.num_moves > self.num_drains + MAX_ROOM_MOVES:
            raise self._fail(request_id, f"moved {outcome.num_moves} times, with {self.num_drains} drains")
        recomputed = outcome.recomputed_tokens
        if self._scenario.calm and recomputed and not self._may_recompute(recomputed, expected.call):
            raise self._fail(request_id, f"{recomputed} tokens were computed again without a cause")
        self._world.counts["moved"] += outcome.num_moves
        self._world.counts["recomputed tokens"] += outcome.recomputed_tokens
        self._world.counts[f"finished {outcome.path.value}"] += 1
        self._world.counts["retried"] += outcome.attempts > 1

    def _may_recompute(self, num_tokens: int, call: _CallRecord) -> bool:
        """A sequence of the call was preempted, or its hand-off lost its blocks likewise, or was not taken. Or a worker
        that drained refused the call, with its prompt computed already: no cache keeps a block that is not full."""
        largest = max(spec.layout.block_size for spec in self._scenario.workers)
        is_lost = self._marked("preemption", call) or self._marked("failed hand-off", call)
        return is_lost or (self._marked("WorkerDrains", call) and num_tokens <= largest)

    def lost(self, request_id: str) -> None:
        """The router of the request is dead, and the client does not resume, or has no time for it."""
        client = self._end(request_id).call.client
        if client.resumes and not client.may_time_out:
            raise self._fail(request_id, "was lost with its router, though its client resumes")
        self._world.counts["failed with its router"] += 1

    def completed(self, request_id: str) -> None:
        """Another router has found the answer complete, and sends only the end of it."""
        expected = self._end(request_id)
        if not expected.stop_matched and expected.continuation.finish_reason is None:
            raise self._fail(request_id, f"was found complete with {expected.num_delivered} tokens")
        self._world.counts["finished before it was resumed"] += 1

    def refused(self, request_id: str, error: TandemError) -> None:
        call = self._requests[first_id(request_id)].call
        too_many = isinstance(error, QueueFull) and self._fills_the_queue(call)
        self._end(request_id)
        too_large = isinstance(error, InvalidRequest) and call.client.oversized
        if not too_many and not too_large:
            raise self._fail(request_id, f"was refused: {error!r}")
        self._world.counts["refused"] += 1

    def failed(self, request_id: str, error: TandemError) -> None:
        expected = self._end(request_id)
        if not self._may_fail(expected, error):
            raise self._fail(request_id, f"failed without cause: {error!r}")
        self._world.counts[f"failed {type(error).__name__}"] += 1

    def _may_fail(self, expected: _Expected, error: TandemError) -> bool:
        """Each kind of error needs its cause. A call with a delivered token is never refused."""
        call, client = expected.call, expected.call.client
        match error:
            case RequestCancelled():
                return expected.cancelled
            case DeadlineExceeded():
                return self._world.now >= expected.deadline and client.may_time_out
            case InvalidRequest():
                return client.oversized
            case QueueFull():
                gave_way = self._fills_the_queue(call)  # to a request of another tenant
                return (self._marked("QueueFull", call) or gave_way) and not call.num_delivered
            case OutOfDeviceMemory():
                return self._marked("sequence without memory", call)
            case TransferFailed() if self._marked("sequence without memory", call):
                return True  # the hand-off of that sequence
            case WorkerUnavailable() | TransferFailed():
                without_worker = str(error).startswith("no decode worker")
                return self._decode_pool_had_trouble(call) if without_worker else self._workers_had_trouble(call)
            case _:
                return self._marked("failed step", call)

    def _fills_the_queue(self, call: _CallRecord) -> bool:
        """Whether the open requests are more than the queue of the router holds."""
        num_others = sum(not other.ended for other in self._requests.values() if other.call is not call)
        return num_others + len(call.client.choices) > self._scenario.router.max_queued

    def _marked(self, what: str, call: _CallRecord) -> bool:
        return any(f"{what} of {dispatch}" in self._world.marks for dispatch in call.dispatches)

    def _decode_pool_had_trouble(self, call: _CallRecord) -> bool:
        """Whether every decode worker had a fault since the arrival of the call."""
        pool = [name for name, node in self._fleet.items() if node.spec.role is ServiceRole.DECODE]
        return all(self._world.had_trouble(worker_id, call.arrived_at) for worker_id in pool)

    def _workers_had_trouble(self, call: _CallRecord) -> bool:
        """Whether a worker of a choice's last dispatch had a fault since. Choices without a token fail together."""
        dispatched = [pair for workers in call.newest.values() for pair in workers.items()]
        return any(self._world.had_trouble(worker_id, since) for worker_id, since in dispatched)

    def _end(self, request_id: str) -> _Expected:
        expected, now = self._requests[first_id(request_id)], self._world.now
        if expected.ended:
            raise self._fail(request_id, "ended twice")
        if now > expected.deadline + TOLERANCE_S:
            raise self._fail(request_id, f"ended {now - expected.deadline:.3f} s after its deadline")
        expected.ended = True
        return expected


def check_paths(seed: int, nodes: Iterable[WorkerShell]) -> None:
    """Without faults, every decode worker has a fine path to every prefill worker, and no other but those of moves."""
    nodes = [node for node in nodes if not node.spec.has_vllm]
    for reader in (node for node in nodes if node.spec.role is ServiceRole.DECODE):
        fine = {path.peer for path in reader.machine.transfers.paths if path.state is PathState.FINE}
        owners = {node.name for node in nodes if node.spec.role is ServiceRole.PREFILL}
        movers = {node.name for node in nodes if node.spec.role is ServiceRole.DECODE}
        if not owners <= fine <= owners | movers:
            raise SimulationError(f"seed {seed}: {reader.name} has fine paths to {fine}, not to {owners}")


def check_leases(seed: int, nodes: Iterable[WorkerShell]) -> None:
    """Without faults, no lease has expired: the messages at the end of a request have freed its blocks."""
    for node in nodes:
        if not node.spec.has_vllm and node.machine.transfers.counters.offers[OwnerState.EXPIRED.value]:
            raise SimulationError(f"seed {seed}: a lease of {node.name} has expired")


def check_left_clean(seed: int, router: RouterMachine, nodes: Iterable[WorkerShell]) -> None:
    """After the end of all requests and leases, no worker and no router has a trace of them."""
    if router.view.num_queued or router.view.num_in_flight:
        raise SimulationError(f"seed {seed}: the router still has open requests")
    for record in router.workers:
        if record.dispatched:
            raise SimulationError(
                f"seed {seed}: the router still counts {list(record.dispatched)} on {record.worker_id}"
            )
    for node in nodes:
        kept = node.kept_blocks
        if any(kept.values()) or not node.machine.idle or node.calls:
            raise SimulationError(f"seed {seed}: {node.name} still has {kept}, calls {list(node.calls)}")
        known, held = node.cached_blocks, router.workers.index.held(node.spec.worker_id)
        if known != held:
            raise SimulationError(f"seed {seed}: the router's index of {node.name} is wrong: {known ^ held}")
