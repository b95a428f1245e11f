"""Foresees that the running sequences of a decode worker will lack blocks, early enough to move some of them away.

A move takes MOVE_S and the time of its bytes. Until then each running sequence grows by a token per step.
"""

from __future__ import annotations

from core.cost.step_cost import StepWork
from core.scheduling.sequence import Sequence
from decode_worker.pull_queue import PullQueue
from kv_transfer.protocol.machine import TransferMachine
from worker.core import WorkerCore
from worker.reported_load import decode_contexts

MOVE_S = 0.5  # of a move, without the time of its bytes: notices, the wait for room, the last blocks
UNKNOWN_BYTES_PER_S = 1e9  # of a worker that has not read yet
MIN_STEP_S = 1e-5  # a fitted cost may be zero


def num_short(core: WorkerCore, pulls: PullQueue, transfers: TransferMachine, num_prefix_targets: int) -> int:
    """Blocks that running sequences will lack before a move of the lowest-ranked one could end; 0 = they lack none.

    The targets of prefixes are given up before, so they count as free.
    """
    running, block_size = core.scheduler.running, core.scheduler.block_size
    if len(running) < 2:
        return 0  # nobody gains by its move
    num_free = core.pool.num_available + num_prefix_targets - pulls.num_promised_blocks()
    # After most steps this is all: no step is shorter than one without sequences.
    most_steps = _num_steps_of_move(core, transfers, running[-1], StepWork(0, 0, 0, 0.0))
    if num_free >= len(running) * (most_steps // block_size + 1):
        return 0
    contexts = decode_contexts(running)
    num_steps = _num_steps_of_move(core, transfers, running[-1], StepWork(len(contexts), sum(contexts), 0, 0.0))
    return max(0, sum(_num_blocks_to_come(s, num_steps, block_size) for s in running) - num_free)


def _num_steps_of_move(core: WorkerCore, transfers: TransferMachine, sequence: Sequence, step: StepWork) -> int:
    counters, layout = transfers.counters, transfers.address.layout
    speed = counters.num_bytes_read / counters.read_seconds if counters.read_seconds else UNKNOWN_BYTES_PER_S
    move_s = MOVE_S + len(sequence.block_table) * layout.block_bytes / speed
    return int(move_s / max(core.costs.cost.seconds(step), MIN_STEP_S)) + 1


def _num_blocks_to_come(sequence: Sequence, num_steps: int, block_size: int) -> int:
    """The last token is sampled but never computed, so it needs no slot."""
    num_tokens = min(sequence.num_tokens + num_steps, sequence.plan_end, sequence.max_num_tokens - 1)
    return max(0, -(-num_tokens // block_size) - len(sequence.block_table))
