"""A form of answers: what each part of an answer becomes, in a stream of server-sent events and folded into one object.

A part makes zero or more events, which are maps. A stream sends each as it comes. One object is what a client would
make of all of them, so the two never differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gateway.formats.encoded import json_pieces
from gateway.router_calls import Chunk
from tandem_client.stubs.inference_pb2 import Finished

Events = list[dict[str, Any]]


def sse(value: Any) -> bytes:
    """`value` may hold encoded values."""
    return b"".join((b"data: ", *json_pieces(value), b"\n\n"))


class AnswerForm(ABC):
    """The parts of one answer."""

    @abstractmethod
    def of_chunk(self, chunk: Chunk) -> Events: ...

    @abstractmethod
    def of_finished(self, finished: Finished) -> Events: ...

    @abstractmethod
    def of_filtered(self, choice: int) -> Events:
        """The guardrail ends `choice`."""

    @abstractmethod
    def encode(self, events: Events) -> bytes:
        """`events` as the client of a stream gets them."""

    @abstractmethod
    def end(self) -> bytes:
        """The text after the last choice."""

    @abstractmethod
    def fail(self, error: Exception) -> bytes:
        """The text if `error` ends the stream early; nothing follows."""

    @abstractmethod
    def fold(self, events: Events) -> None:
        """Keep what the object has of `events`."""

    def collect(self, chunk: Chunk) -> None:
        """Fold the events of `chunk`."""
        self.fold(self.of_chunk(chunk))

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The object, for `json_pieces`, once every part is folded."""

    # ---- a stream; each text may be empty

    def chunk(self, chunk: Chunk) -> bytes:
        return self.encode(self.of_chunk(chunk))

    def finished(self, finished: Finished) -> bytes:
        return self.encode(self.of_finished(finished))

    def filtered(self, choice: int) -> bytes:
        return self.encode(self.of_filtered(choice))
