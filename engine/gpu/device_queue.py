"""The order of work on a device: one stream that computes, and one that uploads the inputs of the next step.

`CudaQueue` and `HostQueue` have one interface. On the host everything happens at once, so the same runner works there.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

import numpy.typing as npt
import torch


class Mark(Protocol):
    """A place in the order of a stream."""

    def wait(self) -> None:
        """Wait on the host until the work before this place has ended. Raises an error of this work."""
        ...

    def has_ended(self) -> bool:
        """Whether the work before this place has ended. Never waits. Raises an error of this work."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Both have ended."""
        ...


class DeviceQueue(Protocol):
    device: torch.device
    launches_ahead: bool  # a step may be launched while the step before is computed

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Launch on the computing stream. Every thread may enter, one at a time."""
        ...

    def uploading(self) -> contextlib.AbstractContextManager[object]: ...

    def mark(self) -> Mark:
        """The end of what the current stream has now."""
        ...

    def follow(self, mark: Mark) -> None:
        """Let the current stream wait for `mark`."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """# int32 [size], page-locked if the device can then copy without the host"""
        ...

    def free_cached(self) -> None:
        """Give unused memory of the allocator back to the device. Waits for the device."""
        ...


class CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def has_ended(self) -> bool:
        return self.event.query()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class CudaQueue:
    launches_ahead = True

    def __init__(self, device: torch.device, background: bool = False) -> None:
        """`background`: programs of a step start before those of this queue wherever both wait for a processor."""
        self.device = device
        self._compute_stream = torch.cuda.Stream(device, priority=0 if background else -1)
        self._upload_stream = torch.cuda.Stream(device)

    def computing(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._compute_stream)

    def uploading(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._upload_stream)

    def mark(self) -> CudaMark:
        return CudaMark()

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self.device).wait_event(mark.event)

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def free_cached(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


class HostMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        """The work before this place has ended."""

    def has_ended(self) -> bool:
        return True

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self.at - earlier.at


class HostQueue:
    def __init__(self, device: torch.device, launches_ahead: bool = False) -> None:
        self.device = device
        self.launches_ahead = launches_ahead

    def computing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def uploading(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> HostMark:
        return HostMark()

    def follow(self, mark: Mark) -> None:
        """Everything before `mark` has ended."""

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def free_cached(self) -> None:
        """The host's allocator keeps no memory of a device."""


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Start the upload on the current stream, without a wait. Torch keeps the page-locked copy until it has ended."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def open_queue(device: torch.device, background: bool = False) -> DeviceQueue:
    return CudaQueue(device, background) if device.type == "cuda" else HostQueue(device)
