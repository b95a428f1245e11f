"""The interface of an engine: tokens in, KV into the pool, tokens out.

A runner owns one KV pool and follows each StepPlan exactly: of a chunk's sequence, a runner reads the slots of
positions [0, start), writes the slots of [start, start + num_tokens), and touches nothing else in the pool. A runner
decides nothing and keeps no state of a sequence between steps. So a sequence that began elsewhere continues here as
soon as the right bytes are in the right blocks.
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
        """Address of block 0's first byte; block n begins n * layout.block_bytes after it. Page-aligned, and fixed."""
        ...

    def pool_memory(self) -> memoryview | None:
        """The pool's bytes, writable, num_blocks * layout.block_bytes of them; None where they lie on a device."""
        ...

    def pool_device(self) -> int | None:
        """The CUDA device that holds the pool; None = host memory."""
        ...

    def start_background_work(self) -> None:
        """Start work that may go on while requests come. Call once, after everything else has started."""
        ...

    def run(self, step: StepPlan) -> StepOutput:
        """Compute one step; on return its KV may be read. One call at a time, from any thread."""
        ...

    def close(self) -> None:
        """Release the model. The pool's memory stays valid as long as its memoryview is referenced."""
        ...
