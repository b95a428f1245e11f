"""The size of the KV pool on a GPU: the memory that is left beside everything else.

    |- other processes -|- context, weights -|- graphs -|- one step -|- margin -|------------ KV pool ------------|
                                             ^ `MemoryUse.free` begins here
    |<--------------------------------------- `MemoryUse.total` ------------------------------------------------->|

Order at start: refuse weights that are too large; load the weights; `measure` the largest step and the largest graph on
a pool of a few blocks; `plan_pool`; allocate the pool; capture the graphs. The pool is the last large allocation,
because only it can take any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from core.errors import ConfigError
from core.kv_layout import KVLayout
from engine.kv_pool import MIN_BLOCKS

MB = 1 << 20
# An automatic pool has at most this many blocks: the worker keeps an entry for each block in the memory of the host.
MAX_AUTO_BLOCKS = 1 << 18


class Allocator(Protocol):
    """The memory of one device, in bytes, as this process may use it."""

    def total(self) -> int:
        """Of the device."""
        ...

    def free(self) -> int:
        """Bytes that this process may still allocate: free on the device, or kept by the allocator."""
        ...

    def own(self) -> int:
        """Bytes that the allocator of this process has taken from the device."""
        ...

    def peak(self) -> int:
        """The most that `own` has been since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Return memory that the allocator keeps, but no tensor uses, to the device."""
        ...


class CudaAllocator:
    """torch's caching allocator on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + kept

    def own(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)  # a tensor that a stream still uses is not returned
        torch.cuda.empty_cache()


class FakeAllocator:
    """A pretended device. `allocate` and `free_bytes` pretend tensors.

    It keeps what was freed until `release`, as torch's allocator does.
    """

    def __init__(self, total: int, others: int = 0) -> None:
        self.num_refused = 0  # calls of `allocate` that found too little memory
        self._total = total
        self.others = others  # taken by other processes
        self._used = self._reserved = self._peak = 0

    def allocate(self, num_bytes: int) -> None:
        """Raises torch's own error if the device has too little memory."""
        grown = max(0, self._used + num_bytes - self._reserved)
        if grown > self._total - self.others - self._reserved:
            self.num_refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        self._used += num_bytes
        self._reserved += grown
        self._peak = max(self._peak, self._reserved)

    def free_bytes(self, num_bytes: int) -> None:
        assert num_bytes <= self._used
        self._used -= num_bytes

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self.others - self._used

    def own(self) -> int:
        return self._reserved

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._reserved

    def release(self) -> None:
        self._reserved = self._used


def measure(allocator: Allocator, run: Callable[[], object]) -> int:
    """The bytes that `run` needs at its peak, beyond what was used before. `run` waits for the device."""
    allocator.release()
    allocator.reset_peak()
    before = allocator.own()
    run()
    return max(0, allocator.peak() - before)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """In bytes, with the weights loaded and nothing else."""

    total: int
    free: int
    own: int  # of this process; counts against its share of the device
    step_peak: int  # of the largest step
    graphs: int  # of all captured graphs

    @classmethod
    def now(cls, allocator: Allocator, step_peak: int, graphs: int) -> MemoryUse:
        allocator.release()
        return cls(allocator.total(), allocator.free(), allocator.own(), step_peak, graphs)

    def room(self, margin: int, share: float = 1.0) -> int:
        """Bytes for the pool. `share`: the part of the device that this process may use, in (0, 1]."""
        assert 0.0 < share <= 1.0
        free = min(self.free, int(self.total * share) - self.own)
        return max(0, free - self.step_peak - self.graphs - margin)


def plan_pool(
    use: MemoryUse, layout: KVLayout, kv_memory_mb: int, margin_mb: int, share: float = 1.0, num_padding_blocks: int = 0
) -> int:
    """The number of blocks of the pool, without its padding blocks. `kv_memory_mb` 0: all that is left.

    Raises `ConfigError` if the device has no room for the pool.
    """
    room = use.room(margin_mb * MB, share)
    num_fitting = room // layout.block_bytes - num_padding_blocks
    wanted = kv_memory_mb * MB // layout.block_bytes if kv_memory_mb else min(num_fitting, MAX_AUTO_BLOCKS)
    if wanted > num_fitting:
        raise ConfigError(
            f"kv_memory_mb = {kv_memory_mb} does not fit: {_uses(use, margin_mb, share)} leave "
            f"{_mb(room)} MB: set kv_memory_mb to 0 (all that is left) or less, or lower gpu_memory_margin_mb"
        )
    if wanted < MIN_BLOCKS and kv_memory_mb:
        raise ConfigError(
            f"kv_memory_mb = {kv_memory_mb} holds {wanted} KV blocks of {layout.block_bytes} bytes: "
            f"set it to {_mb_up(MIN_BLOCKS * layout.block_bytes)} or more"
        )
    if wanted < MIN_BLOCKS:
        needed = (MIN_BLOCKS + num_padding_blocks) * layout.block_bytes
        raise ConfigError(
            f"no room for a KV pool: {_uses(use, margin_mb, share)} leave {_mb(room)} MB, and {MIN_BLOCKS} KV blocks "
            f"need {_mb_up(needed)} MB: choose a smaller model, a quantization or a GPU with more memory, or lower "
            "max_batched_tokens or gpu_memory_margin_mb"
        )
    return wanted


def refuse_large_weights(
    weight_bytes: int, allocator: Allocator, model: str, margin_mb: int, share: float = 1.0
) -> None:
    """Raise `ConfigError` if the weights alone do not fit beside the margin. Call before they are allocated."""
    allocator.release()
    room = MemoryUse.now(allocator, 0, 0).room(margin_mb * MB, share)
    if weight_bytes > room:
        raise weights_do_not_fit(model, weight_bytes, room)


def weights_do_not_fit(model: str, weight_bytes: int, room: int) -> ConfigError:
    """Also for weights whose allocation failed: another process may take memory at the same time."""
    return ConfigError(
        f"model = {model} does not fit: its weights need {_mb_up(weight_bytes)} MB, and the GPU has {_mb(room)} MB for "
        "them: choose a smaller model, a quantization or a GPU with more memory, or lower gpu_memory_margin_mb"
    )


def step_does_not_fit(max_batched_tokens: int, max_running: int) -> ConfigError:
    """The memory that the weights leave holds no step of the largest size."""
    return ConfigError(
        f"no room for a step of max_batched_tokens = {max_batched_tokens} or max_running = {max_running} beside the "
        "weights: lower them, or choose a smaller model, a quantization or a GPU with more memory"
    )


def _uses(use: MemoryUse, margin_mb: int, share: float) -> str:
    """The memory of the device and what takes part of it, in words."""
    shared = "" if share == 1.0 else f" and of which this worker may use {share:g}"
    return (
        f"of a GPU of {_mb(use.total)} MB, of which {_mb(use.free)} MB are free after the weights{shared}, "
        f"a step ({_mb_up(use.step_peak)} MB), graphs ({_mb_up(use.graphs)} MB) and "
        f"gpu_memory_margin_mb ({margin_mb} MB)"
    )


def _mb(num_bytes: int) -> int:
    return num_bytes // MB


def _mb_up(num_bytes: int) -> int:
    return -(-num_bytes // MB)
