"""Readings of the router at each scrape: its queue, and the newest reports of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from core.cost.step_cost import StepWork
from core.handoff import OwnerState
from core.lifecycle import MoveReason, ServiceRole, WorkerState
from core.paths import PathState
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import STEP_BOUNDS_S, WorkerLoad
from router.requests.moves import MOVED, MoveOutcome
from router.requests.router_view import RouterView
from router.routing.worker_record import WorkerRecord
from runtime.prometheus.metric_series import Buckets
from runtime.prometheus.metrics import Metric
from runtime.prometheus.metrics_page import Reading

COUNTED_STATES = (WorkerState.SERVING, WorkerState.DRAINING)
NO_MOVES = {MoveOutcome(reason, MOVED): 0 for reason in MoveReason}  # a rate needs a series before the first move
IN_USE = (Column.HELD, Column.LEASED, Column.INCOMING)


def readings(router: RouterView) -> Callable[[], Iterator[Reading]]:
    def read() -> Iterator[Reading]:
        yield Metric.QUEUED, router.num_queued, {}
        yield Metric.IN_FLIGHT, router.num_in_flight, {}
        for code, count in router.num_retries().items():
            yield Metric.RETRIES, count, {"reason": code.value}
        for (reason, outcome), count in (NO_MOVES | router.num_moves()).items():
            yield Metric.MOVES, count, {"reason": reason.value, "outcome": outcome}
        records = list(router.workers())
        states = Counter((record.role, record.load.state) for record in records)
        for role in (ServiceRole.PREFILL, ServiceRole.DECODE):
            for state in COUNTED_STATES:
                yield Metric.WORKERS, states[role, state], {"role": role.value, "state": state.value}
        for record in records:
            labels = {"worker": record.worker_id, "role": record.role.value}
            yield from _load(record.load, labels)
            yield from _steps(record.load, labels)
            yield from _transfers(record.load, labels)
            yield from _paths(record, router)

    return read


def _load(load: WorkerLoad, labels: dict[str, str]) -> Iterator[Reading]:
    for column, count in load.ledger.items():
        yield Metric.WORKER_BLOCKS, count, labels | {"column": column.value}
    num_blocks = sum(load.ledger.values())
    in_use = sum(load.ledger.get(column, 0) for column in IN_USE)
    yield Metric.WORKER_KV_USAGE, in_use / num_blocks if num_blocks else 0.0, labels
    yield Metric.WORKER_RUNNING, load.num_running, labels
    yield Metric.WORKER_WAITING, load.num_waiting, labels
    yield Metric.WORKER_PULLS_WAITING, load.num_pulls_waiting, labels
    yield Metric.WORKER_QUEUED_TOKENS, load.num_queued_tokens, labels
    yield Metric.WORKER_PROMPT_SECONDS, sum(load.prompt_backlog), labels
    yield Metric.WORKER_PREEMPTIONS, load.num_preemptions, labels


def _steps(load: WorkerLoad, labels: dict[str, str]) -> Iterator[Reading]:
    decodes = StepWork(load.num_decoding, load.decode_context, 0, 0.0)
    yield Metric.WORKER_STEP_SECONDS, load.step_cost.seconds(decodes), labels
    yield Metric.WORKER_DECODE_STEPS, Buckets(STEP_BOUNDS_S, load.decode_steps, load.decode_step_seconds), labels
    yield Metric.WORKER_BATCH_SEQUENCES, load.batch_sequences, labels
    yield Metric.WORKER_BATCH_TOKENS, load.batch_tokens, labels
    yield Metric.WORKER_BUSY_SECONDS, load.busy_seconds, labels
    yield Metric.WORKER_PREFILLED_TOKENS, load.num_prefilled_tokens, labels
    yield Metric.WORKER_SAMPLED_TOKENS, load.num_sampled_tokens, labels
    yield Metric.WORKER_DRAFTS, load.num_drafts, labels
    yield Metric.WORKER_RIGHT_DRAFTS, load.num_right_drafts, labels
    yield Metric.WORKER_FLOP, load.flop, labels
    yield Metric.WORKER_MEMORY_BYTES, load.memory_bytes, labels
    if load.flop_use:  # else the peak is not known, or no step has run
        yield Metric.WORKER_FLOP_USE, load.flop_use, labels
    if load.bandwidth_use:
        yield Metric.WORKER_BANDWIDTH_USE, load.bandwidth_use, labels


def _transfers(load: WorkerLoad, labels: dict[str, str]) -> Iterator[Reading]:
    for state, count in load.transfers.items():
        side = "offer" if isinstance(state, OwnerState) else "pull"
        yield Metric.WORKER_TRANSFERS, count, labels | {"side": side, "state": state.value}
    yield Metric.WORKER_TRANSFERRED_BYTES, load.transferred_bytes, labels
    yield Metric.WORKER_TRANSFER_SECONDS, load.transfer_seconds, labels
    yield Metric.WORKER_EXPIRED_LEASES, load.num_expired_leases, labels
    yield Metric.WORKER_MALFORMED_MESSAGES, load.num_malformed_messages, labels
    yield Metric.WORKER_DROPPED_MESSAGES, load.num_dropped_messages, labels
    yield Metric.WORKER_CORRUPT_BLOCKS, load.num_corrupt_blocks, labels
    yield Metric.WORKER_DISK_BLOCKS, load.num_disk_blocks, labels
    yield Metric.WORKER_DISK_READS, load.num_disk_reads, labels
    yield Metric.WORKER_DISK_WRITES, load.num_disk_writes, labels
    yield Metric.WORKER_DISK_FAILURES, load.num_disk_failures, labels


def _paths(record: WorkerRecord, router: RouterView) -> Iterator[Reading]:
    """The paths of a worker to peers that have not left. The loop changes `record.paths` while this thread reads."""
    paths = [path for path in list(record.paths.values()) if router.worker(path.peer) is not None]
    counts = Counter(path.state for path in paths)
    for state in PathState:
        yield Metric.PATHS, counts[state], {"worker": record.worker_id, "state": state.value}
    for path in paths:
        labels = {"worker": record.worker_id, "peer": path.peer, "lane": path.lane.value}
        if path.bytes_per_s:
            yield Metric.PATH_BANDWIDTH, path.bytes_per_s, labels
        if path.latency_s:
            yield Metric.PATH_LATENCY, path.latency_s, labels
