"""Checks who computes a request: one worker at a time, and one author for each index of the output.

Two Decode calls of a request are open together while it moves, or after a failure that one side has not noticed. The
router ends a call by its own decision, by taking its answer, or by losing the connection; then the worker of this call
may sample on for a while without harm. So for each request, of all calls that the router has not ended:

1. No two are in a step at the same time.
2. No two send different tokens of the same index. (The target of a move repeats tokens of its source.)
"""

from __future__ import annotations

from core.step import StepPlan
from router.requests.routed_request import request_id_of
from simulator.virtual.calls import Call, CallState, first_id
from simulator.virtual.world import SimulationError, World


def _request_of(dispatch_id: str) -> str:
    """A request keeps its name when its client resumes it at another router."""
    return first_id(request_id_of(dispatch_id))


class Authorship:
    """Raises `SimulationError` at the first broken rule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[str, Call] = {}  # Decode calls, by dispatch id
        self._in_steps: dict[str, set[str]] = {}  # request id -> dispatch ids
        self._authors: dict[tuple[str, int], dict[int, Call]] = {}  # (request id, index) -> token id -> first author

    def accepted(self, call: Call) -> None:
        self._calls[call.call_id] = call

    def step_begins(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            dispatch_id = chunk.sequence.sequence_id
            running = self._in_steps.setdefault(_request_of(dispatch_id), set())
            if self._is_open(dispatch_id) and any(self._is_open(other) for other in running - {dispatch_id}):
                raise self._error(f"{dispatch_id} and {running} are in steps at the same time")
            running.add(dispatch_id)

    def step_ended(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            dispatch_id = chunk.sequence.sequence_id
            self._in_steps[_request_of(dispatch_id)].discard(dispatch_id)

    def emitted(self, call: Call, index: int, token_id: int) -> None:
        if call.caller is not CallState.OPEN:
            return
        authors = self._authors.setdefault((_request_of(call.call_id), index), {})
        for other_id, author in authors.items():
            if other_id != token_id and author is not call and author.caller is CallState.OPEN:
                raise self._error(f"{call.call_id} and {author.call_id} are both authors of index {index}")
        authors.setdefault(token_id, call)

    def _is_open(self, dispatch_id: str) -> bool:
        call = self._calls.get(dispatch_id)
        return call is not None and call.caller is CallState.OPEN

    def _error(self, message: str) -> SimulationError:
        return SimulationError(f"seed {self._world.seed}, {self._world.now:.6f} s: {message}")
