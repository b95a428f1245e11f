"""A guardrail for tests: it refuses one word and writes outputs in capitals."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.guardrails import Message, Refused


def make() -> StrictGuardrail:
    return StrictGuardrail()


def _check(text: str) -> str:
    if "forbidden" in text:
        raise Refused("a forbidden word")
    return text


class StrictGuardrail:
    async def check_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        return [Message(message.role, _check(message.text)) for message in messages]

    def open_output(self, messages: Sequence[Message]) -> CapitalOutput:
        del messages
        return CapitalOutput()


class CapitalOutput:
    async def push(self, text: str) -> str:
        return _check(text).upper()

    async def finish(self) -> str:
        return ""
