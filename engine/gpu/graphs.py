"""Steps as graphs: one launch for all kernels of a step.

A graph computes a fixed number of rows, and a step takes the smallest graph that holds it; padding fills the rest.
Steps of decodes have graphs, and so have steps with prompts up to MAX_ROWS: the host needs 15 to 25 ms for the launches
of a step, which a device that computes a larger step does not notice. All graphs read one fixed buffer of inputs, and
share the memory of their intermediate tensors, because one of them runs at a time. On a CPU, `CpuGraph` takes the place
of a CUDA graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from engine.gpu.cpu_graph import CpuGraph
from engine.gpu.device_queue import DeviceQueue
from engine.gpu.step_arrays import GraphSize, StepArranger, StepArrays
from engine.gpu.step_buffers import StagedStep, StepTensors, pack, places, tensors_in
from engine.runner import StepLimits

MAX_ROWS = 2048  # of a graph with prompts
MAX_PROMPTS = 8  # of a graph
_STRIDE = 16
_ROWS = 64  # from one graph with prompts to the next
_MANY_ROWS = 512  # from here on, twice as many
_LEAST_ALONE, _ALONE_FACTOR = 16, 4


def buckets_up_to(max_running: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... and `max_running`. From 16 on, at most an eighth or 15 sequences are padding."""
    found, size = [], 1
    while size < max_running:
        found.append(size)
        size = 2 * size if size < _STRIDE else size + max(_STRIDE, size // 8 // _STRIDE * _STRIDE)
    return [*found, max_running]


def largest_of(sizes: Sequence[GraphSize]) -> list[GraphSize]:
    """The graph with the most logits, then the one with the most rows. The others find room in their memory."""
    return [max(size for size in sizes if not size.prompts), max(sizes)]


def graph_sizes(limits: StepLimits, has_scales: bool = False) -> list[GraphSize]:
    """Of the graphs for steps of these limits. In a pool with scales, prompts have none: their blocks are expanded, as
    many as a step has."""
    decodes = buckets_up_to(limits.max_running)
    largest = 0 if has_scales else min(MAX_ROWS, limits.max_batched_tokens)
    rows, size = [], 0
    while size < largest:
        size += _ROWS if size < _MANY_ROWS else 2 * _ROWS
        rows.append(size)
    alone, count = [0], _LEAST_ALONE
    while alone[-1] < limits.max_running:
        alone.append(min(count, limits.max_running))
        count *= _ALONE_FACTOR
    return [GraphSize(count, count) for count in decodes] + [
        GraphSize(size, count, MAX_PROMPTS, min(count + MAX_PROMPTS, limits.max_running))
        for size in rows
        for count in alone
    ]


def _fewest_alone(size: GraphSize) -> int:
    """Where sizes lie far apart, few rows share the device by splits for few. Splits in vain end at once."""
    if not size.prompts:
        return size.alone
    return 1 if size.alone <= _LEAST_ALONE else size.alone // _ALONE_FACTOR + 1


class StepLogits(NamedTuple):
    """Of a step. The next run of any graph overwrites those of a graph."""

    logits: torch.Tensor  # float32 [S or more, vocab]
    highest: torch.Tensor | None  # int32 [S or more] the argmax of each row; None: not found yet


class Graph(Protocol):
    def replay(self) -> None: ...


# (inputs, positions of the longest context, the fewest rows that attend alone in a step of this size)
Compute = Callable[[StepTensors, int, int], StepLogits]


class StepGraphs:
    """`capture` makes the graphs once, before the first step."""

    def __init__(
        self,
        queue: DeviceQueue,
        arranger: StepArranger,
        compute: Compute,
        max_context: int,  # positions of the longest context
    ) -> None:
        self._queue = queue
        self._arranger = arranger
        self._compute = compute
        self._max_context = max_context
        self._graphs: dict[GraphSize, tuple[Graph, StepLogits, StepTensors]] = {}  # the smallest first
        self._fixed = torch.zeros(0, dtype=torch.int32)
        self._found: StepLogits | None = None  # of the graph with the most logits

    def capture(self, sizes: Sequence[GraphSize]) -> None:
        """The largest graphs come first: the others find memory that these have left."""
        if not sizes:
            return
        max_blocks = -(-self._max_context // self._arranger.block_size)
        num_block_ids = max(size.alone + size.prompts for size in sizes) * max_blocks + 1
        num_places = max(places(self._sizes(size, num_block_ids))[1] for size in sizes)
        self._fixed = torch.zeros(num_places, dtype=torch.int32, device=self._queue.device)
        memory = torch.cuda.graph_pool_handle() if self._queue.device.type == "cuda" else None
        ordered = dict.fromkeys((*largest_of(sizes), *sorted(sizes, reverse=True)))
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # freeing a tensor during a capture may synchronise
        try:
            for size in ordered:
                self._capture(size, memory)
        finally:
            if was_enabled:
                gc.enable()
        self._graphs = dict(sorted(self._graphs.items()))
        self._queue.free_cached()

    def size_for(self, arrays: StepArrays) -> GraphSize | None:
        """Of the graph for a step; None if no graph holds it."""
        if not len(arrays.prefill_row) and len(arrays.sampling_rows) < len(arrays.token_ids):
            return None
        return next((size for size in self._graphs if size.holds(arrays)), None)

    def run(self, size: GraphSize, staged: StagedStep) -> StepLogits:
        """Launch a graph on the current stream. The next run overwrites the result."""
        graph, result, _ = self._graphs[size]
        self._fixed[: len(staged.flat)].copy_(staged.flat)
        graph.replay()
        return result

    def close(self) -> None:
        self._graphs.clear()
        self._fixed = self._fixed[:0].clone()
        self._found = None

    def _capture(self, size: GraphSize, memory: Any) -> None:
        arrays = self._arranger.only_padding(size)
        host = torch.zeros(places(arrays.sizes)[1], dtype=torch.int32)
        pack(arrays, host.numpy())
        self._fixed[: len(host)].copy_(host)
        block_ids_begin = places(arrays.sizes)[0][-1]
        inputs = tensors_in(self._fixed, self._sizes(size, len(self._fixed) - block_ids_begin))

        def compute() -> StepLogits:
            found = self._compute(inputs, self._max_context, _fewest_alone(size))
            return found if self._found is None else self._kept(found)

        if self._queue.device.type != "cuda":
            cpu_graph = CpuGraph(compute)
            self._keep(size, cpu_graph, cpu_graph.result, inputs)
            return
        with self._queue.computing():
            compute()  # compiles kernels and allocates the workspaces of cuBLAS, which a capture must not do
        torch.cuda.synchronize(self._queue.device)
        graph = torch.cuda.CUDAGraph()
        with (
            self._queue.computing(),
            torch.cuda.graph(
                graph,
                pool=memory,
                stream=torch.cuda.current_stream(self._queue.device),
                capture_error_mode="thread_local",  # other threads may use the device meanwhile
            ),
        ):
            result = compute()
        self._keep(size, graph, result, inputs)

    def _keep(self, size: GraphSize, graph: Graph, result: StepLogits, inputs: StepTensors) -> None:
        self._graphs[size] = graph, result, inputs
        if self._found is None:
            self._found = result

    def _kept(self, found: StepLogits) -> StepLogits:
        """Copied into the result of the graph with the most logits: a vocabulary takes half a megabyte for each row."""
        assert self._found is not None
        assert self._found.highest is not None
        assert found.highest is not None
        count = len(found.logits)
        logits, highest = self._found.logits[:count], self._found.highest[:count]
        logits.copy_(found.logits)
        highest.copy_(found.highest)
        return StepLogits(logits, highest)

    def _sizes(self, size: GraphSize, num_block_ids: int) -> tuple[int, ...]:
        return (*self._arranger.only_padding(size).sizes[:-1], num_block_ids)
