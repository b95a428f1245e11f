"""Iterators over the pieces of one answer. After the last piece, `result` is the whole answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType

from tandem_client.blocking import finish
from tandem_client.results import Collector, Completion, Piece
from tandem_client.stubs import inference_pb2


class AsyncStream:
    """`async for piece in stream`. Leave it early by `await aclose()`, or use it in `async with`: the request then ends
    on all workers."""

    def __init__(self, responses: AsyncGenerator[inference_pb2.GenerateResponse, None]) -> None:
        self._responses = responses
        self._collector = Collector()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        """Raises `CallFailed`."""
        async for response in self._responses:
            piece = self._collector.take(response)
            if piece is not None:
                return piece
        raise StopAsyncIteration

    @property
    def result(self) -> Completion:
        """Raises `ValueError` before the last piece."""
        if self._collector.completion is None:
            raise ValueError("the answer has not ended: read all pieces first")
        return self._collector.completion

    async def aclose(self) -> None:
        await self._responses.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Stream:
    """`for piece in stream`. Leave it early by `close()`, or use it in `with`: the request then ends on all workers."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        """Raises `CallFailed`."""
        try:
            return finish(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    @property
    def result(self) -> Completion:
        """Raises `ValueError` before the last piece."""
        return self._stream.result

    def close(self) -> None:
        finish(self._stream.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
