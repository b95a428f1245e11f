"""Prefixes from peers in virtual time: 8 + 8 workers, two traces at three loads, two models, paths of three speeds.

    never      no worker reads from a peer
    auto       the production policy
    always     the longest cached prefix is read, whatever its price
    infinite   auto, with pools and paths without a limit

Each row has the hits as a share of those of one cache without a limit, and TTFT and goodput: medians of the seeds, and
behind them the lowest and the highest. `python -m benchmarks.planner.prefixes --help` lists the axes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.report import OUTPUT_DIR
from benchmarks.traces import CONVERSATION, TRACES
from core.config import RouterConfig, SchedulerConfig
from core.cost.step_cost import StepCost
from core.kv_layout import KVLayout
from router.routing.policy import Candidate, Option, RoutingQuestion, SecondsPolicy, prefix_read
from simulator.calibration.public_points import Filters, fit_file
from simulator.processes import CountEnded, run_all
from simulator.replay import workloads
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import percentile
from simulator.replay.workloads import Workload
from simulator.shells.cost_model import H100_8B, LinkCost, layout_8b

NEVER, AUTO, ALWAYS, INFINITE = "never", "auto", "always", "infinite"
POLICIES = (NEVER, AUTO, ALWAYS, INFINITE)
AGENTS, CONVERSATIONS = "agents", "conversation"
LOADS = {AGENTS: (1.0, 4.0, 16.0), CONVERSATIONS: (0.4, 0.8, 1.2)}
NUM_WORKERS = 8  # of each role
LATENCY_S = 20e-6  # of a path
ENDLESS_TOKENS, ENDLESS_BYTES_PER_S = 20_000_000, 1e15


@dataclass(frozen=True, slots=True)
class Model:
    cost: StepCost
    layout: KVLayout
    slo_ttft_s: float  # about what the longest twentieth of the prompts takes on an idle worker
    slo_tpot_s: float


def model_of(name: str, traces: Path) -> Model:
    """A worker of the 8B model has one H100, one of the 70B model four."""
    if name == "8b":
        return Model(H100_8B, layout_8b(64), 1.0, 0.05)
    fitted = fit_file(traces / "silicon_sample.csv", Filters("llama-3.1-70b", "h100_sxm", "vllm", 4))
    return Model(fitted.cost, KVLayout("llama-3.1-70b", "bfloat16", 80, 8, 64, 128), 3.0, 0.1)


@cache
def workload_of(name: str, traces: Path, limit: int, seed: int) -> Workload:
    if name == AGENTS:
        sessions = workloads.agent_sessions(traces / "agent_sessions.jsonl", seed=seed)
        return workloads.repeated_sessions(sessions, max(1, limit // len(sessions.requests)))
    return workloads.mooncake(traces / CONVERSATION, limit)


class AlwaysPull(SecondsPolicy):
    """To it, every read and every path is free. So it reads whatever a peer has."""

    def choose(self, question: RoutingQuestion) -> Candidate | None:
        chosen = super().choose(
            replace(
                question,
                prefill=_free(question.prefill),
                decode=_free(question.decode),
                sources=_free(question.sources),
            )
        )
        if chosen is None or chosen.read.source is None:
            return chosen
        views = {view.worker_id: view for view, _ in (*question.prefill, *question.decode, *question.sources)}
        reader, owner = views[chosen.prefill_worker or chosen.decode_worker], views[chosen.read.source]
        # The limit of time of the read follows from its true price.
        priced = prefix_read(
            question, reader, chosen.cached_tokens - chosen.read.num_tokens, owner, chosen.cached_tokens
        )
        return chosen if priced is None else chosen._replace(read=chosen.read._replace(seconds=priced.seconds))


def _free(options: Sequence[Option]) -> list[Option]:
    return [(replace(view, block_bytes=0, link_until=0.0), cached) for view, cached in options]


@dataclass(frozen=True, slots=True)
class PrefixResult:
    hit_share: float
    ttft_p50_s: float
    ttft_p90_s: float
    goodput: float  # requests/s within the limits
    attainment: float
    num_failed: int


@dataclass(frozen=True, slots=True)
class PrefixRun:
    model: str
    trace: str
    load: float
    speed_gb: float
    pools: float
    policy: str
    seed: int
    traces: Path
    limit: int

    @property
    def beside(self) -> tuple[str, str, float, float, float]:
        """Runs that differ in policy or seed only have it in common."""
        return self.model, self.trace, self.load, self.speed_gb, self.pools

    def config(self) -> ReplayConfig:
        model, is_endless = model_of(self.model, self.traces), self.policy == INFINITE
        config = ReplayConfig(
            num_prefill=NUM_WORKERS,
            num_decode=NUM_WORKERS,
            layout=model.layout,
            load=self.load,
            seed=self.seed,
            prefill_cost=model.cost,
            decode_cost=model.cost,
            link=LinkCost(ENDLESS_BYTES_PER_S if is_endless else self.speed_gb * 1e9, LATENCY_S),
            slo_ttft_s=model.slo_ttft_s,
            slo_tpot_s=model.slo_tpot_s,
            router=RouterConfig(
                max_in_flight_per_worker=1024,
                slo_ttft_ms=model.slo_ttft_s * 1e3,
                peer_prefixes="never" if self.policy == NEVER else "auto",
            ),
            scheduler=SchedulerConfig(
                max_batched_tokens=8192, max_running=256, max_waiting=4096, slo_itl_ms=model.slo_tpot_s * 1e3
            ),
        )
        config = replace(
            config,
            prefill_pool_tokens=int(config.prefill_pool_tokens * self.pools),
            decode_pool_tokens=int(config.decode_pool_tokens * self.pools),
        )
        if self.policy == ALWAYS:
            return replace(config, new_policy=lambda: AlwaysPull(config.router))
        if is_endless:
            return replace(config, prefill_pool_tokens=ENDLESS_TOKENS, decode_pool_tokens=ENDLESS_TOKENS)
        return config

    def run(self, on_progress: CountEnded) -> PrefixResult:
        workload = workload_of(self.trace, self.traces, self.limit, self.seed)
        result = Replay(workload, self.config()).run(on_progress)
        times = result.ttft_s
        return PrefixResult(
            result.hit_share, percentile(times, 50), percentile(times, 90), result.goodput, result.attainment,
            result.num_failed,
        )  # fmt: skip


def table(runs: Sequence[PrefixRun], results: Sequence[PrefixResult]) -> str:
    """In Markdown, one row for each policy of each setting."""
    by_row: dict[tuple[object, ...], list[PrefixResult]] = {}
    for run, result in zip(runs, results, strict=True):
        by_row.setdefault((*run.beside, run.policy), []).append(result)
    lines = [
        "| model | trace | load | GB/s | pools | policy | hits | TTFT p50, ms | p90, ms | goodput, /s | inside |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, found in by_row.items():
        cells = [
            _spread([one.hit_share for one in found], 3),
            _spread([one.ttft_p50_s * 1e3 for one in found], 0),
            _spread([one.ttft_p90_s * 1e3 for one in found], 0),
            _spread([one.goodput for one in found], 2),
            _spread([one.attainment for one in found], 3),
        ]
        lines.append("| " + " | ".join([*map(str, row), *cells]) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="the directory of the traces")
    parser.add_argument("--models", nargs="+", choices=("8b", "70b"), default=["8b", "70b"])
    parser.add_argument("--workloads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--loads", nargs="+", type=float, help="(default: three of each workload)")
    parser.add_argument("--speeds", nargs="+", type=float, default=[2.0, 10.0, 50.0], help="of each path, in GB/s")
    parser.add_argument("--pools", nargs="+", type=float, default=[1.0, 0.15], help="sizes, as shares of an H100's")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=2000, help="of each workload, in whole sets of sessions")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"no traces in {options.traces}: benchmarks/traces.py names them")
    runs = [
        PrefixRun(model, trace, load, speed, pools, policy, seed, options.traces, options.requests)
        for model in options.models
        for trace in options.workloads
        for load in options.loads or LOADS[trace]
        for speed in options.speeds
        for pools in options.pools
        for policy in options.policies
        for seed in range(options.seeds)
    ]
    text = table(runs, run_all(runs, options.processes, lambda _: None))
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    (OUTPUT_DIR / "prefixes.md").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
