"""What the gateway needs of a router: a router of this process, or one over the wire (cli/remote_router.py).

An answer comes part by part into a `Sink`, which never waits. A reader that is behind makes its sink full; the tokens
then stay in the router, and come as one longer chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from core import service
from core.service import Metadata
from tandem_client.stubs import cluster_pb2, inference_pb2


class Chunk(Protocol):
    """New tokens of one choice. The message `TokenChunk` is one."""

    choice: int

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """In the first chunk of a choice, if the request asks for them."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def text(self) -> str:
        """Without the calls of tools."""

    @property
    def logprobs(self) -> Sequence[inference_pb2.TokenLogprobs]:
        """One for each token if the request has log-probabilities."""

    @property
    def tool_calls(self) -> Sequence[inference_pb2.ToolCallDelta]: ...


def parts_of(chunk: Chunk) -> Iterator[str | inference_pb2.ToolCallDelta]:
    """The text of a chunk and its deltas of calls, in the order of the model. No text is empty."""
    text, position = chunk.text, 0
    for delta in chunk.tool_calls:
        if delta.text_offset > position:
            yield text[position : delta.text_offset]
            position = delta.text_offset
        yield delta
    if position < len(text):
        yield text[position:]


Sink = service.Sink[Chunk, inference_pb2.Finished]


class RouterCalls(Protocol):
    """One router. Every call raises `TandemError`."""

    address: str

    async def open(self) -> None:
        """Call it on the event loop of the gateway, before any other call."""

    async def close(self) -> None: ...

    async def authorize(self, metadata: Metadata) -> None:
        """Raise the error that `generate` would raise for the API key in `metadata`."""

    async def generate(
        self, request: inference_pb2.GenerateRequest, sink: Sink, timeout_s: float, metadata: Metadata
    ) -> None:
        """Generate into `sink`, to the end of the last choice. Cancel it to cancel the request."""

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata
    ) -> inference_pb2.TokenizeResponse: ...

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata
    ) -> inference_pb2.DetokenizeResponse: ...

    async def model(self) -> inference_pb2.GetModelResponse: ...

    async def metrics(self, metadata: Metadata) -> str:
        """The page of the router, in Prometheus' text format."""

    async def fleet(self, metadata: Metadata) -> cluster_pb2.GetFleetResponse: ...

    async def list_requests(self, limit: int, after: int, metadata: Metadata) -> cluster_pb2.ListRequestsResponse: ...

    async def get_trace(self, id: str, metadata: Metadata) -> cluster_pb2.Trace: ...
