"""The pool's memory is what transports and kernels are quick with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.kv_layout import KVLayout
from engine.kv_pool import KVPool

LAYOUT = KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)  # 2 MiB a block
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_bytes(address: int) -> int:
    """How much of the mapping that holds `address` lies in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    raise AssertionError("the address is in no mapping")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this kernel gives no huge pages"
)
def test_a_pool_lies_in_huge_pages() -> None:
    pool = KVPool(LAYOUT, 32, torch.device("cpu"))
    assert huge_page_bytes(pool.address()) >= 16 * LAYOUT.block_bytes  # the rest, where memory is in pieces


def test_the_tensor_and_the_bytes_are_the_same_memory() -> None:
    pool = KVPool(LAYOUT, 4, torch.device("cpu"))
    memory = pool.memory()
    assert memory is not None
    assert memory.nbytes == 4 * LAYOUT.block_bytes
    assert not any(memory[:4096])
    pool.tensor[3].fill_(1.0)
    assert memory[3 * LAYOUT.block_bytes :].tobytes() == pool.tensor[3].view(torch.uint8).numpy().tobytes()
