"""The interface of an engine: tokens in, KV into the pool, tokens out.

A runner owns one KV pool and follows each StepPlan exactly. For each chunk, the runner reads its sequence's slots of
positions [0, start), writes the slots of [start, start + num_tokens), and touches nothing else in the pool. A runner
decides nothing. Between steps, a runner keeps copies of block tables, but nothing that decides a token. A sequence that
began on another worker therefore continues as soon as its KV is in the pool's blocks.

    submit(k)   submit(k + 1)        submit(k + 2)
                collect() -> k       collect() -> k + 1

Every submitted step is collected once, in the order of submission. At most two steps are submitted and not collected.
The second may contain promised chunks: their tokens are sampled by the first. One thread submits, and one thread
collects, so the inputs of a step are prepared while the step before is computed. When a step raises an exception, the
step that is submitted behind the failed step is dropped: its `collect` raises `StepDropped` and computes nothing. So
does a step with a promised chunk if the step before has neither a token nor a failure of that sequence. A step may fail
for some of its sequences alone (`StepOutput.failed`). The step submitted behind computes anything for such a sequence,
in the sequence's own blocks, and names it in `failed` again. `DeviceLost` means that the process must end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from core.cost.model_work import ModelSizes
from core.kv_layout import KVLayout
from core.model_info import ModelInfo
from core.step import StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the scheduler plans. A runner prepares for these sizes; larger steps are only slower."""

    max_running: int = 64  # sequences
    max_batched_tokens: int = 512  # tokens


class StepDropped(Exception):
    """The step was not computed, because the step before has failed or has no token for a promised chunk."""


class Runner(Protocol):
    info: ModelInfo
    layout: KVLayout
    num_blocks: int
    sizes: ModelSizes | None  # None: the runner has no model
    takes_grammars: bool  # else no sequence may have one
    proposes: bool  # else no output has guesses of the next tokens

    def pool_address(self) -> int:
        """Address of block 0; block n begins n * layout.block_bytes later. Page-aligned, and constant."""
        ...

    def pool_memory(self) -> memoryview | None:
        """The pool's num_blocks * layout.block_bytes bytes, writable; None for a pool in device memory."""
        ...

    def pool_device(self) -> int | None:
        """The CUDA device that holds the pool; None for host memory."""
        ...

    def device_memory(self) -> Any:
        """The `DeviceMemory` (kv_transfer/device/device_memory.py) of a pool on a device; None for host memory.

        Each call makes a new one. Only the thread of the transfer agent uses it.
        """
        ...

    def start_background_work(self) -> None:
        """Start background work. Call once, after the worker has started everything else."""
        ...

    def submit(self, step: StepPlan) -> None:
        """Accept a step and prepare its inputs. Starts no compute threads."""
        ...

    def collect(self) -> StepOutput:
        """Compute the oldest submitted step, or wait for its end. After the return, peers may read the step's KV."""
        ...

    def close(self) -> None:
        """Release the model. The pool's memory stays valid while a memoryview refers to it."""
        ...


def run_step(runner: Runner, step: StepPlan) -> StepOutput:
    """Compute one step. No other step is submitted."""
    runner.submit(step)
    return runner.collect()
