"""The two forms of a completion: server-sent chunks, and one object. `echoes`: the text before each choice."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from gateway.formats.chat import Chunks
from gateway.formats.encoded import Encoded
from gateway.formats.outputs import AnswerHead, CompletionLogprobs
from gateway.formats.usage import UsageSum
from gateway.router_calls import Chunk
from tandem_client.stubs.inference_pb2 import Finished


class CompletionChunks(Chunks):
    """Chunks of a completion."""

    def __init__(self, head: AnswerHead, echoes: Sequence[str], usage: UsageSum, with_usage: bool) -> None:
        super().__init__("text_completion", head, usage, with_usage)
        self._echoes = list(echoes)
        self._logprobs = [CompletionLogprobs(len(echo)) for echo in echoes]
        self._before, self._after = self.around('"text": ', "", len(echoes))

    def filtered(self, choice: int) -> bytes:
        return self._event(choice, self._take_echo(choice), "content_filter")

    def finished(self, finished: Finished) -> bytes:
        self.usage.add(finished)
        more = {"stop_reason": self.head.stop_reason(finished)}
        reason = self.head.finish_reason(finished)
        return self._event(finished.choice, self._take_echo(finished.choice), reason, None, more)

    def chunk(self, chunk: Chunk) -> bytes:
        choice = chunk.choice
        text = self._take_echo(choice) + chunk.text
        if chunk.logprobs:
            return self._event(choice, text, None, self._logprobs[choice].take(chunk.logprobs))
        if not text:
            return b""
        return f"{self._before[choice]}{quoted(text)}{self._after}".encode()

    def _take_echo(self, choice: int) -> str:
        """The text before the choice, once."""
        echo, self._echoes[choice] = self._echoes[choice], ""
        return echo

    def _event(
        self,
        choice: int,
        text: str,
        finish_reason: str | None = None,
        logprobs: Any = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        fields = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.event(fields | (more or {}))


class CompletionAnswer:
    """One completion object."""

    def __init__(self, head: AnswerHead, echoes: Sequence[str], usage: UsageSum) -> None:
        self._head = head
        self._usage = usage
        self._texts = [StringIO() for _ in echoes]
        for text, echo in zip(self._texts, echoes, strict=True):
            text.write(echo)
        self._offsets = [CompletionLogprobs(len(echo)) for echo in echoes]
        self._logprobs: list[dict[str, Encoded]] = [{} for _ in echoes]
        self._ends: list[dict[str, Any]] = [{"finish_reason": "content_filter"} for _ in echoes]

    def finished(self, finished: Finished) -> None:
        self._usage.add(finished)
        reason, stop_reason = self._head.finish_reason(finished), self._head.stop_reason(finished)
        self._ends[finished.choice] = {"finish_reason": reason, "stop_reason": stop_reason}

    def chunk(self, chunk: Chunk) -> None:
        self._texts[chunk.choice].write(chunk.text)
        if chunk.logprobs:
            columns = self._logprobs[chunk.choice]
            for name, values in self._offsets[chunk.choice].take(chunk.logprobs).items():
                columns.setdefault(name, Encoded()).extend(values)

    def filtered(self, _: int) -> None:
        """A choice without another end was ended by the guardrail: see `_ends`."""

    def result(self) -> dict[str, Any]:
        head = self._head
        choices = [
            {
                "index": choice,
                "text": text.getvalue(),
                "logprobs": self._logprobs[choice] or None,
                **self._ends[choice],
            }
            for choice, text in enumerate(self._texts)
        ]
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": self._usage.chat(),
        }
