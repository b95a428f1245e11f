"""The pool's memory uses huge pages and is touched before its use."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.kv_layout import FLOAT8, KVLayout
from engine.first_touch import touch_first
from engine.kv_pool import KVPool

LAYOUT = KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)  # 2 MiB per block
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapped_bytes(address: int, kind: str) -> int:
    """The size that smaps lists for the mapping at `address` under `kind`: Rss, AnonHugePages, ..."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == f"{kind}:":
            return int(line.split()[1]) << 10
    raise AssertionError("the address is in no mapping")


def all_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="Linux has no huge pages here"
)
def test_at_least_half_of_a_pool_is_in_huge_pages() -> None:  # fragmented memory may leave the rest in small pages
    pool = KVPool(LAYOUT, 32, torch.device("cpu"))
    assert mapped_bytes(pool.address(), "AnonHugePages") >= 16 * LAYOUT.block_bytes


def test_a_background_thread_touches_the_rest_of_the_pool_and_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv_pool.touch_first", lambda memory: touch_first(memory, 3 * LAYOUT.block_bytes))
    before = all_resident_bytes()
    pool = KVPool(LAYOUT, 64, torch.device("cpu"))
    assert all_resident_bytes() < before + 32 * LAYOUT.block_bytes
    pool.tensor[40].fill_(1.0)
    thread = pool.touch_rest()
    assert thread is not None
    pool.tensor[50].fill_(2.0)
    thread.join()
    assert all_resident_bytes() > before + 60 * LAYOUT.block_bytes
    assert pool.tensor[40].min() == 1.0
    assert pool.tensor[50].min() == 2.0
    assert pool.touch_rest() is None


def test_startup_touches_all_of_a_small_pool() -> None:
    assert KVPool(LAYOUT, 8, torch.device("cpu")).touch_rest() is None


SMALL = KVLayout("m", FLOAT8, num_layers=3, num_kv_heads=2, block_size=4, head_dim=6)


def test_the_scales_of_a_block_lie_behind_its_values() -> None:
    pool = KVPool(SMALL, 5, torch.device("cpu"), num_padding_blocks=1)
    assert pool.scales is not None
    assert (pool.tensor.shape, pool.tensor.dtype) == ((6, 3, 2, 2, 4, 6), torch.float8_e4m3fn)
    assert (pool.scales.shape, pool.scales.dtype) == ((6, 3, 2, 2, 4), torch.float32)
    values = torch.arange(3 * 2 * 2 * 4 * 6).to(torch.uint8)
    scales = torch.rand(3, 2, 2, 4)
    pool.tensor.view(torch.uint8)[2] = values.view(3, 2, 2, 4, 6)
    pool.scales[2] = scales
    memory = pool.memory()
    assert memory is not None
    assert len(memory) == 5 * SMALL.block_bytes
    expected = values.numpy().tobytes() + scales.numpy().tobytes()
    assert memory[2 * SMALL.block_bytes : 3 * SMALL.block_bytes].tobytes() == expected
    assert pool.blocks()[2].numpy().tobytes() == expected
    assert not pool.blocks()[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("dtype", ["bfloat16", FLOAT8])
def test_every_element_of_a_pool_has_a_place_of_its_own(dtype: str) -> None:
    pool = KVPool(replace(SMALL, dtype=dtype), 5, torch.device("cpu"), 1)
    pool.tensor.view(torch.uint8).fill_(1)
    if pool.scales is not None:
        pool.scales.view(torch.uint8).fill_(1)
    assert bool((pool._bytes == 1).all())
    assert pool.tensor.stride(-1) == 1
    assert pool.scales is None or pool.scales.stride(-1) == 1
