"""Traces replayed in virtual time: every request completes, nothing leaks, a seed decides everything."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from core.config import RouterConfig
from prefill_worker.machine import PrefillMachine
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import ReplayResult, percentile
from simulator.replay.trace import TraceRequest
from simulator.replay.workloads import Workload
from simulator.virtual.world import SimulationError

SMALL = ReplayConfig(
    num_prefill=2,
    num_decode=2,
    prefill_pool_tokens=65_536,
    decode_pool_tokens=65_536,
    load=0.8,
    check_every_s=0.5,
    router=RouterConfig(max_in_flight_per_worker=1024, local_prefill="never"),
)
ONE_OF_EACH = replace(SMALL, num_prefill=1, num_decode=1, load=0.01)


def turns(num_conversations: int, num_turns: int) -> Workload:
    """Conversations that grow by two blocks in each turn; all of them begin with block 0."""
    chance = random.Random(0)
    starts = [(chance.uniform(0, 60), number) for number in range(num_conversations)]
    requests = [
        TraceRequest(
            arrives_at=start + 10 * turn,
            hash_ids=(0, *range(1000 * (number + 1), 1000 * (number + 1) + 2 * turn + 2)),
            num_tokens=512 * (2 * turn + 2) + chance.randint(1, 512),
            num_output_tokens=chance.randint(1, 12),
        )
        for start, number in starts
        for turn in range(num_turns)
    ]
    return Workload("turns", sorted(requests, key=lambda request: request.arrives_at))


def replayed(workload: Workload, config: ReplayConfig) -> ReplayResult:
    return Replay(workload, config).run()


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("sticky", [False, True])
def test_every_request_completes_with_all_its_tokens(num_routers: int, sticky: bool) -> None:
    replay = Replay(turns(12, 4), replace(SMALL, num_routers=num_routers, sticky=sticky))
    result = replay.run()
    assert (result.num_requests, result.num_failed, result.num_retried) == (48, 0, 0)
    assert [record.num_output_tokens for record in result.requests] == [
        request.num_output_tokens for request in replay.trace
    ]
    assert all(served.arrived_at < served.first_token_at <= served.last_token_at for served in replay.clients.all)
    assert sum(result.requests_by_router) == 48
    assert min(result.requests_by_router) > 0


def test_requests_complete_when_the_pools_hold_a_few_prompts_only() -> None:
    tight = replace(SMALL, prefill_pool_tokens=8192, decode_pool_tokens=8192, num_routers=2, load=3.0)
    replay = Replay(turns(12, 4), tight)
    result = replay.run()
    assert result.num_failed == 0
    assert percentile(result.ttft_s, 90) > percentile(replayed(turns(12, 4), SMALL).ttft_s, 90)


def test_a_seed_decides_every_figure() -> None:
    config = replace(SMALL, num_routers=2, seed=7)
    assert replayed(turns(12, 4), config) == replayed(turns(12, 4), config)
    assert replayed(turns(12, 4), config).ttft_s != replayed(turns(12, 4), replace(config, seed=8)).ttft_s


def test_every_number_of_routers_gets_the_same_arrivals() -> None:
    arrivals = [
        [request.arrives_at for request in Replay(turns(5, 2), replace(SMALL, num_routers=count)).trace]
        for count in (1, 4)
    ]
    assert arrivals[0] == arrivals[1]


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_turn_of_a_session_waits_for_the_end_of_the_turn_before_it(has_sessions: bool) -> None:
    trace = [
        TraceRequest(0.01 * turn, (1, 2 + turn), 1024, 20, session=7 if has_sessions else None) for turn in range(4)
    ]
    replay = Replay(Workload("hasty turns", trace), replace(ONE_OF_EACH, load=None))
    result = replay.run()
    assert (result.num_requests, result.num_failed) == (4, 0)
    clients = replay.clients.all
    waited = [later.arrived_at >= earlier.last_token_at for earlier, later in pairwise(clients)]
    assert waited == [has_sessions] * 3
    assert result.arrivals_s == pytest.approx(clients[-1].arrived_at - clients[0].arrived_at)


def test_without_a_rate_sessions_begin_when_they_did() -> None:
    workload = Workload("sessions", [TraceRequest(float(at), (at,), 512, 4, session=at % 2) for at in range(9)])
    arrived = Replay(workload, replace(ONE_OF_EACH, load=None))._arrivals(workload)
    assert [request.arrives_at for request in arrived] == [request.arrives_at for request in workload.requests]


def test_one_worker_hits_every_full_block_of_earlier_turns() -> None:
    """Three prompts of 1,000, 1,500 and 1,024 tokens; the last two begin with the first 1,000 tokens."""
    trace = (
        TraceRequest(0.0, (1, 2), 1000, 2),
        TraceRequest(60.0, (1, 2, 3), 1500, 2),
        TraceRequest(120.0, (1, 2), 1024, 2),
    )
    result = replayed(Workload("turns", trace), ONE_OF_EACH)
    # 960 = 15 blocks of 64 tokens; of 1,024 tokens the last is computed, so 15 blocks of 64 are cached again
    assert result.hit_ratio == pytest.approx((0 + 960 + 960) / (1000 + 1500 + 1024))
    assert result.hit_share == pytest.approx(1.0)


def test_pools_without_room_for_a_second_prompt_hits_nothing() -> None:
    turns = [TraceRequest(60.0 * number, (1 + number % 2, 3 + number % 2), 1024, 2) for number in range(6)]
    trace = Workload("two prompts in turns", turns)
    assert replayed(trace, ONE_OF_EACH).hit_ratio > 0.6
    assert replayed(trace, replace(ONE_OF_EACH, prefill_pool_tokens=1024, decode_pool_tokens=1088)).hit_ratio == 0.0


def test_a_first_token_takes_the_steps_of_its_prompt() -> None:
    result = replayed(Workload("one prompt", [TraceRequest(0.0, tuple(range(40)), 20_000, 3)]), ONE_OF_EACH)
    cost, chunks = ONE_OF_EACH.prefill_cost, 3  # of at most 8,192 tokens
    computing_s = cost.prompt_seconds(20_000) + chunks * cost.step_s
    assert computing_s < result.ttft_s[0] < computing_s + 0.01
    context_s = 20_002 * cost.context_s
    assert result.tpot_s[0] > cost.step_s + context_s
    assert result.prefill_busy[0] * result.duration_s == pytest.approx(computing_s)


def test_a_worker_that_keeps_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds one block at the first arrival, and hides it from the checks of the machine."""
    on_arrived = PrefillMachine._on_arrived

    def leak(self: PrefillMachine, event: object, now: float) -> object:
        if not self.core.num_arrived:
            self.core.pool.allocate(1)
        return on_arrived(self, event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillMachine, "_on_arrived", leak)
    monkeypatch.setattr(PrefillMachine, "check", lambda _self: None)
    with pytest.raises(SimulationError, match="keeps"):
        replayed(turns(2, 2), SMALL)
