"""`tandem generate`: sends one prompt, and prints the answer while it streams."""

from __future__ import annotations

import sys

from google.protobuf import json_format

from cli.screens.terminal import print_answer
from core.errors import InvalidRequest
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2


def request_of(prompt: str | None, system: str, raw: bool) -> inference_pb2.GenerateRequest:
    """Unless `raw`, the router renders the chat template of the model around the prompt."""
    text = read_prompt(prompt)
    if raw and system:
        raise InvalidRequest("system", "a raw prompt has no system message; omit --raw or --system")
    if raw:
        return inference_pb2.GenerateRequest(text=text)
    request = inference_pb2.GenerateRequest()
    if system:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=text)
    return request


def read_prompt(argument: str | None) -> str:
    """The argument; standard input if it is missing or `-`. Raises `InvalidRequest` for an empty prompt."""
    text = argument
    if text is None or text == "-":
        if sys.stdin.isatty():
            raise InvalidRequest("prompt", "give a prompt as an argument or on standard input")
        text = sys.stdin.read()
    if not text.strip():
        raise InvalidRequest("prompt", "is empty")
    return text


async def generate(
    connection: AsyncClient, request: inference_pb2.GenerateRequest, timeout_s: float, as_json: bool
) -> None:
    """Print the answer: as plain text, or as one JSON line per message.

    Plain text of several choices is printed choice by choice, each when it is complete, after its number.
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
                    print_answer(chunk.text)
            elif several and response.HasField("finished"):
                choice = response.finished.choice
                print_answer(f"[{choice}] {''.join(held.pop(choice, []))}\n")
    if not as_json and not several:
        print()
