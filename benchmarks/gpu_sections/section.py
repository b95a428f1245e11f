"""The process of one section: where it runs, the time it has, and the figures that it writes for the harness.

A section is a module of this folder with a function `run(section)`. It writes a figure as soon as the figure is known,
and begins no case that would pass the deadline.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any, TextIO

import torch

from benchmarks.report import Line

PACKAGES = ("torch", "triton", "numpy", "nixl-cu13", "nixl-cu12")


class Section:
    """`rehearse`: on a CPU, with tiny shapes."""

    def __init__(self, allowed_s: float, rehearse: bool, messages: TextIO) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        self.failed: list[str] = []  # cases
        self._deadline = time.monotonic() + allowed_s
        self._messages = messages

    def add(self, line: Line) -> None:
        self.send({"line": asdict(line)})

    def note(self, text: str) -> None:
        """A sentence that stands below the figures: what was skipped, and why."""
        self.send({"note": text})

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def has_time_for(self, seconds: float, case: str) -> bool:
        """Notes a case that would not end before the deadline. A rehearsal has time for every case."""
        if self.rehearse or self.seconds_left >= seconds:
            return True
        self.note(f"{case}: not measured, for lack of time")
        return False

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A case whose failure costs only its own figures. The section fails at its end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (noted)
            traceback.print_exc()
            self.note(f"{name}: {type(error).__name__}: {error}")
            self.failed.append(name)

    def send(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._messages, flush=True)


def run_section(section: Section, name: str) -> None:
    """The whole life of the process. A device that failed may hang the end of the process, so it ends at once."""
    try:
        if not section.rehearse and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device: use --rehearse on a CPU")
        section.send({"machine": machine_of(section.device)})
        importlib.import_module(f"benchmarks.gpu_sections.{name}").run(section)
        if section.failed:
            raise RuntimeError(f"these cases failed: {', '.join(section.failed)}")
    except BaseException as error:  # noqa: BLE001 (the harness reports it)
        traceback.print_exc()
        section.send({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def machine_of(device: torch.device) -> dict[str, str]:
    """The device, the driver, and the versions that a figure depends on."""
    found = {"python": platform.python_version(), "system": platform.release()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if device.type != "cuda":
        return {"device": "CPU, a rehearsal"} | found
    about = torch.cuda.get_device_properties(device)
    return found | {
        "device": about.name,
        "device memory": f"{about.total_memory >> 20} MiB",
        "multiprocessors": str(about.multi_processor_count),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
    }


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found[0] if found else "unknown"
