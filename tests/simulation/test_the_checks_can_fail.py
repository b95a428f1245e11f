"""Machines broken on purpose: each must be caught within a few seeds, or the simulator's silence proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
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
from core.step import SampledToken, ScheduledChunk
from decode_worker.machine import DecodeMachine
from decode_worker.moves import Move, MoveEnded, Moves
from decode_worker.pull_queue import PulledPrompt, PullQueue
from kv_transfer.protocol.events import Actions, OfferEnded, PullFailed
from kv_transfer.protocol.owner import Owner
from kv_transfer.protocol.pull import Pull
from kv_transfer.protocol.puller import Puller
from router.requests import events
from router.requests.machine import RouterMachine
from router.requests.moves import OpenMoves
from router.requests.routed_request import Dispatch, RoutedRequest
from router.routing.worker_record import WorkerRecord
from simulator.authorship import Authorship
from simulator.calls import Call
from simulator.clients import ResumingClients
from simulator.faults import Fault, NetworkFaults, ReadFaults, RouterDeath
from simulator.memory import Memory
from simulator.router_shell import RouterShell
from simulator.scenario import (
    SLOW_STEP_COST,
    ClientRequest,
    Scenario,
    make_fleet_scenario,
    make_scenario,
    make_vllm_scenario,
    other_choices,
)
from simulator.simulation import run_scenario
from simulator.vllm_shell import VllmShell
from simulator.worker_shell import WorkerShell
from simulator.world import SimulationError
from tests.support.draining_worlds import draining
from vllm_worker.engine import Prompt
from vllm_worker.fake_engine import FakeCore
from vllm_worker.machine import VllmMachine, _Call
from worker.core import WorkerCore

MAX_SEEDS = 30
NUM_UNBROKEN = 12  # seeds in which unbroken machines must hold


def first_failure(
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
    num_seeds: int = MAX_SEEDS,
    make: Callable[[int], Scenario] = make_scenario,
    first_seed: int = 1,
) -> str:
    """The message of the first seed that fails; empty where none does."""
    for seed in range(first_seed, num_seeds):
        try:
            run_scenario(change(make(seed)))
        except SimulationError as error:
            return str(error)
    return ""


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


def test_the_special_scenarios_hold_for_the_unbroken_machines() -> None:
    assert first_failure(without_digests, NUM_UNBROKEN) == ""


def test_a_router_that_delivers_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = RouterMachine._deliver_new

    def again(self: RouterMachine, routed: RoutedRequest, actions: list[Any], now: float) -> None:
        deliver(self, routed, actions, now)
        actions += actions[-1:]

    monkeypatch.setattr(RouterMachine, "_deliver_new", again)
    assert "is next" in first_failure()


def test_a_router_that_takes_repeated_tokens_for_new_ones_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: RoutedRequest, _index: int, token_id: int, logprobs: SampledToken | None) -> None:
        self.delivered.append(token_id)
        self.new_logprobs += [] if logprobs is None else [logprobs]

    monkeypatch.setattr(RoutedRequest, "accept", append)
    assert "is right" in first_failure()


def breaking_streams(scenario: Scenario) -> Scenario:
    """The token streams break all the time."""
    names = [spec.worker_id for spec in scenario.workers if spec.role is ServiceRole.DECODE]
    losses = tuple(
        Fault("loses its token stream", name, at=0.5 + number / 10, duration_s=0.0)
        for number in range(30)
        for name in names
    )
    return replace(scenario, calm=False, faults=losses, network=NetworkFaults(delay_s=0.01))


def test_every_request_survives_token_streams_that_break_all_the_time() -> None:
    assert first_failure(breaking_streams, NUM_UNBROKEN) == ""


def test_a_router_that_finishes_at_the_end_of_a_call_without_its_last_tokens_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RoutedRequest, "misses_streamed_tokens", lambda _: False)
    assert first_failure(breaking_streams) != ""


def test_a_router_that_waits_for_a_broken_token_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterMachine, "_on_stream_lost", lambda *_: [])
    assert "has no token stream" in first_failure(breaking_streams)


def test_a_worker_that_keeps_the_calls_of_a_broken_token_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: WorkerShell, stream: Call) -> None:
        self.token_streams.pop(stream.call_id, None)

    monkeypatch.setattr(WorkerShell, "close_tokens", forget)
    assert "KeyError" in first_failure(breaking_streams)


def test_a_router_that_ignores_the_death_of_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterMachine, "_on_lost", lambda _self, _event, _now: [])
    # The router waits for a dead worker until the deadline, keeps its blocks in the index, sends it a request, or has
    # no deadline for its silence.
    failure = first_failure()
    signs = ("failed without cause: DeadlineExceeded", "the router's index of", "has no token stream", "deadlines of")
    assert any(sign in failure for sign in signs)


def test_a_router_that_swallows_failures_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterMachine, "_retry", lambda _self, _routed, _error, _worker, _now: [])
    assert "DeadlineExceeded" in first_failure()


def test_a_transfer_that_trusts_reads_after_its_lease_is_caught_without_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pull, "lease_covers_reads", property(lambda _self: True))
    assert "is right" in first_failure(without_digests)


def test_a_transfer_that_accepts_wrong_digests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    on_read_finished = Puller.on_read_finished
    monkeypatch.setattr(
        Puller,
        "on_read_finished",
        lambda self, event, now: on_read_finished(self, replace(event, digests=()), now),
    )
    assert "is right" in first_failure()


def test_a_pool_that_forgets_to_unlease_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "unlease", lambda _self, _blocks: None)
    assert "AssertionError: block" in first_failure()  # of the machine's own check


def test_an_owner_that_never_ends_a_lease_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "on_tick", lambda _self, _now: [])
    monkeypatch.setattr(Owner, "deadlines", lambda _self: [])
    assert "still has" in first_failure()


def test_a_machine_that_asks_for_the_same_tick_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.world.MAX_EVENTS", 10_000)
    monkeypatch.setattr(Owner, "on_tick", lambda _self, _now: [])
    assert "no end after 10000 events" in first_failure()


def test_an_owner_that_frees_blocks_under_a_reader_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole lease shrinks to nothing for the owner, while readers go on."""
    monkeypatch.setattr(Pull, "lease_covers_reads", property(lambda _self: True))
    monkeypatch.setattr(BlockPool, "lease", lambda _self, _blocks: None)
    monkeypatch.setattr(BlockPool, "unlease", lambda _self, _blocks: None)
    monkeypatch.setattr(Owner, "check", lambda _self: None)
    assert "is right" in first_failure(without_digests)


