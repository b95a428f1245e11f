"""The kernels of sampling against numpy's sampler and the references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu import sampling_kernels, sampling_reference
from engine.gpu.draw_kernels import draw_tokens
from tests.unit.engine.gpu.sampling_cases import Case, assert_as_numpy, by_numpy, differing, on_device, some_case


@pytest.mark.parametrize(("seed", "vocab", "num_rows"), [(0, 61, 7), (1, 333, 6), (2, 4100, 3)])
def test_rows_of_every_parameter_sample_numpy_s_tokens(seed: int, vocab: int, num_rows: int) -> None:
    assert_as_numpy(some_case(seed, num_rows, vocab))


def test_the_lowest_ids_of_the_equals_at_the_border_of_top_k_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.topk takes any of them: here the highest ids. The last two rows have fewer tokens than top_k keeps."""

    def topk(logits: torch.Tensor, count: int, sorted: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
        values, places = logits.flip(1).sort(dim=1, descending=True, stable=True)
        return values[:, :count].contiguous(), (logits.shape[1] - 1 - places[:, :count]).contiguous()

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    logits = np.random.default_rng(0).integers(0, 3, (8, 300)).astype(np.float32)
    logits[6:, 20:] = -np.inf
    chunks = []
    for row, top_k in enumerate([1, 7, 7, 20, 20, 40, 40, 40]):
        sampling = SamplingParams(max_tokens=1, seed=row, temperature=2.0, top_k=top_k, top_p=[1.0, 0.8][row % 2])
        chunks.append(ScheduledChunk(SequenceView(str(row), [1], 1, [0], sampling), 0, 1, True, False))
    case = Case(chunks, logits, {})
    found, _ = on_device(case)
    assert differing(case, found, by_numpy(case)) == []


def test_argmax_takes_the_lowest_id_of_ties() -> None:
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)).mul(2).round()
    logits[1] = 0.0
    logits[2] = float("-inf")
    logits[3, 8999] = 50.0
    found, wanted = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    sampling_kernels.argmax(logits, found)
    sampling_reference.argmax(logits, wanted)
    assert found.tolist() == wanted.tolist()
    assert found[:6].tolist() == [int(row.numpy().argmax()) for row in logits]


def test_a_draw_from_a_row_with_a_nan_ends_with_a_valid_token() -> None:
    """The NaN is the highest of its list, and no other token has the least mass beside it."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, 700] = torch.nan
    ids = torch.full((1,), -7, dtype=torch.int32)
    rows, top_k = torch.tensor([0], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    settings, keys = torch.tensor([[1.0, 1.0, 0.1]], dtype=torch.float64), torch.tensor([12345678901234])
    draw_tokens(logits, rows, 1, 32, top_k, settings, keys, ids)
    assert 0 <= int(ids) < 1000
