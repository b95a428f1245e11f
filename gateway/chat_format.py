"""The two forms of a chat completion: server-sent chunks, and one object. Both take the same parts.

A chunk is text around one escaped string: the parts before and after the string are made once for each choice.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from gateway.calls import json_bytes
from gateway.errors import api_error
from gateway.outputs import FINISH_REASONS, AnswerHead, chat_logprobs
from gateway.router_calls import Chunk
from gateway.tool_calls import TextDelta, ToolCallDelta, ToolCallParser, parser_for
from gateway.usage import UsageSum
from tandem_client.stubs.inference_pb2 import Finished

DONE = b"data: [DONE]\n\n"
Delta = TextDelta | ToolCallDelta


def sse(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


class Parsers:
    """One parser of tool calls for each choice; none where the request has no tools."""

    def __init__(self, tool_format: str, num_choices: int) -> None:
        self._parsers: list[ToolCallParser | None] = [parser_for(tool_format) for _ in range(num_choices)]

    def push(self, choice: int, text: str) -> list[Delta]:
        parser = self._parsers[choice]
        return [TextDelta(text)] if parser is None else list(parser.push(text))

    def finish(self, choice: int) -> list[Delta]:
        parser = self._parsers[choice]
        return [] if parser is None else list(parser.finish())

    def has(self, choice: int) -> bool:
        return self._parsers[choice] is not None

    def finish_reason(self, finished: Finished) -> str:
        parser = self._parsers[finished.choice]
        if parser is not None and parser.num_calls:
            return "tool_calls"
        return FINISH_REASONS[finished.finish_reason]


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

    def __init__(self, head: AnswerHead, num_choices: int, parsers: Parsers, usage: UsageSum, with_usage: bool) -> None:
        super().__init__("chat.completion.chunk", head, usage, with_usage)
        self._parsers = parsers
        self._begun = [False] * num_choices
        self._before, self._after = self.around('"delta": {"content": ', "}", num_choices)

    def filtered(self, choice: int) -> bytes:
        return self._begin(choice) + self._event(choice, {}, "content_filter")

    def chunk(self, chunk: Chunk) -> bytes:
        choice, text = chunk.choice, chunk.text
        begin = b"" if self._begun[choice] else self._begin(choice)
        if chunk.logprobs:
            logprobs = {"content": chat_logprobs(chunk.logprobs), "refusal": None}
            deltas = self._parsers.push(choice, text)
            first = _delta(deltas[0]) if deltas else {"content": ""}
            rest = b"".join(self._event(choice, _delta(delta)) for delta in deltas[1:])
            return begin + self._event(choice, first, None, logprobs) + rest
        if self._parsers.has(choice):
            return begin + b"".join(self._event(choice, _delta(delta)) for delta in self._parsers.push(choice, text))
        if not text:
            return begin
        return begin + f"{self._before[choice]}{quoted(text)}{self._after}".encode()

    def finished(self, finished: Finished) -> bytes:
        choice = finished.choice
        self.usage.add(finished)
        rest = b"".join(self._event(choice, _delta(delta)) for delta in self._parsers.finish(choice))
        reason = self._parsers.finish_reason(finished)
        stop_reason = self.head.stop_reason(finished)
        return self._begin(choice) + rest + self._event(choice, {}, reason, None, {"stop_reason": stop_reason})

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


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index}
    if delta.id:
        call |= {"id": delta.id, "type": "function"}
    named = {"name": delta.name} if delta.name else {}
    return {"tool_calls": [call | {"function": named | {"arguments": delta.arguments}}]}


class ChatAnswer:
    """One chat completion object."""

    def __init__(self, head: AnswerHead, num_choices: int, parsers: Parsers, usage: UsageSum) -> None:
        self._head = head
        self._parsers = parsers
        self._usage = usage
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[Any]] = [[] for _ in range(num_choices)]
        self._ends: list[dict[str, Any]] = [{"finish_reason": "content_filter"} for _ in range(num_choices)]

    def chunk(self, chunk: Chunk) -> None:
        self._logprobs[chunk.choice] += chat_logprobs(chunk.logprobs)
        self._take(chunk.choice, self._parsers.push(chunk.choice, chunk.text))

    def finished(self, finished: Finished) -> None:
        self._usage.add(finished)
        self._take(finished.choice, self._parsers.finish(finished.choice))
        reason, stop_reason = self._parsers.finish_reason(finished), self._head.stop_reason(finished)
        self._ends[finished.choice] = {"finish_reason": reason, "stop_reason": stop_reason}

    def _take(self, choice: int, deltas: list[Delta]) -> None:
        calls = self._calls[choice]
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._texts[choice].append(delta.text)
            elif delta.id:
                function = {"name": delta.name, "arguments": delta.arguments}
                calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                calls[delta.index]["function"]["arguments"] += delta.arguments

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
        text, calls = "".join(self._texts[choice]), self._calls[choice]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text.strip() or None, "tool_calls": calls}
        logprobs = self._logprobs[choice]
        return {
            "index": choice,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            **self._ends[choice],
        }