def test_a_puller_that_gives_targets_back_before_its_reads_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_at_once(
        self: Puller, pull: Pull, reason: AbortReason, detail: str, _now: float, state: PullerState = PullerState.FAILED
    ) -> Actions:
        for read_id in list(pull.reads):
            del pull.reads[read_id]
            self._pull_of_read.pop(read_id)
        return self._end(pull, state, PullFailed(pull.transfer_id, state, reason, detail))

    handlers = {name: getattr(Puller, name) for name in ("on_read_finished", "on_read_timed_out", "on_read_failed")}
    monkeypatch.setattr(Puller, "_fail", end_at_once)
    for name, method in handlers.items():
        monkeypatch.setattr(
            Puller, name, lambda s, e, now, m=method: m(s, e, now) if e.read_id in s._pull_of_read else []
        )
    assert "which is not reserved" in first_failure()


def test_a_decode_worker_that_forgets_a_cancelled_call_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: DecodeMachine, request_id: str, error: TandemError, _reason: AbortReason, _now: float) -> list:
        return self._fail_call(request_id, error) if request_id in self._calls else []

    monkeypatch.setattr(DecodeMachine, "_end", forget)
    assert "KeyError" in first_failure()  # its sequence has no call any more


def test_a_hand_off_that_waits_behind_every_older_prompt_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode worker that computes prompts, too, in a pool with room for all."""

    def is_behind(self: PullQueue, pull: PulledPrompt) -> bool:
        older = [s for s in self._scheduler.waiting if s.rank < pull.sequence.rank]
        return any(not sequence.block_table for sequence in older)

    monkeypatch.setattr(PullQueue, "_is_behind_a_prompt", is_behind)
    assert "has not asked" in first_failure()


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


def test_tenants_share_a_worker_of_the_unbroken_machines() -> None:
    for seed in range(1, 4):
        counts = run_scenario(shared_by_tenants(make_scenario(seed))).counts
        assert counts["tenants share a worker"] > 20


def test_a_worker_that_forgets_the_tenants_of_prompts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    add = PromptOrder.add

    def forget(
        self: PromptOrder, name: str, priority: int, _tenant: str, work: float, *, is_back: bool = False
    ) -> None:
        add(self, name, priority, "", work, is_back=is_back)

    monkeypatch.setattr(PromptOrder, "add", forget)
    assert "a tenant lacks its share" in first_failure(shared_by_tenants)


def test_a_worker_that_gives_a_tenant_two_rounds_for_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _Level.begin_rounds

    def favour(self: _Level, shares: Collection[Any]) -> None:
        begin(self, shares)
        for share in shares:
            if share.tenant == "long":
                share.allowance += QUANTUM_S
                self.update(share)

    monkeypatch.setattr(_Level, "begin_rounds", favour)
    assert "a tenant lacks its share" in first_failure(shared_by_tenants)


def never_calm(scenario: Scenario) -> Scenario:
    return replace(scenario, calm=False)


@pytest.mark.parametrize("kind", [WorkerUnavailable, TransferFailed, QueueFull])
def test_a_router_that_fails_a_request_without_cause_is_caught_in_worlds_with_faults_too(
    monkeypatch: pytest.MonkeyPatch, kind: type[TandemError]
) -> None:
    """Where a fault happens to somebody else, the failure of a request still needs a cause of its own."""
    on_decode = RouterMachine._on_decode

    def fail_every_fourth(self: RouterMachine, event: events.DecodeReturned, now: float) -> list[events.RouterAction]:
        routed = self._dispatches.by_id.get(event.dispatch_id)
        if routed is None or routed.arrival % 4:
            return on_decode(self, event, now)
        return self._fail(routed, kind("for no reason"), now)

    monkeypatch.setattr(RouterMachine, "_on_decode", fail_every_fourth)
    assert f"failed without cause: {kind.__name__}" in first_failure(never_calm)


def crowded(scenario: Scenario) -> Scenario:
    """Everybody asks for four choices, and workers let few wait."""
    return replace(
        scenario,
        calm=False,
        workers=tuple(replace(s, scheduler=replace(s.scheduler, max_waiting=2)) for s in scenario.workers),
        router=replace(scenario.router, max_queued=1024, max_in_flight_per_worker=64, max_attempts=2),
        requests=tuple(replace(client, others=other_choices(client.request, 3)) for client in scenario.requests),
    )


def test_a_router_that_refuses_a_choice_when_others_have_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1, 4):
        run_scenario(crowded(make_scenario(seed)))
    retry = RouterMachine._retry

    def refuse(
        self: RouterMachine, routed: RoutedRequest, error: TandemError, worker_id: str, now: float
    ) -> list[events.RouterAction]:
        routed.has_streamed = False
        return retry(self, routed, error, worker_id, now)

    monkeypatch.setattr(RouterMachine, "_retry", refuse)
    assert "failed without cause: QueueFull" in first_failure(crowded)


def test_a_scheduler_that_frees_the_blocks_of_an_ended_sequence_under_a_step_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish = Scheduler._finish

    def finish_and_free(self: Scheduler, sequence: Sequence, reason: FinishReason) -> None:
        finish(self, sequence, reason)
        if sequence.sequence_id in self.queues.ending:
            self.pool.release(sequence.block_table)
            sequence.block_table = []

    monkeypatch.setattr(Scheduler, "_finish", finish_and_free)
    monkeypatch.setattr(Scheduler, "check", lambda _self: None)  # which would notice first
    assert "is not its own" in first_failure()


def test_a_runner_that_takes_wrong_guesses_for_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Memory._sample

    def take_all(self: Memory, chunk: ScheduledChunk) -> tuple[SampledToken, ...]:
        return (*map(SampledToken, chunk.drafts), *sample(self, chunk)[-1:])

    monkeypatch.setattr(Memory, "_sample", take_all)
    assert "is right" in first_failure()


def test_a_scheduler_that_plans_ahead_of_guesses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ahead starts where the chunk without drafts would have ended."""
    monkeypatch.setattr(_StepInFlight, "has_drafts", False)
    monkeypatch.setattr(Scheduler, "check", lambda _self: None)  # which would notice first
    assert first_failure() != ""


