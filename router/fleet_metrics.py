"""The metrics of the router: one record for each request that ends, and readings from the reports of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from core.errors import TandemError
from core.handoff import OwnerState
from core.lifecycle import Stage
from core.paths import PathState
from core.step_cost import StepWork
from router.choice_stream import PROVIDER, ChoiceStream, phase_timings
from router.events import Fail, Finish
from router.machine import RouterMachine
from router.worker_record import WorkerRecord
from router.workers import WorkerTable
from runtime.metrics import REQUEST, Metric
from runtime.metrics_page import Metrics, Reading

# Phases of PhaseTimings. The time to the first token and the total have metrics of their own.
PHASES = ("tokenize", "router_queue", "prefill_queue", "prefill", "decode")
TRANSFER_PHASES = ("transfer", "transfer_exposed")  # of requests whose KV moved between workers


def readings(machine: RouterMachine) -> Callable[[], Iterator[Reading]]:
    def read() -> Iterator[Reading]:
        yield Metric.QUEUED, machine.num_queued, {}
        yield Metric.IN_FLIGHT, machine.num_in_flight, {}
        for record in list(machine.workers):
            labels = {"worker": record.worker_id, "role": record.role.value}
            load = record.load
            for column, count in load.ledger.items():
                yield Metric.WORKER_BLOCKS, count, labels | {"column": column.value}
            yield Metric.WORKER_RUNNING, load.num_running, labels
            yield Metric.WORKER_QUEUED_TOKENS, load.num_queued_tokens, labels
            yield Metric.WORKER_PROMPT_SECONDS, sum(load.prompt_backlog), labels
            decodes = StepWork(load.num_decoding, load.decode_context, 0, 0.0)
            yield Metric.WORKER_STEP_SECONDS, load.step_cost.seconds(decodes), labels
            for state, count in load.transfers.items():
                side = "offer" if isinstance(state, OwnerState) else "pull"
                yield Metric.WORKER_TRANSFERS, count, labels | {"side": side, "state": state.value}
            yield Metric.WORKER_TRANSFERRED_BYTES, load.transferred_bytes, labels
            yield Metric.WORKER_TRANSFER_SECONDS, load.transfer_seconds, labels
            yield Metric.WORKER_EXPIRED_LEASES, load.num_expired_leases, labels
            yield Metric.WORKER_PREEMPTIONS, load.num_preemptions, labels
            yield Metric.WORKER_MALFORMED_MESSAGES, load.num_malformed_messages, labels
            yield Metric.WORKER_DROPPED_MESSAGES, load.num_dropped_messages, labels
            yield Metric.WORKER_CORRUPT_BLOCKS, load.num_corrupt_blocks, labels
            yield from _paths(record, machine.workers)

    return read


def _paths(record: WorkerRecord, workers: WorkerTable) -> Iterator[Reading]:
    """The paths of a worker to peers that have not left."""
    paths = [path for path in record.paths.values() if workers.get(path.peer) is not None]
    counts = Counter(path.state for path in paths)
    for state in PathState:
        yield Metric.PATHS, counts[state], {"worker": record.worker_id, "state": state.value}
    for path in paths:
        labels = {"worker": record.worker_id, "peer": path.peer, "lane": path.lane.value}
        if path.bytes_per_s:
            yield Metric.PATH_BANDWIDTH, path.bytes_per_s, labels
        if path.latency_s:
            yield Metric.PATH_LATENCY, path.latency_s, labels


def record_refusal(metrics: Metrics, error: TandemError) -> None:
    metrics.record(Metric.REQUESTS, 1, path="none", end=error.code.value)


def record_end(metrics: Metrics, stream: ChoiceStream, result: Finish | Fail, now: float) -> None:
    labels = dict(zip(REQUEST, (stream.operation, PROVIDER, stream.model), strict=True))
    error_type = result.error.code.value if isinstance(result, Fail) else ""
    metrics.record(Metric.REQUEST_DURATION, now - stream.arrived_at, **labels, error_type=error_type)
    if isinstance(result, Fail):
        record_refusal(metrics, result.error)
        return
    outcome = result.outcome
    metrics.record(Metric.REQUESTS, 1, path=outcome.path.value, end=outcome.finish_reason.value)
    metrics.record(Metric.TIME_TO_FIRST_TOKEN, outcome.first_token_s, **labels)
    if outcome.attempts == 1:  # else the path tells nothing of the attempt that was predicted
        ratio = outcome.first_token_s / outcome.predicted_first_token_s
        metrics.record(Metric.TTFT_PREDICTION_RATIO, ratio, path=outcome.path.value)
    if outcome.num_output_tokens > 1:
        decode_s = outcome.timeline.seconds_in(Stage.DECODE)
        metrics.record(Metric.TIME_PER_OUTPUT_TOKEN, decode_s / (outcome.num_output_tokens - 1), **labels)
    metrics.record(Metric.TOKENS, outcome.num_prompt_tokens, kind="prompt")
    metrics.record(Metric.TOKENS, outcome.cached_tokens, kind="cached")
    metrics.record(Metric.TOKENS, outcome.num_output_tokens, kind="output")
    timings = phase_timings(outcome, now - stream.arrived_at)
    moved = outcome.decode is not None and outcome.decode.transferred_bytes > 0
    for phase in (*PHASES, *TRANSFER_PHASES) if moved else PHASES:
        metrics.record(Metric.PHASE_DURATION, getattr(timings, f"{phase}_ms") / 1e3, phase=phase)
