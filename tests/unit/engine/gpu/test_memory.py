"""The pool takes what weights, graphs, a step and the margin leave, on a fake allocator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.kv_layout import KVLayout
from engine.gpu.memory import MAX_AUTO_BLOCKS, MB, FakeAllocator, MemoryUse, measure, plan_pool, refuse_large_weights

# 32 layers x 2 x 8 heads x 16 tokens x 128 x 2 bytes = 2 MB in a block
LAYOUT = KVLayout("model", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)
SMALL = KVLayout("model", "bfloat16", num_layers=1, num_kv_heads=1, block_size=16, head_dim=16)


USE = MemoryUse(total=1000 * MB, free=800 * MB, own=200 * MB, step_peak=100 * MB, graphs=50 * MB)
PLANS = [
    ({}, (800 - 100 - 50 - 50) // 2),
    ({"num_padding_blocks": 1}, 300 - 1),
    ({"kv_memory_mb": 64}, 32),
    ({"share": 0.5}, (500 - 200 - 100 - 50 - 50) // 2),  # less what the worker has taken already
    ({"layout": SMALL}, MAX_AUTO_BLOCKS),
    ({"layout": SMALL, "kv_memory_mb": 500}, 500 * MB // SMALL.block_bytes),
]


@pytest.mark.parametrize(("options", "num_blocks"), PLANS)
def test_an_automatic_pool_takes_all_that_is_left_and_another_its_size(
    options: dict[str, Any], num_blocks: int
) -> None:
    assert LAYOUT.block_bytes == 2 * MB
    settings: dict[str, Any] = {"layout": LAYOUT, "kv_memory_mb": 0, "margin_mb": 50} | options
    assert plan_pool(USE, **settings) == num_blocks


def test_two_workers_that_share_a_device_fit_beside_each_other() -> None:
    """The first has its pool already; the second finds less free memory, but its share is the same."""
    first = plan_pool(USE, LAYOUT, 0, 50, share=0.5)
    left_mb = 800 - 2 * first - 100
    second = MemoryUse(1000 * MB, (left_mb - 200) * MB, 200 * MB, 100 * MB, 50 * MB)
    assert plan_pool(second, LAYOUT, 0, 50, share=0.5) == first


REFUSED = [
    ({"kv_memory_mb": 700, "margin_mb": 50}, r"kv_memory_mb = 700 does not fit: of a GPU of 1000 MB.*leave 600 MB"),
    ({"kv_memory_mb": 0, "margin_mb": 648}, "no room for a KV pool: .*leave 2 MB, and 4 KV blocks need 8 MB"),
    ({"kv_memory_mb": 0, "margin_mb": 648, "num_padding_blocks": 2}, "leave 2 MB, and 4 KV blocks need 12 MB"),
    ({"kv_memory_mb": 0, "margin_mb": 5000}, "leave 0 MB.*or lower max_batched_tokens or gpu_memory_margin_mb"),
    ({"kv_memory_mb": 7, "margin_mb": 50}, "kv_memory_mb = 7 holds 3 KV blocks of 2097152 bytes: set it to 8 or more"),
    ({"kv_memory_mb": 0, "margin_mb": 50, "share": 0.2}, "this worker may use 0.2.*leave 0 MB"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_an_error_names_the_option_and_the_memory(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_pool(USE, LAYOUT, **options)  # type: ignore[arg-type]


@given(
    total=st.integers(0, 200_000),
    taken=st.integers(0, 200_000),
    step=st.integers(0, 20_000),
    margin=st.integers(0, 4000),
    wanted=st.sampled_from([0, 0, 100, 10_000]),
    share=st.sampled_from([1.0, 0.5, 0.25]),
)
def test_everything_fits_or_the_plan_is_refused(
    total: int, taken: int, step: int, margin: int, wanted: int, share: float
) -> None:
    device = FakeAllocator(total * MB)
    use = MemoryUse(total * MB, (total - min(taken, total)) * MB, min(taken, total) * MB, step * MB, 0)
    device.allocate(min(taken, total) * MB)
    try:
        num_blocks = plan_pool(use, LAYOUT, wanted, margin, share)
    except ConfigError:
        return
    for part in (num_blocks * LAYOUT.block_bytes, step * MB, margin * MB):
        device.allocate(part)
    assert device.own() <= total * MB * share
    assert device.num_refused == 0


def test_a_step_is_measured_by_its_peak_and_not_by_what_it_keeps() -> None:
    device = FakeAllocator(1000 * MB)
    device.allocate(100 * MB)
    device.allocate(400 * MB)
    device.free_bytes(400 * MB)  # kept by the allocator: it must not hide what the step needs

    def step() -> None:
        device.allocate(30 * MB)
        device.allocate(20 * MB)
        device.free_bytes(50 * MB)

    assert measure(device, step) == 50 * MB
    use = MemoryUse.now(device, step_peak=50 * MB, graphs=0)
    assert (use.total, use.free, use.own) == (1000 * MB, 900 * MB, 100 * MB)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    device = FakeAllocator(1000 * MB, others=300 * MB)
    refuse_large_weights(600 * MB, device, "llama", margin_mb=100)
    with pytest.raises(ConfigError, match=r"model = llama does not fit: its weights need 601 MB, and .* 600 MB"):
        refuse_large_weights(601 * MB, device, "llama", margin_mb=100)
    with pytest.raises(ConfigError, match="400 MB"):
        refuse_large_weights(600 * MB, device, "llama", margin_mb=100, share=0.5)
