"""Guessed tokens on the runner of a GPU: graphs by rows, grammars, draws and penalties, and steps without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu.runner import GpuRunner
from engine.gpu.step_arrays import GraphSize
from engine.gpu.step_computer import StepComputer
from engine.model import Model, ModelInputs
from engine.runner import StepLimits, run_step
from engine.torch_runner import TorchRunner
from tests.support.drafts import compute_every_guess
from tests.unit.engine.driving import Engine
from tests.unit.engine.gpu.test_grammars import CONFIG, ENDING, ENDLESS, LIMITS, PROMPT, READER

REQUESTS = [*ENDLESS, *ENDING]


def generate(
    monkeypatch: pytest.MonkeyPatch, with_graphs: bool = True
) -> tuple[dict[str, list[int]], dict[str, list[int]], Engine]:
    """The tokens without and with many right and some wrong guesses."""
    oracle = compute_every_guess(monkeypatch)
    runner = GpuRunner(CONFIG, limits=LIMITS, grammars=READER, drafter=oracle, with_graphs=with_graphs)
    engine = Engine(runner, budget=64)
    engine.scheduler.speculates = False
    expected = engine.generate(*REQUESTS)
    oracle.texts = [[*wanted.token_ids, *expected[wanted.request_id]] for wanted in REQUESTS]
    engine.scheduler.speculates = True
    return expected, engine.generate(*REQUESTS), engine


@pytest.mark.parametrize("with_graphs", [True, False])
def test_guesses_change_no_token(with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, GraphSize | None]] = []
    stage = StepComputer.stage

    def noted(computer: StepComputer, chunks: Any, rows_before: Any) -> Any:
        staged, size = stage(computer, chunks, rows_before)
        if any(chunk.drafts for chunk in chunks) and all(chunk.num_tokens == 1 for chunk in chunks):
            sizes.append((sum(chunk.num_rows for chunk in chunks), size))
        return staged, size

    monkeypatch.setattr(StepComputer, "stage", noted)
    expected, found, engine = generate(monkeypatch, with_graphs)
    assert found == expected
    assert engine.scheduler.num_right_drafts > 20
    assert engine.scheduler.num_drafts > engine.scheduler.num_right_drafts
    if with_graphs:
        assert any(size is not None for _, size in sizes), "no graph computed a draft"
    for num_rows, size in sizes:
        assert size is None or num_rows <= size.rows


def test_a_step_with_drafts_that_finds_no_memory_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, refused = Model.compute, list[int]()

    def scarce(model: Model, inputs: ModelInputs) -> torch.Tensor:
        if len(inputs.token_ids) > 50:  # more than any prompt alone
            refused.append(len(inputs.token_ids))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return compute(model, inputs)

    monkeypatch.setattr(Model, "compute", scarce)
    expected, found, _ = generate(monkeypatch, with_graphs=False)
    assert found == expected
    assert refused, "the memory was never scarce"


def test_drafts_beside_a_prompt_sample_more_rows_than_a_graph_of_few_sequences() -> None:
    """A graph has logits for max_running rows; a step may have drafts beyond it."""
    found = []
    for runner in (TorchRunner(CONFIG), GpuRunner(CONFIG, limits=StepLimits(max_running=4, max_batched_tokens=64))):
        tokens, sampling = [*PROMPT[:20]], SamplingParams(max_tokens=30, temperature=0.0)
        first = SequenceView("first", tokens, 20, [0, 1, 2], sampling)
        second = SequenceView("second", PROMPT[20:50], 30, [3, 4], sampling)
        done = run_step(runner, StepPlan(0, (ScheduledChunk(first, 0, 20, True, False),)))
        tokens.append(done.sampled["first"][0].token_id)
        drafted = ScheduledChunk(first, 20, 1, True, False, (1, 2, 3))
        found.append(run_step(runner, StepPlan(1, (drafted, ScheduledChunk(second, 0, 30, True, False)))).sampled)
        runner.close()
    assert found[0].keys() == {"first", "second"}
    assert found[0] == found[1]
