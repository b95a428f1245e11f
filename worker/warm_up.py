"""Measures steps of a new worker, so that its step cost is right before the first request.

    16 tokens of a prompt (not counted: they load caches and start threads), 16 more, decodes of 1 and of 8 sequences
    behind the whole blocks of this prompt, 64 and 256 more tokens of it

No step begins that is predicted to end after TIME_LIMIT_S. The steps use blocks of the pool by their numbers, before
there is a `BlockPool`: no block is allocated, and no block has contents that matter.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from core.cost.step_cost import work_of
from core.cost.step_cost_fit import StepCostFit
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepOutput, StepPlan
from worker.core import Planned
from worker.executor import StepExecutor

FIRST_CHUNKS = (16, 16)
DECODES = (1, 1, 8, 8)
LAST_CHUNKS = (64, 256)
TIME_LIMIT_S = 1.5
STEP_TIMEOUT_S = 120.0  # the first step of a GPU compiles its kernels
TOKEN = 1


def warm_up(
    executor: StepExecutor, costs: StepCostFit, block_size: int, num_blocks: int, max_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Run the steps and feed the fit. `max_tokens` bounds the prompt. Raises the error of a step."""
    ends_at = clock() + TIME_LIMIT_S
    for number, step in enumerate(_steps(block_size, num_blocks, max_tokens)):
        work = work_of(step.chunks)
        # Nothing is known before the first two steps, and they are short.
        if number >= len(FIRST_CHUNKS) and clock() + costs.cost.seconds(work) > ends_at:
            continue
        started_at = clock()
        _run(executor, step)
        if number > 0:
            costs.record(work, clock() - started_at)


def _steps(block_size: int, num_blocks: int, max_tokens: int) -> Iterator[StepPlan]:
    """Steps that fit into the pool. A skipped chunk leaves slots of the prompt without contents, at no cost in time."""
    num_prompt_blocks = num_blocks - max(DECODES)
    max_tokens = min(max_tokens, num_prompt_blocks * block_size, sum(FIRST_CHUNKS + LAST_CHUNKS))
    if max_tokens < sum(FIRST_CHUNKS):
        return
    blocks = list(range(-(-max_tokens // block_size)))
    prompt = _view("warm-up", max_tokens, blocks)
    start = 0
    for size in FIRST_CHUNKS:
        yield StepPlan(-1, (ScheduledChunk(prompt, start, size, False, False),))
        start += size
    shared = blocks[: start // block_size]
    context = len(shared) * block_size
    for count in DECODES:
        # Each decode writes to a block of its own.
        views = [_view(f"warm-up-{row}", context + 1, [*shared, len(blocks) + row]) for row in range(count)]
        yield StepPlan(-1, tuple(ScheduledChunk(view, context, 1, True, False) for view in views))
    for size in LAST_CHUNKS:
        if start + size <= max_tokens:
            yield StepPlan(-1, (ScheduledChunk(prompt, start, size, False, False),))
            start += size


def _view(name: str, num_tokens: int, blocks: list[int]) -> SequenceView:
    return SequenceView(name, [TOKEN] * num_tokens, num_tokens, blocks, SamplingParams(max_tokens=1))


def _run(executor: StepExecutor, step: StepPlan) -> None:
    done: queue.SimpleQueue[StepOutput | Exception] = queue.SimpleQueue()
    executor.submit(step, Planned.IDLE, done.put)
    result = done.get(timeout=STEP_TIMEOUT_S)
    if isinstance(result, Exception):
        raise result
    for error in result.failed.values():
        raise error