def dying_routers(scenario: Scenario) -> Scenario:
    """Two routers die in turn, all the time. Every client resumes."""
    deaths = tuple(RouterDeath(number % 2, at=0.5 + number / 10, duration_s=0.05) for number in range(30))
    clients = tuple(replace(client, resumes=True) for client in scenario.requests)
    return replace(scenario, calm=False, num_routers=2, requests=clients, router_deaths=deaths)


def test_every_request_survives_routers_that_die_all_the_time() -> None:
    assert first_failure(dying_routers, NUM_UNBROKEN) == ""


def test_a_router_that_starts_a_resumed_answer_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = RouterMachine._on_arrived
    monkeypatch.setattr(
        RouterMachine, "_on_arrived", lambda self, event, now: arrived(self, replace(event, delivered=()), now)
    )
    assert "received tokens from index 0" in first_failure(dying_routers)


def test_a_router_that_counts_only_its_own_tokens_of_a_resumed_answer_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = RoutedRequest.outcome

    def own(self: RoutedRequest, *arguments: Any) -> events.Outcome:
        found = outcome(self, *arguments)
        return replace(found, num_output_tokens=found.num_output_tokens - found.num_resumed_tokens)

    monkeypatch.setattr(RoutedRequest, "outcome", own)
    assert "usage counts" in first_failure(dying_routers)


