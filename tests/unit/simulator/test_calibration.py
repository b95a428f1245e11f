"""A calibration: the costs that follow from measurements, and a simulation that finds the measured times again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import RouterConfig
from core.cost.step_cost import PRIOR, StepCost
from simulator.calibration.calibration import MeasuredRequest, MeasuredWorker, compare, costs_of, simulate_run
from simulator.replay.replay_config import ReplayConfig
from simulator.shells.cost_model import RDMA_400G, LinkCost

FAST = StepCost(1e-3, 1e-4, 1e-7, 1e-5, 1e-9)
MIDDLE = StepCost(2e-3, 1e-4, 1e-7, 1e-5, 1e-9)
SLOW = StepCost(9e-3, 1e-4, 1e-7, 1e-5, 1e-9)
REQUEST = MeasuredRequest(10.0, 100, 8, ttft_s=0.5, tpot_s=0.02, in_worker_s=0.4, transferred_bytes=112 * 400)
CONFIG = ReplayConfig(num_prefill=1, num_decode=1, router=RouterConfig(local_prefill="never"))


def worker(name: str, cost: StepCost, *paths: LinkCost) -> MeasuredWorker:
    return MeasuredWorker(name, name.startswith("p"), cost, max_step_tokens=256, paths=paths)


def test_each_role_has_the_cost_of_its_typical_worker() -> None:
    workers = [worker("p0", SLOW), worker("p1", FAST), worker("p2", MIDDLE), worker("d0", SLOW), worker("d1", PRIOR)]
    costs = costs_of("a test", workers, [REQUEST])
    assert (costs.prefill, costs.decode, costs.max_step_tokens) == (MIDDLE, SLOW, 256)


def test_the_link_is_the_median_path() -> None:
    paths = [LinkCost(speed, 1e-5) for speed in (1e9, 3e9, 9e9)]
    assert costs_of("a test", [worker("d0", FAST, *paths)], [REQUEST]).link == LinkCost(3e9, 1e-5)
    assert costs_of("a test", [worker("d0", FAST)], [REQUEST]).link == RDMA_400G


def test_what_is_outside_the_workers_is_divided_among_the_messages() -> None:
    costs = costs_of("a test", [worker("d0", FAST)], [REQUEST])
    assert costs.message_delay_s * 2 * 1.5 == pytest.approx(0.1)


def test_the_kv_of_a_token_follows_from_the_longest_moved_prompt() -> None:
    whole = replace(REQUEST, num_prompt_tokens=128, transferred_bytes=128 * 400)
    local = replace(REQUEST, num_prompt_tokens=512, transferred_bytes=0)
    assert costs_of("a test", [worker("d0", FAST)], [REQUEST, whole, local]).token_bytes == 400
    assert costs_of("a test", [worker("d0", FAST)], [local]).token_bytes == 128 * 1024


@pytest.mark.parametrize(
    ("workers", "requests", "message"),
    [
        ([worker("p0", FAST)], [REQUEST], "needs a decode worker"),
        ([worker("d0", FAST)], [], "finished requests"),
        ([worker("d0", PRIOR)], [REQUEST], "no decode worker has fitted"),
        ([worker("d0", FAST), worker("p0", PRIOR)], [REQUEST], "no prefill worker has fitted"),
    ],
)
def test_a_run_that_shows_nothing_is_refused(
    workers: list[MeasuredWorker], requests: list[MeasuredRequest], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        costs_of("a test", workers, requests)


def test_a_simulated_request_takes_what_the_costs_say() -> None:
    costs = costs_of("a test", [worker("p0", SLOW), worker("d0", SLOW)], [replace(REQUEST, in_worker_s=0.497)])
    sent = [replace(REQUEST, sent_at=10.0 + number) for number in range(4)]
    simulated = simulate_run(sent, costs, CONFIG)
    prompt_s = SLOW.step_s + SLOW.prompt_seconds(100) + 2 * 1.5 * costs.message_delay_s
    assert [record.num_prompt_tokens for record in simulated.requests] == [100] * 4
    assert [record.arrived_at for record in simulated.requests] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [record.ttft_s for record in simulated.requests] == pytest.approx([prompt_s] * 4, rel=0.2)
    assert [record.tpot_s for record in simulated.requests] == pytest.approx([SLOW.step_s] * 4, rel=0.2)


def test_a_comparison_pairs_requests_by_their_time() -> None:
    costs = costs_of("a test", [worker("p0", SLOW), worker("d0", SLOW)], [replace(REQUEST, in_worker_s=0.497)])
    simulated = simulate_run([REQUEST, replace(REQUEST, sent_at=11.0)], costs, CONFIG)
    first, second = simulated.requests
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    late = replace(REQUEST, sent_at=11.0, ttft_s=second.ttft_s, tpot_s=second.tpot_s)
    early = replace(REQUEST, sent_at=10.0, ttft_s=first.ttft_s * 2, tpot_s=first.tpot_s)
    found = compare([late, early], simulated)
    assert found.largest_error == pytest.approx(0.5)
    assert found.median_error == 0.0
    assert found.row("TTFT p90").error == pytest.approx(-0.5, rel=0.2)
    assert found.row("TPOT p50").error == 0.0
