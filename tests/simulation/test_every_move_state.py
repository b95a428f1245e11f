"""Something goes wrong while a request moves, in each state of the move: a death, a stop for longer than the lease, or
a cut link, at the source or at the target, the death of the router, a cancel or a deadline; and something else later.
Likewise in each state of a hand-off, and of a read of a cached prefix from a peer. Every check of the simulator holds:
each index has one author, each request ends once with the right tokens, and no block is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from core.handoff import HandoffMessage, OwnerState, PullerState, TransferId
from core.scheduling.sequence import Sequence
from decode_worker.events import DecodeArrived
from decode_worker.machine import DecodeMachine
from decode_worker.moves import Move, MoveState
from decode_worker.pull_queue import PullQueue
from kv_transfer.protocol.pull import Pull
from prefill_worker.machine import PrefillArrived
from router.requests.routed_request import request_id_of
from simulator.search.scenario import Scenario, make_scenario
from simulator.search.simulation import Simulation
from simulator.shells.worker_shell import WorkerShell
from simulator.virtual.calls import first_id
from simulator.virtual.faults import Fault, ReadFaults, RouterDeath
from tests.support.small_worlds import draining, sharing
from worker.prefixes import PrefixPull, PrefixRequested

SEED = 4
LONG_S = 1.3  # more than any lease of a scenario
LATER_S = (0.002, 0.03, 0.4)

# A state of the move, as the source and the target see it. Before the WANT, the target waits for room.
STATES: dict[str, Callable[[Move, PullerState | None], bool]] = {
    "asked for blocks": lambda move, pull: move.state is MoveState.COPYING and pull is None,
    "waits for room": lambda move, pull: move.state is MoveState.COPYING and pull is PullerState.RESERVED,
    "copies": lambda move, pull: move.state is MoveState.COPYING and pull is PullerState.READING,
    "pauses": lambda move, _: move.state is MoveState.PAUSING,
    "is handed over": lambda move, pull: move.state is MoveState.HANDED_OVER and pull is not None,
    "is read": lambda move, pull: move.state is MoveState.HANDED_OVER and pull is PullerState.READING,
    "runs at the target": lambda move, pull: move.state is MoveState.HANDED_OVER and pull is None,
}
KINDS = ("dies", "vanishes", "stops", "loses its token stream", "cut link")
PULL_KINDS = ("dies", "vanishes", "stops", "cut link")
SIDES = ("source", "target")


def _small_world() -> Scenario:
    """Ten requests within a second, and two drains."""
    scenario = draining(make_scenario(SEED), num_requests=10, num_drains=2)
    requests = tuple(replace(client, arrives_at=0.3 + 0.03 * n) for n, client in enumerate(scenario.requests))
    return replace(scenario, calm=False, requests=requests, num_routers=1)


class BrokenMove:
    """A small world in which faults happen as soon as a move is in a state."""

    def __init__(self, state: str, *what: Callable[[BrokenMove, WorkerShell, Move], None]) -> None:
        self.simulation = Simulation(_small_world())
        self.is_in_state, self._what, self._needs_room = STATES[state], what, state == "waits for room"
        self.took_effect = False

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        post = WorkerShell.post

        def watched(shell: WorkerShell, event: Any) -> None:
            self._note(shell, event)
            post(shell, event)
            self._look()

        monkeypatch.setattr(WorkerShell, "post", watched)
        if self._needs_room:
            admit = PullQueue._admit
            has_room = lambda pull: self.took_effect or not pull.is_growing  # noqa: E731
            monkeypatch.setattr(PullQueue, "_admit", lambda queue, pull: has_room(pull) and admit(queue, pull))
        self.simulation.run()
        assert self.took_effect, "no move was in this state"

    def _note(self, shell: WorkerShell, event: Any) -> None:
        """An event comes to a worker."""

    def _look(self) -> None:
        for source in self.simulation.fleet.values():
            if self.took_effect or not source.alive or not isinstance(source.machine, DecodeMachine):
                continue
            for move in source.machine.moves.by_id.values():
                target = self.target_of(source, move)
                if target is None or not self.is_in_state(move, self._pull_state(target, move)):
                    continue
                target.machine.pulls._last_inputs = None  # there may be room now
                self._act(source, move)
                return

    def _act(self, source: WorkerShell, move: Any) -> None:
        self.took_effect = True
        for act in self._what:
            self.simulation.world.after(0.0, partial(act, self, source, move))

    def target_of(self, source: WorkerShell, move: Any) -> WorkerShell | None:
        if isinstance(move, KnownPull):
            return move.target
        offer = source.machine.transfers.owner.offers.get(move.transfer_id)
        return None if offer is None else self.simulation.fleet[offer.peer.name.partition("@")[0]]

    def _pull_state(self, target: WorkerShell, move: Move) -> PullerState | None:
        pull = target.machine.transfers.puller.pulls.get(move.transfer_id)
        return None if pull is None else pull.state

    # ---- what goes wrong

    def break_side(self, kind: str, side: str, source: WorkerShell, move: Move) -> None:
        target = self.target_of(source, move)
        if target is None:
            return
        victim = source if side == "source" else target
        if kind == "cut link":
            self._cut(source.agent.name, target.agent.name)
        elif victim.alive:
            now = self.simulation.world.now
            self.simulation._inject(Fault(kind, victim.spec.worker_id, now, LONG_S))

    def _cut(self, one: str, other: str) -> None:
        network, world = self.simulation.network, self.simulation.world
        notify, until = network.notify, world.now + LONG_S
        world.trouble(one, other, until=until)

        def lossy(source: str, target: str, message: HandoffMessage, deliver: Callable[[], None]) -> None:
            if {source, target} != {one, other} or world.now >= until:
                notify(source, target, message, deliver)

        network.notify = lossy  # type: ignore[method-assign]


def broken(kind: str, side: str) -> Callable[[BrokenMove, WorkerShell, Move], None]:
    return lambda broken_move, source, move: broken_move.break_side(kind, side, source, move)


def later(delay_s: float, kind: str, side: str) -> Callable[[BrokenMove, WorkerShell, Move], None]:
    def act(broken_move: BrokenMove, source: WorkerShell, move: Move) -> None:
        target = broken_move.target_of(source, move)
        victim = source if side == "source" else target
        if victim is not None:
            fault = Fault(kind, victim.spec.worker_id, broken_move.simulation.world.now + delay_s, LONG_S)
            broken_move.simulation.world.after(delay_s, partial(broken_move.simulation._inject, fault))

    return act


def router_death(broken_move: BrokenMove, _: WorkerShell, __: Move) -> None:
    broken_move.simulation._kill_router(RouterDeath(0, broken_move.simulation.world.now, 0.1))


def cancel(broken_move: BrokenMove, _: WorkerShell, move: Move) -> None:
    simulation = broken_move.simulation
    expected = simulation.oracle._requests[first_id(request_id_of(move.sequence.sequence_id))]
    simulation.clients.cancel(expected.call.client)


def deadline(broken_move: BrokenMove, source: WorkerShell, move: Move) -> None:
    """The deadline of the request passes at the router and at the source, in any order."""
    simulation, dispatch_id = broken_move.simulation, move.sequence.sequence_id
    request_id, due = request_id_of(dispatch_id), simulation.world.now + 0.001
    expected = simulation.oracle._requests[first_id(request_id)]
    expected.deadline, expected.call.client = due, replace(expected.call.client, timeout_s=1.0)
    simulation.routers[0].machine._deadlines.set(("request", request_id), due)
    simulation.routers[0]._timer.update()
    for shell in (source, broken_move.target_of(source, move)):
        if shell is not None and dispatch_id in shell.machine.core.open_calls.timelines:
            shell.machine.core.open_calls.deadlines.set(dispatch_id, shell.clock + 0.001)
            shell._timer.update()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_one_side_of_a_move_fails_in_each_state(
    monkeypatch: pytest.MonkeyPatch, state: str, kind: str, side: str
) -> None:
    BrokenMove(state, broken(kind, side)).run(monkeypatch)


@pytest.mark.parametrize("what", [router_death, cancel, deadline], ids=lambda what: what.__name__)
@pytest.mark.parametrize("state", STATES)
def test_the_request_ends_in_each_state_of_its_move(
    monkeypatch: pytest.MonkeyPatch, state: str, what: Callable[[BrokenMove, WorkerShell, Move], None]
) -> None:
    BrokenMove(state, what).run(monkeypatch)


def _second_faults() -> list[Any]:
    """Each pair of faults in each state with one delay, which differs between states; `make soak` tries all delays."""
    pairs = product(
        ("copies", "pauses", "is handed over", "runs at the target"), ("dies", "stops", "cut link"), ("dies", "stops")
    )
    return [
        pytest.param(*pair, delay_s, marks=() if (number + number // 6 + turn) % 3 == 0 else pytest.mark.slow)
        for number, pair in enumerate(pairs)
        for turn, delay_s in enumerate(LATER_S)
    ]


@pytest.mark.parametrize(("state", "first", "second", "delay_s"), _second_faults())
def test_the_other_side_fails_too(
    monkeypatch: pytest.MonkeyPatch, state: str, first: str, second: str, delay_s: float
) -> None:
    for one, other in (SIDES, SIDES[::-1]):
        with monkeypatch.context() as patch:
            BrokenMove(state, broken(first, one), later(delay_s, second, other)).run(patch)


# ---- a hand-off

HAND_OFF_STATES: dict[str, Callable[[OwnerState, Pull], bool]] = {
    "waits for room": lambda _, pull: pull.state is PullerState.RESERVED,
    "is computed": lambda owner, pull: owner is OwnerState.COMPUTING and pull.state is PullerState.WANTING,
    "is read in part": lambda _, pull: pull.state is PullerState.WANTING and bool(pull.verified),
    "is read": lambda _, pull: pull.state is PullerState.READING,
    "is verified": lambda _, pull: pull.state is PullerState.VERIFYING,
}


class KnownPull(NamedTuple):
    """As a `Move`, to what goes wrong."""

    transfer_id: TransferId
    target: WorkerShell
    sequence: Sequence | None


class BrokenHandOff(BrokenMove):
    """A small world in which faults happen as soon as a hand-off is in a state."""

    def __init__(self, state: str, *what: Callable[[BrokenMove, WorkerShell, Any], None]) -> None:
        super().__init__(next(iter(STATES)), *what)
        scenario = _small_world()
        model = replace(scenario.workers[0].scheduler, max_batched_tokens=16)
        num_blocks = 17 if state == "waits for room" else scenario.workers[0].num_blocks  # 17: a request fits alone
        workers = tuple(replace(spec, scheduler=model, num_blocks=num_blocks) for spec in scenario.workers)
        router = replace(scenario.router, local_prefill="never")
        self.simulation = Simulation(replace(scenario, workers=workers, router=router, faults=()))
        self._is_hand_off_in_state, self._needs_proof = HAND_OFF_STATES[state], state == "is verified"

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self._needs_proof:  # that the lease covered the reads
            covers = Pull.lease_covers_reads.fget  # type: ignore[attr-defined]
            monkeypatch.setattr(Pull, "lease_covers_reads", property(lambda pull: self.took_effect and covers(pull)))
        super().run(monkeypatch)

    def _look(self) -> None:
        targets = (shell for shell in self.simulation.fleet.values() if isinstance(shell.machine, DecodeMachine))
        for target, prompt in [(shell, prompt) for shell in targets for prompt in shell.machine.pulls.by_id.values()]:
            pull = target.machine.transfers.puller.pulls.get(prompt.transfer_id)
            source = pull and self.simulation.fleet[pull.owner.name.partition("@")[0]]
            offer = source and source.machine.transfers.owner.offers.get(prompt.transfer_id)
            if offer and not self.took_effect and self._is_hand_off_in_state(offer.state, pull):
                self._act(source, KnownPull(prompt.transfer_id, target, prompt.sequence))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", PULL_KINDS)
@pytest.mark.parametrize("state", HAND_OFF_STATES)
def test_one_side_of_a_hand_off_fails_in_each_state(
    monkeypatch: pytest.MonkeyPatch, state: str, kind: str, side: str
) -> None:
    BrokenHandOff(state, broken(kind, side)).run(monkeypatch)


@pytest.mark.parametrize("what", [router_death, cancel, deadline], ids=lambda what: what.__name__)
@pytest.mark.parametrize("state", HAND_OFF_STATES)
def test_the_request_ends_in_each_state_of_its_hand_off(
    monkeypatch: pytest.MonkeyPatch, state: str, what: Callable[[BrokenMove, WorkerShell, Any], None]
) -> None:
    BrokenHandOff(state, what).run(monkeypatch)


# ---- a prefix from a peer


class View(NamedTuple):
    """Of one pull of a prefix."""

    pull: PrefixPull | None  # of the reader
    reader: PullerState | None
    source: OwnerState | None
    was_begun: bool  # by the reader


PULL_STATES: dict[str, Callable[[View], bool]] = {
    "is offered": lambda view: view.source is OwnerState.OFFERED and not view.was_begun,
    "is wanted": lambda view: view.reader is PullerState.WANTING and view.source is None,
    "is offered and wanted": lambda view: view.reader is PullerState.WANTING and view.source is OwnerState.OFFERED,
    "is read": lambda view: view.reader is PullerState.READING,
    "is given up": lambda view: view.pull is not None and not view.pull.is_awaited,
    "is complete": lambda view: view.source is OwnerState.OFFERED and view.was_begun and view.pull is None,
}


class BrokenPull(BrokenMove):
    """A small world in which faults happen as soon as the pull of a prefix is in a state."""

    def __init__(self, state: str, *what: Callable[[BrokenMove, WorkerShell, Any], None]) -> None:
        super().__init__(next(iter(STATES)), *what)
        reads = ReadFaults(slow=1.0) if state == "is given up" else ReadFaults()
        self.simulation = Simulation(replace(sharing(make_scenario(SEED)), calm=False, num_routers=1, reads=reads))
        self._is_pull_in_state, self._begun = PULL_STATES[state], set[TransferId]()
        self._sides: dict[TransferId, tuple[str, str]] = {}  # the worker ids of source and reader

    def _note(self, shell: WorkerShell, event: Any) -> None:
        if isinstance(event, PrefixRequested):
            self._sides[event.transfer_id] = shell.spec.worker_id, event.reader.name.partition("@")[0]
        elif isinstance(event, PrefillArrived | DecodeArrived) and event.prefix is not None:
            self._sides[event.prefix.transfer_id] = event.prefix.agent.name.partition("@")[0], shell.spec.worker_id

    def _look(self) -> None:
        for transfer_id, names in self._sides.items():
            source, reader = (self.simulation.fleet[name] for name in names)
            if self.took_effect or not (source.alive and reader.alive):
                return
            pull = reader.machine.prefixes.pulls.get(transfer_id)
            known = reader.machine.transfers.puller.pulls.get(transfer_id)
            offer = source.machine.transfers.owner.offers.get(transfer_id)
            if pull is not None:
                self._begun.add(transfer_id)
            state, given = known and known.state, offer and offer.state
            if self._is_pull_in_state(View(pull, state, given, transfer_id in self._begun)):
                self._act(source, KnownPull(transfer_id, reader, pull and pull.sequence))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", PULL_KINDS)
@pytest.mark.parametrize("state", PULL_STATES)
def test_one_side_of_a_prefix_fails_in_each_state(
    monkeypatch: pytest.MonkeyPatch, state: str, kind: str, side: str
) -> None:
    BrokenPull(state, broken(kind, side)).run(monkeypatch)


@pytest.mark.parametrize("state", PULL_STATES)
def test_the_router_dies_in_each_state_of_a_prefix(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    BrokenPull(state, router_death).run(monkeypatch)


@pytest.mark.parametrize("state", [state for state in PULL_STATES if state not in ("is offered", "is complete")])
def test_the_request_is_cancelled_in_each_state_of_its_prefix(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    BrokenPull(state, cancel).run(monkeypatch)
