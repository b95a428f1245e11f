"""Sampling on the device of the model: the tokens of `engine/sampling.py` from the same float32 logits.

    prepare (host, any thread) -> sample (launches only; the host does not wait) -> collect (waits for one small copy)

The logits stay on the device. Token ids and the log-probabilities that a request asked for are copied to the host.
The order of a step's work: change the logits of rows with a bias, penalties or min_tokens; mask the rows whose outputs
have a grammar (`engine/gpu/grammar_masks.py`); take the highest logit of each row; draw where the temperature asks for
it; change the logits back; find log-probabilities, which are the raw logits'. The operators `argmax`, `adjust_logits`,
`draw_tokens` and `find_logprobs` of `engine/gpu/ops.py` compute.

A score may differ from numpy's in its last bits, so a draw differs where the two best scores lie within these bits.
Counts and masses are integers, so a token depends neither on the number of programs nor on their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from core.output_grammar import Masks
from core.request import MAX_LOGPROBS, SamplingParams
from core.step import SampledToken, ScheduledChunk, SequenceView
from engine.gpu.device_queue import DeviceQueue, Mark, open_queue
from engine.gpu.grammar_masks import mask_logits
from engine.gpu.ops import ops
from engine.gpu.sampling_plan import NO_ROWS, Planner, SamplingPlan
from engine.sampling import NO_MASKS


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The result of a step on its way to the host."""

    plan: SamplingPlan
    token_ids: torch.Tensor  # int32 [S] on the device; the next step's `sampled_before`
    on_host: torch.Tensor  # int32 [S + L * (1 + 2 * MAX_LOGPROBS)], complete after `copied`
    copied: Mark


