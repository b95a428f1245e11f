"""The two forms of a chat completion: server-sent chunks, and one object. Both take the same parts.

A chunk is text around one escaped string: the parts before and after the string are made once for each choice.
"""

from __future__ import annotations

import json
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from gateway.errors import api_error
from gateway.formats.encoded import Encoded
from gateway.formats.outputs import AnswerHead, chat_logprobs
from gateway.formats.usage import UsageSum
from gateway.router_calls import Chunk, parts_of
from gateway.routes.calls import json_bytes
from tandem_client.stubs.inference_pb2 import Finished, ToolCallDelta

DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


class Chunks:
    """The chunks of one streamed answer. `kind`: their `object`. With `with_usage`, `usage` is a last chunk."""

    def __init__(self, kind: str, head: AnswerHead, usage: UsageSum, with_usage: bool) -> None:
        self.head, self.usage = head, usage
        self._with_usage = with_usage
        self._common = {"id": head.id, "object": kind, "created": head.created, "model": head.model}

    def around(self, before: str, after: str, num_choices: int) -> tuple[list[str], str]:
        """The text before, for each choice, and after the one escaped string of a chunk with nothing but text."""
        opening = json.dumps(self._common)[:-1]
        no_usage = ', "usage": null' if self._with_usage else ""
        befores = [f'data: {opening}, "choices": [{{"index": {i}, {before}' for i in range(num_choices)]
        return befores, f'{after}, "logprobs": null, "finish_reason": null}}]{no_usage}}}\n\n'

    def event(self, fields: dict[str, Any]) -> bytes:
        """The chunk with `fields` of one choice."""
        no_usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return sse(self._common | {"choices": [fields]} | no_usage)

    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return sse(self._common | {"choices": [], "usage": self.usage.chat()}) + DONE

    def fail(self, error: Exception) -> bytes:
        return sse(api_error(error).body())


class ChatChunks(Chunks):
    """Chat completion chunks."""

    def __init__(self, head: AnswerHead, num_choices: int, usage: UsageSum, with_usage: bool) -> None:
        super().__init__("chat.completion.chunk", head, usage, with_usage)
        self._begun = [False] * num_choices
        self._before, self._after = self.around('"delta": {"content": ', "}", num_choices)

    def filtered(self, choice: int) -> bytes:
        return self._begin(choice) + self._event(choice, {}, "content_filter")

    def chunk(self, chunk: Chunk) -> bytes:
        choice, text = chunk.choice, chunk.text
        begin = b"" if self._begun[choice] else self._begin(choice)
        if chunk.logprobs:
            logprobs = {"content": chat_logprobs(chunk.logprobs), "refusal": None}
            first, *rest = list(parts_of(chunk)) or [""]
            later = b"".join(self._event(choice, _delta(part)) for part in rest)
            return begin + self._event(choice, _delta(first), None, logprobs) + later
        if chunk.tool_calls:
            return begin + b"".join(self._event(choice, _delta(part)) for part in parts_of(chunk))
        if not text:
            return begin
        return begin + f"{self._before[choice]}{quoted(text)}{self._after}".encode()

    def finished(self, finished: Finished) -> bytes:
        choice = finished.choice
        self.usage.add(finished)
        reason, more = self.head.finish_reason(finished), {"stop_reason": self.head.stop_reason(finished)}
        return self._begin(choice) + self._event(choice, {}, reason, None, more)

    def _begin(self, choice: int) -> bytes:
        """The chunk that opens a choice; nothing if it is open."""
        if self._begun[choice]:
            return b""
        self._begun[choice] = True
        return self._event(choice, {"role": "assistant", "content": ""})

    def _event(
        self,
        choice: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Any = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        fields = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.event(fields | (more or {}))


def _delta(part: str | ToolCallDelta) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    call: dict[str, Any] = {"index": part.index}
    if part.id:
        call |= {"id": part.id, "type": "function"}
    named = {"name": part.name} if part.name else {}
    return {"tool_calls": [call | {"function": named | {"arguments": part.arguments_json}}]}


class ChatAnswer:
    """One chat completion object."""

    def __init__(self, head: AnswerHead, num_choices: int, usage: UsageSum) -> None:
        self._head = head
        self._usage = usage
        self._texts = [StringIO() for _ in range(num_choices)]
        self._calls: list[list[tuple[str, str, StringIO]]] = [[] for _ in range(num_choices)]  # id, name, arguments
        self._logprobs = [Encoded() for _ in range(num_choices)]
        self._ends: list[dict[str, Any]] = [{"finish_reason": "content_filter"} for _ in range(num_choices)]

    def chunk(self, chunk: Chunk) -> None:
        self._logprobs[chunk.choice].extend(chat_logprobs(chunk.logprobs))
        self._texts[chunk.choice].write(chunk.text)
        calls = self._calls[chunk.choice]
        for delta in chunk.tool_calls:
            if delta.id:
                calls.append((delta.id, delta.name, StringIO()))
            calls[delta.index][2].write(delta.arguments_json)

    def finished(self, finished: Finished) -> None:
        self._usage.add(finished)
        reason, stop_reason = self._head.finish_reason(finished), self._head.stop_reason(finished)
        self._ends[finished.choice] = {"finish_reason": reason, "stop_reason": stop_reason}

    def filtered(self, _: int) -> None:
        """A choice without another end was ended by the guardrail: see `_ends`."""

    def result(self) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(choice) for choice in range(len(self._texts))],
            "usage": self._usage.chat(),
        }

    def _choice(self, choice: int) -> dict[str, Any]:
        text = self._texts[choice].getvalue()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments.getvalue()}}
            for call_id, name, arguments in self._calls[choice]
        ]
        if calls:
            message |= {"content": text.strip() or None, "tool_calls": calls}
        logprobs = self._logprobs[choice]
        return {
            "index": choice,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            **self._ends[choice],
        }
