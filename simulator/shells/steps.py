"""Computes the steps of a simulated worker one after another, in the time that a cost model gives.

With KV content, a step writes its slots in the middle of its time, and its result follows at the end. So a block that
is reused too early shows in a token. A step may fail, or lack memory for one of its sequences.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from core.cost.step_cost import work_of
from core.errors import OutOfDeviceMemory, TandemError
from core.scheduling.block_pool import BlockPool, Column
from core.step import StepOutput, StepPlan
from simulator.shells.authorship import Authorship
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.memory import Memory
from simulator.virtual.world import SimulationError, World
from worker.core import Planned, RunStep, StepFailed, StepFinished


class SimulatedExecutor:
    """`post` takes the end of each step."""

    def __init__(
        self,
        world: World,
        spec: WorkerSpec,
        pool: BlockPool,
        memory: Memory,
        post: Callable[[StepFinished | StepFailed], None],
        authorship: Authorship | None = None,
    ) -> None:
        self._authorship = authorship
        self.alive = True
        self.busy_s = 0.0  # time in steps
        self._world, self._spec, self._pool, self._memory, self._post = world, spec, pool, memory, post
        self._steps: deque[StepPlan] = deque()  # in flight, oldest first
        self._step_failed = False  # the newest step failed or was dropped
        self._noise = random.Random(f"steps of {spec.worker_id}, {world.seed}")

    def run(self, step: RunStep) -> None:
        """Compute a step after the steps in flight, as `StepExecutor` does."""
        self._world.counts[f"step planned {step.planned.value}"] += 1
        if step.planned is Planned.AHEAD and self._step_failed:
            self._world.counts["dropped step"] += 1
            return
        self._step_failed = False
        self._steps.append(step.plan)
        if len(self._steps) == 1:
            self._start()

    def _start(self) -> None:
        world, spec, plan = self._world, self._spec, self._steps[0]
        noise = self._noise.lognormvariate(0.0, spec.step_noise) if spec.step_noise else 1.0
        duration = spec.step_cost.seconds(work_of(plan.chunks)) + spec.step_cost.sequence_s * plan.num_drafts
        duration *= noise
        self.busy_s += duration
        if self._authorship is not None:
            self._authorship.step_begins(plan)
        if world.chance(spec.step_failure):
            world.counts["failed step"] += 1
            world.marks.update(f"failed step of {chunk.sequence.sequence_id}" for chunk in plan.chunks)
            world.after(duration, self._fail)
        elif self._memory.has_content:
            world.after(duration / 2, partial(self._compute, plan, duration / 2))
        else:
            world.after(duration, lambda: self._end(self._memory.run(plan)))

    def _fail(self) -> None:
        """The oldest step fails, and takes the step that was planned ahead with it."""
        if self._authorship is not None:
            self._authorship.step_ended(self._steps[0])
        self._world.counts["dropped step"] += len(self._steps) - 1
        self._steps.clear()
        self._step_failed = True
        self._post(StepFailed(TandemError("the step failed")))

    def _compute(self, plan: StepPlan, remaining_s: float) -> None:
        if not self.alive:
            return
        self._check_writes(plan)
        output = self._memory.run(plan, self._without_memory(plan))
        self._world.after(remaining_s, lambda: self._end(output))

    def _without_memory(self, plan: StepPlan) -> dict[str, TandemError]:
        """The sequence of a step that the device has no memory for, if there is one."""
        world = self._world
        if not world.chance(self._spec.memory_failure):
            return {}
        sequence_id = world.random.choice(plan.chunks).sequence.sequence_id
        world.counts["sequence without memory"] += 1
        world.marks.add(f"sequence without memory of {sequence_id}")
        return {sequence_id: OutOfDeviceMemory(f"no memory for {sequence_id}")}

    def _end(self, output: StepOutput) -> None:
        """The next step begins before the machine takes the output."""
        plan = self._steps.popleft()
        if self._authorship is not None:
            self._authorship.step_ended(plan)
        if self._steps:
            self._start()
        self._post(StepFinished(output))

    def _check_writes(self, plan: StepPlan) -> None:
        """Raises `SimulationError` if a step writes into a block of two sequences, a leased block or a free block."""
        block_size = self._spec.layout.block_size
        written: set[int] = set()
        for chunk in plan.chunks:
            first, last = chunk.start // block_size, (chunk.start + chunk.num_rows - 1) // block_size
            for block in chunk.sequence.block_table[first : last + 1]:
                held = self._pool.column_of(block) is Column.HELD
                if block in written or self._pool.num_leases(block) or not held:
                    raise SimulationError(
                        f"{self._spec.worker_id}: block {block} of {chunk.sequence.sequence_id} is not its own"
                    )
                written.add(block)
