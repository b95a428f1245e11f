"""The elementwise kernels beside the references."""

from __future__ import annotations

import pytest
import torch

from engine.gpu import elementwise, reference

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("updated", [True, False])
@pytest.mark.parametrize("size", [96, 576, 1024])
def test_add_rms_norm_is_the_reference(dtype: torch.dtype, updated: bool, size: int) -> None:
    update = random(3, size, dtype=dtype, seed=2) if updated else None
    weight = random(size, dtype=dtype, seed=3)
    found, expected = random(3, size, dtype=dtype), random(3, size, dtype=dtype)
    normed, expected_normed = torch.full_like(found, torch.nan), torch.empty_like(found)

    elementwise.add_rms_norm(found, update, weight, 1e-5, normed)
    reference.add_rms_norm(expected, update, weight, 1e-5, expected_normed)

    # The interpreter cuts a float32 off where a device rounds it to bfloat16.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=0)
    torch.testing.assert_close(normed, expected_normed, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_add_rms_norm_takes_rows_of_a_wider_tensor() -> None:
    wide, normed = random(3, 256, dtype=torch.float32), torch.full((3, 200), torch.nan)
    before, hidden, expected = wide.clone(), wide[:, 16:96], torch.empty(3, 80)
    weight, update = random(80, dtype=torch.float32, seed=3), random(3, 80, dtype=torch.float32, seed=2)
    expected_hidden = hidden.clone()

    elementwise.add_rms_norm(hidden, update, weight, 1e-6, normed[:, :80])
    reference.add_rms_norm(expected_hidden, update, weight, 1e-6, expected)

    torch.testing.assert_close(normed[:, :80], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(hidden, expected_hidden)
    assert normed[:, 80:].isnan().all()
    assert torch.equal(wide[:, :16], before[:, :16])
    assert torch.equal(wide[:, 96:], before[:, 96:])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [96, 1536])
def test_silu_and_multiply_is_the_reference(dtype: torch.dtype, size: int) -> None:
    gate_up = random(5, 2 * size, dtype=dtype) * 8
    found, expected = torch.full((5, size), torch.nan, dtype=dtype), torch.empty(5, size, dtype=dtype)

    elementwise.silu_and_multiply(gate_up, found)
    reference.silu_and_multiply(gate_up, expected)

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_silu_of_large_values_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    activated = torch.empty(1, 4)
    elementwise.silu_and_multiply(gate_up, activated)
    assert activated.tolist() == [[0.0, 0.0, 200.0, 1e4]]


def test_no_rows_launch_nothing() -> None:
    empty = torch.empty(0, 64)
    elementwise.add_rms_norm(empty, empty, torch.ones(64), 1e-5, empty)
    elementwise.silu_and_multiply(torch.empty(0, 128), empty)
