"""The router's end of a token stream: a worker joins only while the stream is open, and each stream has its own id."""

from __future__ import annotations

import logging

import grpc
import pytest

from core.errors import InvalidRequest, TokenStreamEnded, WorkerUnavailable
from core.request import Request, SamplingParams
from core.step import SampledToken
from router.links.token_stream import decode_step_tokens
from router.requests.events import DecodeReturned, StartDecode, StepTokens, TokenStreamLost, WorkerJoined, WorkerLost
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.unit.router.fake_reports import FakeWorker, snapshot

BROKEN = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "reset", None)
TOKENS = worker_pb2.StepTokens(calls=[5, 6], indexes=[0, 3], token_ids=[11, 12])


def decode(worker: FakeWorker) -> None:
    request = Request("r#1", (1, 2, 3), 3, SamplingParams(max_tokens=8))
    worker.link.start_decode(StartDecode("r#1", "w", request, None, timeout_s=60.0, call=7))


async def test_each_message_is_one_event(worker: FakeWorker) -> None:
    await worker.joins()
    worker.tokens[0].put(TOKENS)
    assert await worker.event() == StepTokens([5, 6], [0, 3], [11, 12], {})


async def test_a_call_names_the_open_stream_and_returns_the_number_of_its_tokens(worker: FakeWorker) -> None:
    await worker.joins()
    decode(worker)
    event = await worker.event()
    assert isinstance(event, DecodeReturned)
    assert event.result.num_tokens == 3  # type: ignore[union-attr]


async def test_after_a_loss_the_worker_joins_again_with_a_stream_of_another_id(worker: FakeWorker) -> None:
    await worker.joins()
    worker.tokens[0].put(BROKEN)
    assert await worker.event() == TokenStreamLost("w", "reset")
    await worker.joins()
    assert len(set(worker.stream_ids)) == 2
    assert 0 not in worker.stream_ids
    decode(worker)
    assert isinstance(await worker.event(), DecodeReturned)


async def test_between_two_streams_no_report_reaches_the_machine_and_every_call_is_refused(worker: FakeWorker) -> None:
    """A report would tell the machine that the worker may be used."""
    await worker.joins()
    worker.silent = True  # the next stream does not open
    worker.tokens[0].put(BROKEN)
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=1, load=snapshot("w").load))
    assert isinstance(await worker.event(), TokenStreamLost)
    decode(worker)
    event = await worker.event()
    assert isinstance(event, DecodeReturned)
    assert isinstance(event.result, WorkerUnavailable)
    assert event.result.retryable
    assert worker.posted.empty()


async def test_a_stream_that_does_not_open_loses_the_worker(
    new_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_worker.silent = True
    monkeypatch.setattr("router.links.worker_link.CONNECT_TIMEOUT_S", 0.01)
    new_worker.is_followed()
    assert isinstance(await new_worker.event(), WorkerLost)
    assert new_worker.num_watches == 0
    new_worker.silent = False
    monkeypatch.setattr("router.links.worker_link.CONNECT_TIMEOUT_S", 5.0)
    new_worker.reports.put(snapshot("w"))
    while not isinstance(await new_worker.event(), WorkerJoined):
        pass


async def test_a_call_that_tells_of_the_end_of_its_stream_loses_the_stream_at_once(worker: FakeWorker) -> None:
    """The stream tells its end only after all tokens before, and until then each call on it would be refused."""
    await worker.joins()
    trailers = grpc.aio.Metadata(("tandem-retryable", "true"), ("tandem-token-stream-ended", "true"))
    unavailable = grpc.StatusCode.UNAVAILABLE
    worker.refusal = grpc.aio.AioRpcError(unavailable, grpc.aio.Metadata(), trailers, "no such stream", None)
    decode(worker)
    assert await worker.event() == TokenStreamLost("w", "no such stream")
    assert isinstance((await worker.event()).result, TokenStreamEnded)
    worker.tokens[0].put(TOKENS)
    await worker.joins()
    assert len(set(worker.stream_ids)) == 2


async def test_a_new_report_stream_keeps_the_token_stream(worker: FakeWorker) -> None:
    await worker.joins()
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=9, load=snapshot("w").load))  # a gap
    await worker.joins()
    assert worker.num_watches == 2
    assert len(worker.stream_ids) == 1


UNFIT = {
    "columns": worker_pb2.StepTokens(calls=[5, 6], indexes=[0], token_ids=[11, 12]),
    "no place": worker_pb2.StepTokens(
        calls=[5], indexes=[0], token_ids=[11], logprobs=[inference_pb2.TokenLogprobs(logprob=-1.0)]
    ),
    "a place outside": worker_pb2.StepTokens(
        calls=[5], indexes=[0], token_ids=[11], logprob_places=[1], logprobs=[inference_pb2.TokenLogprobs(logprob=-1.0)]
    ),
}


@pytest.mark.parametrize("message", UNFIT.values(), ids=UNFIT.keys())
async def test_a_message_whose_columns_do_not_fit_ends_the_stream(
    worker: FakeWorker, message: worker_pb2.StepTokens, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest):
        decode_step_tokens(message)
    await worker.joins()
    with caplog.at_level(logging.CRITICAL):
        worker.tokens[0].put(message)
        assert isinstance(await worker.event(), TokenStreamLost)
    await worker.joins()


def test_log_probabilities_are_found_at_their_places() -> None:
    found = inference_pb2.TokenLogprobs(logprob=-0.5, top=[inference_pb2.Logprob(token_id=12, logprob=-0.5)])
    message = worker_pb2.StepTokens(
        calls=[5, 6], indexes=[0, 0], token_ids=[11, 12], logprob_places=[1], logprobs=[found]
    )
    assert decode_step_tokens(message).logprobs == {1: SampledToken(12, -0.5, ((12, -0.5),))}
