"""One choice of a call, from admission to its end: its tokens, its text, its chunks and its trace.

Delivered tokens stay in `ChoiceStream` until the writer of the call takes all of them as one `Chunk`. They become text
only then, in one run. With stop strings they become text at once: a stop string ends the output at the worker, whether
the client reads or not.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import WorkerUnavailable
from core.lifecycle import FinishReason
from core.request import Request
from core.step import SampledToken
from protos import codec
from router.requests.events import Deliver, Fail, Finish, Outcome, Promise
from router.serving.choice_calls import ChoiceCalls
from router.serving.ended_choice import EndedChoice
from router.serving.receipt import encode_promise, phase_timings, receipt_of
from runtime.tracing.trace_context import TraceContext
from tandem_client.stubs import inference_pb2
from text.detokenizer import TokenBytes
from text.text_stream import TextStream

MAX_CHUNK_ITEMS = 4096  # tokens and log-probabilities in one message, some 100 KB; beyond: the next message
CALL_ITEMS = 16  # for which a token of an output with calls of tools counts: its text is parsed, 1 us a character


@dataclass(slots=True)
class Chunk:
    """New tokens of one choice, with their text. The fields are those of the message `TokenChunk`."""

    choice: int
    index: int  # of the first token, in the output
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[inference_pb2.TokenLogprobs] = ()  # one for each token if the request has log-probabilities
    tool_calls: Sequence[inference_pb2.ToolCallDelta] = ()
    prompt_token_ids: Sequence[int] = ()  # of the first chunk, if the client asks for them
    token_items: int = 1  # of each token, as in MAX_CHUNK_ITEMS

    @property
    def num_items(self) -> int:
        """As in MAX_CHUNK_ITEMS, and token ids of the prompt."""
        return self.token_items * len(self.token_ids) + len(self.prompt_token_ids)

    def fill(self, message: inference_pb2.TokenChunk) -> None:
        """Fill an empty message."""
        message.choice, message.index, message.text = self.choice, self.index, self.text
        message.token_ids.extend(self.token_ids)
        if self.logprobs:
            message.logprobs.extend(self.logprobs)
        if self.tool_calls:
            message.tool_calls.extend(self.tool_calls)
        if self.prompt_token_ids:
            message.prompt_token_ids.extend(self.prompt_token_ids)


@dataclass(slots=True, eq=False)
class ChoiceStream:
    choice: int
    model: str
    operation: str  # "chat" or "text_completion"
    request: Request
    client_request_id: str
    arrived_at: float
    text: TextStream
    trace: TraceContext
    changed: Callable[[], None]  # called after new tokens, and after the end
    token_name: TokenBytes  # for log-probabilities; names special tokens too
    calls: ChoiceCalls | None = None  # None: the output cannot have calls of tools
    returns_prompt: bool = False  # the first chunk has the token ids of the prompt
    result: Finish | Fail | FinishReason | None = None  # FinishReason: of an answer that had ended before
    token_ids: list[int] = field(default_factory=list)  # all, up to a stop string. At most max_tokens
    num_taken: int = 0  # of token_ids, in a chunk
    num_resumed: int = 0  # of token_ids, which the client has from another router
    promise: Promise | None = None  # of the newest dispatch; None before the first
    last_token_at: float = 0.0  # when tokens came last; 0 = not yet
    _pause: asyncio.TimerHandle | None = None  # ends the least time between two chunks
    _logprobs: list[SampledToken] = field(default_factory=list)  # of token_ids[num_taken:], if the request has them
    # With stop strings: token_ids[num_taken:] in runs that fit into a chunk, the number of tokens and the text of each
    _runs: deque[tuple[int, str]] = field(default_factory=deque)

    def resume(self, token_ids: Sequence[int], end: FinishReason | None) -> None:
        """Begin behind the tokens that the client has, as `text` and `calls` do. `end`: they are the whole answer."""
        self.token_ids = list(token_ids)
        self.num_taken = self.num_resumed = len(token_ids)
        if end is not None:
            self.end(end)

    def deliver(self, delivered: Deliver) -> bool:
        """Take new tokens of the machine. Returns True if their text completes a stop string."""
        if self.text.stop_match:
            return False
        if self._pause is None and not self.has_chunk:
            self.changed()  # once for all tokens of a chunk
        num_used = self._search(delivered.token_ids) if self.text.has_stop_strings else len(delivered.token_ids)
        self.token_ids += delivered.token_ids[:num_used]
        self._logprobs += delivered.logprobs[:num_used]
        return bool(self.text.stop_match)

    def _search(self, token_ids: Sequence[int]) -> int:
        """Look for a stop string. Returns the number of the tokens that belong to the output."""
        num_used = 0
        while num_used < len(token_ids) and not self.text.stop_match:
            text, num = self.text.push(token_ids[num_used : num_used + self._max_chunk_tokens])
            self._runs.append((num, text))
            num_used += num
        return num_used

    def dispatched(self, promise: Promise | None) -> None:
        self.promise = promise
        self.changed()

    def end(self, result: Finish | Fail | FinishReason) -> None:
        self.result = result
        self.changed()

    @property
    def has_chunk(self) -> bool:
        return self.num_taken < len(self.token_ids)

    @property
    def is_due(self) -> bool:
        """Whether there is a chunk to write now. The last chunk ignores the least time between two chunks."""
        return self.has_chunk and (self._pause is None or self.result is not None)

    def pause(self, seconds: float) -> None:
        """Let no chunk be due for `seconds`, because one was written."""
        self._pause = asyncio.get_running_loop().call_later(seconds, self.end_pause)

    def end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self.changed()

    def take_chunk(self) -> Chunk:
        """The tokens that are in no chunk yet, up to the limit of a chunk."""
        first, most = self.num_taken, self._max_chunk_tokens
        if self.text.has_stop_strings:
            num_tokens, texts = 0, []
            while self._runs and num_tokens + self._runs[0][0] <= most:
                num_run, run_text = self._runs.popleft()
                num_tokens += num_run
                texts.append(run_text)
            token_ids, text = self.token_ids[first : first + num_tokens], "".join(texts)
        else:
            token_ids = self.token_ids[first : first + most]
            text, _ = self.text.push(token_ids)
        self.num_taken += len(token_ids)
        logprobs = self._take_logprobs(len(token_ids)) if self._logprobs else ()
        prompt = self.request.token_ids if self.returns_prompt and first == 0 else ()
        text, tool_calls = (text, ()) if self.calls is None else self.calls.push(text)
        return Chunk(self.choice, first, token_ids, text, logprobs, tool_calls, prompt, self._token_items)

    def _take_logprobs(self, num_tokens: int) -> list[inference_pb2.TokenLogprobs]:
        taken = self._logprobs[:num_tokens]
        del self._logprobs[:num_tokens]
        entries = list(map(codec.encode_logprobs, taken))
        for token, entry in zip(taken, entries, strict=True):
            codec.name_tokens(entry, token.token_id, self.token_name)
        return entries

    @property
    def _token_items(self) -> int:
        num_logprobs = self.request.sampling.num_logprobs
        return (1 if num_logprobs is None else 2 + num_logprobs) + (0 if self.calls is None else CALL_ITEMS)

    @property
    def _max_chunk_tokens(self) -> int:
        return MAX_CHUNK_ITEMS // self._token_items

    def last_chunk(self) -> Chunk | None:
        """The text and the deltas that waited as the possible start of a stop string or of a call; None if there are
        none."""
        text = self.text.flush()
        text, tool_calls = (text, ()) if self.calls is None else self.calls.finish(text)
        return Chunk(self.choice, len(self.token_ids), (), text, (), tool_calls) if text or tool_calls else None

    def finished(self, outcome: Outcome, now: float) -> inference_pb2.Finished:
        candidate, decode = outcome.candidate, outcome.decode
        return inference_pb2.Finished(
            choice=self.choice,
            finish_reason=codec.FINISH_TO_WIRE[outcome.finish_reason],
            usage=inference_pb2.Usage(
                prompt_tokens=outcome.num_prompt_tokens,
                completion_tokens=len(self.token_ids),
                cached_tokens=outcome.cached_tokens,
                drafted_tokens=0 if decode is None else decode.drafted_tokens,
                accepted_drafts=0 if decode is None else decode.accepted_drafts,
            ),
            timings=phase_timings(outcome, now - self.arrived_at),
            prefill_worker=candidate.prefill_worker or candidate.decode_worker,
            decode_worker=candidate.decode_worker,
            path=codec.PATH_TO_WIRE[outcome.path],
            attempts=outcome.attempts,
            transferred_bytes=outcome.transferred_bytes,
            request_id=self.client_request_id,
            seed=self.request.sampling.seed,
            trace_id=self.trace.trace_id_hex,
            stop_match=self._stop_match(outcome.finish_reason),
            promise=None if outcome.promise is None else encode_promise(outcome.promise),
            receipt=receipt_of(outcome),
            recomputed_tokens=outcome.recomputed_tokens,
            num_moves=outcome.num_moves,
            num_tool_calls=self._num_tool_calls,
        )

    def ended_before(self, reason: FinishReason) -> inference_pb2.Finished:
        """The end of an answer that the client has as a whole."""
        return inference_pb2.Finished(
            choice=self.choice,
            finish_reason=codec.FINISH_TO_WIRE[reason],
            usage=inference_pb2.Usage(
                prompt_tokens=self.request.num_prompt_tokens, completion_tokens=len(self.token_ids)
            ),
            request_id=self.client_request_id,
            seed=self.request.sampling.seed,
            trace_id=self.trace.trace_id_hex,
            stop_match=self._stop_match(reason),
            num_tool_calls=self._num_tool_calls,
        )

    @property
    def _num_tool_calls(self) -> int:
        return 0 if self.calls is None else self.calls.num_complete_calls

    def _stop_match(self, reason: FinishReason) -> str:
        if self.text.stop_match or reason is not FinishReason.STOP:
            return self.text.stop_match
        return str(self.token_ids[-1])

    @property
    def started(self) -> inference_pb2.Started:
        request = self.request
        return inference_pb2.Started(
            request_id=self.client_request_id,
            seed=request.sampling.seed,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
        )

    # ---- the trace

    def ended(self, now: float) -> EndedChoice:
        """The choice for the ring and the trace. Call it after the last message."""
        result, request = self.result, self.request
        outcome, error, timeline = None, None, None
        match result:
            case Finish():
                outcome, timeline = result.outcome, result.outcome.timeline
            case Fail():
                error, timeline = result.error, result.timeline
            case FinishReason():
                raise AssertionError("an answer that had ended before has no trace")
            case None:
                error = WorkerUnavailable("the router stopped before the request ended")
        return EndedChoice(
            trace=self.trace,
            request_id=self.client_request_id,
            choice=self.choice,
            operation=self.operation,
            model=self.model,
            arrived_at=self.arrived_at,
            ended_at=now,
            arrived_unix_s=time.time() - (now - self.arrived_at),
            tenant=request.tenant_name,
            sampling=request.sampling,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(self.token_ids) - self.num_resumed,
            stages=() if timeline is None else tuple(timeline.history),
            generated_at=None if timeline is None else timeline.entered_at,
            outcome=outcome,
            error_code="" if error is None else error.code.value,
            error="" if error is None else str(error),
            attempts=() if result is None else result.attempts,
        )
