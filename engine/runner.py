"""What computes: tokens in, KV into the pool, tokens out.

A runner owns one KV pool and obeys each StepPlan to the letter: of a chunk's sequence it reads the slots of positions
[0, start), writes those of [start, start + num_tokens), and touches nothing else in the pool. It decides nothing and
remembers nothing of a sequence between steps, so whoever brings the right bytes into the right blocks may go on with a
sequence that began elsewhere.
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

    def settle(self) -> None:
        """Begin what may go on while requests come. To be called once, when everything else has started."""
        ...

    def run(self, step: StepPlan) -> StepOutput:
        """Compute one step; blocks until it is done and its KV may be read. One call at a time, from any thread."""
        ...

    def close(self) -> None:
        """Let go of the model. The pool's memory stays valid while somebody still holds its memoryview."""
        ...
