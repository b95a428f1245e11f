"""What one call sends: the chunks and the ends of all of its choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core.lifecycle import FinishReason
from router.requests.events import Fail, Promise
from router.serving.choice_stream import ChoiceStream, Chunk
from tandem_client.stubs import inference_pb2

Part = Chunk | inference_pb2.Finished


class CallMessages:
    """Tokens that arrive before the writer of the call takes them go into one chunk of their choice."""

    def __init__(self, streams: Sequence[ChoiceStream], min_interval_s: float, now: Callable[[], float]) -> None:
        """`min_interval_s`: the least time between two chunks of a choice."""
        self._first = streams[0]
        self._open = list(streams)
        self._min_interval_s = min_interval_s
        self._now = now
        self._has_promised = False
        self.receipts: list[inference_pb2.Receipt] = []  # of the choices that have ended

    @property
    def have_ended(self) -> bool:
        """The end of every choice is taken."""
        return not self._open

    @property
    def is_due(self) -> bool:
        """`due` has something to give."""
        return any(stream.is_due or stream.result is not None for stream in self._open)

    def take_promise(self) -> Promise | None:
        """The prediction for the first choice, once, when there is one."""
        promise = self._first.promise
        if promise is None or self._has_promised:
            return None
        self._has_promised = True
        return promise

    @property
    def started(self) -> inference_pb2.Started:
        """The first message of the call."""
        return self._first.started

    def due(self) -> Iterator[Part]:
        """The parts to send now. Raises the error of the first choice that fails.

        A chunk has the tokens up to the moment at which the iterator reaches it.
        """
        ended = False
        for stream in self._open:
            if stream.is_due:
                if self._min_interval_s and stream.result is None:
                    stream.pause(self._min_interval_s)
                end = len(stream.token_ids)
                while stream.num_taken < end:
                    yield stream.take_chunk()
            ended = ended or stream.result is not None
        if ended:
            for stream in [stream for stream in self._open if stream.result is not None]:
                self._open.remove(stream)
                yield from self._last_parts(stream)

    def _last_parts(self, stream: ChoiceStream) -> Iterator[Part]:
        while stream.has_chunk:
            yield stream.take_chunk()
        if isinstance(stream.result, Fail):
            raise stream.result.error
        assert stream.result is not None
        last = stream.last_chunk()
        if last is not None:
            yield last
        if isinstance(stream.result, FinishReason):
            finished = stream.ended_before(stream.result)
        else:
            finished = stream.finished(stream.result.outcome, self._now())
        if stream.text.stop_match:
            finished.finish_reason = inference_pb2.FINISH_REASON_STOP
        self.receipts.append(finished.receipt)
        yield finished
