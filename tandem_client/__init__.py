"""The Python client of a Tandem router, for asyncio programs (`AsyncClient`) and for all others (`Client`).

from tandem_client import Client

with Client("127.0.0.1:50051") as client:
    stream = client.stream([{"role": "user", "content": "What is the capital of France?"}], max_tokens=32)
    for piece in stream:
        print(piece.text, end="", flush=True)
    print(stream.result.usage, stream.result.path)

`stream` and `complete` take plain values and return typed results: `Piece`, `Completion`, `ToolCall`. All other calls
take and return the messages of protos/, which `tandem_client.stubs` defines; `generate` sends any `GenerateRequest`.
Commands of Tandem use `generate`, because they print every field.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_client.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Load the names of `tandem_client.api` when a program asks for the first one. Tandem's own packages, which import
    `tandem_client.stubs` alone, thus load no client."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("tandem_client.api"), name)
