"""Sizes of a device that the launch grids depend on."""

from __future__ import annotations

import functools

import torch

HOPPER_PROCESSORS = 132  # streaming multiprocessors of an H100 SXM and of an H200
INTERPRETED_PROCESSORS = 4  # Triton's interpreter runs the programs one after another


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device. Kernels compiled ahead of time have meta tensors: those of Hopper."""
    if device.type == "cuda":
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
    return HOPPER_PROCESSORS if device.type == "meta" else INTERPRETED_PROCESSORS


@functools.cache
def _of_cuda(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
