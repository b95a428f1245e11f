"""The chunks of a completion, and its texts. `echoes`: the text before each choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.chunks import Chunks, FoldedChoice
from gateway.formats.form import Events
from gateway.formats.outputs import AnswerHead, CompletionLogprobs
from gateway.router_calls import Chunk


class CompletionChunks(Chunks):
    before = '"text": '

    def __init__(self, head: AnswerHead, echoes: Sequence[str]) -> None:
        super().__init__(("text_completion", "text_completion"), head, len(echoes))
        self._echoes = list(echoes)
        self._logprobs = [CompletionLogprobs(len(echo)) for echo in echoes]

    def plain_text(self, chunk: Chunk) -> str | None:
        return None if chunk.logprobs else self._take_echo(chunk.choice) + chunk.text

    def parts(self, chunk: Chunk) -> Events:
        text = self._take_echo(chunk.choice) + chunk.text
        event = self.fields(chunk.choice, {"text": text})
        if chunk.logprobs:
            event["logprobs"] = self._logprobs[chunk.choice].take(chunk.logprobs)
        return [event] if text or chunk.logprobs else []

    def opening(self, _: int) -> Events:
        return []

    def rest(self, choice: int) -> dict[str, Any]:
        return {"text": self._take_echo(choice)}

    def whole(self, folded: FoldedChoice) -> dict[str, Any]:
        return {"text": folded.text.getvalue()}

    def _take_echo(self, choice: int) -> str:
        """The text before the choice, once."""
        echo, self._echoes[choice] = self._echoes[choice], ""
        return echo
