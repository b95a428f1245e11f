"""Decode steps as graphs: one launch for all kernels of a step.

A graph computes a fixed number of sequences, its bucket. A step takes the smallest bucket that holds it, and padding
sequences fill the rest. All graphs read one fixed buffer of inputs and share the memory of their intermediate tensors,
because one of them runs at a time. On a CPU, `CpuGraph` takes the place of a CUDA graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from engine.gpu.cpu_graph import CpuGraph
from engine.gpu.device_queue import DeviceQueue
from engine.gpu.step_arrays import StepArranger
from engine.gpu.step_buffers import StagedStep, StepTensors, pack, places, tensors_in

_STRIDE = 16


def buckets_up_to(max_running: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... and `max_running`. From 16 on, at most an eighth or 15 sequences are padding."""
    found, size = [], 1
    while size < max_running:
        found.append(size)
        size = 2 * size if size < _STRIDE else size + max(_STRIDE, size // 8 // _STRIDE * _STRIDE)
    return [*found, max_running]


class StepLogits(NamedTuple):
    """Of a step. The next run of a graph overwrites those of a graph."""

    logits: torch.Tensor  # float32 [S or more, vocab]
    highest: torch.Tensor | None  # int32 [S or more] the argmax of each row; None: not found yet


class Graph(Protocol):
    def replay(self) -> None: ...


Compute = Callable[[StepTensors, int], StepLogits]  # (inputs, positions of the longest context)


class DecodeGraphs:
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
        self._graphs: dict[int, tuple[Graph, StepLogits, StepTensors]] = {}
        self._fixed = torch.zeros(0, dtype=torch.int32)

    def capture(self, buckets: Sequence[int]) -> None:
        """The largest graph comes first, and the others find memory that it has left."""
        if not buckets:
            return
        max_blocks = -(-self._max_context // self._arranger.block_size)
        largest = self._sizes(max(buckets), max(buckets) * max_blocks + 1)
        self._fixed = torch.zeros(places(largest)[1], dtype=torch.int32, device=self._queue.device)
        memory = torch.cuda.graph_pool_handle() if self._queue.device.type == "cuda" else None
        for bucket in sorted(buckets, reverse=True):
            self._capture(bucket, memory)
        self._queue.free_cached()

    def bucket_for(self, num_sequences: int) -> int | None:
        """The bucket of the graph for a step; None if no graph is large enough."""
        return min((bucket for bucket in self._graphs if bucket >= num_sequences), default=None)

    def run(self, bucket: int, staged: StagedStep) -> StepLogits:
        """Launch a graph on the current stream. The next run overwrites the result."""
        graph, result, _ = self._graphs[bucket]
        self._fixed[: len(staged.flat)].copy_(staged.flat)
        graph.replay()
        return result

    def close(self) -> None:
        self._graphs.clear()
        self._fixed = self._fixed[:0].clone()

    def _capture(self, bucket: int, memory: Any) -> None:
        arrays = self._arranger.only_padding(bucket)
        host = torch.zeros(places(arrays.sizes)[1], dtype=torch.int32)
        pack(arrays, host.numpy())
        self._fixed[: len(host)].copy_(host)
        block_ids_begin = places(arrays.sizes)[0][-1]
        inputs = tensors_in(self._fixed, self._sizes(bucket, len(self._fixed) - block_ids_begin))

        def compute() -> StepLogits:
            return self._compute(inputs, self._max_context)

        if self._queue.device.type != "cuda":
            cpu_graph = CpuGraph(compute)
            self._graphs[bucket] = cpu_graph, cpu_graph.result, inputs
            return
        with self._queue.computing():
            compute()  # compiles kernels and allocates the workspaces of cuBLAS, which a capture must not do
        torch.cuda.synchronize(self._queue.device)
        gc.collect()  # freeing a tensor during a capture may synchronise
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
        self._graphs[bucket] = graph, result, inputs

    def _sizes(self, bucket: int, num_block_ids: int) -> tuple[int, ...]:
        return (*self._arranger.only_padding(bucket).sizes[:-1], num_block_ids)
