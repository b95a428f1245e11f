"""Several steps of a decode worker at once.

A *stretch* is a run of steps in which nothing happens but that each sequence in decode gets one token: no sequence
ends, waits, or needs a block, and no block is filled. `skip_steps` changes the state as if the machine had handled the
end of each of these steps, in the time of one. The replay handles the last step of a stretch as usual, so the machine
itself plans what follows. tests/simulation/test_decode_stretch.py compares both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.cost.step_cost import StepWork, work_of
from core.step import ScheduledChunk, StepPlan
from decode_worker.machine import DecodeMachine


def stretch_length(machine: DecodeMachine) -> int:
    """The number of steps that may be handled together, the running one included; 1 if none may follow it.

    Valid until the next event of the machine.
    """
    scheduler = machine.core.scheduler
    queues, in_flight = scheduler.queues, scheduler._in_flight
    if not in_flight or machine.pulls.lacks_blocks or queues.waiting or queues.prefilling or queues.ending:
        return 1
    num_running = len(queues.running)
    for plan, sequences in in_flight:
        if len(sequences) != num_running or any(chunk.num_tokens != 1 for chunk in plan.chunks):
            return 1
    block_size, num_ahead = scheduler.block_size, len(in_flight)
    length = 1 << 30
    for sequence in queues.running:
        computed = sequence.num_computed_tokens
        length = min(
            length,
            sequence.max_num_tokens - computed - 2,  # no step of the stretch samples the last token
            len(sequence.block_table) * block_size - computed - num_ahead + 1,  # none needs a block
            (sequence.num_registered_blocks + 1) * block_size - computed,  # none but the last one fills a block
        )
    return max(1, length)


def skip_steps(machine: DecodeMachine, token_id: int, ends: Sequence[float]) -> None:
    """Handle the ends of steps at these times. Each step has sampled `token_id` for each sequence."""
    core, count = machine.core, len(ends)
    scheduler = core.scheduler
    plan, sequences = scheduler._in_flight[0]
    num_decodes, context = len(sequences), sum(chunk.start + 1 for chunk in plan.chunks)
    started_at = core.step_started_at
    for number, ended_at in enumerate(ends):
        work = StepWork(num_decodes, context + number * num_decodes, 0, 0.0)
        core.record_step(work, ended_at - started_at)
        scheduler.queues.prompts.set_cost(scheduler.step_cost)  # as before each plan
        started_at = ended_at
    new_tokens = [token_id] * count
    for sequence in sequences:
        sequence.token_ids += new_tokens
        sequence.num_computed_tokens += count
        sequence.num_planned_tokens += count
    scheduler._in_flight = [step._replace(plan=_later(step.plan, count)) for step in scheduler._in_flight]
    scheduler._next_step_id += count
    core._step_works = [work_of(step.plan) for step in scheduler._in_flight]
    core.num_sampled_tokens += count * num_decodes
    core._on_step_started(started_at)


def _later(plan: StepPlan, count: int) -> StepPlan:
    chunks = tuple(
        ScheduledChunk(view, start + count, num_tokens, samples, promised)
        for view, start, num_tokens, samples, promised in plan.chunks
    )
    return StepPlan(plan.step_id + count, chunks)
