"""`tandem generate`: one prompt in, its answer out as it comes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from google.protobuf import json_format

from core.errors import InvalidRequest
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to ask: as a chat the model's template is rendered around the text, else the text is used as it is."""

    text: str
    system: str = ""
    chat: bool = True

    def fill(self, request: inference_pb2.GenerateRequest) -> None:
        if not self.chat:
            if self.system:
                raise InvalidRequest("system", "a raw prompt has no system message; leave --raw or --system out")
            request.text = self.text
            return
        if self.system:
            request.chat.messages.add(role="system", content=self.system)
        request.chat.messages.add(role="user", content=self.text)


def read_prompt(argument: str | None) -> str:
    """The argument, or standard input where it is missing or `-`. Raises `InvalidRequest` where there is nothing."""
    text = argument
    if text is None or text == "-":
        if sys.stdin.isatty():
            raise InvalidRequest("prompt", "give it as an argument or on standard input")
        text = sys.stdin.read()
    if not text.strip():
        raise InvalidRequest("prompt", "is empty")
    return text


async def generate(
    connection: AsyncClient, request: inference_pb2.GenerateRequest, timeout_s: float, as_json: bool
) -> None:
    """Print the answer: plain text, each choice headed by its number where there are several; or one JSON a message.

    With several choices text is held back until a choice is complete, so that they do not mix.
    """
    several = request.n > 1
    held: dict[int, list[str]] = {}
    async with connection as client:
        async for response in client.generate(request, timeout_s):
            if as_json:
                print(json_format.MessageToJson(response, indent=None, preserving_proto_field_name=True), flush=True)
            elif response.HasField("tokens"):
                chunk = response.tokens
                if several:
                    held.setdefault(chunk.choice, []).append(chunk.text)
                else:
                    print(chunk.text, end="", flush=True)
            elif several:
                choice = response.finished.choice
                print(f"[{choice}] {''.join(held.pop(choice, []))}", flush=True)
    if not as_json and not several:
        print()
