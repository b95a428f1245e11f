"""What a worker reports about itself: workers write a `WorkerLoad`, routers read it (`LoadReport` in worker.proto)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.block_pool import Column
from core.handoff import OwnerState, PullerState
from core.lifecycle import WorkerState
from core.paths import PathStatus


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Counts run from the start of the worker; every other number is of now."""

    state: WorkerState
    num_running: int = 0
    num_waiting: int = 0
    num_pulls_waiting: int = 0
    num_queued_tokens: int = 0  # to compute before every sequence here is in decode
    ledger: Mapping[Column, int] = field(default_factory=dict)
    num_prefilled_tokens: int = 0  # since the start
    num_sampled_tokens: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0
    transfer_seconds: float = 0.0  # in which pulls were reading; bytes / seconds is the speed of the paths
    num_expired_leases: int = 0
    num_preemptions: int = 0
    transfers: Mapping[OwnerState | PullerState, int] = field(default_factory=dict)  # alive; sums to num_transfers
    num_malformed_messages: int = 0  # notifications of peers that were no message; dropped
    num_dropped_messages: int = 0  # messages of peers that were late, doubled, foreign or for no transfer here
    num_corrupt_blocks: int = 0  # read from peers with bytes that did not fit the digest of the block
    paths: tuple[PathStatus, ...] = ()
