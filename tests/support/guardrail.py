"""A guardrail for tests of the gateway: the prompt decides what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.guardrails import Message, Refused

REWRITTEN = "a much longer prompt than the one that the client has sent"


class _Output:
    def __init__(self, prompt: str) -> None:
        self._prompt, self._num_chars = prompt, 0

    async def push(self, text: str) -> str:
        self._num_chars += len(text)
        match self._prompt:
            case "mask":
                return "x" * len(text)
            case "hold back":
                return ""
            case "end early" if self._num_chars >= 4:
                raise Refused("enough of this")
            case "break":
                raise ValueError("a bug in the guardrail")
        return text

    async def finish(self) -> str:
        return "held" if self._prompt == "hold back" else ""


class ScriptedGuardrail:
    async def check_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        if messages[-1].text == "refuse":
            raise Refused("such prompts are not answered")
        return [replace(message, text=REWRITTEN) if message.text == "rewrite" else message for message in messages]

    def open_output(self, messages: Sequence[Message]) -> _Output:
        return _Output(messages[-1].text)


def build() -> ScriptedGuardrail:
    return ScriptedGuardrail()
