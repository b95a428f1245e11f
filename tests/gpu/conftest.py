"""Every test of this folder needs a CUDA device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _need_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
