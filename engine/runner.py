"""The interface of an engine: tokens in, KV into the pool, tokens out.

A runner owns one KV pool and follows each StepPlan exactly. For each chunk, the runner reads its sequence's slots of
positions [0, start), writes the slots of [start, start + num_tokens), and touches nothing else in the pool. A runner
decides nothing and keeps no state of a sequence between steps. A sequence that began on another worker therefore
continues as soon as its KV is in the pool's blocks.
"""

from __future__ import annotations

from typing import Protocol

from core.kv_layout import KVLayout
from core.model_info import ModelInfo
from core.step import StepOutput, StepPlan


class Runner(Protocol):
    info: ModelInfo
    layout: KVLayout
    num_blocks: int

    def pool_address(self) -> int:
        """Address of block 0; block n begins n * layout.block_bytes later. Page-aligned, and constant."""
        ...

    def pool_memory(self) -> memoryview | None:
        """The pool's num_blocks * layout.block_bytes bytes, writable; None for a pool in device memory."""
        ...

    def pool_device(self) -> int | None:
        """The CUDA device that holds the pool; None for host memory."""
        ...

    def start_background_work(self) -> None:
        """Start background work. Call once, after the worker has started everything else."""
        ...

    def run(self, step: StepPlan) -> StepOutput:
        """Compute one step. After the return, the step's KV may be read. Calls come from any thread, one at a time."""
        ...

    def close(self) -> None:
        """Release the model. The pool's memory stays valid while a memoryview refers to it."""
        ...
