"""The scheduler's own time per step. All sequences decode, their blocks fill up at different steps, and one step is
planned while another is in flight."""

from __future__ import annotations

import statistics
import time

from benchmarks.report import Line, Report
from core.config import SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from core.step import SampledToken, StepOutput

MOST_MS = {256: 0.4, 1024: 1.6}  # sequences -> the most for a step
BLOCK_SIZE = 16
NUM_STEPS = 64  # of one sample: each sequence fills four blocks
NUM_SAMPLES = 9


def measure(report: Report, repeats: int) -> None:
    for num_sequences, most in MOST_MS.items():
        cost_ms = 1e3 * statistics.median(step_cost_s(num_sequences) for _ in range(repeats))
        report.add(Line(f"schedule and complete a step of {num_sequences:,} sequences", cost_ms, "ms", most=most))


def step_cost_s(num_sequences: int) -> float:
    """CPU seconds of `schedule` and `complete_step` together, per step; the best of several samples."""
    scheduler = decoding(num_sequences)
    output = {f"s{index}": (SampledToken(7),) for index in range(num_sequences)}
    plan = scheduler.schedule()
    best = float("inf")
    for _ in range(NUM_SAMPLES):
        started_at = time.process_time()
        for _ in range(NUM_STEPS):
            ahead = scheduler.schedule()
            assert plan is not None
            scheduler.complete_step(StepOutput(plan.step_id, output))
            plan = ahead
        best = min(best, (time.process_time() - started_at) / NUM_STEPS)
    assert len(scheduler.running) == num_sequences
    return best


def decoding(num_sequences: int) -> Scheduler:
    num_tokens = NUM_STEPS * (NUM_SAMPLES + 1)
    pool = BlockPool(num_sequences * (num_tokens // BLOCK_SIZE + 3))
    config = SchedulerConfig(num_sequences, num_sequences, num_sequences)
    scheduler = Scheduler(config, pool, BLOCK_SIZE, frozenset({0}))
    for index in range(num_sequences):
        prompt = tuple(range(1, 17 + index % BLOCK_SIZE))
        sequence = Sequence(Request(f"s{index}", prompt, len(prompt), SamplingParams(max_tokens=num_tokens)), index)
        scheduler.hold_cached_prefix(sequence, len(prompt))
        reserved = pool.reserve(-(-len(prompt) // BLOCK_SIZE) - len(sequence.block_table))
        assert reserved is not None
        pool.arrive(reserved)
        sequence.block_table += reserved
        sequence.num_computed_tokens = len(prompt)
        sequence.token_ids.append(7)
        scheduler.add(sequence)
    return scheduler
