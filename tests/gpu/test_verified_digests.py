"""The digests of `verified_kv` on a CUDA device are those of the same function on a CPU."""

from __future__ import annotations

import pytest
import torch

from verified_kv.digests import BlockDigests

pytestmark = pytest.mark.gpu


def test_a_device_digests_as_a_cpu_does() -> None:
    caches = {f"layer.{layer}": torch.randn(64, 2, 16, 256).to(torch.bfloat16) for layer in range(3)}
    blocks = torch.randperm(64)[:40].tolist()
    pending = BlockDigests({name: cache.cuda() for name, cache in caches.items()}, 64).begin(blocks)
    torch.cuda.synchronize()
    assert pending.poll() == BlockDigests(caches, 64, "sums").begin(blocks).poll()
