"""The load that a worker reports to routers, as `LoadReport` of worker.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.block_pool import Column
from core.handoff import OwnerState, PullerState
from core.lifecycle import WorkerState
from core.paths import PathStatus


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Totals count from the start of the worker; every other number is current."""

    state: WorkerState
    num_running: int = 0
    num_waiting: int = 0
    num_pulls_waiting: int = 0
    num_queued_tokens: int = 0  # tokens to compute before every sequence of the worker is in decode
    ledger: Mapping[Column, int] = field(default_factory=dict)
    num_prefilled_tokens: int = 0  # since the start
    num_sampled_tokens: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0
    transfer_seconds: float = 0.0  # time in which pulls were reading; bytes / seconds is the speed of the paths
    num_expired_leases: int = 0
    num_preemptions: int = 0
    transfers: Mapping[OwnerState | PullerState, int] = field(default_factory=dict)  # open ones; sums to num_transfers
    num_malformed_messages: int = 0  # dropped notifications that could not be decoded
    num_dropped_messages: int = 0  # dropped messages: late, repeated, foreign, or of an unknown transfer
    num_corrupt_blocks: int = 0  # blocks read from peers with bytes that do not match the digest
    paths: tuple[PathStatus, ...] = ()
