"""The sampling parameters of `vllm.grpc.engine` as Tandem's own. What the engine lacks is refused by name.

The router makes the text, so fields that only shape the text have no effect here: skip_special_tokens,
spaces_between_special_tokens and include_stop_str_in_output.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2

from core.errors import InvalidRequest
from core.request import (
    MAX_CHOICES,
    SamplingParams,
    check_num_logit_biases,
    check_num_stop_token_ids,
    check_stop_strings,
)

FIELD = "sampling_params"
_NEUTRAL_AT_ZERO = ("top_p", "repetition_penalty")  # an unset field is 0 on this wire, where 1 has no effect
_PLAIN = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
_UNSUPPORTED = ("prompt_logprobs", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True)
class Sampling:
    params: SamplingParams
    num_choices: int
    stop_strings: tuple[str, ...]


def decode_sampling(wire: vllm_engine_pb2.SamplingParams, room: int, random_seed: int) -> Sampling:
    """`room` is the default of max_tokens. Raises `InvalidRequest` with the name of the field."""
    refuse_unknown_fields(FIELD, wire)
    constraint = wire.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"{FIELD}.{constraint}", "structured output is not supported")
    for name in _UNSUPPORTED:
        if wire.HasField(name):
            raise InvalidRequest(f"{FIELD}.{name}", "is not supported")
    if wire.n > MAX_CHOICES:
        raise InvalidRequest(f"{FIELD}.n", f"must be in [1, {MAX_CHOICES}], is {wire.n}")
    if wire.HasField("logprobs") and wire.logprobs < 0:
        raise InvalidRequest(f"{FIELD}.logprobs", f"must be 0 or more (-1, all, is not supported), is {wire.logprobs}")
    if wire.seed < 0:
        raise InvalidRequest(f"{FIELD}.seed", f"must be 0 or more, is {wire.seed}")
    check_stop_strings(f"{FIELD}.stop", wire.stop)
    check_num_stop_token_ids(len(wire.stop_token_ids))
    check_num_logit_biases(len(wire.logit_bias))
    params = SamplingParams(
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else room,
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        seed=wire.seed if wire.HasField("seed") else random_seed,
        stop_token_ids=frozenset(wire.stop_token_ids),
        num_logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        logit_bias=dict(wire.logit_bias),
        **{name: getattr(wire, name) or 1.0 for name in _NEUTRAL_AT_ZERO},  # type: ignore[arg-type]
        **{name: getattr(wire, name) for name in _PLAIN},
    )
    return Sampling(params, wire.n or 1, tuple(wire.stop))


def refuse_unknown_fields(field: str, message: object) -> None:
    """A caller that knows a newer protocol must not believe that its parameter has an effect."""
    unknown = sorted({entry.field_number for entry in UnknownFieldSet(message)})  # type: ignore[arg-type,attr-defined]
    if unknown:
        raise InvalidRequest(field, f"the field with number {unknown[0]} is unknown here")
