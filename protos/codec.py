"""Converts between the types of core/ and the messages of inference.proto and worker.proto.

Decoding is strict: a value that does not fit raises `InvalidRequest`, which names the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from core.block_hash import unpack_token_ids
from core.errors import InvalidRequest
from core.handoff import LIVE_STATES, PrefixSource, TransferId
from core.lifecycle import FinishReason, RequestPath, ServiceRole, WorkerState
from core.paths import PeerJoined, PeerLeft
from core.request import Request, SamplingParams, check_num_logit_biases, check_num_stop_token_ids
from core.scheduling.block_pool import Column
from core.scheduling.ledger import BlockHolder, HolderState, SequenceState
from core.scheduling.worker_load import NO_CALL, CallId
from core.step import SampledToken
from protos import handoff_codec
from protos.agent_codec import decode_agent as decode_agent
from protos.agent_codec import decode_layout as decode_layout
from protos.agent_codec import encode_agent as encode_agent
from protos.agent_codec import encode_layout as encode_layout
from protos.unknown_fields import refuse_unknown_inside
from tandem_client.stubs import inference_pb2, worker_pb2

ROLE_TO_WIRE = {
    ServiceRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    ServiceRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
ROLE_FROM_WIRE: dict[int, ServiceRole] = {wire: role for role, wire in ROLE_TO_WIRE.items()}

STATE_TO_WIRE = {
    WorkerState.STARTING: worker_pb2.WORKER_STATE_STARTING,
    WorkerState.SERVING: worker_pb2.WORKER_STATE_SERVING,
    WorkerState.DRAINING: worker_pb2.WORKER_STATE_DRAINING,
    WorkerState.LOST: worker_pb2.WORKER_STATE_LOST,
}
STATE_FROM_WIRE = {wire: state for state, wire in STATE_TO_WIRE.items()}

FINISH_TO_WIRE = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM_WIRE: dict[int, FinishReason | None] = {wire: reason for reason, wire in FINISH_TO_WIRE.items()}

PATH_TO_WIRE = {
    RequestPath.DISAGGREGATED: inference_pb2.REQUEST_PATH_DISAGGREGATED,
    RequestPath.LOCAL: inference_pb2.REQUEST_PATH_LOCAL,
    RequestPath.RECOMPUTED: inference_pb2.REQUEST_PATH_RECOMPUTED,
    RequestPath.MIGRATED: inference_pb2.REQUEST_PATH_MIGRATED,
}

# Kind of a holder of blocks, by the column of the ledger that counts its blocks.
KIND_TO_WIRE = {
    Column.HELD: worker_pb2.HOLDER_KIND_SEQUENCE,
    Column.LEASED: worker_pb2.HOLDER_KIND_OFFER,
    Column.INCOMING: worker_pb2.HOLDER_KIND_PULL,
}
HOLDER_STATE_TO_WIRE: dict[HolderState, worker_pb2.HolderState] = {
    state: getattr(worker_pb2, f"HOLDER_STATE_{state.name}") for state in (*SequenceState, *LIVE_STATES)
}


def decode_role(wire: int) -> ServiceRole:
    if wire not in ROLE_FROM_WIRE:
        raise InvalidRequest("role", f"{wire} is not a WorkerRole")
    return ROLE_FROM_WIRE[wire]


def decode_finish_reason(wire: int) -> FinishReason | None:
    """None for a sequence that has not ended."""
    if wire not in FINISH_FROM_WIRE:
        raise InvalidRequest("finish_reason", f"{wire} is not a FinishReason")
    return FINISH_FROM_WIRE[wire]


def encode_change(change: PeerJoined | PeerLeft) -> worker_pb2.PeerChange:
    match change:
        case PeerLeft(name):
            return worker_pb2.PeerChange(left=name)
        case PeerJoined(peer, is_owner):
            agent = encode_agent(peer)
            return worker_pb2.PeerChange(owner=agent) if is_owner else worker_pb2.PeerChange(reader=agent)


def decode_change(wire: worker_pb2.PeerChange) -> PeerJoined | PeerLeft:
    match wire.WhichOneof("change"):
        case "left":
            return PeerLeft(wire.left)
        case "owner":
            return PeerJoined(decode_agent(wire.owner), is_owner=True)
        case "reader":
            return PeerJoined(decode_agent(wire.reader), is_owner=False)
        case _:
            raise InvalidRequest("changes", "one of owner, reader and left must be set, none is")


def decode_transfer_id(wire: bytes) -> TransferId:
    try:
        return handoff_codec.decode_transfer_id(wire)
    except handoff_codec.MalformedMessage as error:
        raise InvalidRequest("transfer_id", str(error)) from error


def encode_sequence(request: Request, call: CallId = NO_CALL) -> worker_pb2.SequenceRequest:
    sampling = request.sampling
    return worker_pb2.SequenceRequest(
        request_id=request.request_id,
        packed_token_ids=request.packed_token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=inference_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
        ),
        stop=inference_pb2.StopConditions(
            max_tokens=sampling.max_tokens,
            stop_token_ids=sorted(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
        ),
        logprobs=sampling.num_logprobs,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        priority=request.priority,
        call=call.number,
        router_id=call.router_id,
        tenant=request.tenant,
        grammar=sampling.grammar,
        no_speculation=not sampling.speculation,
        age_us=round(request.age_s * 1e6),
    )


def decode_sampling(
    wire: inference_pb2.SamplingParams,
    stop: inference_pb2.StopConditions,
    logprobs: int | None,
    defaults: Mapping[str, float],
    grammar: str = "",
    speculation: bool = True,
) -> SamplingParams:
    """The sampling of a request. `defaults` has values for max_tokens and others, used for fields that are not set.

    Raises `InvalidRequest`. Lengths are checked before ids are converted (router/serving/validation.py says why).
    """
    refuse_unknown_inside(wire, "sampling")
    refuse_unknown_inside(stop, "stop")
    check_num_stop_token_ids(len(stop.stop_token_ids))
    check_num_logit_biases(len(wire.logit_bias))
    given = dict(defaults)
    for name in (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    ):  # fmt: skip
        if wire.HasField(name):
            given[name] = getattr(wire, name)
    if stop.HasField("max_tokens"):
        given["max_tokens"] = stop.max_tokens
    return SamplingParams(
        **given,  # type: ignore[arg-type]
        stop_token_ids=frozenset(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        min_tokens=stop.min_tokens,
        num_logprobs=logprobs,
        logit_bias=dict(wire.logit_bias),
        grammar=grammar,
        speculation=speculation,
    )


def decode_sequence(wire: worker_pb2.SequenceRequest) -> Request:
    logprobs = wire.logprobs if wire.HasField("logprobs") else None
    return Request(
        request_id=wire.request_id,
        token_ids=decode_token_ids(wire.packed_token_ids),
        num_prompt_tokens=wire.num_prompt_tokens,
        sampling=decode_sampling(
            wire.sampling, wire.stop, logprobs, {"max_tokens": 0}, wire.grammar, not wire.no_speculation
        ),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        adapter=wire.adapter,
        tenant=wire.tenant,
        age_s=wire.age_us / 1e6,
    )


def decode_token_ids(packed: bytes) -> tuple[int, ...]:
    try:
        return unpack_token_ids(packed)
    except ValueError as error:
        message = f"must have 4 bytes for each token, has {len(packed)} bytes"
        raise InvalidRequest("packed_token_ids", message) from error


def encode_prefix(prefix: PrefixSource | None) -> worker_pb2.PrefixSource | None:
    if prefix is None:
        return None
    return worker_pb2.PrefixSource(
        transfer_id=handoff_codec.encode_transfer_id(prefix.transfer_id),
        agent=encode_agent(prefix.agent),
        num_tokens=prefix.num_tokens,
        limit_ms=prefix.limit_s * 1e3,
    )


def decode_prefix(wire: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> PrefixSource | None:
    """The source of a call; None without one."""
    if not wire.HasField("prefix"):
        return None
    transfer_id, agent = decode_transfer_id(wire.prefix.transfer_id), decode_agent(wire.prefix.agent)
    return PrefixSource(transfer_id, agent, wire.prefix.num_tokens, decode_limit(wire.prefix.limit_ms))


def decode_limit(limit_ms: float) -> float:
    """Seconds."""
    if not 0.0 < limit_ms < math.inf:
        raise InvalidRequest("limit_ms", f"must be finite and more than 0, is {limit_ms}")
    return limit_ms / 1e3


def decode_call(wire: worker_pb2.SequenceRequest) -> CallId:
    return CallId(wire.router_id, wire.call)


def encode_logprobs(token: SampledToken) -> inference_pb2.TokenLogprobs:
    """`token` must have log-probabilities."""
    return inference_pb2.TokenLogprobs(
        logprob=token.logprob or 0.0,
        top=[inference_pb2.Logprob(token_id=token_id, logprob=value) for token_id, value in token.top_logprobs],
    )


def name_tokens(wire: inference_pb2.TokenLogprobs, token_id: int, token_name: Callable[[int], bytes]) -> None:
    """Fill in the bytes of the generated token and of the most likely tokens. Workers have no tokenizer, so only a
    router does this."""
    wire.token = token_name(token_id)
    for entry in wire.top:
        entry.token = token_name(entry.token_id)


def encode_token(index: int, token: SampledToken) -> worker_pb2.SampledToken:
    logprobs = None if token.logprob is None else encode_logprobs(token)
    return worker_pb2.SampledToken(index=index, token_id=token.token_id, logprobs=logprobs)


def decode_token(wire: worker_pb2.SampledToken) -> tuple[int, SampledToken]:
    """(index in the output, token)"""
    if not wire.HasField("logprobs"):
        return wire.index, SampledToken(wire.token_id)
    return wire.index, decode_logprobs(wire.token_id, wire.logprobs)


def decode_logprobs(token_id: int, wire: inference_pb2.TokenLogprobs) -> SampledToken:
    return SampledToken(token_id, wire.logprob, tuple((entry.token_id, entry.logprob) for entry in wire.top))


def encode_ledger(ledger: Mapping[Column, int]) -> worker_pb2.Ledger:
    return worker_pb2.Ledger(**{column.value: count for column, count in ledger.items()})


def encode_holder(holder: BlockHolder) -> worker_pb2.BlockHolder:
    claim = holder.claim
    return worker_pb2.BlockHolder(
        kind=KIND_TO_WIRE[claim.column],
        name=claim.name,
        state=HOLDER_STATE_TO_WIRE[claim.state],
        num_blocks=len(claim.blocks),
        num_counted=holder.num_counted,
        age_ms=holder.age_s * 1e3,
        peer=claim.peer,
    )
