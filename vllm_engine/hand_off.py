"""The parameters with which a router of another project carries a hand-off from a prefill to a decode worker, as JSON.

    router --{"do_remote_decode": true}--> prefill worker --answer--> router --the answer, unchanged--> decode worker

The answer has the ticket of an open offer (docs/protocol.md), so whoever reads it may read the blocks of the prompt.
The hash of the prompt lets the decode worker refuse the blocks of another prompt.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from core.errors import InvalidRequest
from core.handoff import AgentAddress, TransferId
from core.request import Request
from core.step import SampledToken
from protos import codec
from tandem_client.stubs import worker_pb2

FIELD = "kv_transfer_params_json"
VERSION = 1
MAX_JSON_CHARS = 1 << 20
_SECTION = "tandem"


@dataclass(frozen=True, slots=True)
class HandOff:
    """An open offer, and what its prefill worker knows about the prompt."""

    transfer_id: TransferId
    owner: AgentAddress
    prompt_hash: str
    first_token: SampledToken
    cached_tokens: int


def wants_decode_elsewhere(text: str) -> bool:
    """Whether a prefill worker must offer the blocks of the prompt. Raises `InvalidRequest`."""
    return bool(text) and _parse(text).get("do_remote_decode") is True


def prompt_hash(request: Request) -> str:
    return f"{xxhash.xxh3_128_hexdigest(request.packed_token_ids())}"


def encode_hand_off(hand_off: HandOff) -> str:
    """For the decode worker."""
    token = hand_off.first_token
    return json.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            _SECTION: {
                "version": VERSION,
                "transfer_id": f"{hand_off.transfer_id:032x}",
                "agent": base64.b64encode(codec.encode_agent(hand_off.owner).SerializeToString()).decode(),
                "prompt_hash": hand_off.prompt_hash,
                "first_token": [token.token_id, token.logprob, token.top_logprobs],
                "cached_tokens": hand_off.cached_tokens,
            },
        }
    )


def decode_hand_off(text: str) -> HandOff | None:
    """None if the parameters ask for no blocks of another worker. Raises `InvalidRequest`."""
    params = _parse(text) if text else {}
    section = params.get(_SECTION)
    if section is None:
        if params.get("do_remote_prefill") is True:
            raise InvalidRequest(FIELD, "do_remote_prefill needs the answer of a prefill worker of Tandem")
        return None
    try:
        version = section["version"]
        if version != VERSION:
            raise InvalidRequest(FIELD, f"tandem.version must be {VERSION}, is {version}")
        token_id, logprob, top = section["first_token"]
        owner = worker_pb2.AgentAddress.FromString(base64.b64decode(section["agent"], validate=True))
        return HandOff(
            transfer_id=codec.decode_transfer_id(bytes.fromhex(section["transfer_id"])),
            owner=codec.decode_agent(owner),
            prompt_hash=str(section["prompt_hash"]),
            first_token=SampledToken(
                int(token_id),
                None if logprob is None else float(logprob),
                tuple((int(other), float(value)) for other, value in top),
            ),
            cached_tokens=int(section["cached_tokens"]),
        )
    except InvalidRequest as error:
        raise InvalidRequest(FIELD, str(error)) from error
    except (KeyError, TypeError, ValueError, binascii.Error, DecodeError) as error:
        raise InvalidRequest(FIELD, f"tandem: {type(error).__name__}: {error}") from error


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_JSON_CHARS:
        raise InvalidRequest(FIELD, f"must have at most {MAX_JSON_CHARS} characters, has {len(text)}")
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(FIELD, f"is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise InvalidRequest(FIELD, f"must be a JSON object, is {type(params).__name__}")
    return params