def test_a_client_that_gives_up_with_its_router_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResumingClients, "_pause", ResumingClients._give_up)
    assert "was lost with its router, though its client resumes" in first_failure(dying_routers)


def test_a_client_that_forgets_a_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive = RouterShell.arrive

    def forget(
        self: RouterShell, request: Request, timeout_s: float, others: Any = (), delivered: tuple[int, ...] = ()
    ) -> None:
        arrive(self, request, timeout_s, others, delivered[:-1])

    monkeypatch.setattr(RouterShell, "arrive", forget)
    assert "is next" in first_failure(dying_routers)


# ---- vLLM inside the workers


def test_a_vllm_worker_that_numbers_a_resumed_stream_from_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Call, "next_index", property(lambda call: call.num_tokens))
    assert first_failure(make=make_vllm_scenario) != ""


def test_a_vllm_worker_that_waits_for_a_hung_engine_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: VllmMachine) -> float | None:
        return self.open_calls.deadlines.next()

    monkeypatch.setattr(VllmMachine, "next_deadline", never)
    assert "DeadlineExceeded" in first_failure(make=make_vllm_scenario)


def test_an_engine_that_loads_the_kv_of_another_prompt_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = FakeCore.submit

    def swapped(self: FakeCore, prompt: Prompt) -> None:
        kept = self._cluster.kept
        if prompt.handoff in kept and len(kept) > 1:
            kept[prompt.handoff] = next(reversed(kept.values()))
        submit(self, prompt)

    monkeypatch.setattr(FakeCore, "submit", swapped)
    failure = first_failure(make=make_vllm_scenario)
    assert any(sign in failure for sign in ("is right", "finished by"))  # the KV has other tokens, and their number


def test_an_engine_that_keeps_kv_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmShell, "_expire", lambda *_: None)
    assert "prompts kept for others" in first_failure(make=make_vllm_scenario)


# ---- moves


def lossy_drains(scenario: Scenario) -> Scenario:
    return replace(draining(scenario), calm=False, network=NetworkFaults(delay_s=0.001, loss=0.3))


@pytest.mark.parametrize("change", [draining, lossy_drains])
def test_the_worlds_that_drain_hold_for_the_unbroken_machines(change: Callable[[Scenario], Scenario]) -> None:
    for seed in range(1, 4):
        assert run_scenario(change(make_scenario(seed))).counts["moved"] > 0


def test_a_worker_that_samples_on_after_it_has_handed_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the release of a complete pull for a failure."""

    def run_on(self: Moves, ended: OfferEnded, now: float) -> list[MoveEnded]:
        return on_offer_ended(self, replace(ended, reason=AbortReason.CANCELLED), now)

    on_offer_ended = Moves.on_offer_ended
    monkeypatch.setattr(Moves, "on_offer_ended", run_on)
    assert "are in steps at the same time" in first_failure(draining)


def test_a_second_author_is_caught_where_no_two_steps_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    on_offer_ended = Moves.on_offer_ended
    monkeypatch.setattr(
        Moves, "on_offer_ended", lambda s, e, now: on_offer_ended(s, replace(e, reason=AbortReason.CANCELLED), now)
    )
    monkeypatch.setattr(Authorship, "step_begins", lambda *_: None)
    monkeypatch.setattr(Authorship, "step_ended", lambda *_: None)
    assert "are both authors of index" in first_failure(draining)


def test_a_worker_that_writes_the_block_it_has_handed_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It samples on at once in the block that the reader reads."""
    hand_over = Moves._hand_over_if_still

    def and_run_on(self: Moves, move: Move, now: float) -> list[Any]:
        actions = hand_over(self, move, now)
        move.sequence.plan_end = move.sequence.max_num_tokens
        return actions

    monkeypatch.setattr(Moves, "_hand_over_if_still", and_run_on)
    monkeypatch.setattr(Moves, "check", lambda _: None)
    for check in ("step_begins", "step_ended", "emitted"):
        monkeypatch.setattr(Authorship, check, lambda *_: None)
    assert "is not its own" in first_failure(draining, first_seed=10)  # the seeds before it do not show it


