"""Drives a runner with the real scheduler and pool, as a worker does, with little memory on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from core.config import SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool, Column
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from core.step import ScheduledChunk, SequenceView
from engine.model import Model, ModelInputs
from engine.runner import Runner, run_step


def request(name: str, prompt: Iterable[int], **sampling: object) -> Request:
    token_ids = tuple(prompt)
    options: dict[str, object] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    return Request(name, token_ids, len(token_ids), SamplingParams(**(options | sampling)))  # type: ignore[arg-type]


def chunk_of(
    token_ids: list[int], start: int, count: int, blocks: list[int], name: str = "a", **sampling: object
) -> ScheduledChunk:
    """Tokens of a prompt, which sample a token. Greedy unless `sampling` says otherwise."""
    options: dict[str, object] = {"max_tokens": 9, "temperature": 0.0}
    params = SamplingParams(**(options | sampling))  # type: ignore[arg-type]
    return ScheduledChunk(SequenceView(name, token_ids, len(token_ids), blocks, params), start, count, True, False)


class Engine:
    """A scheduler, a pool and a runner.

    `num_cached_tokens`: of each request of the last `generate`; `max_chunks_of_one`: of one request in one step.
    """

    def __init__(self, runner: Runner, *, num_blocks: int | None = None, budget: int = 512) -> None:
        self.runner = runner
        self.pool = BlockPool(num_blocks or runner.num_blocks)
        config = SchedulerConfig(max_batched_tokens=budget, max_running=min(budget, 16))
        self.scheduler = Scheduler(config, self.pool, runner.layout.block_size, runner.info.eos_token_ids)
        self.num_cached_tokens: dict[str, int] = {}
        self.max_chunks_of_one = 0
        self._num_added = 0

    def generate(self, *requests: Request) -> dict[str, list[int]]:
        """Run all requests to completion. Returns each request's tokens by its name."""
        sequences = [Sequence(wanted, self._num_added + index) for index, wanted in enumerate(requests)]
        self._num_added += len(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
        tokens: dict[str, list[int]] = {wanted.request_id: [] for wanted in requests}
        while (plan := self.scheduler.schedule()) is not None:
            counts = [sum(chunk.sequence.sequence_id == name for chunk in plan.chunks) for name in tokens]
            self.max_chunks_of_one = max(self.max_chunks_of_one, *counts)
            for event in self.scheduler.complete_step(run_step(self.runner, plan)):
                assert event.index == len(tokens[event.sequence_id])
                tokens[event.sequence_id].append(event.token.token_id)
            self.scheduler.check()
            self.pool.check()
        self.num_cached_tokens = {sequence.sequence_id: sequence.num_cached_tokens for sequence in sequences}
        ledger = self.pool.ledger()
        assert ledger[Column.HELD] == ledger[Column.LEASED] == ledger[Column.INCOMING] == 0
        return tokens


class Scarce:
    """Replaces `Model.compute`: a step that meets `is_too_large` finds no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_too_large: Callable[[ModelInputs], bool]) -> None:
        self.num_refused = 0
        self.num_tokens: list[int] = []  # of the steps that were computed
        compute = Model.compute

        def scarce(model: Model, inputs: ModelInputs) -> torch.Tensor:
            if is_too_large(inputs):
                self.num_refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            self.num_tokens.append(len(inputs.token_ids))
            return compute(model, inputs)

        monkeypatch.setattr(Model, "compute", scarce)
