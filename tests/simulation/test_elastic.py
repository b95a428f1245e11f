"""Pools that change their sizes in virtual time, with the machines of the fleet, its planner, routers and workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.planner.elastic import ElasticReplay
from core.config import PlannerConfig, RouterConfig
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole
from core.traffic import RouterTraffic
from fleet.law.events import FleetMessage, ScaleTo, SwitchRole
from fleet.planner.planner import Planner
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.workloads import Synthetic, Workload, by_curve, synthetic
from simulator.shells.cost_model import layout_8b

P, D = ServiceRole.PREFILL, ServiceRole.DECODE
REQUESTS = synthetic(Synthetic(num_requests=400, prompt_tokens=20_000, output_tokens=30, spread=0.3), seed=1)


def config(num_prefill: int, num_decode: int) -> ReplayConfig:
    router = RouterConfig(max_in_flight_per_worker=1024, slo_ttft_ms=3000.0)
    sizes = {"num_prefill": num_prefill, "num_decode": num_decode}
    layout = layout_8b(1024)  # few blocks, because work with blocks takes most of the time of these tests
    return ReplayConfig(
        **sizes,  # type: ignore[arg-type]
        layout=layout,
        check_every_s=10.0,
        slo_ttft_s=3.0,
        slo_tpot_s=0.1,
        router=router,
    )


def constant(rate: float, duration_s: float) -> Workload:
    return by_curve(REQUESTS, lambda _: rate, rate, duration_s)


@dataclass
class Script:
    """Acts at given seconds."""

    actions: dict[int, ScaleTo | SwitchRole]
    seen: list[RouterTraffic] = field(default_factory=list)
    second: int = 0

    def note(self, router_id: str, traffic: RouterTraffic, now: float) -> None:
        del router_id, now
        self.seen.append(traffic)

    def plan(self, status: FleetStatus, now: float) -> list[ScaleTo | SwitchRole | FleetMessage]:
        del status, now
        self.second += 1
        return [action for second, action in self.actions.items() if second == self.second]


def test_workers_start_leave_and_switch_and_no_request_fails_or_starts_anew() -> None:
    script = Script(
        {10: ScaleTo({P: 3, D: 3}), 40: SwitchRole("prefill-0", D), 60: ScaleTo({D: 1}), 90: ScaleTo({P: 1})}
    )
    result = ElasticReplay(constant(3.0, 120.0), config(2, 2), script, start_s=15.0).run_elastic()
    replay = result.replay
    assert (replay.num_failed, result.num_recomputed, result.num_switches) == (0, 0, 1)
    assert [record.num_output_tokens for record in replay.requests] == [
        request.num_output_tokens for request in constant(3.0, 120.0).requests
    ]
    sizes = [(change.num_prefill, change.num_decode) for change in result.changes]
    assert sizes == [(2, 2), (3, 3), (2, 4), (2, 1), (1, 1)]
    assert {record.decode_worker.partition(".")[0] for record in replay.requests} > {"decode-2", "prefill-0"}
    first = min(record.arrived_at for record in replay.requests if record.decode_worker.startswith("decode-2"))
    assert first >= 10.0 + 15.0 - 2.0, "a worker takes its time to start"
    last = script.seen[-1].totals
    assert last.num_arrived == replay.num_requests
    assert last.prompt_tokens >= 0.9 * sum(record.num_prompt_tokens for record in replay.requests)
    assert 4 * 120 / 3600 < result.worker_hours < 7 * 120 / 3600


def test_the_planner_follows_a_step_and_comes_back() -> None:
    step = by_curve(REQUESTS, lambda at: 5.0 if 50.0 < at < 120.0 else 1.0, 5.0, 300.0)
    planner = Planner(PlannerConfig(enabled=True, max_prefill=6, max_decode=6, start_s=10.0))
    result = ElasticReplay(step, config(1, 1), planner, start_s=10.0).run_elastic()
    assert result.replay.num_failed == 0
    assert result.replay.attainment > 0.85
    sizes = [change.num_prefill + change.num_decode for change in result.changes]
    assert max(sizes) >= 4
    assert sizes[-1] <= max(sizes) - 2
    assert any("wants" in note for note in result.notes)
