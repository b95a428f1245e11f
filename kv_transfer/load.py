"""What a worker's transfers add to what it says about its load."""

from __future__ import annotations

from dataclasses import replace

from core.handoff import OwnerState
from core.worker import WorkerLoad
from kv_transfer.machine import TransferMachine
from kv_transfer.peers import Drop


def with_transfers(load: WorkerLoad, transfers: TransferMachine) -> WorkerLoad:
    counters = transfers.counters
    return replace(
        load,
        num_transfers=transfers.num_alive,
        transfers=transfers.num_by_state(),
        transferred_bytes=counters.num_bytes_read,
        transfer_seconds=counters.read_seconds,
        num_expired_leases=counters.offers[OwnerState.EXPIRED.value],
        num_dropped_messages=counters.dropped.total() - counters.dropped[Drop.UNSENT],
        num_corrupt_blocks=counters.num_digest_mismatches + counters.num_spoilt_blocks,
        paths=transfers.paths,
    )