class DeviceSampler:
    """Samples the rows of a step on a device. Steps run in order on one stream."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        eos_token_ids: frozenset[int] = frozenset(),
        queue: DeviceQueue | None = None,  # of the steps; None: a queue of its own
    ) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._queue = queue or open_queue(device)
        self._planner = Planner(self._queue, vocab_size, eos_token_ids)
        if device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Run every operator once, so that the first request waits for no compiler."""
        every = SamplingParams(
            max_tokens=2, top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=2.0, num_logprobs=1, logit_bias={0: 1.0}
        )
        for sampling in (every, replace(every, top_k=0), replace(every, temperature=0.0)):
            chunk = ScheduledChunk(SequenceView("warm-up", [0, 0], 1, [0], sampling), 0, 2, True, False)
            logits = torch.zeros(1, self._vocab_size, device=self._device)
            self.collect(self.sample(logits, self.prepare([chunk])))

    def prepare(self, chunks: Sequence[ScheduledChunk], rows_before: Mapping[str, int] = NO_ROWS) -> SamplingPlan:
        """The plan of a step's chunks, uploaded without a wait. Row i belongs to chunk i of those that sample.

        `rows_before` is `row_of` of the step before: a promised token is sampled_before[rows_before[sequence_id]].
        Calls must not overlap, and come in the order of the steps.
        """
        plan = self._planner.plan(chunks, rows_before)
        assert plan.num_rows <= self._max_rows, f"{plan.num_rows} rows sample, at most {self._max_rows} may"
        return plan

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        sampled_before: torch.Tensor | None = None,
        highest: torch.Tensor | None = None,
        masks: Masks = NO_MASKS,
    ) -> SampledRows:
        """Launch the sampling of a step on the current stream, behind the logits. The host does not wait.

        Work in progress writes the logits of some rows and restores them.
        # logits: float32 [S, vocab], rows contiguous
        # sampled_before: int32 [rows of the step before], None if the plan has no promised token that matters
        # highest: int32 [S or more], what `argmax` found in these logits, if it ran already
        # masks: of the plan's `grammar_rows`; a row that has failed is sampled without one
        """
        assert logits.shape == (plan.num_rows, self._vocab_size), "one row of logits for each chunk that samples"
        assert logits.dtype is torch.float32, "sampling is exact in float32"
        assert sampled_before is not None or not plan.reads_promised, "a promised token is counted from the step before"
        num_asked = len(plan.num_logprobs)
        self._wait_for_upload(plan)
        result = torch.empty(plan.num_rows + num_asked * (1 + 2 * MAX_LOGPROBS), dtype=torch.int32, device=self._device)
        token_ids = result[: plan.num_rows]
        saved = self._adjust(logits, plan, sampled_before)
        unmasked = mask_logits(logits, plan.grammar_rows, masks)
        if not plan.all_drawn:
            if highest is None or plan.adjusted is not None or plan.grammar_rows:
                ops.argmax(logits, token_ids)
            else:
                token_ids.copy_(highest[: plan.num_rows])
        if plan.drawn is not None:
            rows = plan.drawn
            listed = (rows.num_listed, rows.list_size, rows.top_k)
            ops.draw_tokens(logits, rows.rows, *listed, rows.settings, rows.keys, token_ids)
        if unmasked is not None:
            unmasked.restore(logits)
        if saved is not None:
            self._restore(logits, plan, sampled_before, saved)
        if plan.logprob_rows is not None:
            found = result[plan.num_rows :].view(num_asked, 1 + 2 * MAX_LOGPROBS)
            num_best = max(plan.num_logprobs)
            logprobs, best_ids = found.split((1 + MAX_LOGPROBS, MAX_LOGPROBS), dim=1)
            ops.find_logprobs(logits, plan.logprob_rows, token_ids, num_best, best_ids, logprobs.view(torch.float32))
        return self._to_host(plan, result)

    def collect(self, rows: SampledRows) -> dict[str, SampledToken]:
        """The tokens by sequence id, after the step's small copy to the host. Raises the device's errors."""
        rows.copied.wait()
        plan = rows.plan
        token_ids = rows.on_host[: plan.num_rows].tolist()
        sampled = dict(zip(plan.row_of, map(SampledToken, token_ids), strict=True))
        found = rows.on_host[plan.num_rows :].view(-1, 1 + 2 * MAX_LOGPROBS)
        logprobs, best_ids = found.split((1 + MAX_LOGPROBS, MAX_LOGPROBS), dim=1)
        values, ids = logprobs.view(torch.float32).tolist(), best_ids.tolist()
        for index, (name, num_best) in enumerate(zip(plan.logprob_names, plan.num_logprobs, strict=True)):
            best = zip(ids[index][:num_best], values[index][1 : 1 + num_best], strict=True)
            sampled[name] = SampledToken(sampled[name].token_id, values[index][0], tuple(best))
        return sampled

    def _wait_for_upload(self, plan: SamplingPlan) -> None:
        if plan.uploaded is None:
            return
        self._queue.follow(plan.uploaded)
        if plan.memory is not None and plan.memory.is_cuda:
            plan.memory.record_stream(torch.cuda.current_stream(self._device))  # free after this stream has read it

    def _adjust(
        self, logits: torch.Tensor, plan: SamplingPlan, sampled_before: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the raw logits of the changed tokens."""
        if plan.adjusted is None:
            return None
        rows = plan.adjusted
        saved = torch.empty(rows.token_ids.numel() + rows.rows.numel(), dtype=torch.float32, device=self._device)
        ops.adjust_logits(
            logits,
            rows.rows,
            rows.first_entry,
            rows.token_ids,
            rows.counts,
            rows.first_bias,
            rows.biases,
            rows.penalties,
            rows.promised,
            rows.promised if sampled_before is None else sampled_before,  # not read without a promised token
            saved,
        )
        return saved

    def _restore(
        self, logits: torch.Tensor, plan: SamplingPlan, sampled_before: torch.Tensor | None, saved: torch.Tensor
    ) -> None:
        rows = plan.adjusted
        assert rows is not None
        before = rows.promised if sampled_before is None else sampled_before
        ops.restore_logits(logits, rows.rows, rows.first_entry, rows.token_ids, rows.promised, before, saved)

    def _to_host(self, plan: SamplingPlan, result: torch.Tensor) -> SampledRows:
        token_ids = result[: plan.num_rows]
        on_host = self._queue.host_buffer(len(result))
        on_host.copy_(result, non_blocking=True)
        return SampledRows(plan, token_ids, on_host, self._queue.mark())
