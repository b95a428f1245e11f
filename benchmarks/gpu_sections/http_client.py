"""One client for every server with OpenAI's /v1/completions: prompts of token ids, and the times of what arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from conformance.http_exchange import Call, End, Endpoint, Reply, exchange


@dataclass(slots=True)
class Received:
    """`times` of the pieces of a stream, in seconds from its send. A piece has one token, unless the server lags."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0  # as the server counts them
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
        received, start, num_seen = Received(), time.perf_counter(), 0

        def take(reply: Reply, is_whole: bool = False) -> bool:
            """The lines that have come: events, or a whole answer. Raises `ValueError`."""
            nonlocal num_seen
            end = len(reply.body) if is_whole else reply.body.rfind(b"\n") + 1
            lines, num_seen = bytes(reply.body[num_seen:end]), max(num_seen, end)
            for line in lines.splitlines() if reply.status == 200 else ():
                if (event := line.removeprefix(b"data: ")).startswith(b"{"):
                    take_event(json.loads(event), received, time.perf_counter() - start)
            return False

        call = Call("/v1/completions", self._body(prompt, max_tokens, stream))
        try:
            reply = await exchange(Endpoint("127.0.0.1", self.port, tls=False), call, timeout_s, take)
            take(reply, is_whole=True)
            if reply.status != 200 or reply.end is not End.COMPLETE:
                received.error = f"{reply.status}, {reply.end.value}: {reply.body[:2000].decode(errors='replace')}"
        except ValueError as error:
            received.error = str(error)
        if not received.error and (received.num_tokens != max_tokens or not received.times):
            received.error = f"{received.num_tokens} of {max_tokens} tokens in {len(received.times)} pieces of text"
        return received

    def _body(self, prompt: Sequence[int], max_tokens: int, stream: bool) -> bytes:
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()


def take_event(event: dict[str, Any], received: Received, at: float) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    if any(choice.get("text") for choice in event.get("choices", ())):
        received.times.append(at)
    if event.get("usage"):
        received.num_tokens = event["usage"]["completion_tokens"]
