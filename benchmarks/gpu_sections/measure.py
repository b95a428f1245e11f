"""Times work on the device with events, and measures the rates that floors are made of.

Inputs are random: zeros multiply and copy faster than real data. A copy counts the bytes that it reads and writes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]
WARM_UP_CALLS = 3


def finish(device: torch.device) -> None:
    """Wait for all work of the device. Runners and transfers have streams that do not wait for torch's own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(work: Work, device: torch.device, least_s: float = 0.3, most_calls: int = 100) -> float:
    """The median of calls that take `least_s` in all, after a warm-up."""
    for _ in range(WARM_UP_CALLS):
        work()
    if device.type != "cuda":
        return _median_on_host(work, most_calls=3)
    finish(device)
    times: list[float] = []
    while len(times) < most_calls and sum(times) < least_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _median_on_host(work: Work, most_calls: int) -> float:
    times = []
    for _ in range(most_calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second by a copy from the device to itself."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of a product of square matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: torch.matmul(left, right, out=product), device)
