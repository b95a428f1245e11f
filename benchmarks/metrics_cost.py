"""Measures the time of a decode step of 64 streams, and the share of it that metrics take: `make bench-metrics`.

    on the worker, in each step     the durations and operations of the step, and the blocks that each sequence holds
    on the router, in each step     a gap between tokens for each stream
    on the router, for each choice  every metric of an ended choice and of its routing decision, divided by its tokens

The step is measured with the kernels and the model of `--model`, on the cores that this process may use. The metrics
are timed alone, in CPU time. Each figure is the least of several runs: other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.report import Line, Report
from core.config import EngineConfig, RouterConfig, TelemetryConfig
from core.cost.model_work import ModelSizes, Peak
from core.cost.step_cost import work_of
from core.lifecycle import FinishReason, RequestPath, Stage, Timeline
from core.request import Request, SamplingParams
from core.step import SampledToken, ScheduledChunk, SequenceView, StepPlan
from engine.factory import build_runner
from engine.runner import Runner, run_step
from router.operations.request_metrics import RequestMetrics
from router.requests.events import DecodeResult, Finish, Outcome, PrefillResult, Promise
from router.routing.policy import Candidate
from router.serving.choice_stream import ChoiceStream
from runtime.prometheus.metrics import Metric
from runtime.prometheus.metrics_page import Metrics
from worker.block_meter import BlockMeter
from worker.step_stats import StepStats

NUM_STREAMS = 64
CONTEXT = 256  # tokens of each sequence
OUTPUT_TOKENS = 128  # of each choice: an end is paid once in this many tokens
NUM_RUNS = 7
SIZES = ModelSizes(106_000_000, 28_000_000, 2.0, 4.0 * 30 * 576, 23_040.0)


def best_s(work: Callable[[], None], num_times: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of one call, by default of CPU time."""
    best = float("inf")
    for _ in range(NUM_RUNS):
        started = clock()
        for _ in range(num_times):
            work()
        best = min(best, (clock() - started) / num_times)
    return best


def decode_plan(block_size: int) -> StepPlan:
    """One token of each stream, whose blocks do not overlap."""
    num_blocks = CONTEXT // block_size + 1
    chunks = []
    for stream in range(NUM_STREAMS):
        table = list(range(stream * num_blocks, (stream + 1) * num_blocks))
        view = SequenceView(f"s{stream}", [7] * CONTEXT, CONTEXT - 1, table, SamplingParams(max_tokens=OUTPUT_TOKENS))
        chunks.append(ScheduledChunk(view, CONTEXT - 1, 1, samples=True, promised=False))
    return StepPlan(1, tuple(chunks))


def step_seconds(model: str) -> float:
    runner: Runner = build_runner(EngineConfig(model=model, kv_memory_mb=1024))
    plan = decode_plan(runner.layout.block_size)
    run_step(runner, plan)  # warms up
    seconds = best_s(lambda: cast(None, run_step(runner, plan)), 1, time.perf_counter)
    runner.close()
    return seconds


def worker_seconds() -> float:
    stats, meter, plan = StepStats(SIZES, Peak(1e12, 1e11)), BlockMeter(), decode_plan(16)

    def step() -> None:
        stats.record(work_of(plan), 0.02)
        meter.note_planned(plan.chunks, 5.0)
        _ = stats.decode_steps, stats.flop_use, stats.bandwidth_use

    return best_s(step, 500)


def _stream(number: int) -> ChoiceStream:
    request = Request(f"r{number}", (1,), 1, SamplingParams(max_tokens=OUTPUT_TOKENS), tenant=f"tenant-{number}")
    absent = cast(Any, None)
    return ChoiceStream(0, "model", "chat", request, "r", 0.0, absent, absent, lambda: None, absent)


def router_seconds() -> tuple[float, float]:
    """Of a step of all streams, and of the end of one choice."""
    metrics = Metrics(TelemetryConfig(), lambda: ())
    requests, streams = RequestMetrics(metrics, RouterConfig()), [_stream(number) for number in range(NUM_STREAMS)]

    def step() -> None:
        for stream in streams:
            requests.note_tokens(stream, 1, time.monotonic())

    history = [(Stage.TOKENIZE, 0.0, 0.1), (Stage.QUEUE, 0.1, 0.2), (Stage.PREFILL, 0.2, 0.5), (Stage.DECODE, 0.5, 3.0)]
    outcome = Outcome(
        FinishReason.LENGTH, CONTEXT, OUTPUT_TOKENS, 64, RequestPath.DISAGGREGATED, 1,
        Timeline(Stage.FINISHED, 3.0, history), Candidate("p", "d", 64, 192, 5, 0), 0.5, 0.5,
        PrefillResult(0, SampledToken(1), None, 64, 0.1, 0.2, kv_block_seconds=3.0),
        DecodeResult(FinishReason.LENGTH, OUTPUT_TOKENS, 64, 0.0, 0.0, 0.1, 0.0, 4096, (), 4.0, 12, 4),
        Promise(0.5, 0.02, RequestPath.DISAGGREGATED), 7.0, 0.1,
    )  # fmt: skip
    finish, decisions = Finish("r0", outcome), metrics.buckets(Metric.DECISION_DURATION)

    def end() -> None:
        requests.ended(streams[0], finish, 3.0)
        decisions.observe(1e-4)

    return best_s(step, 500), best_s(end, 500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:smollm2-135m")
    model = parser.parse_args().model
    report = Report("metrics_cost")
    step_s, worker_s, (gaps_s, end_s) = step_seconds(model), worker_seconds(), router_seconds()
    ends_s = end_s * NUM_STREAMS / OUTPUT_TOKENS
    report.add(Line(f"a decode step of {NUM_STREAMS} streams, {model}", step_s * 1e3, "ms"))
    report.add(Line("metrics on the worker, a step", worker_s * 1e6, "us"))
    report.add(Line("metrics on the router, gaps between the tokens of a step", gaps_s * 1e6, "us"))
    report.add(Line(f"metrics on the router, ends of choices with {OUTPUT_TOKENS} tokens, a step", ends_s * 1e6, "us"))
    share = (worker_s + gaps_s + ends_s) / step_s * 100
    report.add(Line("all metrics of a step, share of the step", share, "%", most=1.0))
    report.write()


if __name__ == "__main__":
    main()
