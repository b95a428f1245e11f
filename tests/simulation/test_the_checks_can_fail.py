"""Machines broken on purpose: each must be caught within a few seeds, or the simulator's silence proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest

from core.errors import QueueFull, TandemError, TransferFailed, WorkerUnavailable
from core.handoff import AbortReason, PullerState
from core.lifecycle import FinishReason, ServiceRole
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.prompt_order import QUANTUM_S, PromptOrder, _Level
from core.scheduling.scheduler import Scheduler, _StepInFlight
from core.scheduling.sequence import Sequence
from core.step import SampledToken
from decode_worker.machine import DecodeMachine
from decode_worker.moves import Move, MoveEnded, Moves
from decode_worker.pull_queue import PulledPrompt, PullQueue
from kv_transfer.protocol.events import Actions, OfferEnded, PullCompleted, PullFailed
from kv_transfer.protocol.owner import Owner
from kv_transfer.protocol.pull import Pull
from kv_transfer.protocol.puller import Puller
from router.requests import events
from router.requests.machine import RouterMachine
from router.requests.moves import OpenMoves
from router.requests.open_dispatches import OpenDispatches
from router.requests.routed_request import Dispatch, RoutedRequest
from router.routing.worker_record import WorkerRecord
from simulator.search.clients import ResumingClients
from simulator.search.orders import FleetFaults, Order, OrderKind
from simulator.search.scenario import (
    SLOW_STEP_COST,
    ClientRequest,
    Scenario,
    make_disk_scenario,
    make_fleet_scenario,
    make_scenario,
    make_vllm_scenario,
    other_choices,
)
from simulator.search.simulation import run_scenario
from simulator.shells import disk
from simulator.shells.authorship import Authorship
from simulator.shells.disk import SimulatedDisk
from simulator.shells.router_shell import RouterShell
from simulator.shells.vllm_shell import VllmShell
from simulator.shells.worker_shell import WorkerShell
from simulator.virtual import world
from simulator.virtual.calls import Call
from simulator.virtual.faults import Fault, NetworkFaults, ReadFaults, RouterDeath
from simulator.virtual.world import SimulationError
from tests.support.small_worlds import draining
from vllm_worker.engine import Prompt
from vllm_worker.engine_call import EngineCall
from vllm_worker.fake_engine import FakeCore
from vllm_worker.machine import VllmMachine
from worker.core import WorkerCore
from worker.prefixes import Prefixes, PrefixRequested, PullResult
from worker.tier.disk_tier import DiskTier
from worker.tier.events import ReadBlocks

MAX_SEEDS = 60

RouterActions = list[events.RouterAction]


# ---- the worlds


def unchanged(scenario: Scenario) -> Scenario:
    return scenario


def never_calm(scenario: Scenario) -> Scenario:
    return replace(scenario, calm=False)


def without_sources(scenario: Scenario) -> Scenario:
    """No worker reads the cached prefixes of another."""
    return replace(scenario, router=replace(scenario.router, peer_prefixes="never"))


def without_digests(scenario: Scenario) -> Scenario:
    """The lease alone protects: no digests, nothing corrupted, and readers stopped for longer than it lasts."""
    transfer = replace(
        scenario.workers[0].transfer,
        verify_digests=False,
        lease_s=0.3,
        max_reads_in_flight=1,
        max_blocks_per_read=1,
    )
    model = replace(scenario.workers[0], num_blocks=96 // scenario.workers[0].layout.block_size, transfer=transfer)
    roles = {"prefill-0": ServiceRole.PREFILL, "decode-0": ServiceRole.DECODE, "decode-1": ServiceRole.DECODE}
    stops = [(0.4 + 0.4 * number, f"decode-{number % 2}") for number in range(8)]
    return replace(
        scenario,
        calm=False,
        workers=tuple(replace(model, worker_id=name, role=role, step_failure=0.0) for name, role in roles.items()),
        router=replace(scenario.router, local_prefill="never", max_queued=1024),
        requests=tuple(client for client in scenario.requests if client.request.max_total_tokens <= 96),
        network=NetworkFaults(delay_s=0.02),
        reads=ReadFaults(seconds_per_block=0.002),
        faults=tuple(Fault("stops", worker_id, at, 0.7) for at, worker_id in stops),
    )


def breaking_streams(scenario: Scenario) -> Scenario:
    """The token streams break all the time."""
    names = [spec.worker_id for spec in scenario.workers if spec.role is ServiceRole.DECODE]
    losses = tuple(
        Fault("loses its token stream", name, at=0.5 + number / 10, duration_s=0.0)
        for number in range(30)
        for name in names
    )
    return replace(scenario, calm=False, faults=losses, network=NetworkFaults(delay_s=0.01))


def shared_by_tenants(scenario: Scenario) -> Scenario:
    """One tenant sends many short prompts and two send long ones, all at once, to one worker with room for all."""
    sizes, num_tokens = {"short": 20, "long": 60, "longer": 120}, 3000
    spec = next(spec for spec in scenario.workers if spec.role is ServiceRole.DECODE)
    scheduler = replace(spec.scheduler, max_batched_tokens=256, max_running=256, max_waiting=256)
    worker = replace(spec, num_blocks=4096, scheduler=scheduler, known_cost=SLOW_STEP_COST, step_cost=SLOW_STEP_COST)
    clients = []
    for tenant, size in sizes.items():
        for number in range(num_tokens // size):
            prompt = tuple(1 + (number * 7 + place) % 50 for place in range(size))
            request = Request(
                f"{tenant}{number}", prompt, size, SamplingParams(2, ignore_eos=True), cache_salt=f"{tenant}{number}",
                tenant=tenant,
            )  # fmt: skip
            clients.append(ClientRequest(request, 0.5, 60.0))
    return replace(
        scenario,
        calm=True,
        workers=(replace(worker, step_failure=0.0, memory_failure=0.0),),
        router=replace(scenario.router, max_queued=1024, max_in_flight_per_worker=1024, local_prefill="auto"),
        requests=tuple(clients),
        faults=(),
        num_routers=1,
        router_deaths=(),
    )


def crowded(scenario: Scenario) -> Scenario:
    """Everybody asks for four choices, and workers let few wait."""
    return replace(
        scenario,
        calm=False,
        workers=tuple(replace(s, scheduler=replace(s.scheduler, max_waiting=2)) for s in scenario.workers),
        router=replace(scenario.router, max_queued=1024, max_in_flight_per_worker=64, max_attempts=2),
        requests=tuple(replace(client, others=other_choices(client.request, 3)) for client in scenario.requests),
    )


def dying_routers(scenario: Scenario) -> Scenario:
    """Two routers die in turn, all the time. Every client resumes."""
    deaths = tuple(RouterDeath(number % 2, at=0.5 + number / 10, duration_s=0.05) for number in range(30))
    clients = tuple(replace(client, resumes=True) for client in scenario.requests)
    return replace(scenario, calm=False, num_routers=2, requests=clients, router_deaths=deaths)


def lossy_drains(scenario: Scenario) -> Scenario:
    return replace(draining(scenario), calm=False, network=NetworkFaults(delay_s=0.001, loss=0.3))


def dying_targets(scenario: Scenario) -> Scenario:
    """Roles switch, and workers die 0.2 s later: among them one that computed a prompt and became the target of its
    move."""
    scenario = without_sources(scenario)
    if scenario.fleet is None:
        return scenario
    moments = [0.4 + 0.3 * number for number in range(12)]
    orders = [order for at in moments for order in (Order(OrderKind.SWITCH, at), Order(OrderKind.DIE, at + 0.2))]
    return replace(scenario, fleet=FleetFaults(tuple(orders), drain_timeout_s=4.0, failed_start=0.0))


def cancelled_on_the_way(scenario: Scenario) -> Scenario:
    """Every client of a calm world cancels its request while the calls are on their way."""
    cancels = tuple(
        replace(client, cancel_at=client.arrives_at + 0.004 * (1 + number % 5))
        for number, client in enumerate(scenario.requests)
    )
    return replace(scenario, network=NetworkFaults(delay_s=0.02), requests=cancels)


# ---- the broken machines


@dataclass(frozen=True)
class Broken:
    signs: tuple[str, ...]  # The message of the first failure has one of them.
    patches: tuple[tuple[Any, str, Any], ...]  # (class or module, attribute, value)
    change: Callable[[Scenario], Scenario] = unchanged
    make: Callable[[int], Scenario] = make_scenario
    first_seed: int = 1  # the first that shows it today; the search goes on with the next ones

    def first_failure(self) -> str:
        """The message of the first seed that fails; empty where none does."""
        for seed in range(self.first_seed, self.first_seed + MAX_SEEDS):
            try:
                run_scenario(self.change(self.make(seed)))
            except SimulationError as error:
                return str(error)
        return ""


def ignore(*_: Any) -> None:
    pass


def do_nothing(*_: Any) -> list[Any]:
    return []


# A router that ignores the death of workers waits for a dead one until the deadline, keeps its blocks in the index,
# sends it a request, or has no deadline for its silence.
DEAD_WORKER = ("failed without cause: DeadlineExceeded", "the router's index of", "has no token stream", "deadlines of")
# A worker takes the release of a complete pull for a failure.
TWO_AUTHORS = (
    Moves,
    "on_offer_ended",
    lambda self, ended, now, original=Moves.on_offer_ended: original(
        self, replace(ended, reason=AbortReason.CANCELLED), now
    ),
)


def _use_all(self: Prefixes, result: PullResult, now: float, end: Any = Prefixes.end) -> None:
    if isinstance(result, PullCompleted):
        stats = replace(result.stats, num_blocks=len(self.pulls[result.transfer_id].targets))
        result = replace(result, stats=stats)
    end(self, result, now)


def _offer_half(self: Prefixes, event: PrefixRequested, *rest: Any, offer: Any = Prefixes.offer) -> Any:
    """As after an eviction between the promise and the offer."""
    return offer(self, replace(event, token_ids=event.token_ids[: len(event.token_ids) // 2]), *rest)


def _find_anything(self: SimulatedDisk, action: ReadBlocks, num_read: int) -> list[list[int] | None]:
    found = [self._slots.get(read.slot) for read in action.reads[:num_read]]
    return [None if kept is None else kept[1][::-1] for kept in found]


def only_tell_the_machine(self: RouterShell, dispatch_id: str, _: TandemError) -> None:
    self.post(events.DecodeReturned(dispatch_id, TransferFailed("not taken")))


BROKEN = {
    "a worker that believes the promise of the source of a prefix": Broken(
        ("is right",), ((Prefixes, "end", _use_all), (Prefixes, "offer", _offer_half))
    ),
    "a disk that does not compare names": Broken(
        ("is right",), ((SimulatedDisk, "_found", _find_anything),), make=make_disk_scenario, first_seed=2
    ),
    "a worker that does not hold what is copied to the disk": Broken(  # another sequence writes into the block before
        ("is right",), ((disk, "COPY_S", 0.5), (DiskTier, "_pin", ignore)), make=make_disk_scenario, first_seed=2
    ),
    "a router that finishes at the end of a call without its last tokens": Broken(
        ("",), ((RoutedRequest, "misses_streamed_tokens", lambda _: False),), breaking_streams, first_seed=25
    ),
    "a router that waits for a broken token stream": Broken(
        ("has no token stream",), ((RouterMachine, "_on_stream_lost", do_nothing),), breaking_streams
    ),
    "a router that ignores the death of workers": Broken(DEAD_WORKER, ((RouterMachine, "_on_lost", do_nothing),)),
    "a router that swallows failures": Broken(("DeadlineExceeded",), ((RouterMachine, "_retry", do_nothing),)),
    "a transfer that trusts reads after its lease": Broken(
        ("is right",), ((Pull, "lease_covers_reads", property(lambda _: True)),), without_digests
    ),
    "a pool that forgets to unlease": Broken(("AssertionError: block",), ((BlockPool, "unlease", ignore),)),
    "a router that withdraws no offer": Broken(
        ("a lease of prefill",), ((OpenDispatches, "_withdraw", do_nothing),), cancelled_on_the_way, first_seed=5
    ),
    "an owner that never ends a lease": Broken(
        ("still has",), ((Owner, "on_tick", do_nothing), (Owner, "deadlines", do_nothing)), first_seed=9
    ),
    "a machine that asks for the same tick for ever": Broken(
        ("no end after 10000 events",), ((world, "MAX_EVENTS", 10_000), (Owner, "on_tick", do_nothing)), first_seed=3
    ),
    "a scheduler that plans ahead of guesses": Broken(  # the step ahead starts where the chunk without drafts had ended
        ("",), ((_StepInFlight, "has_drafts", False), (Scheduler, "check", ignore)), first_seed=19
    ),
    "a client that gives up with its router": Broken(
        ("was lost with its router, though its client resumes",),
        ((ResumingClients, "_pause", ResumingClients._give_up),),
        dying_routers,
    ),
    "a vLLM worker that numbers a resumed stream from zero": Broken(
        ("",),
        ((EngineCall, "next_index", property(lambda call: call.num_tokens)),),
        make=make_vllm_scenario,
        first_seed=2,
    ),
    "a vLLM worker that waits for a hung engine": Broken(
        ("DeadlineExceeded",),
        ((VllmMachine, "next_deadline", lambda self: self.open_calls.deadlines.next()),),
        make=make_vllm_scenario,
        first_seed=4,
    ),
    "a link that leaves the call of a failed hand-off open": Broken(
        ("calls that nobody will end are open",),
        ((RouterShell, "_fail_hand_over", only_tell_the_machine),),
        make=make_vllm_scenario,
    ),
    "an engine that keeps KV for ever": Broken(
        ("prompts kept for others",), ((VllmShell, "_expire", ignore),), make=make_vllm_scenario, first_seed=2
    ),
    "a worker that samples on after it has handed over": Broken(
        ("are in steps at the same time",), (TWO_AUTHORS,), draining
    ),
    "a second author where no two steps meet": Broken(
        ("are both authors of index",),
        (TWO_AUTHORS, *((Authorship, name, ignore) for name in ("step_begins", "step_ended"))),
        draining,
    ),
    "a drain that ends running sequences": Broken(
        ("tokens were computed again without a cause",),
        ((WorkerCore, "unbegun", lambda self: [*self.scheduler.waiting, *self.scheduler.running]),),
        draining,
    ),
}


def broken(
    *signs: str, method: Any, also: tuple[tuple[Any, str, Any], ...] = (), **where: Any
) -> Callable[[Callable[..., Any]], None]:
    """The decorated function is the broken form of the method, which is its first argument."""

    def add(replacement: Callable[..., Any]) -> None:
        owner = replacement.__globals__[method.__qualname__.partition(".")[0]]

        def patched(*arguments: Any, **options: Any) -> Any:
            return replacement(method, *arguments, **options)

        name = replacement.__name__.strip("_").replace("_", " ")
        BROKEN[name] = Broken(signs, ((owner, method.__name__, patched), *also), **where)

    return add


@broken("is next", method=RouterMachine._deliver_new)
def a_router_that_delivers_twice(deliver: Any, self: RouterMachine, _: Any, actions: list[Any], now: float) -> None:
    deliver(self, _, actions, now)
    actions += actions[-1:]


@broken("is right", method=RoutedRequest.accept, first_seed=2)
def a_router_that_takes_repeated_tokens_for_new_ones(
    _: Any, self: RoutedRequest, _index: int, token_id: int, logprobs: SampledToken | None
) -> None:
    self.delivered.append(token_id)
    self.new_logprobs += [] if logprobs is None else [logprobs]


@broken("KeyError", method=WorkerShell.close_tokens, change=breaking_streams)
def a_worker_that_keeps_the_calls_of_a_broken_token_stream(_: Any, self: WorkerShell, stream: Call) -> None:
    self.token_streams.pop(stream.call_id, None)


READ_ENDS = {name: getattr(Puller, name) for name in ("on_read_finished", "on_read_timed_out", "on_read_failed")}


@broken(
    "which is not reserved",
    method=Puller._fail,
    also=tuple(
        (Puller, name, lambda s, e, now, m=method: m(s, e, now) if e.read_id in s._pull_of_read else [])
        for name, method in READ_ENDS.items()
    ),
    first_seed=2,
)
def a_puller_that_gives_targets_back_before_its_reads_end(
    _: Any,
    self: Puller,
    pull: Pull,
    reason: AbortReason,
    detail: str,
    _now: float,
    state: PullerState = PullerState.FAILED,
) -> Actions:
    for read_id in list(pull.reads):
        del pull.reads[read_id]
        self._pull_of_read.pop(read_id)
    return self._end(pull, state, PullFailed(pull.transfer_id, state, reason, detail))


@broken("has not asked", method=PullQueue._is_behind_a_prompt, first_seed=10)
def a_hand_off_that_waits_behind_every_older_prompt(_: Any, self: PullQueue, pull: PulledPrompt) -> bool:
    """Of a decode worker that computes prompts, too, in a pool with room for all."""
    older = [s for s in self._scheduler.waiting if s.rank < pull.sequence.rank]
    return any(not sequence.block_table for sequence in older)


@broken("a tenant lacks its share", method=PromptOrder.add, change=shared_by_tenants)
def a_worker_that_forgets_the_tenants_of_prompts(
    add: Any, self: PromptOrder, name: str, priority: int, _tenant: str, work: float, *, is_back: bool = False
) -> None:
    add(self, name, priority, "", work, is_back=is_back)


@broken("a tenant lacks its share", method=_Level.begin_rounds, change=shared_by_tenants)
def a_worker_that_gives_a_tenant_two_rounds_for_one(begin: Any, self: _Level, shares: Collection[Any]) -> None:
    begin(self, shares)
    for share in shares:
        if share.tenant == "long":
            share.allowance += QUANTUM_S
            self.update(share)


def _fail_every_fourth(kind: type[TandemError]) -> Broken:
    """Where a fault happens to somebody else, the failure of a request still needs a cause of its own."""
    on_decode = RouterMachine._on_decode

    def fail(self: RouterMachine, event: events.DecodeReturned, now: float) -> RouterActions:
        routed = self._dispatches.by_id.get(event.dispatch_id)
        if routed is None or routed.arrival % 4:
            return on_decode(self, event, now)
        return self._fail(routed, kind("for no reason"), now)

    return Broken(
        (f"failed without cause: {kind.__name__}",), ((RouterMachine, "_on_decode", fail),), change=never_calm
    )


BROKEN |= {
    f"a router that fails a request with {kind.__name__} without cause": _fail_every_fourth(kind)
    for kind in (WorkerUnavailable, TransferFailed, QueueFull)
}


@broken("failed without cause: QueueFull", method=RouterMachine._retry, change=crowded, first_seed=4)
def a_router_that_refuses_a_choice_when_others_have_tokens(
    retry: Any, self: RouterMachine, routed: RoutedRequest, error: TandemError, worker_id: str, now: float
) -> RouterActions:
    routed.has_streamed = False
    actions: RouterActions = retry(self, routed, error, worker_id, now)
    return actions


@broken("is not its own", method=Scheduler._finish, also=((Scheduler, "check", ignore),))  # which would notice first
def a_scheduler_that_frees_the_blocks_of_an_ended_sequence_under_a_step(
    finish: Any, self: Scheduler, sequence: Sequence, reason: FinishReason
) -> None:
    finish(self, sequence, reason)
    if sequence.sequence_id in self.queues.ending:
        self.pool.release(sequence.block_table)
        sequence.block_table = []


@broken("received tokens from index 0", method=RouterMachine._on_arrived, change=dying_routers)
def a_router_that_starts_a_resumed_answer_again(arrived: Any, self: RouterMachine, event: Any, now: float) -> Any:
    return arrived(self, replace(event, delivered=()), now)


@broken("usage counts", method=RoutedRequest.outcome, change=dying_routers)
def a_router_that_counts_only_its_own_tokens_of_a_resumed_answer(
    outcome: Any, self: RoutedRequest, *arguments: Any
) -> events.Outcome:
    found: events.Outcome = outcome(self, *arguments)
    return replace(found, num_output_tokens=found.num_output_tokens - found.num_resumed_tokens)


@broken("is next", method=RouterShell.arrive, change=dying_routers)
def a_client_that_forgets_a_token(
    arrive: Any, self: RouterShell, *arguments: Any, delivered: tuple[int, ...] = ()
) -> None:
    arrive(self, *arguments, delivered=delivered[:-1])


@broken("is right", "finished by", method=FakeCore.submit, make=make_vllm_scenario, first_seed=2)
def an_engine_that_loads_the_kv_of_another_prompt(submit: Any, self: FakeCore, prompt: Prompt) -> None:
    """The KV has other tokens, and their number."""
    kept = self._cluster.kept
    if prompt.handoff in kept and len(kept) > 1:
        kept[prompt.handoff] = next(reversed(kept.values()))
    submit(self, prompt)


# ---- moves


@broken(
    "is not its own",
    method=Moves._hand_over_if_still,
    also=((Moves, "check", ignore), *((Authorship, name, ignore) for name in ("step_begins", "step_ended", "emitted"))),
    change=draining,
    first_seed=2,
)
def a_worker_that_writes_the_block_it_has_handed_over(hand_over: Any, self: Moves, move: Move, now: float) -> Any:
    """It samples on at once in the block that the reader reads."""
    actions = hand_over(self, move, now)
    move.sequence.plan_end = move.sequence.max_num_tokens
    return actions


@broken(
    "is paused for more than a lease",
    method=Moves.on_offer_ended,
    also=((Moves, "_lease_s", 1e6),),
    change=lossy_drains,
    first_seed=10,
)
def a_worker_that_waits_for_ever_for_the_reader(
    end: Any, self: Moves, ended: OfferEnded, now: float
) -> list[MoveEnded]:
    return end(self, ended, now) if ended.is_released else []


@broken("are both authors of index", "is right", method=Pull.end_growth, change=draining)
def a_target_that_loses_the_tokens_it_was_given(end_growth: Any, self: Pull, token_ids: tuple[int, ...]) -> Any:
    fits = end_growth(self, token_ids)
    self.token_ids = (*token_ids[:-1], (token_ids[-1] + 1) % 64) if token_ids else ()
    return fits


@broken("times, with", method=DecodeMachine.handle, change=lambda scenario: draining(scenario, num_drains=1))
def requests_that_move_without_a_drain(handle: Any, self: DecodeMachine, event: Any, now: float) -> list[Any]:
    """A worker that begins to run asks for moves at once."""
    actions: list[Any] = handle(self, event, now)
    return actions if self.core.draining else [*actions, *self.moves.ask_to_leave(now)]


RESUMED: RouterActions = []


def _take_over(self: OpenMoves, routed: RoutedRequest, take_over: Any = OpenMoves._take_over) -> Dispatch:
    assert routed.move is not None
    ticket = routed.move.target.transfer_id
    source: Dispatch = take_over(self, routed)
    assert ticket is not None
    RESUMED.append(events.ResumeSequence(source.dispatch_id, source.candidate.decode_worker, ticket))
    return source


@broken(
    "are in steps at the same time",
    "are both authors of index",
    method=RouterMachine.handle,
    also=((OpenMoves, "_take_over", _take_over),),
    change=lossy_drains,
)
def a_router_that_resumes_the_source_of_a_target_with_tokens(
    handle: Any, self: RouterMachine, event: events.RouterEvent, now: float
) -> RouterActions:
    """A RELEASE that is lost leaves the source paused, and the router tells it to sample on."""
    actions: RouterActions = handle(self, event, now)
    while RESUMED:
        actions = [*actions, RESUMED.pop()]
    return actions


@broken(
    "waits for a worker that is lost",
    method=RouterMachine._retry_dispatches,
    change=dying_targets,
    make=make_fleet_scenario,
    first_seed=127,
)
def a_router_that_takes_the_loss_of_a_moved_request_for_that_of_its_prompt(
    retry: Any, self: RouterMachine, record: WorkerRecord, error: TandemError, now: float
) -> RouterActions:
    """The worker that computed the prompt has become a decode worker, and the target of the move."""
    for name in list(record.dispatched):
        routed = self._dispatches.by_id.get(name)
        dispatch = None if routed is None else routed.dispatch
        is_open = dispatch is None or dispatch.prefill_open
        if dispatch is not None and not is_open and dispatch.candidate.prefill_worker == record.worker_id:
            record.remove_call(name)
    actions: RouterActions = retry(self, record, error, now)
    return actions


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = BROKEN[name]
    for owner, attribute, value in machine.patches:
        monkeypatch.setattr(owner, attribute, value)
    failure = machine.first_failure()
    assert failure
    assert any(sign in failure for sign in machine.signs), failure


# What has to happen in a world, and how often at least.
HAPPENS: dict[Callable[[Scenario], Scenario], tuple[str, int]] = {
    shared_by_tenants: ("tenants share a worker", 21),
    draining: ("moved", 1),
    lossy_drains: ("moved", 1),
    cancelled_on_the_way: ("cancelled on its way", 20),
}


@pytest.mark.parametrize(
    ("make", "change", "seed"),
    dict.fromkeys((m.make, m.change, m.first_seed) for m in BROKEN.values() if m.change not in (unchanged, never_calm)),
)
def test_unbroken_machines_hold_in_each_world_that_shows_a_broken_one(
    make: Callable[[int], Scenario], change: Callable[[Scenario], Scenario], seed: int
) -> None:
    """test_seeds.py runs the unchanged worlds."""
    counts = run_scenario(change(make(seed))).counts
    happens, least = HAPPENS.get(change, ("", 0))
    assert counts[happens] >= least
