"""One client for every server with OpenAI's /v1/completions: prompts of token ids, and the times of what arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

HOST = "127.0.0.1"
MAX_LINE_BYTES = 1 << 24
_DATA = b"data: {"


@dataclass(slots=True)
class Received:
    """`times` of the pieces of a stream, in seconds from its send. A piece has one token, unless the server lags."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0  # as the server counts them
    seconds: float = 0.0  # from the send to the end
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def mean_gap(self) -> float:
        """Seconds for each token after the first one."""
        return (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    model: str  # its name there

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, timeout_s: float = 120.0, stream: bool = True
    ) -> Received:
        """Greedy, with exactly `max_tokens` tokens. Never raises: whatever goes wrong is the `error`."""
        received = Received()
        start = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(self._body(prompt, max_tokens, stream), received, start)
        except (OSError, ValueError, TimeoutError) as error:
            received.error = f"{type(error).__name__}: {error}"
        received.seconds = time.perf_counter() - start
        if not received.error and (received.num_tokens != max_tokens or not received.times):
            received.error = f"{received.num_tokens} of {max_tokens} tokens in {len(received.times)} pieces of text"
        return received

    def _body(self, prompt: Sequence[int], max_tokens: int, stream: bool) -> bytes:
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()

    async def _exchange(self, body: bytes, received: Received, start: float) -> None:
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=MAX_LINE_BYTES)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError((status + await reader.read(2000)).decode(errors="replace"))
            async for line in reader:
                if line.startswith(_DATA):
                    take_event(json.loads(line.removeprefix(b"data: ")), received, time.perf_counter() - start)
                elif line.startswith(b"{"):  # the whole answer
                    take_event(json.loads(line), received, time.perf_counter() - start)
        finally:
            writer.close()


def take_event(event: dict[str, Any], received: Received, at: float) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    if any(choice.get("text") for choice in event.get("choices", ())):
        received.times.append(at)
    if event.get("usage"):
        received.num_tokens = event["usage"]["completion_tokens"]
