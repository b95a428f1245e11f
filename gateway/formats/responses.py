"""The typed server-sent events of a response. The last one has the whole object, with the items that grew meanwhile.

response.created, response.in_progress
  for each item: response.output_item.added
    text:  response.content_part.added, response.output_text.delta ..., response.output_text.done,
           response.content_part.done
    call:  response.function_call_arguments.delta ..., response.function_call_arguments.done
  response.output_item.done
response.completed, or response.incomplete if the output was cut
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from gateway.errors import api_error
from gateway.formats.encoded import EncodedValue
from gateway.formats.form import AnswerForm, Events, sse
from gateway.formats.outputs import AnswerHead
from gateway.formats.usage import UsageSum
from gateway.router_calls import Chunk, parts_of
from tandem_client.stubs.inference_pb2 import Finished, ToolCallDelta

CUT_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseItems:
    """The output items of a response, and the typed events of their growth."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id.removeprefix("resp_")
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._written = StringIO()  # the text or the arguments of the open item

    def take(self, part: str | ToolCallDelta) -> list[dict[str, Any]]:
        return self._take_text(part) if isinstance(part, str) else self._take_call(part)

    def _take_call(self, delta: ToolCallDelta) -> list[dict[str, Any]]:
        opening: list[dict[str, Any]] = []
        if delta.id:
            opening = [*self.close(), *self._open(_call_item(f"fc_{delta.id}", delta.id, delta.name))]
        if not delta.arguments_json:
            return opening
        self._written.write(delta.arguments_json)
        return [*opening, self._of_item("response.function_call_arguments.delta", delta=delta.arguments_json)]

    def _take_text(self, text: str) -> list[dict[str, Any]]:
        opening: list[dict[str, Any]] = []
        if not self._is_open or self.items[-1]["type"] != "message":
            if not text.strip() and self.items:  # space between calls is no message
                return []
            opening = [*self.close(), *self._open(_message_item(f"msg_{self._id}_{len(self.items)}"))]
            part = {"type": "output_text", "text": "", "annotations": []}
            opening.append(self._of_item("response.content_part.added", content_index=0, part=part))
            self.items[-1]["content"].append(dict(part))
            if not text:
                return opening
        self._written.write(text)
        return [*opening, self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self.items.append(item)
        self._is_open, self._written = True, StringIO()
        shown = item | ({"content": []} if item["type"] == "message" else {})
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The events that end the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, written = self.items[-1], self._written.getvalue()
        item["status"] = status
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        if item["type"] == "function_call":
            item["arguments"], name = written, item["name"]
            return [self._of_item("response.function_call_arguments.done", arguments=written, name=name), done]
        (part,) = item["content"]
        part["text"] = written
        return [
            self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=[]),
            self._of_item("response.content_part.done", content_index=0, part=part),
            done,
        ]

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _message_item(item_id: str) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _call_item(item_id: str, call_id: str, name: str) -> dict[str, Any]:
    return {
        "id": item_id, "type": "function_call", "status": "in_progress", "call_id": call_id, "name": name,
        "arguments": "",
    }  # fmt: skip


class ResponseEvents(AnswerForm):
    """Each event has a number."""

    def __init__(self, head: AnswerHead, echoed: Mapping[str, EncodedValue]) -> None:
        self._head, self._echoed, self._usage = head, echoed, UsageSum(head.num_choices, head.with_receipt)
        self._items = ResponseItems(head.id)
        self._status, self._cut_reason = "in_progress", ""
        self._number = 0

    def of_chunk(self, chunk: Chunk) -> Events:
        return [typed for part in parts_of(chunk) for typed in self._items.take(part)]

    def of_finished(self, finished: Finished) -> Events:
        self._usage.add(finished)
        return self._end(self._head.finish_reason(finished))

    def of_filtered(self, _: int) -> Events:
        return self._end("content_filter")

    def _end(self, reason: str) -> Events:
        self._cut_reason = CUT_REASONS.get(reason, "")
        self._status = "incomplete" if self._cut_reason else "completed"
        opening = [] if self._items.items else self._items.take("")  # clients read the text of the first item
        return [*opening, *self._items.close(self._status)]

    def encode(self, events: Events) -> bytes:
        opening: Events = []
        if not self._number:
            begun = self.result() | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
            opening = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        return b"".join(map(self._sse, [*opening, *events]))

    def _sse(self, typed: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return f"event: {typed['type']}\n".encode() + sse(typed | {"sequence_number": number})

    def end(self) -> bytes:
        response = self.result()
        return self._sse({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: Exception) -> bytes:
        found = api_error(error)
        failure = {"code": found.code or "server_error", "message": found.message}
        response = self.result() | {"status": "failed", "error": failure}
        failed = self._sse({"type": "response.failed", "response": response})
        return self._sse({"type": "error", "param": found.param, **failure}) + failed

    def fold(self, _: Events) -> None:
        """The items have grown already."""

    def result(self) -> dict[str, Any]:
        head, running = self._head, self._status == "in_progress"
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": self._cut_reason} if self._cut_reason else None,
            "model": head.model,
            "output": self._items.items if not running else [],
            "usage": None if running else self._usage.responses(),
            **self._echoed,
        }
