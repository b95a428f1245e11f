"""Requests of a later version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from core.config import RouterConfig
from core.errors import InvalidRequest
from core.request import Request, SamplingParams
from protos import codec
from protos.unknown_fields import refuse_unknown
from router.serving.validation import tokenize_prompt
from tandem_client.stubs import cluster_pb2, inference_pb2
from text.tokenizer import load_tokenizer

REQUESTS = [
    inference_pb2.GenerateRequest,
    inference_pb2.TokenizeRequest,
    cluster_pb2.ScaleRequest,
    cluster_pb2.SwitchRoleRequest,
    cluster_pb2.ApplyRequest,
]
NUMBER = 9999
LATER_VALUE, LATER_DEFAULT = b"\xf8\xf0\x04\x07", b"\xf8\xf0\x04\x00"  # field 9999 as 7, and as 0


def filled(message: Message) -> Iterator[Message]:
    """The message and one of each message inside, at any depth."""
    yield message
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        target: Any = getattr(message, field.name)
        if field.is_repeated:
            target = target.add()
        else:
            target.SetInParent()
        yield from filled(target)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_a_field_of_a_later_version_is_refused_at_any_depth_unless_it_is_unset(kind: type[Message]) -> None:
    for place in range(len(list(filled(kind())))):
        request = kind()
        inside = list(filled(request))
        if not request.IsInitialized() or not is_inside(request, inside[place]):
            continue  # another part of a oneof has replaced it
        refuse_unknown(request)
        inside[place].MergeFromString(LATER_DEFAULT)
        refuse_unknown(request)
        inside[place].MergeFromString(LATER_VALUE)
        name = inside[place].DESCRIPTOR.name
        with pytest.raises(InvalidRequest, match=re.escape(f"field {NUMBER} of {name} is of a later version")):
            refuse_unknown(request)


def is_inside(request: Message, part: Message) -> bool:
    before = request.SerializeToString()
    part.MergeFromString(LATER_VALUE)
    changed = request.SerializeToString() != before
    part.DiscardUnknownFields()  # type: ignore[no-untyped-call]
    return changed


def test_the_router_refuses_a_prompt_that_it_cannot_read_as_a_whole() -> None:
    tokenizer = load_tokenizer("fake:tiny")
    request = inference_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "a"}]})
    assert tokenize_prompt(request, tokenizer, RouterConfig())
    request.chat.messages[0].MergeFromString(LATER_VALUE)
    with pytest.raises(InvalidRequest, match=f"messages: field {NUMBER} of ChatMessage"):
        tokenize_prompt(request, tokenizer, RouterConfig())


def test_a_worker_refuses_a_rule_of_sampling_that_it_lacks_and_ignores_a_hint() -> None:
    """A later router sends its hints with every request, also to workers of this version."""
    wire = codec.encode_sequence(Request("a", (1, 2), 2, SamplingParams(max_tokens=1)))
    wire.MergeFromString(LATER_VALUE)
    codec.decode_sequence(wire)
    for part in (wire.sampling, wire.stop):
        part.MergeFromString(LATER_VALUE)
        with pytest.raises(InvalidRequest, match=f"field {NUMBER} of {part.DESCRIPTOR.name}"):
            codec.decode_sequence(wire)
        part.DiscardUnknownFields()
