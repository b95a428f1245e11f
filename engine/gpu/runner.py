"""The runner of a GPU. Its host prepares and launches steps, and waits for the device once a step.

    submit(k + 1)    arrange, start the upload; launch if a graph computes the step and step k is launched
    collect(k)       launch step k, and a submitted step k + 1 behind it, if they are not; wait; the tokens of step k

So a step begins on the device as soon as the step before has ended, while the host still handles the tokens of that
step. A step without a graph takes the host long to launch: it is launched ahead only behind another such step, which
takes the device as long. Promised tokens stay on the device. With device "cpu" the same code runs on the references of
the operators, and `CpuGraph` takes the place of CUDA graphs.

A step with a row whose output has a grammar is launched ahead without its sampling, whose masks depend on the tokens of
the step before: collect(k) finds the masks while the device computes, and launches the sampling of step k.

A chunk with drafts has a row for each, which attends and samples like a sequence of its own. A graph takes a step with
drafts by its rows. The proposals of a step follow its tokens, so no step is planned ahead of them.

A step that needs more memory than there is begins again in parts: all chunks of one token, then every prompt chunk
alone. A chunk that fails alone is in `StepOutput.failed`; the others are computed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.config import EngineConfig
from core.cost.model_work import ModelSizes
from core.errors import ConfigError, OutOfDeviceMemory, TandemError
from core.kv_layout import KVLayout
from core.output_grammar import Grammars, Masks
from core.step import SampledToken, ScheduledChunk, StepPlan
from engine.drafting import Drafter, Proposer
from engine.fp8 import FP8
from engine.gpu.device_queue import DeviceQueue, Mark, open_queue
from engine.gpu.draft_rows import join, masks_of_rows, rows_of
from engine.gpu.errors import sorted_error
from engine.gpu.graphs import StepLogits, graph_sizes
from engine.gpu.linear import DeviceLinear
from engine.gpu.memory import CudaAllocator, refuse_large_weights, weights_do_not_fit
from engine.gpu.pool_size import NUM_PADDING_BLOCKS, PoolSizer
from engine.gpu.sampling import SampledRows
from engine.gpu.sampling_plan import SamplingPlan
from engine.gpu.step_arrays import GraphSize
from engine.gpu.step_attention import NumSplits, OperatorOps, fixed_splits
from engine.gpu.step_buffers import StagedStep
from engine.gpu.step_computer import StepComputer
from engine.kv_pool import KVPool
from engine.loading import ModelSetup, load_model
from engine.model import Model
from engine.quantization import head_weight_bytes
from engine.runner import StepLimits
from engine.sampling import NO_MASKS, begin_masks
from engine.step_queue import Computed, PromisedTokens, QueuedRunner

_FLOAT8_CAPABILITY = (8, 9)  # Ada and Hopper


@dataclass(slots=True, eq=False)
class _Step:
    """A submitted step. `staged` and `plan` are None if the step before has no token for a promised chunk, or if the
    device had no memory for the inputs."""

    submitted: StepPlan
    rows_before: Mapping[str, int]  # of the step before
    row_of: Mapping[str, int]  # of each sequence that samples, and of each draft
    staged: StagedStep | None = None
    plan: SamplingPlan | None = None
    size: GraphSize | None = None  # of its graph
    launched: bool = False
    error: Exception | None = None  # of the preparation or the launch
    begun: Mark | None = None
    ended: Mark | None = None
    logits: StepLogits | None = None  # launched, and not sampled yet
    rows: SampledRows | None = None

    @property
    def chunks(self) -> Sequence[ScheduledChunk]:
        return self.submitted.chunks


class GpuRunner(QueuedRunner[_Step]):
    """The constructor loads the model, sizes and allocates the pool, and captures the graphs.

    Raises `ConfigError` or `ModelNotFound`. `device_seconds` is the time of the step collected last on the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache_dir: Path | None = None,
        *,
        limits: StepLimits | None = None,
        share: float = 1.0,  # of the device that this process may use
        with_graphs: bool = True,
        queue: DeviceQueue | None = None,  # replaces that of the device
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__()
        setup = ModelSetup.of(config, cache_dir)
        limits = limits or StepLimits()
        device = setup.device
        _refuse_fp8(config, device)
        self.info = setup.info
        self.layout: KVLayout = setup.layout
        self.sizes: ModelSizes | None = setup.sizes
        self.proposes = drafter is not None
        self._proposer = Proposer(drafter, grammars)
        self.takes_grammars = grammars is not None
        self._grammars = grammars
        self.device_seconds = 0.0
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if share < 1.0:
                torch.cuda.set_per_process_memory_fraction(share, device)
        self._queue = queue or open_queue(device)
        splits = _choose_splits(device)
        # All of the start runs on the stream of the steps, so the steps see its results.
        with torch.inference_mode(), self._queue.computing():
            model = _load(setup, share)

            def make_pool(num_blocks: int) -> KVPool:
                with torch.inference_mode(False):  # others write to the pool, too
                    return KVPool(setup.layout, num_blocks, device, NUM_PADDING_BLOCKS)

            def make_computer(pool: KVPool) -> StepComputer:
                return StepComputer(setup, model, pool, limits, self._queue, splits)

            allocator = CudaAllocator(device) if device.type == "cuda" else None
            sizer = PoolSizer(setup, limits, allocator, share, make_pool, make_computer)
            self.num_blocks = sizer.num_blocks()
            self._queue.free_cached()
            self._pool = make_pool(self.num_blocks)
            self._computer: StepComputer | None = make_computer(self._pool)
            if device.type == "cuda":
                self._computer.warm_up()
            if with_graphs:
                self._computer.graphs.capture(graph_sizes(limits, setup.layout.has_scales))
        self._queue.free_cached()
        self._prepare_lock = threading.Lock()
        self._launch_lock = threading.Lock()
        self._submitted: deque[_Step] = deque(maxlen=2)  # the newest steps

    def pool_address(self) -> int:
        return self._pool.address()

    def pool_memory(self) -> memoryview | None:
        return self._pool.memory()

    def pool_device(self) -> int | None:
        return None if self._device.type == "cpu" else self._device.index or 0

    def device_memory(self) -> Any:
        if self._device.type == "cpu":
            return None
        from engine.gpu.device_memory import CudaDeviceMemory

        return CudaDeviceMemory(self._pool.blocks())

    def start_background_work(self) -> None:
        self._pool.touch_rest()

    def logits(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Compute chunks without promised tokens, for measurements. No step is submitted. # -> float32 [S, vocab]"""
        computer = self._open()
        with torch.inference_mode(), self._queue.computing():
            found = computer.logits(computer.stage_apart(chunks, {}))
            self._queue.mark().wait()
            return found

    def close(self) -> None:
        if self._computer is not None:
            self._computer.graphs.close()
        self._computer = None
        self._submitted.clear()

    def _open(self) -> StepComputer:
        assert self._computer is not None, "the runner is closed"
        return self._computer

    def _prepare(self, plan: StepPlan) -> _Step:
        computer = self._open()
        before = self._submitted[-1] if self._submitted else None
        sampling = (row.sequence.sequence_id for row in rows_of(plan.chunks) if row.samples)
        row_of = {name: row for row, name in enumerate(sampling)}
        step = _Step(plan, {} if before is None else before.row_of, row_of)
        if all(chunk.sequence.sequence_id in step.rows_before for chunk in plan.chunks if chunk.promised):
            self._stage(step, computer)
        self._submitted.append(step)
        if self._launch_lock.acquire(blocking=False):  # else the engine's thread launches
            try:
                if step.size is not None:  # this thread also answers requests
                    self._launch_ahead(before, step)
            finally:
                self._launch_lock.release()
        return step

    def _stage(self, step: _Step, computer: StepComputer) -> None:
        """Raises `DeviceLost`. A step without memory for its inputs is computed in parts when it is collected."""
        try:
            with torch.inference_mode(), self._prepare_lock:
                step.plan = computer.sampler.prepare(rows_of(step.chunks), step.rows_before)
                step.staged, step.size = computer.stage(step.chunks, step.rows_before)
        except Exception as error:
            found = sorted_error(error)
            if not isinstance(found, OutOfDeviceMemory):
                raise found from error
            step.launched, step.error = True, found

    def _compute(self, step: _Step, promised: PromisedTokens) -> Computed:
        written = [chunk for chunk in step.chunks if chunk.samples and chunk.sequence.sampling.grammar]
        masks_of = begin_masks(written, self._grammars, promised)
        with self._launch_lock:
            if not step.launched:
                self._launch(step)
            masks = masks_of_rows(masks_of(), written)
            if step.logits is not None:
                self._sample(step, masks)
            if step.error is not None:
                return self._proposing(step, promised, self._compute_after(step, step.error, masks))
            newest = self._submitted[-1]
            if newest is not step and (newest.size is not None or step.size is None):
                self._launch_ahead(step, newest)
        return self._proposing(step, promised, self._collect(step, masks))

    def _proposing(self, step: _Step, promised: PromisedTokens, found: Computed) -> Computed:
        return found._replace(proposed=self._proposer.propose(step.submitted, promised, found.sampled))

    def _launch_ahead(self, before: _Step | None, step: _Step) -> None:
        """Launch a step behind the step before."""
        is_ready = before is None or (before.launched and before.logits is None and before.error is None)
        if self._queue.launches_ahead and step.staged is not None and not step.launched and is_ready:
            self._launch(step)

    def _launch(self, step: _Step) -> None:
        assert step.staged is not None, "the queue drops a step without its promised tokens"
        assert step.plan is not None
        step.launched = True
        computer = self._open()
        try:
            with torch.inference_mode(), self._queue.computing():
                step.begun = self._queue.mark()
                step.logits = computer.launch(step.staged, step.size)
        except Exception as error:  # noqa: BLE001 - `_compute` raises it when the step is collected
            step.error = error
        else:
            if not step.plan.grammar_rows:
                self._sample(step, NO_MASKS)

    def _sample(self, step: _Step, masks: Masks) -> None:
        assert step.logits is not None
        assert step.plan is not None
        computer = self._open()
        try:
            with torch.inference_mode(), self._queue.computing():
                step.rows = computer.sample(step.logits, step.plan, masks)
                if step.rows is not None:
                    computer.keep_ids(step.rows)
                step.ended = self._queue.mark()
        except Exception as error:  # noqa: BLE001 - as above
            step.error = error
        step.logits = None

    def _collect(self, step: _Step, masks: Masks) -> Computed:
        assert step.begun is not None
        assert step.ended is not None
        try:
            step.ended.wait()
            sampled = {} if step.rows is None else self._open().sampler.collect(step.rows)
            self.device_seconds = step.ended.seconds_since(step.begun)
        except Exception as error:
            raise sorted_error(error) from error
        return Computed(join(sampled, step.chunks, masks), masks.failed)

    def _compute_after(self, step: _Step, error: Exception, masks: Masks) -> Computed:
        """Compute a step whose launch has failed in parts, if memory was missing."""
        found = sorted_error(error)
        if not isinstance(found, OutOfDeviceMemory):
            raise found from error
        # The exception holds the frames of the launch, and so its tensors.
        step.error = error = error.with_traceback(None)
        error.__context__ = error.__cause__ = None
        begun = self._marked()
        sampled: dict[str, SampledToken] = {}
        failed: dict[str, TandemError] = {}
        decodes = [chunk for chunk in step.chunks if chunk.num_tokens == 1]
        parts = deque([decodes] if decodes else [])
        parts.extend([chunk] for chunk in step.chunks if chunk.num_tokens > 1)
        while parts:
            part = parts.popleft()
            try:
                sampled |= self._compute_part(part, step.rows_before, masks)
            except OutOfDeviceMemory as missing:
                if len(part) == 1:
                    failed[part[0].sequence.sequence_id] = OutOfDeviceMemory(str(missing))
                else:
                    parts.extendleft([chunk] for chunk in reversed(part))
        with torch.inference_mode(), self._queue.computing():
            self._open().keep_ids_apart(step.row_of, sampled)
        ended = self._marked()
        ended.wait()
        self.device_seconds = ended.seconds_since(begun)
        step.error = None
        return Computed(join(sampled, step.chunks, masks), {**masks.failed, **failed})

    def _marked(self) -> Mark:
        with self._queue.computing():
            return self._queue.mark()

    def _compute_part(
        self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int], masks: Masks
    ) -> dict[str, SampledToken]:
        """Raises the sorted errors of the device."""
        computer = self._open()
        try:
            self._queue.free_cached()
            with torch.inference_mode(), self._prepare_lock, self._queue.computing():
                plan = computer.sampler.prepare(rows_of(chunks), rows_before)
                rows = computer.sample(computer.launch(computer.stage_apart(chunks, rows_before), None), plan, masks)
                ended = self._queue.mark()
            ended.wait()
            return {} if rows is None else computer.sampler.collect(rows)
        except Exception as error:  # noqa: BLE001 - sorted and raised, without the tensors of the launch
            raise sorted_error(error) from None


