"""What the router puts on its metrics page: its requests as they end, its workers as they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from core.handoff import OwnerState
from core.lifecycle import Stage
from core.paths import PathState
from router.events import Fail, Finish
from router.workers import WorkerRecord, WorkerTable
from runtime.metrics import Metric, Metrics, Reading

if TYPE_CHECKING:
    from router.shell import RouterShell


def readings(shell: RouterShell) -> Callable[[], Iterator[Reading]]:
    def read() -> Iterator[Reading]:
        yield Metric.QUEUED, shell.machine.num_queued, {}
        yield Metric.IN_FLIGHT, shell.machine.num_in_flight, {}
        for record in list(shell.machine.workers):
            labels = {"worker": record.worker_id, "role": record.role.value}
            load = record.load
            for column, count in load.ledger.items():
                yield Metric.WORKER_BLOCKS, count, labels | {"column": column.value}
            yield Metric.WORKER_RUNNING, load.num_running, labels
            yield Metric.WORKER_QUEUED_TOKENS, load.num_queued_tokens, labels
            for state, count in load.transfers.items():
                side = "offer" if isinstance(state, OwnerState) else "pull"
                yield Metric.WORKER_TRANSFERS, count, labels | {"side": side, "state": state.value}
            yield Metric.WORKER_TRANSFERRED_BYTES, load.transferred_bytes, labels
            yield Metric.WORKER_TRANSFER_SECONDS, load.transfer_seconds, labels
            yield Metric.WORKER_EXPIRED_LEASES, load.num_expired_leases, labels
            yield Metric.WORKER_PREEMPTIONS, load.num_preemptions, labels
            yield Metric.WORKER_MALFORMED_MESSAGES, load.num_malformed_messages, labels
            yield Metric.WORKER_DROPPED_MESSAGES, load.num_dropped_messages, labels
            yield from _paths(record, shell.machine.workers)

    return read


def _paths(record: WorkerRecord, workers: WorkerTable) -> Iterator[Reading]:
    """Of a worker, to those peers that are still there."""
    paths = [path for path in record.load.paths if workers.get(path.peer) is not None]
    counts = Counter(path.state for path in paths)
    for state in PathState:
        yield Metric.PATHS, counts[state], {"worker": record.worker_id, "state": state.value}
    for path in paths:
        labels = {"worker": record.worker_id, "peer": path.peer, "lane": path.lane.value}
        if path.bytes_per_s:
            yield Metric.PATH_BANDWIDTH, path.bytes_per_s, labels
        if path.latency_s:
            yield Metric.PATH_LATENCY, path.latency_s, labels


def record_end(metrics: Metrics, result: Finish | Fail, arrived_at: float, now: float) -> None:
    metrics.record(Metric.REQUEST_DURATION, now - arrived_at)
    if isinstance(result, Fail):
        metrics.record(Metric.REQUESTS, 1, path="none", end=result.error.code.value)
        return
    outcome = result.outcome
    metrics.record(Metric.REQUESTS, 1, path=outcome.path.value, end=outcome.finish_reason.value)
    metrics.record(Metric.TIME_TO_FIRST_TOKEN, outcome.first_token_s)
    if outcome.num_output_tokens > 1:
        decode_s = outcome.timeline.seconds_in(Stage.DECODE)
        metrics.record(Metric.TIME_PER_OUTPUT_TOKEN, decode_s / (outcome.num_output_tokens - 1))
    metrics.record(Metric.TOKENS, outcome.num_prompt_tokens, kind="prompt")
    metrics.record(Metric.TOKENS, outcome.cached_tokens, kind="cached")
    metrics.record(Metric.TOKENS, outcome.num_output_tokens, kind="output")
    if outcome.decode is not None:
        metrics.record(Metric.TRANSFERRED_BYTES, outcome.decode.transferred_bytes)
