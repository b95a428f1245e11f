"""A model on the device, times of work there, and the rates that floors are made of.

Inputs are random: zeros multiply and copy faster than real data. A copy counts the bytes that it reads and writes.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_sections.section import Section
from core.config import EngineConfig
from engine.gpu import graphs
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits

BIG_MODEL, TINY_MODEL = "random:llama-3.1-8b", "random:llama3-tiny"

Work = Callable[[], object]
WARM_UP_CALLS, HOST_CALLS, MOST_CALLS, LEAST_S = 3, 3, 100, 0.3


def build(section: Section, limits: StepLimits, **options: Any) -> GpuRunner:
    """The runner of a worker: an 8B model on the device, or in a rehearsal a tiny one on the CPU."""
    defaults: dict[str, Any] = {"model": BIG_MODEL, "dtype": "bfloat16", "device": "cuda:0"}
    if section.rehearse:
        defaults = {"model": TINY_MODEL, "dtype": "float32", "device": "cpu", "num_threads": 1}
        options["kv_memory_mb"] = 8
        graphs.MAX_ROWS = 0  # the kernels of each graph with prompts would be interpreted for half a minute
    else:
        gc.collect()  # an earlier runner is a cycle of objects
        torch.cuda.empty_cache()  # the pool takes what is free
    return GpuRunner(EngineConfig(**(defaults | options)), limits=limits)


def finish(device: torch.device) -> None:
    """Wait for all work of the device. Runners and transfers have streams that do not wait for torch's own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(work: Work, device: torch.device) -> float:
    """The median of calls that take `LEAST_S` in all, after a warm-up; of three calls on a CPU."""
    for _ in range(WARM_UP_CALLS):
        work()
    finish(device)
    times: list[float] = []
    while device.type != "cuda" and len(times) < HOST_CALLS:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    while device.type == "cuda" and len(times) < MOST_CALLS and sum(times) < LEAST_S:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
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
