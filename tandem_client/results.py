"""The results of `stream` and `complete`: frozen objects with plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem_client.stubs import inference_pb2

FinishReasonName = Literal["stop", "length"]
PathName = Literal["disaggregated", "local", "recomputed", "migrated", "unknown"]

FINISH_REASONS: dict[int, FinishReasonName] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
PATHS: dict[int, PathName] = {
    inference_pb2.REQUEST_PATH_UNSPECIFIED: "unknown",
    inference_pb2.REQUEST_PATH_DISAGGREGATED: "disaggregated",
    inference_pb2.REQUEST_PATH_LOCAL: "local",
    inference_pb2.REQUEST_PATH_RECOMPUTED: "recomputed",
    inference_pb2.REQUEST_PATH_MIGRATED: "migrated",
}


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of one generated token: its log-probability, and those of the most likely tokens at its place."""

    token_id: int
    token: bytes  # perhaps a part of a character
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call of a tool. The first delta of a call has its id and its name, the later ones the arguments."""

    index: int  # of the call in the answer
    id: str
    name: str
    arguments_json: str  # a piece of the JSON text
    text_offset: int  # so many characters of the text of the piece come before the delta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. A message of the next prompt may have it among its `tool_calls`."""

    id: str
    name: str
    arguments_json: str  # the start of a JSON object, if the answer ended inside the call


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens, and the text and the pieces of calls that they complete. Each may be empty."""

    text: str  # outside of calls
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # one for each token, if the request asks for logprobs
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in a prefix cache
    drafted_tokens: int = 0  # guesses that the decode worker computed
    accepted_drafts: int = 0  # ... and that were right


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of the phases, in milliseconds; PhaseTimings of inference.proto describes each."""

    tokenize_ms: float
    router_queue_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    first_token_ms: float
    transfer_ms: float
    transfer_exposed_ms: float
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Promise:
    """The router's prediction at dispatch."""

    ttft_ms: float
    tpot_ms: float
    path: PathName


@dataclass(frozen=True, slots=True)
class Receipt:
    """The resources that the request used."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    kv_block_seconds: float
    transferred_bytes: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str  # outside of calls
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReasonName  # also of an answer with calls. "length": the last call may be incomplete
    stop_match: str  # the stop string or the id of the stop token, if that ended the output
    usage: Usage
    timings: Timings
    path: PathName
    promise: Promise | None
    receipt: Receipt | None
    request_id: str
    trace_id: str
    seed: int
    prefill_worker: str
    decode_worker: str
    num_attempts: int  # of the router
    num_moves: int  # between decode workers, with the KV
    recomputed_tokens: int  # of prompt and output


class Collector:
    """Turns the messages of a call with one choice into pieces and, at the end, the completion."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.completion: Completion | None = None

    def take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        """None for the first message, and for the last one, which makes `completion`."""
        if response.HasField("finished"):
            self.completion = _completion(self._pieces, response.finished)
            return None
        if not response.HasField("tokens"):
            return None
        chunk = response.tokens
        ids = tuple(chunk.token_ids)
        calls = tuple(map(_call_delta, chunk.tool_calls))
        piece = Piece(chunk.text, ids, tuple(map(_logprob, ids, chunk.logprobs)), calls)
        self._pieces.append(piece)
        return piece


def _logprob(token_id: int, found: inference_pb2.TokenLogprobs) -> TokenLogprob:
    top = tuple(TopLogprob(entry.token_id, entry.token, entry.logprob) for entry in found.top)
    return TokenLogprob(token_id, found.token, found.logprob, top)


def _call_delta(found: inference_pb2.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(found.index, found.id, found.name, found.arguments_json, found.text_offset)


def _calls(pieces: list[Piece]) -> tuple[ToolCall, ...]:
    calls: list[list[ToolCallDelta]] = []
    for delta in (delta for piece in pieces for delta in piece.tool_calls):
        if delta.id:
            calls.append([])
        calls[delta.index].append(delta)
    return tuple(
        ToolCall(deltas[0].id, deltas[0].name, "".join(delta.arguments_json for delta in deltas)) for deltas in calls
    )


def _completion(pieces: list[Piece], end: inference_pb2.Finished) -> Completion:
    promise, receipt = end.promise, end.receipt
    return Completion(
        text="".join(piece.text for piece in pieces),
        tool_calls=_calls(pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish_reason=FINISH_REASONS.get(end.finish_reason, "stop"),  # of a later version: it has ended
        stop_match=end.stop_match,
        usage=Usage(**{name: getattr(end.usage, name) for name in Usage.__dataclass_fields__}),
        timings=Timings(**{name: getattr(end.timings, name) for name in Timings.__dataclass_fields__}),
        path=PATHS.get(end.path, "unknown"),
        promise=Promise(promise.ttft_ms, promise.tpot_ms, PATHS.get(promise.path, "unknown"))
        if end.HasField("promise")
        else None,
        receipt=Receipt(**{name: getattr(receipt, name) for name in Receipt.__dataclass_fields__})
        if end.HasField("receipt")
        else None,
        request_id=end.request_id,
        trace_id=end.trace_id,
        seed=end.seed,
        prefill_worker=end.prefill_worker,
        decode_worker=end.decode_worker,
        num_attempts=end.attempts,
        num_moves=end.num_moves,
        recomputed_tokens=end.recomputed_tokens,
    )
