"""The inputs of a step in one flat run of int32: packed by the host, uploaded in one copy, seen as tensors.

    host buffer, page-locked  --copy stream-->  device buffer of the set  --copy at the step's begin-->  fixed buffer

Two sets alternate, so the next step is uploaded while a step is computed. Eager steps read the buffer of the set. A
graph reads the same addresses at each replay, so the inputs of a graph are copied to the fixed buffer first. Fields
begin at multiples of 16 bytes, so that kernels of one kind meet pointers of one alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.gpu.device_queue import DeviceQueue, Mark
from engine.gpu.step_arrays import StepArrays, StepFields

_ALIGNMENT = 4  # int32
NUM_SETS = 2  # steps in flight

StepTensors = StepFields[torch.Tensor]  # on the device


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The first place of each field, and the end of the last."""
    begins, end = [], 0
    for size in sizes:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        begins.append(end)
        end += size
    return begins, end


def tensors_in(flat: torch.Tensor, sizes: Sequence[int]) -> StepTensors:
    """# flat: int32"""
    begins, _ = places(sizes)
    return StepTensors(*(flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)))


def pack(arrays: StepArrays, into: np.ndarray) -> int:
    """Returns the number of places. # into: int32"""
    begins, end = places(arrays.sizes)
    for begin, array in zip(begins, arrays, strict=True):
        into[begin : begin + len(array)] = array
    return end


@dataclass(frozen=True, slots=True)
class StagedStep:
    flat: torch.Tensor  # int32 on the device, with the inputs after `uploaded`
    sizes: tuple[int, ...]
    max_context: int  # positions of the longest context of a row that attends alone
    has_promised: bool
    uploaded: Mark

    def tensors(self) -> StepTensors:
        return tensors_in(self.flat, self.sizes)


class StagingSet:
    """Grows for a step that is larger than all before."""

    def __init__(self, queue: DeviceQueue, capacity: int) -> None:
        self._queue = queue
        self._uploaded: Mark | None = None
        self._allocate(capacity)

    def stage(self, arrays: StepArrays) -> StagedStep:
        """Start the upload. The step that used this set last has ended, or is not computed any more."""
        if self._uploaded is not None:
            self._uploaded.wait()  # the host buffer is read until then
        _, size = places(arrays.sizes)
        if size > len(self._on_host):
            self._allocate(2 * size)
        pack(arrays, self._on_host.numpy())
        flat = self._on_device[:size]
        with self._queue.uploading():
            flat.copy_(self._on_host[:size], non_blocking=True)
            self._uploaded = self._queue.mark()
        has_promised = bool((arrays.sources >= 0).any())
        max_context = int(arrays.decode_positions.max(initial=0))
        return StagedStep(flat, arrays.sizes, max_context, has_promised, self._uploaded)

    def _allocate(self, capacity: int) -> None:
        self._on_host = self._queue.host_buffer(capacity)
        with self._queue.uploading():
            self._on_device = torch.zeros(capacity, dtype=torch.int32, device=self._queue.device)
