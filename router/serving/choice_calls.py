"""Separates the calls of one choice from its text, in a request with tools.

State and ids are a function of the request and of the output so far. So another router that reads the first tokens of
an answer again continues its calls where they broke off.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from typing import Any

from core.request import Request
from tandem_client.stubs import inference_pb2
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer
from text.tool_calls import Delta, TextDelta, ToolCallParser
from text.tool_formats import FORMATS, ToolFormat

NUM_ID_BYTES = 12
SHORT_ID_CHARS = string.ascii_letters + string.digits
SHORT_ID_LENGTH = 9

Separated = tuple[str, list[inference_pb2.ToolCallDelta]]


class ChoiceCalls:
    """Call `push` for all text in order. The last text goes to `finish`."""

    def __init__(self, tool_format: ToolFormat, request: Request, client_request_id: str) -> None:
        self._format, self._request, self._client_request_id = tool_format, request, client_request_id
        self._parser = ToolCallParser(tool_format, self._id_of)
        self._id_hash: Any = None  # of the request; None before the first call

    @property
    def num_complete_calls(self) -> int:
        """Of the output so far."""
        return self._parser.num_complete_calls

    def push(self, text: str) -> Separated:
        """The text outside of calls and the deltas of calls that are complete with `text`."""
        return _separated(self._parser.push(text))

    def finish(self, text: str) -> Separated:
        return _separated([*self._parser.push(text), *self._parser.finish()])

    def _id_of(self, index: int) -> str:
        """Different for each call of a conversation, because each of its requests has another prompt."""
        if self._id_hash is None:
            named = f"{self._client_request_id}\0{self._request.sampling.seed}\0".encode()
            self._id_hash = hashlib.blake2b(named + self._request.packed_token_ids(), digest_size=NUM_ID_BYTES)
        of_call = self._id_hash.copy()
        of_call.update(index.to_bytes(4, "little"))
        digest = of_call.digest()
        return _short_id(digest) if self._format.has_short_ids else f"call_{digest.hex()}"


Output = tuple[TextStream, ChoiceCalls | None]  # of one choice; None: it cannot have calls


def open_output(
    wire: inference_pb2.GenerateRequest,
    request: Request,
    client_request_id: str,
    tokenizer: ModelTokenizer,
    stop_strings: StopStrings,
) -> Output:
    """For one choice of `wire`, whose own request is `request`."""
    tool_format = FORMATS.get(tokenizer.tool_format) if wire.chat.tools else None
    detokenizer = tokenizer.detokenizer(with_tags=tool_format is not None)
    text = TextStream(detokenizer, stop_strings, request.sampling.min_tokens)
    return text, None if tool_format is None else ChoiceCalls(tool_format, request, client_request_id)


def _short_id(digest: bytes) -> str:
    number, characters = int.from_bytes(digest, "little"), ""
    while len(characters) < SHORT_ID_LENGTH:
        number, place = divmod(number, len(SHORT_ID_CHARS))
        characters += SHORT_ID_CHARS[place]
    return characters


def _separated(deltas: Iterable[Delta]) -> Separated:
    text, calls = "", []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        else:
            call = inference_pb2.ToolCallDelta(
                index=delta.index,
                id=delta.id,
                name=delta.name,
                arguments_json=delta.arguments,
                text_offset=len(text),
            )
            calls.append(call)
    return text, calls
