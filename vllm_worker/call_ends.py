"""What the end of a call of a vLLM worker says."""

from __future__ import annotations

from core.errors import InvalidRequest, TandemError, TransferFailed
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason, Stage, Timeline
from decode_worker.events import DecodeDone
from prefill_worker.machine import PrefillDone
from vllm_worker.engine import EngineOutput
from vllm_worker.engine_call import EngineCall
from worker.call_record import CallRecord
from worker.prefixes import PulledPrefix


def prefill_done(
    call: EngineCall,
    output: EngineOutput,
    finish_reason: FinishReason | None,
    layout: KVLayout,
    timeline: Timeline,
    record: CallRecord,
) -> PrefillDone:
    """`output`: the last one."""
    request = call.request
    return PrefillDone(
        request_id=request.request_id,
        index=call.next_index,
        token=output.tokens[0],
        finish_reason=finish_reason,
        cached_tokens=call.num_cached_tokens,
        timeline=timeline,
        num_tokens=len(request.token_ids),
        num_blocks=layout.num_blocks_for(len(request.token_ids)),
        record=record,
        handoff=b"" if finish_reason is not None else output.handoff,
        prefix=_pulled_prefix(call, output, layout, timeline),
    )


def decode_done(
    call: EngineCall,
    output: EngineOutput,
    finish_reason: FinishReason,
    layout: KVLayout,
    timeline: Timeline,
    record: CallRecord,
) -> DecodeDone:
    """`output`: the last one."""
    num_prompt_tokens = len(call.request.token_ids)
    return DecodeDone(
        call.request.request_id,
        finish_reason,
        min(call.num_cached_tokens, num_prompt_tokens),
        timeline,
        pull=None,
        num_prompt_tokens=num_prompt_tokens,
        num_blocks=layout.num_blocks_for(num_prompt_tokens + call.num_tokens),
        num_recomputed_tokens=max(0, call.num_pulled_tokens - 1),  # the owner has computed all but the last one
        record=record,
        prefix=_pulled_prefix(call, output, layout, timeline),
    )


def _pulled_prefix(call: EngineCall, output: EngineOutput, layout: KVLayout, timeline: Timeline) -> PulledPrefix | None:
    num_tokens = output.num_prefix_tokens
    if call.prefix is None or num_tokens is None:
        return None
    num_bytes = num_tokens // layout.block_size * layout.block_bytes
    return PulledPrefix(num_tokens, timeline.seconds_in(Stage.QUEUE), call.prefix.agent.name, num_bytes)


def lost_move() -> TransferFailed:
    return TransferFailed("the KV of a request that moves has not come")


def error_of(output: EngineOutput) -> TandemError:
    if output.invalid:
        return InvalidRequest("request", f"vLLM refuses it: {output.error}")
    return TransferFailed(f"the engine failed this request: {output.error}")
