"""Drives a runner one step ahead with random plans, as a scheduler might: chunks of any size, and promised tokens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from core.request import Request
from core.step import ScheduledChunk, SequenceView, StepOutput, StepPlan
from engine.runner import Runner


@dataclass(eq=False)
class Live:
    """A sequence, and its tokens that are submitted to be computed."""

    request: Request
    view: SequenceView
    num_submitted: int = 0
    sampled_in: int = -1  # the newest step that samples a token of this sequence

    @classmethod
    def of(cls, request: Request, token_ids: list[int]) -> Live:
        view = SequenceView(request.request_id, token_ids, request.num_prompt_tokens, [], request.sampling)
        return cls(request, view)

    @property
    def output(self) -> list[int]:
        return list(self.view.token_ids[self.request.num_prompt_tokens :])


@dataclass
class OneAhead:
    """At most two steps are submitted. Ended sequences are thrown away while a step computes their next token."""

    runner: Runner
    draw: random.Random
    num_promised: int = 0
    num_thrown_away: int = 0
    _free: list[int] = field(default_factory=list)
    _live: list[Live] = field(default_factory=list)
    _steps: deque[tuple[StepPlan, list[list[int]]]] = field(default_factory=deque)  # with the blocks that end with it
    _step_id: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.runner.num_blocks))
        self.draw.shuffle(self._free)

    def generate(self, requests: list[Request]) -> dict[str, list[int]]:
        waiting = list(requests)
        answers: dict[str, list[int]] = {}
        while waiting or self._live or self._steps:
            while waiting and self.draw.random() < 0.5:
                wanted = waiting.pop()
                self._live.append(Live.of(wanted, list(wanted.token_ids)))
            if len(self._steps) < 2 and self.draw.random() < 0.7:
                self._submit()
            elif self._steps:
                answers |= self._collect()
        return answers

    def _submit(self) -> None:
        chunks = [chunk for live in self._live if self.draw.random() < 0.8 and (chunk := self._chunk(live))]
        if not chunks:
            return
        plan = StepPlan(self._step_id, tuple(chunks))
        self._step_id += 1
        self.runner.submit(plan)
        self._steps.append((plan, []))

    def _chunk(self, live: Live) -> ScheduledChunk | None:
        start, known = live.num_submitted, len(live.view.token_ids)
        by_the_step_before = live.sampled_in == self._step_id - 1 >= 0
        promised = start >= known - 1 and by_the_step_before and (start == known or self.draw.random() < 0.5)
        if start == known and not promised:
            return None  # its next token is sampled by a step before the newest
        count = 1 if promised else self.draw.randint(1, known - start)
        self._grow(live, start + count)
        live.num_submitted = start + count
        samples = promised or start + count == known
        if samples:
            live.sampled_in = self._step_id
        self.num_promised += promised
        return ScheduledChunk(live.view, start, count, samples, promised)

    def _grow(self, live: Live, num_tokens: int) -> None:
        table = live.view.block_table
        assert isinstance(table, list)
        while len(table) * self.runner.layout.block_size < num_tokens:
            table.append(self._free.pop())

    def _collect(self) -> dict[str, list[int]]:
        output: StepOutput = self.runner.collect()
        plan, ended = self._steps.popleft()
        assert output.step_id == plan.step_id
        for blocks in ended:
            self._free += blocks
        answers = {}
        for chunk in plan.chunks:
            found = [live for live in self._live if live.view is chunk.sequence]
            if not chunk.samples or not found:
                continue
            (live,) = found
            live.view.token_ids.append(output.sampled[live.request.request_id][0].token_id)  # type: ignore[attr-defined]
            if len(live.output) == live.request.sampling.max_tokens:
                answers[live.request.request_id] = live.output
                self._end(live)
            elif self.draw.random() < 0.05 and live.num_submitted < len(live.view.token_ids):
                self._preempt(live)
        return answers

    def _end(self, live: Live) -> None:
        self._live.remove(live)
        if any(chunk.sequence is live.view for plan, _ in self._steps for chunk in plan.chunks):
            self.num_thrown_away += 1
            self._steps[-1][1].append(list(live.view.block_table))
        else:
            self._free += live.view.block_table

    def _preempt(self, live: Live) -> None:
        """The sequence loses its blocks, and is computed again under another view."""
        if not any(chunk.sequence is live.view for plan, _ in self._steps for chunk in plan.chunks):
            self._free += live.view.block_table
            again = Live.of(live.request, list(live.view.token_ids))
            self._live[self._live.index(live)] = again
