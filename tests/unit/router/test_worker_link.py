"""The router's connection to a worker: calls, changes of peers, its report stream and its token stream.

Every fault of a call, of a stream or of the router itself ends in an event for the machine. What is out of step is not
used, and a stream starts again with a snapshot. A worker joins only while its token stream is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
import pytest_asyncio

from core.errors import InvalidRequest, TokenStreamEnded, TransferFailed, WorkerUnavailable
from core.handoff import LIVE_STATES
from core.lifecycle import FinishReason, ServiceRole, Stage, Timeline, WorkerState
from core.paths import PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.step import SampledToken
from decode_worker.events import DecodeDone
from decode_worker.servicer import DecodeServicer, _encode_done
from kv_transfer.protocol.events import PullStats
from prefill_worker.machine import PrefillDone
from prefill_worker.servicer import PrefillServicer
from protos import codec, report_codec
from router.links.token_stream import decode_step_tokens
from router.links.worker_link import _decode_finished, _decode_prefill
from router.requests import events
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.support.driven_worker import address
from tests.support.waiting import until
from tests.unit.router.fake_reports import FakeWorker, Reports, load, snapshot
from worker.prefixes import PulledPrefix

STOP: Any = inference_pb2.FINISH_REASON_STOP
UNKNOWN_VALUE: Any = 99  # of an enum; a later version may define it
REQUEST = Request("r#1", (1, 2, 3), 3, SamplingParams(max_tokens=8))
TOKENS = worker_pb2.StepTokens(calls=[5, 6], indexes=[0, 3], token_ids=[11, 12])
METADATA = grpc.aio.Metadata()
GONE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, METADATA, METADATA, "it is gone", None)
STRANGER = grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, METADATA, METADATA, "another token", None)


@pytest_asyncio.fixture
async def new_worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeWorker]:
    """A worker whose router waits for no retry. The test calls `is_followed`."""
    monkeypatch.setattr("router.links.worker_link.RETRY_S", (0.0,))
    worker = FakeWorker()
    yield worker
    await worker.link.close()


@pytest_asyncio.fixture
async def worker(new_worker: FakeWorker) -> FakeWorker:
    """A worker that a router follows."""
    new_worker.is_followed()
    return new_worker


async def rejoins(worker: FakeWorker) -> None:
    """With a token stream of another id."""
    await worker.joins()
    assert len(set(worker.stream_ids)) == 2
    assert 0 not in worker.stream_ids


def decode(worker: FakeWorker) -> None:
    worker.link.perform(events.StartDecode("r#1", "w", REQUEST, None, timeout_s=60.0, call=7))


def prefill(worker: FakeWorker) -> None:
    worker.link.perform(events.StartPrefill("r#1", "w", REQUEST, 7, address("d"), timeout_s=60.0, call=8))


# ---- calls


@pytest.mark.parametrize(
    ("encodes", "retryable", "says"),
    [
        (True, True, "finish_reason: 99 is not a FinishReason"),
        (False, False, "a call to a worker failed in the router: ZeroDivisionError"),
    ],
    ids=["an answer that cannot be read", "an unexpected exception"],
)
async def test_a_call_ends_with_one_error_for_the_machine(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, encodes: bool, retryable: bool, says: str
) -> None:
    worker.finish_reason = UNKNOWN_VALUE
    if not encodes:
        monkeypatch.setattr("protos.codec.encode_sequence", lambda *_: 1 // 0)
    await worker.joins()
    prefill(worker)
    decode(worker)
    ended = [await worker.event(), await worker.event()]
    assert {type(event) for event in ended} == {events.PrefillReturned, events.DecodeReturned}
    assert all(says in str(event.result) and event.result.retryable == retryable for event in ended)


async def test_a_hand_off_that_the_worker_does_not_take_ends_the_decode_call(worker: FakeWorker) -> None:
    """Also at the worker: its call would wait for the hand-off until the deadline of the request."""
    await worker.joins()
    worker.waits = True
    decode(worker)
    await until(lambda: worker.decodes, "no call")
    worker.link.perform(events.HandOver("r#1", "w", 7, b"kv", timeout_s=60.0))
    ended = await worker.event()
    assert (type(ended), ended.dispatch_id) == (events.DecodeReturned, "r#1")
    assert isinstance(ended.result, TransferFailed)
    await until(lambda: worker.num_cancelled, "the call goes on", seconds=2.0)
    assert worker.posted.empty(), "the machine takes one end of the call"


async def test_the_router_hears_of_a_source_that_makes_no_offer(worker: FakeWorker) -> None:
    await worker.joins()
    worker.link.perform(events.OfferPrefix("r#1", "w", 7, address("p"), (1, 2, 3), "", limit_s=60.0))
    refused = await worker.event()
    assert (type(refused), refused.dispatch_id, refused.worker_id) == (events.PrefixRefused, "r#1", "w")


async def test_a_decode_call_brings_the_source_of_its_blocks(worker: FakeWorker) -> None:
    await worker.joins()
    worker.link.perform(events.StartDecode("r#1", "w", REQUEST, (7, address("p")), timeout_s=60.0, call=7))
    assert isinstance(await worker.event(), events.DecodeReturned)
    (request,) = worker.decodes
    assert (codec.decode_transfer_id(request.transfer_id), codec.decode_agent(request.source)) == (7, address("p"))


# ---- receipts: the figures that the servicers of workers write, and this link reads

STAGES = [
    (Stage.QUEUE, 10.0, 11.0), (Stage.PREFILL, 11.0, 13.0), (Stage.TRANSFER, 13.0, 16.0), (Stage.DECODE, 16.0, 20.0),
    (Stage.MOVE, 20.0, 25.0),
]  # fmt: skip
PULL = PullStats(31, 3_000_000, 32, 33, total_s=9.0, read_s=0.002, exposed_s=0.25, owner="p", lane="rdma")
PULLED = {"bytes": 3_000_000, "exposed_ms": 250, "blocks": 31, "skipped_blocks": 7, "reads": 32, "reread_blocks": 33,
          "gb_per_s": 1.5, "lane": "rdma", "owner": "p"}  # fmt: skip
PREFIX = PulledPrefix(21, 0.5, "p", 22)


def receipt_of(done: DecodeDone) -> tuple[events.DecodeResult, dict[str, dict[str, str]]]:
    """The receipt without its stages, and their attributes."""
    servicer = DecodeServicer(60.0)
    servicer.attach(Mock(), "d", Mock())
    wire = _encode_done(done, 3)
    wire.stages.extend(servicer._stages(done, 3))
    found = _decode_finished(wire)
    assert isinstance(found, events.DecodeResult)
    assert [(stage.start_s, stage.duration_s) for stage in found.stages] == [(0, 1), (1, 2), (3, 3), (6, 4), (10, 5)]
    return replace(found, stages=()), {stage.name: dict(stage.attributes) for stage in found.stages}


def test_the_router_reads_each_figure_of_a_decode_worker_at_its_place() -> None:
    done = DecodeDone("r", FinishReason.HANDOFF, 5, Timeline(Stage.FINISHED, 25.0, STAGES), PULL, 6.5, 7, 20, 8, 9, 10,
                      11, 12, 13, PREFIX)  # fmt: skip
    found, stages = receipt_of(done)
    assert found == events.DecodeResult(
        FinishReason.HANDOFF, 3, 5, 1.0, 2.0, 3.0, 0.25, 3_000_000, kv_block_seconds=6.5, num_moved_blocks=31,
        num_skipped_blocks=7, drafted_tokens=10, accepted_drafts=11, recomputed_tokens=12, read_tokens=21,
        read_bytes=22,
    )  # fmt: skip
    queue, prefill, transfer, decode, move = stages.values()
    read = {"tandem.prefix.tokens": "21", "tandem.prefix.wait_ms": "500", "tandem.prefix.bytes": "22"}
    assert queue.items() >= {**read, "tandem.prefix.owner": "p"}.items()
    assert (prefill[Attribute.CACHED_TOKENS], prefill[Attribute.TOKENS]) == ("5", "15")
    pulled = {f"tandem.transfer.{name}": str(value) for name, value in PULLED.items()}
    assert transfer == {Attribute.WORKER: "d", **pulled}
    assert [decode[name] for name in (Attribute.TOKENS, Attribute.BLOCKS, Attribute.PREEMPTIONS)] == ["3", "8", "9"]
    assert move == {Attribute.WORKER: "d", Attribute.TRANSFERRED_BYTES: "13"}


def test_a_decode_worker_that_has_read_nothing_says_so() -> None:
    done = DecodeDone("r", FinishReason.LENGTH, 0, Timeline(Stage.FINISHED, 25.0, STAGES), None)
    found, stages = receipt_of(done)
    assert found == events.DecodeResult(FinishReason.LENGTH, 3, 0, 1.0, 2.0, 3.0, 0.0, 0)
    assert stages[SpanName.DECODE_MOVE.value] == {Attribute.WORKER: "d"}, "the move has failed"
    _, stages = receipt_of(replace(done, pull=replace(PULL, read_s=0.0)))
    assert stages[SpanName.DECODE_TRANSFER.value][Attribute.TRANSFER_GB_PER_S] == "0"


def test_an_end_without_a_reason_or_a_token_is_a_failure() -> None:
    for lacks, fields in (("finish_reason", {"num_tokens": 3}), ("token", {"finish_reason": STOP})):
        assert str(_decode_finished(worker_pb2.DecodeFinished(**fields))).endswith(f"finished without a {lacks}")


@pytest.mark.parametrize(("prefix", "read"), [(PREFIX, (21, 22)), (None, (None, 0))])
async def test_the_router_reads_each_figure_of_a_prefill_worker_at_its_place(
    monkeypatch: pytest.MonkeyPatch, prefix: PulledPrefix | None, read: tuple[int | None, int]
) -> None:
    done = PrefillDone("r", 4, SampledToken(1), FinishReason.STOP, 5, Timeline(Stage.DECODE, 13.0, STAGES[:2]), 20, 8,
                       kv_block_seconds=6.5, prefix=prefix, handoff=b"kv")  # fmt: skip
    servicer = PrefillServicer(60.0)
    servicer.attach(Mock(), "p", Mock())
    monkeypatch.setattr(servicer, "_compute", AsyncMock(return_value=done))
    found = _decode_prefill(await servicer.Prefill(worker_pb2.PrefillRequest(), Mock(time_remaining=lambda: 9.0)))
    expected = events.PrefillResult(4, SampledToken(1), FinishReason.STOP, 5, 1.0, 2.0, (), 6.5, *read, b"kv")
    assert replace(found, stages=()) == expected
    queue, prefill = (stage.attributes for stage in found.stages)
    assert queue.get(Attribute.PREFIX_TOKENS) == (prefix and "21")
    computed = [prefill[name] for name in (Attribute.CACHED_TOKENS, Attribute.TOKENS, Attribute.BLOCKS)]
    assert computed == ["5", "15", "8"]


# ---- changes of peers


async def test_a_change_that_arrives_as_a_call_ends_is_sent_with_the_next_call(worker: FakeWorker) -> None:
    worker.later_changes = [[PeerLeft("c")], [PeerLeft("d")]]
    worker.link.update_peers([PeerLeft("a"), PeerLeft("b")])
    await until(lambda: len(worker.told) == 3, "every change is sent")
    assert worker.told == [["a", "b"], ["c"], ["d"]]


async def test_an_unexpected_exception_in_an_update_of_peers_does_not_stop_the_next_one(worker: FakeWorker) -> None:
    nonsense: Any = "no change of a peer"
    worker.link.update_peers([nonsense])
    await asyncio.sleep(0)
    worker.link.update_peers([PeerLeft("a")])
    await until(lambda: worker.told, "the change is sent")
    assert worker.told == [["a"]]


# ---- the report stream


def report(number: int) -> worker_pb2.WorkerReport:
    return worker_pb2.WorkerReport(sequence_number=number, load=load(), block_changes=[number], block_runs=[1])


FIRST, OTHER, PREFILL = snapshot("w"), snapshot("other"), snapshot("w", ServiceRole.PREFILL)
NO_LOAD, UNREADABLE = snapshot("w"), snapshot("w")
NO_LOAD.ClearField("load")
UNREADABLE.snapshot.role = UNKNOWN_VALUE
AGAIN = [[FIRST, report(1)]]
STREAMS: dict[str, tuple[list[list[Any]], list[str]]] = {  # the reports of each Watch call -> events
    "a lost report": ([[FIRST, report(1), report(3)], *AGAIN], ["joined", "blocks 1", "joined", "blocks 1"]),
    "a doubled report": ([[FIRST, report(1), report(1)], *AGAIN], ["joined", "blocks 1", "joined", "blocks 1"]),
    "a restarted stream": ([[FIRST, report(1), report(0)], *AGAIN], ["joined", "blocks 1", "joined", "blocks 1"]),
    "a report far ahead": ([[FIRST, report(1), report(2**40)], *AGAIN], ["joined", "blocks 1", "joined", "blocks 1"]),
    "no snapshot": ([[report(1)], [FIRST]], ["joined"]),
    # A worker that cuts off a slow router still serves the calls of the router.
    "one failure": ([[GONE], [FIRST]], ["joined"]),
    "two failures": ([[GONE], [GONE], [FIRST]], ["lost: it is gone", "joined"]),
    "another token once": ([[STRANGER], [FIRST]], ["joined"]),
    "another token": ([[STRANGER], [STRANGER], [FIRST]], ["lost: another token", "joined"]),
    "failures with reports between them": ([[FIRST, GONE], [FIRST, GONE], [FIRST]], ["joined"] * 3),
    "an unreadable snapshot": ([[UNREADABLE], [FIRST]], ["refused: role: 99 is not a WorkerRole", "joined"]),
    "another worker": ([[OTHER], [FIRST]], ["refused: worker_id: must be 'w', is 'other'", "joined"]),
    "no load": ([[NO_LOAD], [FIRST]], ["refused: load: must be set beside a snapshot", "joined"]),
    # Until the supervisor tells the router of the role.
    "another role": ([[PREFILL], [PREFILL], [FIRST]], ["lost: the worker serves as prefill worker now", "joined"]),
}


def words_of(event: events.WorkerJoined | events.WorkerReported | events.WorkerLost, errors: list[str]) -> str:
    match event:
        case events.WorkerJoined():
            return "joined"
        case events.WorkerReported():
            return f"blocks {event.changes.blocks[0][0][0]}"
        case events.WorkerLost():
            return f"{'refused' if f'worker w cannot join: {event.detail}' in errors else 'lost'}: {event.detail}"


@pytest.mark.parametrize(("streams", "expected"), STREAMS.values(), ids=STREAMS)
async def test_reports_out_of_step_are_not_used_and_the_link_subscribes_again(
    new_worker: FakeWorker, caplog: pytest.LogCaptureFixture, streams: list[list[Any]], expected: list[str]
) -> None:
    with caplog.at_level(logging.ERROR):
        new_worker.is_followed(*(Reports(*stream) for stream in streams))
        found = [words_of(await new_worker.event(), caplog.messages) for _ in expected]
    assert found == expected
    assert caplog.text.count("have different cluster tokens") == (streams[0] == [STRANGER])
    assert new_worker.num_watches == len(streams)
    assert new_worker.posted.empty()


async def test_a_worker_that_the_machine_has_given_up_joins_again_by_its_next_report(new_worker: FakeWorker) -> None:
    stream = Reports(snapshot("w"))
    new_worker.is_followed(stream, Reports(snapshot("w")))
    assert isinstance(await new_worker.event(), events.WorkerJoined)
    new_worker.known = False  # silent for too long
    stream.put(report(1))
    assert isinstance(await new_worker.event(), events.WorkerJoined)


async def test_a_worker_learns_the_pace_of_its_reports_when_it_joins_and_when_it_changes(
    new_worker: FakeWorker,
) -> None:
    first, second = Reports(), Reports(snapshot("w"))
    new_worker.is_followed(first, second)
    new_worker.link.pace_reports(70)
    await until(lambda: new_worker.num_watches, "the Watch call opens")
    new_worker.link.pace_reports(80)  # while the Watch call opens: the worker could not tell whose pace this is
    await asyncio.sleep(0)
    assert new_worker.intervals_ms == [70]
    first.put(snapshot("w"))
    await new_worker.event()
    for interval_ms in (80, 90, 90):
        new_worker.link.pace_reports(interval_ms)
        await asyncio.sleep(0)
    assert new_worker.intervals_ms == [70, 80, 90]
    first.put(report(7))  # a gap: the link subscribes again
    await new_worker.event()
    assert new_worker.intervals_ms == [70, 80, 90, 90]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_cost": worker_pb2.StepCost(step_s=float("nan"))},
        {"step_cost": worker_pb2.StepCost(step_s=0.004, token_s=float("inf"))},
        {"step_cost": worker_pb2.StepCost(step_s=-0.004)},
        {"step_cost": None},
        {"prompt_backlog": [float("inf")]},
        {"step_cost": worker_pb2.StepCost(token_s=1.7e308)},  # a product with it is infinite
        {"step_limit_s": float("nan")},
        {"busy_seconds": -1.0},
    ],
)
def test_a_load_of_impossible_seconds_is_refused(wrong: dict[str, Any]) -> None:
    """The next request would end the router, and its restart, and every other router."""
    with pytest.raises(InvalidRequest) as refused:
        report_codec.decode_load(load(**wrong))
    assert refused.value.field == f"load.{next(iter(wrong))}"


def test_of_paths_those_of_a_later_version_are_left_out_and_impossible_speeds_are_refused() -> None:
    fine = worker_pb2.PathReport(peer="p", state=worker_pb2.PATH_STATE_FINE)
    later = worker_pb2.PathReport(peer="q", state=99)  # type: ignore[arg-type]
    (path,) = report_codec.decode_changes(worker_pb2.WorkerReport(paths=[fine, later])).paths
    assert path.peer == "p"
    fine.latency_ms = float("nan")
    with pytest.raises(InvalidRequest, match="paths: "):
        report_codec.decode_changes(worker_pb2.WorkerReport(paths=[fine]))


async def test_after_an_unexpected_exception_the_worker_is_lost_and_joins_by_its_next_snapshot(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.reports.put(snapshot("w"))
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("protos.report_codec.decode_load", lambda _: 1 // 0)
        assert isinstance(await worker.event(), events.WorkerLost)
    assert "Traceback" in caplog.text
    worker.reports.put(snapshot("w"))
    assert isinstance(await worker.event(), events.WorkerJoined)


async def test_a_report_without_a_load_keeps_the_load_that_the_link_shows(worker: FakeWorker) -> None:
    zeros: dict[str, Any] = {"ledger": dict.fromkeys(Column, 0), "transfers": dict.fromkeys(LIVE_STATES, 0)}
    known = WorkerLoad(WorkerState.SERVING, num_running=3, **zeros)
    first = snapshot("w")
    first.load.CopyFrom(report_codec.encode_load(known))
    worker.reports.put(first)
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=1))
    joined, reported = await worker.event(), await worker.event()
    assert joined.load == known
    assert reported == events.WorkerReported("w", WorkerChanges())
    assert worker.link.load == known


# ---- the token stream


async def test_each_message_is_one_event_with_log_probabilities_at_their_places(worker: FakeWorker) -> None:
    await worker.joins()
    message = worker_pb2.StepTokens(logprob_places=[1])
    message.MergeFrom(TOKENS)
    message.logprobs.add(logprob=-0.5, top=[inference_pb2.Logprob(token_id=12, logprob=-0.5)])
    worker.tokens[0].put(message)
    found = {1: SampledToken(12, -0.5, ((12, -0.5),))}
    assert await worker.event() == events.StepTokens([5, 6], [0, 3], [11, 12], found)


async def test_after_a_loss_the_worker_joins_again_with_a_stream_of_another_id(worker: FakeWorker) -> None:
    await worker.joins()
    worker.tokens[0].put(GONE)
    assert await worker.event() == events.TokenStreamLost("w", "it is gone")
    await rejoins(worker)
    decode(worker)
    assert (await worker.event()).result.num_tokens == 3


async def test_between_two_streams_no_report_reaches_the_machine_and_every_call_is_refused(worker: FakeWorker) -> None:
    """A report would tell the machine that the worker may be used."""
    await worker.joins()
    worker.silent = True  # the next stream does not open
    worker.tokens[0].put(GONE)
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=1, load=snapshot("w").load))
    assert isinstance(await worker.event(), events.TokenStreamLost)
    decode(worker)
    result = (await worker.event()).result
    assert isinstance(result, WorkerUnavailable)
    assert result.retryable
    assert worker.posted.empty()


async def test_a_stream_that_does_not_open_loses_the_worker(
    new_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_worker.silent = True
    monkeypatch.setattr("router.links.worker_link.CONNECT_TIMEOUT_S", 0.01)
    new_worker.is_followed()
    assert isinstance(await new_worker.event(), events.WorkerLost)
    assert new_worker.num_watches == 0
    new_worker.silent = False
    monkeypatch.setattr("router.links.worker_link.CONNECT_TIMEOUT_S", 5.0)
    new_worker.reports.put(snapshot("w"))
    while not isinstance(await new_worker.event(), events.WorkerJoined):
        pass


async def test_a_call_that_tells_of_the_end_of_its_stream_loses_the_stream_at_once(worker: FakeWorker) -> None:
    """The stream tells its end only after all tokens before, and until then each call on it would be refused."""
    await worker.joins()
    trailers = grpc.aio.Metadata(("tandem-retryable", "true"), ("tandem-token-stream-ended", "true"))
    unavailable = grpc.StatusCode.UNAVAILABLE
    worker.refusal = grpc.aio.AioRpcError(unavailable, METADATA, trailers, "no such stream", None)
    decode(worker)
    assert await worker.event() == events.TokenStreamLost("w", "no such stream")
    assert isinstance((await worker.event()).result, TokenStreamEnded)
    worker.tokens[0].put(TOKENS)
    await rejoins(worker)


async def test_a_new_report_stream_keeps_the_token_stream(worker: FakeWorker) -> None:
    await worker.joins()
    worker.reports.put(worker_pb2.WorkerReport(sequence_number=9, load=snapshot("w").load))  # a gap
    await worker.joins()
    assert worker.num_watches == 2
    assert len(worker.stream_ids) == 1


ONE: dict[str, Any] = {"calls": [5], "indexes": [0], "token_ids": [11]}
LOGPROBS = [inference_pb2.TokenLogprobs(logprob=-1.0)]
UNFIT = {
    "columns": worker_pb2.StepTokens(calls=[5, 6], indexes=[0], token_ids=[11, 12]),
    "no place": worker_pb2.StepTokens(**ONE, logprobs=LOGPROBS),
    "a place outside": worker_pb2.StepTokens(**ONE, logprob_places=[1], logprobs=LOGPROBS),
}


@pytest.mark.parametrize("message", UNFIT.values(), ids=UNFIT)
async def test_a_message_whose_columns_do_not_fit_ends_the_stream(
    worker: FakeWorker, message: worker_pb2.StepTokens, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest):
        decode_step_tokens(message)
    await worker.joins()
    with caplog.at_level(logging.CRITICAL):
        worker.tokens[0].put(message)
        assert isinstance(await worker.event(), events.TokenStreamLost)
    await worker.joins()
