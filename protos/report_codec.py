"""Converts between the reports of a worker (core/scheduling/worker_load.py) and WorkerReport (worker.proto).

Decoding is strict: a value that does not fit raises `InvalidRequest`, which names the field. A router decodes thousands
of reports a second, so `decode_load` and `decode_changes` convert only what a report has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from core.cost.step_cost import StepCost
from core.errors import InvalidRequest
from core.handoff import LIVE_STATES
from core.paths import PathStatus
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import BlockRun, RouterCalls, WorkerChanges, WorkerLoad
from protos import codec
from protos.path_codec import PATH_STATE_FROM_WIRE, decode_path, encode_path
from tandem_client.stubs import worker_pb2

_COUNTS = (
    "num_running", "num_waiting", "num_calls", "num_pulls_waiting", "num_queued_tokens", "num_prefilled_tokens",
    "num_sampled_tokens", "num_transfers", "transferred_bytes", "num_expired_leases", "num_preemptions",
    "num_malformed_messages", "num_dropped_messages", "transfer_seconds", "num_corrupt_blocks", "max_step_tokens",
    "step_limit_s", "num_decoding", "decode_context", "num_promised_blocks", "num_released_blocks",
    "batch_sequences", "batch_tokens", "busy_seconds", "decode_step_seconds", "flop", "memory_bytes", "flop_use",
    "bandwidth_use", "slo_itl_s", "num_drafts", "num_right_drafts", "takes_moves",
    "gives_prefixes", "num_disk_blocks", "num_disk_reads", "num_disk_writes", "num_disk_failures",
    "disk_bytes_per_s",
)  # fmt: skip
MAX_SECONDS = 1e9  # of a price: a product of two such numbers and a count of tokens is still finite
_COLUMNS = tuple(Column)
_STEP_COST = ("step_s", "sequence_s", "context_s", "token_s", "pair_s")
_read_step_cost = attrgetter(*_STEP_COST)
_read_counts = attrgetter(*_COUNTS)
_read_ledger = attrgetter(*(column.value for column in Column))
_read_transfers = attrgetter(*(state.value for state in LIVE_STATES))


def encode_load(load: WorkerLoad, paths: Iterable[PathStatus] = ()) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        state=codec.STATE_TO_WIRE[load.state],
        ledger=codec.encode_ledger(load.ledger),
        transfers=worker_pb2.TransferCounts(**{state.value: count for state, count in load.transfers.items()}),
        router_calls=[
            worker_pb2.RouterCalls(router_id=router_id, last_call=calls.last_call, num_open=calls.num_open)
            for router_id, calls in load.router_calls.items()
        ],
        paths=map(encode_path, paths),
        step_cost=worker_pb2.StepCost(**{name: getattr(load.step_cost, name) for name in _STEP_COST}),
        prompt_backlog=load.prompt_backlog,
        decode_steps=load.decode_steps,
        **{name: getattr(load, name) for name in _COUNTS},
    )


def decode_load(wire: worker_pb2.LoadReport) -> WorkerLoad:
    if wire.state not in codec.STATE_FROM_WIRE:
        raise InvalidRequest("load.state", f"{wire.state} is not a WorkerState")
    step_cost = _read_step_cost(wire.step_cost)
    if not all(0.0 <= seconds <= MAX_SECONDS for seconds in step_cost) or not any(step_cost):
        raise InvalidRequest("load.step_cost", f"must be in [0, {MAX_SECONDS:g}] and not all 0, is {step_cost}")
    if not all(0.0 <= seconds <= MAX_SECONDS for seconds in wire.prompt_backlog):
        raise InvalidRequest("load.prompt_backlog", f"must be in [0, {MAX_SECONDS:g}]")
    counts = _read_counts(wire)
    if not all(0.0 <= count < math.inf for count in counts):
        odd = next(name for name, count in zip(_COUNTS, counts, strict=True) if not 0.0 <= count < math.inf)
        raise InvalidRequest(f"load.{odd}", "must be finite and 0 or more")
    return WorkerLoad(
        state=codec.STATE_FROM_WIRE[wire.state],
        ledger=dict(zip(_COLUMNS, _read_ledger(wire.ledger), strict=True)),
        transfers=dict(zip(LIVE_STATES, _read_transfers(wire.transfers), strict=True)),
        router_calls={calls.router_id: RouterCalls(calls.last_call, calls.num_open) for calls in wire.router_calls},
        step_cost=StepCost(*step_cost),
        prompt_backlog=tuple(wire.prompt_backlog),
        decode_steps=tuple(wire.decode_steps),
        **dict(zip(_COUNTS, counts, strict=True)),
    )


def encode_changes(changes: WorkerChanges) -> worker_pb2.WorkerReport:
    """A report without its number."""
    report = worker_pb2.WorkerReport(
        load=None if changes.load is None else encode_load(changes.load),
        paths=map(encode_path, changes.paths),
        removed_paths=changes.removed_paths,
    )
    for sequence_hashes, is_stored in changes.blocks:
        if is_stored is bool(len(report.block_runs) % 2):  # the runs alternate, beginning with stored blocks
            report.block_runs.append(0)
        report.block_changes.extend(sequence_hashes)
        report.block_runs.append(len(sequence_hashes))
    return report


def decode_changes(wire: worker_pb2.WorkerReport) -> WorkerChanges:
    return WorkerChanges(
        load=decode_load(wire.load) if wire.HasField("load") else None,
        blocks=_decode_runs(wire) if wire.block_runs or wire.block_changes else (),
        paths=tuple(decode_path(path) for path in wire.paths if path.state in PATH_STATE_FROM_WIRE),  # of this version
        removed_paths=tuple(wire.removed_paths),
    )


def _decode_runs(wire: worker_pb2.WorkerReport) -> tuple[BlockRun, ...]:
    sequence_hashes = list(wire.block_changes)
    if sum(wire.block_runs) != len(sequence_hashes):
        raise InvalidRequest(
            "block_runs", f"must sum to the {len(sequence_hashes)} block_changes, is {sum(wire.block_runs)}"
        )
    runs: list[BlockRun] = []
    start, is_stored = 0, True
    for length in wire.block_runs:
        if length:
            runs.append((sequence_hashes[start : start + length], is_stored))
        start, is_stored = start + length, not is_stored
    return tuple(runs)
