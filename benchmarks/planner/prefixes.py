"""Prefixes from peers in virtual time: 8 + 8 workers, two traces at three loads, two models, paths of three speeds.

    never      no worker reads from a peer
    auto       the production policy
    always     the longest cached prefix is read, whatever its price
    infinite   auto, with pools and paths without a limit

Each row has the hits as a share of those of one cache without a limit, and TTFT and goodput: medians of the seeds, and
behind them the lowest and the highest. `python -m benchmarks.planner.prefixes --help` lists the axes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.planner.sizings import fleet_config
from benchmarks.report import Report, parser_of
from benchmarks.traces import CONVERSATION, TRACES
from core.cost.step_cost import StepCost
from core.kv_layout import KVLayout
from router.routing.policy import SecondsPolicy, prefix_read
from router.routing.question import Candidate, Option, RoutingQuestion
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
FIGURES = {"hits": 3, "TTFT p50, ms": 0, "p90, ms": 0, "goodput, /s": 2, "inside": 3}  # -> digits
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


Setting = tuple[str, str, float, float, float]  # model, trace, load, GB/s of a path, size of the pools


@dataclass(frozen=True, slots=True)
class PrefixRun:
    setting: Setting
    policy: str
    seed: int
    traces: Path
    limit: int

    def config(self) -> ReplayConfig:
        name, _, load, speed_gb, pools = self.setting
        model, is_endless = model_of(name, self.traces), self.policy == INFINITE
        link = LinkCost(ENDLESS_BYTES_PER_S if is_endless else speed_gb * 1e9, LATENCY_S)
        config = fleet_config(
            NUM_WORKERS, NUM_WORKERS, model.cost, model.slo_ttft_s, model.slo_tpot_s,
            layout=model.layout, load=load, seed=self.seed, link=link,
        )  # fmt: skip
        config = replace(config, router=replace(config.router, peer_prefixes=NEVER if self.policy == NEVER else "auto"))
        config = replace(
            config,
            prefill_pool_tokens=int(config.prefill_pool_tokens * pools),
            decode_pool_tokens=int(config.decode_pool_tokens * pools),
        )
        if self.policy == ALWAYS:
            return replace(config, new_policy=lambda: AlwaysPull(config.router))
        if is_endless:
            return replace(config, prefill_pool_tokens=ENDLESS_TOKENS, decode_pool_tokens=ENDLESS_TOKENS)
        return config

    def run(self, on_progress: CountEnded) -> tuple[float, ...]:
        """One for each of `FIGURES`."""
        workload = workload_of(self.setting[1], self.traces, self.limit, self.seed)
        found = Replay(workload, self.config()).run(on_progress)
        ttft_ms = [1e3 * percentile(found.ttft_s, percent) for percent in (50, 90)]
        return found.hit_share, *ttft_ms, found.goodput, found.attainment


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main() -> None:
    parser = parser_of(__doc__)
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
    settings: list[Setting] = [
        (model, trace, load, speed, pools)
        for model in options.models
        for trace in options.workloads
        for load in options.loads or LOADS[trace]
        for speed in options.speeds
        for pools in options.pools
    ]
    seeds, rows = range(options.seeds), []
    every = list(itertools.product(settings, options.policies))
    runs = [PrefixRun(*row, seed, options.traces, options.requests) for row in every for seed in seeds]
    results = run_all(runs, options.processes, lambda _: None)
    for number, (setting, policy) in enumerate(every):
        of_seeds = zip(*results[number * len(seeds) : (number + 1) * len(seeds)], strict=True)
        rows.append((*setting, policy, *map(_spread, of_seeds, FIGURES.values())))
    Report("prefixes").add_table(("model", "trace", "load", "GB/s", "pools", "policy", *FIGURES), rows)


if __name__ == "__main__":
    main()