def test_a_worker_that_waits_for_ever_for_the_reader_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    on_offer_ended = Moves.on_offer_ended
    monkeypatch.setattr(Moves, "_lease_s", 1e6)
    monkeypatch.setattr(
        Moves, "on_offer_ended", lambda s, ended, now: on_offer_ended(s, ended, now) if ended.is_released else []
    )
    assert "is paused for more than a lease" in first_failure(lossy_drains)


def test_a_target_that_loses_the_tokens_it_was_given_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    end_growth = Pull.end_growth

    def forget_one(self: Pull, token_ids: tuple[int, ...]) -> bool:
        fits = end_growth(self, token_ids)
        self.token_ids = (*token_ids[:-1], (token_ids[-1] + 1) % 64) if token_ids else ()
        return fits

    monkeypatch.setattr(Pull, "end_growth", forget_one)
    assert any(sign in first_failure(draining) for sign in ("are both authors of index", "is right"))


def test_requests_that_move_without_a_drain_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that begins to run asks for moves at once."""
    handle = DecodeMachine.handle

    def and_ask(self: DecodeMachine, event: Any, now: float) -> list[Any]:
        actions = handle(self, event, now)
        return actions if self.core.draining else [*actions, *self.moves.ask_to_leave(now)]

    monkeypatch.setattr(DecodeMachine, "handle", and_ask)
    assert "times, with" in first_failure(lambda scenario: draining(scenario, num_drains=1))


def test_a_drain_that_ends_running_sequences_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerCore, "unbegun", lambda self: [*self.scheduler.waiting, *self.scheduler.running])
    assert "tokens were computed again without a cause" in first_failure(draining)


def test_a_router_that_resumes_the_source_of_a_target_with_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RELEASE that is lost leaves the source paused, and the router tells it to sample on."""
    take_over = OpenMoves._take_over
    resumed: list[events.RouterAction] = []

    def and_resume(self: OpenMoves, routed: RoutedRequest) -> Dispatch:
        assert routed.move is not None
        ticket = routed.move.target.transfer_id
        source = take_over(self, routed)
        assert ticket is not None
        resumed.append(events.ResumeSequence(source.dispatch_id, source.candidate.decode_worker, ticket))
        return source

    handle = RouterMachine.handle

    def and_send(self: RouterMachine, event: events.RouterEvent, now: float) -> list[events.RouterAction]:
        actions = handle(self, event, now)
        while resumed:
            actions = [*actions, resumed.pop()]
        return actions

    monkeypatch.setattr(OpenMoves, "_take_over", and_resume)
    monkeypatch.setattr(RouterMachine, "handle", and_send)
    failure = first_failure(lossy_drains)
    assert any(sign in failure for sign in ("are in steps at the same time", "are both authors of index"))


# ---- fleets


def test_a_router_that_takes_the_loss_of_a_moved_request_for_that_of_its_prompt_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that computed the prompt has become a decode worker, and the target of the move."""
    retry = RouterMachine._retry_dispatches

    def forget(self: RouterMachine, record: WorkerRecord, error: TandemError, now: float) -> list[events.RouterAction]:
        for name in list(record.dispatched):
            routed = self._dispatches.by_id.get(name)
            dispatch = None if routed is None else routed.dispatch
            is_open = dispatch is None or dispatch.prefill_open
            if dispatch is not None and not is_open and dispatch.candidate.prefill_worker == record.worker_id:
                record.remove_call(name)
        return retry(self, record, error, now)

    monkeypatch.setattr(RouterMachine, "_retry_dispatches", forget)
    assert "waits for a worker that is lost" in first_failure(make=make_fleet_scenario, first_seed=3)
