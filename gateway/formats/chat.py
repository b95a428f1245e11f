"""The chunks of a chat completion, and its messages."""

from __future__ import annotations

from typing import Any

from gateway.formats.chunks import Chunks, FoldedChoice
from gateway.formats.form import Events
from gateway.formats.outputs import AnswerHead, chat_logprobs
from gateway.router_calls import Chunk, parts_of
from tandem_client.stubs.inference_pb2 import ToolCallDelta


class ChatChunks(Chunks):
    before, after = '"delta": {"content": ', "}"
    prompt_is_beside = True

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(("chat.completion.chunk", "chat.completion"), head, head.num_choices)
        self._begun = [False] * head.num_choices

    def plain_text(self, chunk: Chunk) -> str | None:
        return None if chunk.logprobs or chunk.tool_calls else chunk.text

    def parts(self, chunk: Chunk) -> Events:
        choice, deltas = chunk.choice, [_delta(part) for part in parts_of(chunk)]
        if chunk.logprobs and not deltas:
            deltas = [{"content": ""}]
        events = [self.fields(choice, {"delta": delta}) for delta in deltas]
        if chunk.logprobs:
            events[0]["logprobs"] = {"content": chat_logprobs(chunk.logprobs), "refusal": None}
        return events

    def opening(self, choice: int) -> Events:
        if self._begun[choice]:
            return []
        self._begun[choice] = True
        return [self.fields(choice, {"delta": {"role": "assistant", "content": ""}})]

    def rest(self, _: int) -> dict[str, Any]:
        return {"delta": {}}

    def whole(self, folded: FoldedChoice) -> dict[str, Any]:
        text = folded.text.getvalue()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if folded.calls:
            calls = [_whole_call(first, arguments.getvalue()) for first, arguments in folded.calls]
            message |= {"content": text.strip() or None, "tool_calls": calls}
        return {"message": message}


def _delta(part: str | ToolCallDelta) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    call: dict[str, Any] = {"index": part.index}
    if part.id:
        call |= {"id": part.id, "type": "function"}
    named = {"name": part.name} if part.name else {}
    return {"tool_calls": [call | {"function": named | {"arguments": part.arguments_json}}]}


def _whole_call(first: dict[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": first["function"].get("name", ""), "arguments": arguments}
    return {"id": first["id"], "type": first["type"], "function": function}