def _refuse_fp8(config: EngineConfig, device: torch.device) -> None:
    """Raises `ConfigError` for a GPU without conversions from and to 8 bits."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY:
        return
    wanted = (("kv_dtype", config.kv_dtype, "auto"), ("quantization", config.quantization, "none"))
    for option, value, otherwise in wanted:
        if value == FP8:
            raise ConfigError(
                f"{option} = {FP8} needs a GPU of compute capability {_FLOAT8_CAPABILITY[0]}.{_FLOAT8_CAPABILITY[1]}: "
                f"{torch.cuda.get_device_name(device)} has less, set {option} to {otherwise}"
            )


def _load(setup: ModelSetup, share: float) -> Model:
    """Raises `ConfigError` if the weights do not fit."""
    ops = OperatorOps()
    if setup.device.type == "cpu":
        return load_model(setup, DeviceLinear(ops), ops)
    config, sizes, allocator = setup.config, setup.sizes, CudaAllocator(setup.device)
    num_bytes = int((sizes.num_layer_weights + sizes.num_head_weights) * sizes.weight_bytes)
    if not setup.model_config.tie_embeddings:  # the embedding is another matrix of the head's size
        num_bytes += int(sizes.num_head_weights * head_weight_bytes(setup.dtype_name, config.quantization))
    refuse_large_weights(num_bytes, allocator, config.model, config.gpu_memory_margin_mb, share)
    try:
        return load_model(setup, DeviceLinear(ops), ops)
    except torch.OutOfMemoryError:
        room = allocator.free() + allocator.own()
        raise weights_do_not_fit(config.model, num_bytes, room) from None


def _choose_splits(device: torch.device) -> NumSplits:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return fixed_splits(1)
    from engine.gpu.decode_attention import num_decode_splits

    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return lambda batch, num_kv_heads, context: num_decode_splits(batch, num_kv_heads, context, num_processors)
