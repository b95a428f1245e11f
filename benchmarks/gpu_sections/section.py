"""The process of one section: where it runs, the time it has, and the report that it writes for the harness.

A section is a module of this folder with a function `run(section)`. It adds a figure as soon as the figure is known,
and begins no case that would pass the deadline. A case whose failure costs only its own figures is a `section` of the
report.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import time
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu_sections.harness import query_gpu
from benchmarks.report import Report

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
        from core.config import VllmConfig

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
