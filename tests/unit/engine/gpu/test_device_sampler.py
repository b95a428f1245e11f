"""The sampler of a device gives the tokens of `engine/sampling.py` from the same logits."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.sampling import DeviceSampler
from engine.gpu.sampling_reference import REFERENCES
from engine.histories import Histories
from tests.unit.engine.driving import chunk_of
from tests.unit.engine.gpu.sampling_cases import CPU, Case, assert_as_numpy, by_numpy, on_device, some_case


@pytest.mark.parametrize("seed", range(40))
def test_thousands_of_rows_sample_numpy_s_tokens(seed: int) -> None:
    assert_as_numpy(some_case(seed, num_rows=64, vocab=[61, 200, 1000, 5000][seed % 4]))


def greedy(name: str, **options: object) -> ScheduledChunk:
    return chunk_of([1, 2], 1, 1, [0], name, **options)


def drawn_row(name: int, **options: object) -> ScheduledChunk:
    return greedy(str(name), temperature=1.0, **options)


def test_a_step_without_a_row_that_samples_returns_nothing() -> None:
    sampler = DeviceSampler(50, 4, CPU)
    plan = sampler.prepare([greedy("a")._replace(samples=False)])
    assert sampler.collect(sampler.sample(torch.zeros(0, 50), plan)) == {}


def test_what_a_graph_found_is_taken_for_plain_greedy_rows_alone() -> None:
    sampler = DeviceSampler(50, 4, CPU)
    logits = torch.zeros(2, 50)
    plain = sampler.prepare([greedy("a"), greedy("b")])
    rows = sampler.sample(logits, plain, highest=torch.tensor([7, 8, 9], dtype=torch.int32))
    assert [token.token_id for token in sampler.collect(rows).values()] == [7, 8]
    biased = sampler.prepare([greedy("a"), greedy("b", logit_bias={4: 1.0})])
    rows = sampler.sample(logits, biased, highest=torch.tensor([7, 8, 9], dtype=torch.int32))
    assert [token.token_id for token in sampler.collect(rows).values()] == [0, 4]


def test_the_rows_with_top_k_come_first_and_their_lists_are_longer() -> None:
    top_ks = [0, 7, 50, 3, 49]
    chunks = [drawn_row(row, top_k=top_k) for row, top_k in enumerate(top_ks)]
    drawn = DeviceSampler(50, 8, CPU).prepare(chunks).drawn
    assert drawn is not None
    assert drawn.rows.tolist() == [1, 3, 4, 0, 2]
    assert drawn.top_k.tolist() == [7, 3, 49, 0, 0], "50 of 50 tokens are all of them"
    assert (drawn.num_listed, drawn.list_size) == (3, 50)


def test_a_promised_sequence_that_the_step_before_lacks_is_an_error() -> None:
    chunk = greedy("a", repetition_penalty=2.0)._replace(promised=True)
    with pytest.raises(KeyError, match="a"):
        DeviceSampler(50, 4, CPU).prepare([chunk], {"b": 0})


def test_penalties_that_count_a_promised_token_need_the_step_before() -> None:
    sampler = DeviceSampler(50, 4, CPU)
    plan = sampler.prepare([greedy("a", repetition_penalty=2.0)._replace(promised=True)], {"a": 0})
    with pytest.raises(AssertionError, match="counted from the step before"):
        sampler.sample(torch.zeros(1, 50), plan)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_the_warm_up_runs_every_operator_of_sampling() -> None:
    with Recorder() as recorder:
        DeviceSampler(50, 1, CPU).warm_up()
    assert {f"tandem::{name}" for name in REFERENCES} <= recorder.names


def test_flat_rows_of_a_whole_vocabulary_draw_numpy_s_tokens() -> None:
    """No token stands out, so a draw needs all masses."""
    chunks = [drawn_row(seed, seed=seed, top_p=0.9) for seed in range(8)]
    case = Case(chunks, np.zeros((8, 128_256), np.float32), {})
    found, _ = on_device(case)
    assert {name: token.token_id for name, token in found.items()} == {
        name: token.token_id for name, token in by_numpy(case).items()
    }


def test_histories_end_with_their_sequences() -> None:
    histories = Histories()
    views = {name: SequenceView(name, [4, 4, 7], 2, [0], SamplingParams(max_tokens=9)) for name in "abc"}
    for view in views.values():
        histories.counts(view, 3, [9])
    del view, views["a"], views["b"]
    gc.collect()
    assert len(histories._histories) == 1
