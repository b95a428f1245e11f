"""Launches the steps of one model on one pool: eagerly, or by a graph. The host never waits here.

    T tokens of the step    S rows that sample

The ids of the newest step stay on the device, because the promised tokens of the step behind are gathered from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from core.output_grammar import Masks
from core.scheduling.drafts import MAX_DRAFTS
from core.step import SampledToken, ScheduledChunk
from engine.gpu.device_queue import DeviceQueue
from engine.gpu.graphs import StepGraphs, StepLogits
from engine.gpu.ops import ops
from engine.gpu.sampling import DeviceSampler, SampledRows
from engine.gpu.sampling_plan import SamplingPlan
from engine.gpu.step_arrays import GraphSize, StepArranger
from engine.gpu.step_attention import NumSplits, OperatorAttention, fixed_splits
from engine.gpu.step_buffers import NUM_SETS, StagedStep, StagingSet, StepTensors
from engine.kv_pool import KVPool
from engine.loading import ModelSetup
from engine.model import Model, ModelInputs
from engine.runner import StepLimits
from engine.sampling import NO_MASKS

_MIN_ROWS = 1 + MAX_DRAFTS  # that sample: those of one sequence
_WARM_UP_SPLITS = (1, 2)  # more splits need no other kernels
_FIRST_BLOCK_IDS = 4096  # of a staging set; it grows with the steps


class StepComputer:
    """Everything runs under `torch.inference_mode`. The pool has a padding block behind its last block."""

    def __init__(
        self, setup: ModelSetup, model: Model, pool: KVPool, limits: StepLimits, queue: DeviceQueue, splits: NumSplits
    ) -> None:
        self.queue = queue
        self._model = model
        self._pool = pool
        self._dtype = setup.dtype
        self._splits = splits
        self._rotary_table = setup.rotary_table(pool.num_blocks)
        self.arranger = StepArranger(pool.num_blocks, pool.layout.block_size)
        num_rows = max(limits.max_running, _MIN_ROWS)
        self.sampler = DeviceSampler(setup.info.vocab_size, num_rows, setup.device, setup.info.eos_token_ids, queue)
        capacity = 8 * limits.max_batched_tokens + 8 * num_rows + _FIRST_BLOCK_IDS
        self._sets = [StagingSet(queue, capacity) for _ in range(NUM_SETS)]
        self._next_set = 0
        self._set_apart = StagingSet(queue, capacity)  # for steps that are computed in parts
        self._ids = torch.zeros(num_rows, dtype=torch.int32, device=setup.device)  # of the newest step
        max_context = min(setup.info.context_length, len(self._rotary_table.cosine))
        self.graphs = StepGraphs(queue, self.arranger, self._compute_for_graph, max_context)

    def stage(
        self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int]
    ) -> tuple[StagedStep, GraphSize | None]:
        """Start the upload of a step's inputs. Returns the size of the step's graph, too."""
        arrays = self.arranger.arrange(chunks, rows_before)
        size = self.graphs.size_for(arrays)
        if size is not None:
            arrays = self.arranger.padded(arrays, size)
        staging = self._sets[self._next_set]
        self._next_set = (self._next_set + 1) % NUM_SETS
        return staging.stage(arrays), size

    def stage_apart(self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int]) -> StagedStep:
        """Like `stage`, for some chunks of a step, without a graph. The parts before have ended."""
        return self._set_apart.stage(self.arranger.arrange_apart(chunks, rows_before))

    def launch(self, staged: StagedStep, size: GraphSize | None) -> StepLogits:
        """Launch a step on the current stream, but for its sampling. `size`: of its graph."""
        if size is None:
            return StepLogits(self.logits(staged), None)
        self.queue.follow(staged.uploaded)
        return self.graphs.run(size, staged)

    def sample(self, found: StepLogits, plan: SamplingPlan, masks: Masks = NO_MASKS) -> SampledRows | None:
        """Launch the sampling of the newest launched step. Returns None if no row samples."""
        if plan.num_rows == 0:
            return None
        return self.sampler.sample(found.logits[: plan.num_rows], plan, self._ids, found.highest, masks)

    def warm_up(self) -> None:
        """Run decode attention with every kind of split, so that no step waits for a compiler."""
        config, pool = self._model.config, self._pool
        step = self._set_apart.stage(self.arranger.only_padding(GraphSize(1, 1)))
        self.queue.follow(step.uploaded)
        shape = (1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        for count in _WARM_UP_SPLITS:
            attention = OperatorAttention(
                pool.tensor, self._rotary_table, step.tensors(), 1, fixed_splits(count), pool.scales
            )
            attention.attend(torch.zeros(shape, dtype=self._dtype, device=pool.tensor.device), layer=0)

    def keep_ids(self, rows: SampledRows) -> None:
        """Let the step behind take its promised tokens from these rows."""
        self._ids[: len(rows.token_ids)].copy_(rows.token_ids)

    def keep_ids_apart(self, row_of: Mapping[str, int], sampled: Mapping[str, SampledToken]) -> None:
        """Like `keep_ids`, for a step that was computed in parts. Waits for the device."""
        for name, token in sampled.items():
            self._ids[row_of[name]] = token.token_id

    def logits(self, staged: StagedStep) -> torch.Tensor:
        """Launch a step eagerly on the current stream, without sampling. # -> float32 [S, vocab]"""
        self.queue.follow(staged.uploaded)
        step = staged.tensors()
        attention = self._attention(step, staged.max_context)
        token_ids = self._token_ids(step, staged.has_promised)
        return self._model.compute(ModelInputs(token_ids, step.sampling_rows, attention))

    def _compute_for_graph(self, step: StepTensors, max_context: int, fewest_alone: int) -> StepLogits:
        attention = self._attention(step, max_context, fewest_alone)
        sampling_rows = step.sampling_rows if len(step.sampling_rows) else None
        logits = self._model.compute(ModelInputs(self._token_ids(step, has_promised=True), sampling_rows, attention))
        highest = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        ops.argmax(logits, highest)
        return StepLogits(logits, highest)

    def _attention(self, step: StepTensors, max_context: int, num_alone: int | None = None) -> OperatorAttention:
        """`num_alone`: the rows that attend alone, for the choice of splits; None: those of the step."""
        pool, splits = self._pool, self._splits
        if num_alone is not None:
            splits = fixed_splits(splits(num_alone, pool.tensor.shape[3], max_context))
        return OperatorAttention(pool.tensor, self._rotary_table, step, max_context, splits, pool.scales)

    def _token_ids(self, step: StepTensors, has_promised: bool) -> torch.Tensor:
        """# int32 [T]"""
        if not has_promised:
            return step.token_ids
        sampled_before = self._ids.index_select(0, step.sources.clamp(min=0))
        return torch.where(step.sources >= 0, sampled_before, step.token_ids)
