"""From vLLM's outputs and statistics to what an `Engine` reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.handoff import TransferId
from core.lifecycle import FinishReason
from core.step import SampledToken
from vllm_worker.engine import EngineOutput, EngineStep, Prompt
from vllm_worker.handoff import encode_handoff
from vllm_worker.kv.ledger import decode_holders
from vllm_worker.kv.parameters import (
    HOLDERS,
    LOST_MOVES,
    NUM_LENT,
    PULLED_TOKENS,
    READ_BYTES,
    READ_SECONDS,
    RequestEnd,
    decode_end,
)

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def output_of(prompt: Prompt, output: Any, *, moves_blocks: bool) -> EngineOutput:
    """`moves_blocks`: by a transfer agent of ours."""
    completion = output.outputs[0]
    tokens = tuple(_sampled_tokens(completion.token_ids, completion.logprobs, prompt.request.sampling.num_logprobs))
    error, finish_reason, handoff, end = "", None, b"", RequestEnd()
    if output.finished:
        finish_reason = FINISH.get(completion.finish_reason)
        if finish_reason is None:
            error = f"it ended with {completion.finish_reason!r}"
        if moves_blocks:
            end = decode_end(output.kv_transfer_params)
        elif prompt.offers and output.kv_transfer_params:
            handoff = encode_handoff(output.kv_transfer_params)
    num_cached_tokens = output.num_cached_tokens or 0
    metrics = output.metrics
    return EngineOutput(
        prompt.request_id,
        tokens,
        finish_reason,
        num_cached_tokens,
        handoff,
        scheduled_at=0.0 if metrics is None else metrics.scheduled_ts,
        error=error,
        num_pulled_tokens=_num_pulled_tokens(prompt, num_cached_tokens),
        is_moved=end.is_moved,
        num_prefix_tokens=end.num_prefix_tokens,
    )


def _num_pulled_tokens(prompt: Prompt, num_cached_tokens: int) -> int:
    """An engine that samples the first token computes at least one token of the prompt for it."""
    is_pull = prompt.transfer is not None and not prompt.transfer.is_offer
    return max(0, num_cached_tokens + 1 - len(prompt.request.token_ids)) if is_pull else 0


def _sampled_tokens(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, num_logprobs: int | None
) -> list[SampledToken]:
    if num_logprobs is None or not logprobs:
        return [SampledToken(token_id) for token_id in token_ids]
    tokens = []
    for token_id, row in zip(token_ids, logprobs, strict=True):
        ranked = sorted(row.items(), key=lambda entry: entry[1].rank)
        top = tuple((other, entry.logprob) for other, entry in ranked if entry.rank <= num_logprobs)
        tokens.append(SampledToken(token_id, row[token_id].logprob, top))
    return tokens


def decode_pulled(wire: Iterable[tuple[str, Sequence[int]]]) -> tuple[tuple[TransferId, tuple[int, ...]], ...]:
    return tuple((int(transfer_id, 16), tuple(token_ids)) for transfer_id, token_ids in wire)


def step_of(stats: Any) -> EngineStep:
    """`stats`: vLLM's `SchedulerStats` of one step."""
    details, transfers = stats.iteration_details, stats.kv_connector_stats or {}
    nixl = transfers.get("inner") or transfers  # vLLM's own connector, which VerifiedConnector may wrap
    return EngineStep(
        num_running=stats.num_running_reqs,
        num_waiting=stats.num_waiting_reqs,
        kv_usage=stats.kv_cache_usage,
        num_decodes=0 if details is None else details.num_generation_requests,
        prompt_tokens=0 if details is None else details.num_ctx_tokens,
        num_lent=transfers.get(NUM_LENT, 0),
        holders=decode_holders(transfers.get(HOLDERS, ())),
        lost_moves=tuple(int(transfer_id, 16) for transfer_id in transfers.get(LOST_MOVES, ())),
        pulled_tokens=decode_pulled(transfers.get(PULLED_TOKENS, ())),
        read_bytes=transfers.get(READ_BYTES, 0) + sum(nixl.get("bytes_transferred", ())),
        read_seconds=transfers.get(READ_SECONDS, 0.0) + sum(nixl.get("transfer_duration", ())),
    )
