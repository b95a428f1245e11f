"""The reports of a worker to routers: its load, and the changes of load, prefix cache and paths (worker.proto)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from core.cost.step_cost import PRIOR, StepCost
from core.handoff import OwnerState, PullerState
from core.lifecycle import WorkerState
from core.paths import PathStatus
from core.scheduling.block_pool import Column

BlockRun = tuple[Sequence[int], bool]  # sequence hashes in order; True = stored in the prefix cache, False = removed


class CallId(NamedTuple):
    """A call of a router to a worker. A router numbers its calls 1, 2, 3, ... in the order in which it starts them."""

    router_id: str
    number: int


NO_CALL = CallId("", 0)  # of a sequence that no router has sent


class RouterCalls(NamedTuple):
    """The calls of one router that a worker has admitted."""

    last_call: int = 0  # the highest number
    num_open: int = 0


STEP_BOUNDS_S = tuple(0.0005 * 2**i for i in range(14))  # 0.5 ms to 4.1 s: upper ends of the buckets of step times

NUM_SIZE_CLASSES = 18  # the last one begins at 131 s


def size_class(seconds: float) -> int:
    """Class 0 has the prompts with less than 2 ms of work left; class k those with 2^k to 2^(k + 1) ms."""
    return min(max(int(seconds * 1e3), 1).bit_length() - 1, NUM_SIZE_CLASSES - 1)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Totals count from the start of the worker; every other number is current."""

    state: WorkerState
    num_running: int = 0
    num_waiting: int = 0
    num_calls: int = 0  # open, of all routers
    router_calls: Mapping[str, RouterCalls] = field(default_factory=dict)  # by router id; only routers with open calls
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
    step_cost: StepCost = PRIOR  # as fitted to the steps of the worker
    max_step_tokens: int = 512  # token budget of a step
    step_limit_s: float = 0.0  # of a step with sequences in decode; 0 = no limit
    num_decoding: int = 0  # sequences in decode
    decode_context: int = 0  # tokens that they attend to
    prompt_backlog: tuple[float, ...] = ()  # seconds of prompt work to do, by `size_class` of the remaining work
    num_promised_blocks: int = 0  # that open pulls and, in decode workers, own prompts have yet to take
    num_released_blocks: int = 0  # that sequences have given back since the start
    batch_sequences: int = 0  # in the newest step
    batch_tokens: int = 0  # in the newest step
    busy_seconds: float = 0.0  # in steps since the start
    decode_steps: tuple[int, ...] = ()  # steps with a decode since the start, by STEP_BOUNDS_S; no zeros at the end
    decode_step_seconds: float = 0.0  # of these steps
    flop: float = 0.0  # of all steps since the start; 0 = not known
    memory_bytes: float = 0.0  # read and written by all steps since the start; 0 = not known
    flop_use: float = 0.0  # share of the peak in recent steps; 0 = not known
    bandwidth_use: float = 0.0  # share of the peak in recent steps; 0 = not known
    slo_itl_s: float = 0.0  # wanted time between tokens; 0 = none
    num_drafts: int = 0  # guessed tokens that steps have computed since the start
    num_right_drafts: int = 0  # ... and that were right
    takes_moves: bool = False  # a decode worker that can take running sequences of others, and ask for moves
    gives_prefixes: bool = False  # it offers cached prefixes to peers, and reads those of peers
    num_disk_blocks: int = 0  # cached blocks on its disk
    num_disk_reads: int = 0  # blocks that prompts have read from the disk since the start
    num_disk_writes: int = 0  # blocks written to the disk since the start
    num_disk_failures: int = 0  # reads and writes since the start that failed, were late, or found another block
    disk_bytes_per_s: float = 0.0  # bandwidth of the disk; 0 = it has none, or its last read has failed


@dataclass(frozen=True, slots=True)
class WorkerChanges:
    """The content of a report: what has changed since the report before."""

    load: WorkerLoad | None = None  # None = unchanged
    blocks: tuple[BlockRun, ...] = ()
    paths: tuple[PathStatus, ...] = ()  # new and changed ones
    removed_paths: tuple[str, ...] = ()  # names of peers
