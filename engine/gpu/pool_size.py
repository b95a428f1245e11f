"""The pool of a runner: its number of blocks is measured, because the pool takes what everything else leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import OutOfDeviceMemory
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.errors import sort_error
from engine.gpu.graphs import graph_sizes, largest_of
from engine.gpu.memory import Allocator, MemoryUse, measure, plan_pool, step_does_not_fit
from engine.gpu.step_computer import StepComputer
from engine.kv_pool import KVPool, num_blocks_within
from engine.loading import ModelSetup
from engine.runner import StepLimits

NUM_PADDING_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class PoolSizer:
    setup: ModelSetup
    limits: StepLimits
    allocator: Allocator | None  # None: the pool is in host memory
    share: float  # of the device that this process may use
    make_pool: Callable[[int], KVPool]
    make_computer: Callable[[KVPool], StepComputer]

    def num_blocks(self) -> int:
        """The blocks of the pool, without padding. The weights are loaded. Raises `ConfigError` if they do not fit."""
        config, layout = self.setup.config, self.setup.layout
        if self.allocator is None:
            return num_blocks_within(layout, config.host_kv_memory_mb)
        try:
            step_peak, graphs = self._measured(self.allocator)
        except Exception as error:
            if not isinstance(sort_error(error), OutOfDeviceMemory):
                raise
            raise step_does_not_fit(self.limits.max_batched_tokens, self.limits.max_running) from error
        gc.collect()  # the small pool and its computer refer to each other
        use = MemoryUse.now(self.allocator, step_peak, graphs)
        margin_mb = config.gpu_memory_margin_mb
        return plan_pool(use, layout, config.kv_memory_mb, margin_mb, self.share, NUM_PADDING_BLOCKS)

    def _measured(self, allocator: Allocator) -> tuple[int, int]:
        """The bytes of the largest step, and of the largest graphs, on a pool that just holds the step."""
        num_tokens = min(self.limits.max_batched_tokens, self.setup.info.context_length - 1)
        num_prompt_blocks = self.setup.layout.num_blocks_for(num_tokens)
        computer = self.make_computer(self.make_pool(num_prompt_blocks + 1))
        prompt = _chunk("prompt", num_tokens, list(range(num_prompt_blocks)))
        decodes = [_chunk(f"decode {number}", 1, [num_prompt_blocks]) for number in range(self.limits.max_running)]
        # The sum of both bounds every step of these limits.
        peak = measure(allocator, lambda: run_apart(computer, [prompt]))
        peak += measure(allocator, lambda: run_apart(computer, decodes))
        sizes = largest_of(graph_sizes(self.limits, self.setup.layout.has_scales))
        graphs = measure(allocator, lambda: computer.graphs.capture(sizes))
        computer.graphs.close()
        return peak, graphs


def run_apart(computer: StepComputer, chunks: list[ScheduledChunk]) -> None:
    """Compute a step without promised tokens, and wait for its end."""
    with computer.queue.computing():
        plan = computer.sampler.prepare(chunks)
        rows = computer.sample(computer.launch(computer.stage_apart(chunks, {}), None), plan)
        assert rows is not None
    computer.sampler.collect(rows)


def _chunk(name: str, num_tokens: int, blocks: list[int]) -> ScheduledChunk:
    """A chunk that needs every kernel of sampling, because the first use of a kernel compiles it."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=1)
    view = SequenceView(name, [1] * num_tokens, num_tokens, blocks, sampling)
    return ScheduledChunk(view, 0, num_tokens, samples=True, promised=False)
