"""The process of one section: where it runs, the time it has, and the report that it writes for the harness.

A section is a module of this folder with a function `run(section)`. It adds a figure as soon as the figure is known,
and begins no case that would pass the deadline. A case whose failure costs only its own figures is a `section` of the
report.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sections.harness import query_gpu
from benchmarks.report import Report
from core.config import EngineConfig, VllmConfig
from engine.runner import StepLimits

BIG_MODEL, TINY_MODEL = "random:llama-3.1-8b", "random:llama3-tiny"

Work = Callable[[], object]
WARM_UP_CALLS, HOST_CALLS, MOST_CALLS, LEAST_S = 3, 3, 100, 0.3
PACKAGES = ("torch", "triton", "numpy", "nixl-cu13", "nixl-cu12")


class Section(Report):
    """`rehearse`: on a CPU, with tiny shapes."""

    def __init__(self, name: str, folder: Path, allowed_s: float, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        self._deadline = time.monotonic() + allowed_s
        super().__init__(name, folder, machine_of(self.device))

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def has_fleets(self) -> bool:
        if importlib.util.find_spec("ray") is None:
            self.note("no fleet was measured, ray is not installed")
            return False
        return True

    def has_vllm(self) -> bool:
        from cli.diagnosis.vllm_environment import python_of  # needs packages that other sections do without

        python = python_of(VllmConfig())
        if not python.exists():
            self.note(f"vLLM is not installed at {python}")
        return python.exists()

    def has_time_for(self, seconds: float, case: str) -> bool:
        """Notes a case that would not end before the deadline. A rehearsal has time for every case."""
        if self.rehearse or self.seconds_left >= seconds:
            return True
        self.note(f"{case}: not measured, for lack of time")
        return False


def run_section(section: Section) -> None:
    """The whole life of the process. A device that failed may hang the end of the process, so it ends at once."""
    with section.section(section.name):
        section.save()
        if not (section.rehearse or torch.cuda.is_available()):
            raise RuntimeError("torch sees no CUDA device: use --rehearse on a CPU")
        importlib.import_module(f"benchmarks.gpu_sections.{section.name}").run(section)
    os._exit(bool(section.failed))


def machine_of(device: torch.device) -> str:
    """The device, the driver, and the versions that a figure depends on."""
    found = {"python": platform.python_version(), "system": platform.release()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if device.type != "cuda":
        found = {"device": "CPU, a rehearsal"} | found
    elif torch.cuda.is_available():
        about = torch.cuda.get_device_properties(device)
        found |= {
            "device": about.name, "device memory": f"{about.total_memory >> 20} MiB",
            "multiprocessors": str(about.multi_processor_count), "driver": query_gpu("driver_version"),
            "cuda": str(torch.version.cuda),
        }  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in found.items())


# ---- a model on the device, times of work there, and the rates that floors are made of
#
# Inputs are random: zeros multiply and copy faster than real data. A copy counts the bytes that it reads and writes.


def build(section: Section, limits: StepLimits, **options: Any) -> Any:
    """The runner of a worker: an 8B model on the device, or in a rehearsal a tiny one on the CPU."""
    from engine.gpu import graphs  # triton, which only the sections of a model need
    from engine.gpu.runner import GpuRunner

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
