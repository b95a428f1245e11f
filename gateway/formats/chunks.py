"""What chat completions and completions share: chunks with choices, and the object that they fold into.

Most chunks are text around one escaped string. The parts before and after the string are made once for each choice.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from gateway.errors import api_error
from gateway.formats.encoded import Encoded, EncodedValue
from gateway.formats.form import AnswerForm, Events, sse
from gateway.formats.outputs import AnswerHead
from gateway.formats.usage import UsageSum
from gateway.router_calls import Chunk
from tandem_client.stubs.inference_pb2 import Finished

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class FoldedChoice:
    """What the chunks of one choice add up to."""

    text: StringIO = field(default_factory=StringIO)
    calls: list[tuple[dict[str, Any], StringIO]] = field(default_factory=list)  # the first delta, all arguments
    logprobs: dict[str, Encoded | None] = field(default_factory=dict)
    token_ids: Encoded = field(default_factory=Encoded)
    prompt_token_ids: EncodedValue | None = None
    end: dict[str, Any] = field(default_factory=dict)

    def take(self, fields: dict[str, Any]) -> None:
        delta = fields.get("delta") or {"content": fields.get("text", "")}
        self.text.write(delta.get("content", ""))
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self.calls.append((part, StringIO()))
            self.calls[part["index"]][1].write(part["function"]["arguments"])
        for name, entries in (fields["logprobs"] or {}).items():
            column = self.logprobs.setdefault(name, None if entries is None else Encoded())
            if column is not None:
                column.extend(entries)
        self.token_ids.extend(fields.get("token_ids", ()))
        self.prompt_token_ids = fields.get("prompt_token_ids", self.prompt_token_ids)
        if fields["finish_reason"]:
            self.end = {name: fields[name] for name in ("finish_reason", "stop_reason") if name in fields}


class Chunks(AnswerForm):
    """The chunks of one answer. With `head.with_usage`, `usage` is the last chunk of a stream.

    Token ids are where vLLM has them: those of the prompt with the first chunk of each choice, or once for a choice of
    the object; a chat has them beside its choices.
    """

    before, after = "", ""  # the text of a chunk with nothing but text, around the text
    prompt_is_beside = False  # the token ids of the prompt are no field of a choice

    def __init__(self, kinds: tuple[str, str], head: AnswerHead, num_choices: int) -> None:
        """`kinds`: the `object` of a chunk, and that of the whole. `num_choices`: of all prompts."""
        self.head, self.usage = head, UsageSum(head.num_choices, head.with_receipt)
        self._common = {"id": head.id, "object": kinds[0], "created": head.created, "model": head.model}
        self._kind, self._num_choices = kinds[1], num_choices
        self._folded: defaultdict[int, FoldedChoice] = defaultdict(FoldedChoice)
        self._prompts: dict[int, EncodedValue] = {}  # token ids, by the number of the prompt
        self._before, self._after = self._around()

    @abstractmethod
    def plain_text(self, chunk: Chunk) -> str | None:
        """The text of a chunk with nothing but text, as most of them are; None for another one."""

    @abstractmethod
    def parts(self, chunk: Chunk) -> Events:
        """The text, the calls and the log-probabilities of a chunk."""

    @abstractmethod
    def opening(self, choice: int) -> Events:
        """The chunk that opens a choice; nothing if it is open, or needs none."""

    @abstractmethod
    def rest(self, choice: int) -> dict[str, Any]:
        """The content of the last chunk of a choice."""

    @abstractmethod
    def whole(self, folded: FoldedChoice) -> dict[str, Any]:
        """The content of a choice of the object."""

    def of_chunk(self, chunk: Chunk) -> Events:
        choice, events = chunk.choice, self.parts(chunk)
        if self.head.with_token_ids and chunk.token_ids:
            events = events or [self.fields(choice, self.rest(choice))]
            events[0]["token_ids"] = list(chunk.token_ids)
        events = [*self.opening(choice), *events]
        if chunk.prompt_token_ids:
            events[0]["prompt_token_ids"] = self._prompt(chunk)
        return events

    def _prompt(self, chunk: Chunk) -> EncodedValue:
        """The token ids of the prompt, encoded once for all of its choices."""
        number = chunk.choice // self.head.num_choices
        if number not in self._prompts:
            self._prompts[number] = EncodedValue(list(chunk.prompt_token_ids))
        return self._prompts[number]

    def of_finished(self, finished: Finished) -> Events:
        self.usage.add(finished)
        choice, reason = finished.choice, self.head.finish_reason(finished)
        end = self.fields(choice, self.rest(choice), reason) | {"stop_reason": self.head.stop_reason(finished)}
        return [*self.opening(choice), end]

    def of_filtered(self, choice: int) -> Events:
        return [*self.opening(choice), self.fields(choice, self.rest(choice), "content_filter")]

    def fields(self, choice: int, content: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A chunk, without the fields that all have in common."""
        token_ids: dict[str, Any] = {"token_ids": []} if self.head.with_token_ids else {}
        return {"index": choice, **content, "logprobs": None, "finish_reason": finish_reason, **token_ids}

    # ---- a stream

    def chunk(self, chunk: Chunk) -> bytes:
        text = None if self.head.with_token_ids else self.plain_text(chunk)
        if text is None:
            return super().chunk(chunk)
        opening = self.opening(chunk.choice)
        begin = self.encode(opening) if opening else b""
        return begin + f"{self._before[chunk.choice]}{quoted(text)}{self._after}".encode() if text else begin

    def _around(self) -> tuple[list[str], str]:
        """The parts before, for each choice, and after the escaped text."""
        opening = json.dumps(self._common)[:-1]
        no_usage = ', "usage": null' if self.head.with_usage else ""
        befores = [f'data: {opening}, "choices": [{{"index": {i}, {self.before}' for i in range(self._num_choices)]
        return befores, f'{self.after}, "logprobs": null, "finish_reason": null}}]{no_usage}}}\n\n'

    def encode(self, events: Events) -> bytes:
        no_usage: dict[str, Any] = {"usage": None} if self.head.with_usage else {}
        return b"".join(
            sse(self._common | self._beside(fields) | {"choices": [fields]} | no_usage) for fields in events
        )

    def _beside(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Take what belongs beside the choices out of the fields of a choice."""
        is_beside = self.prompt_is_beside and "prompt_token_ids" in fields
        return {"prompt_token_ids": fields.pop("prompt_token_ids")} if is_beside else {}

    def end(self) -> bytes:
        if not self.head.with_usage:
            return DONE
        return sse(self._common | {"choices": [], "usage": self.usage.chat()}) + DONE

    def fail(self, error: Exception) -> bytes:
        return sse(api_error(error).body())

    # ---- one object

    def collect(self, chunk: Chunk) -> None:
        text = None if self.head.with_token_ids else self.plain_text(chunk)
        if text is None:
            super().collect(chunk)
        else:
            self._folded[chunk.choice].text.write(text)

    def fold(self, events: Events) -> None:
        for fields in events:
            self._folded[fields["index"]].take(fields)

    def result(self) -> dict[str, Any]:
        choices = [self._whole_choice(index, self._folded[index]) for index in range(self._num_choices)]
        beside = self._beside(choices[0])
        for other in choices[1:]:
            self._beside(other)
        return self._common | {"object": self._kind, "choices": choices, "usage": self.usage.chat()} | beside

    def _whole_choice(self, index: int, folded: FoldedChoice) -> dict[str, Any]:
        choice = {"index": index, **self.whole(folded), "logprobs": folded.logprobs or None, **folded.end}
        if self.head.with_token_ids:
            choice |= {"token_ids": folded.token_ids, "prompt_token_ids": folded.prompt_token_ids}
        return choice
