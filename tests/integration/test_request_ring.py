"""The router keeps its last requests with their spans, also without any exporter."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2
from tests.support.deployment import deploy, make_request, tiny_config
from tests.support.steps import slow_down


async def test_the_ring_lists_requests_newest_first_and_gives_their_spans_of_all_choices() -> None:
    async with deploy(tiny_config()) as deployment:
        answer = await deployment.generate(token_ids=range(1, 81), max_tokens=16)
        await deployment.generate(text="hello over there", max_tokens=1)
        finished = answer.finished
        async with AsyncClient(deployment.router_address) as client:
            newest, oldest = (await client.list_requests()).requests
            assert [newest.number, oldest.number] == [2, 1]
            assert oldest.request_id == finished.request_id
            assert (oldest.trace_id, oldest.end) == (finished.trace_id, "length")
            assert (oldest.path, oldest.attempts) == (finished.path, 1)
            assert (oldest.prefill_worker, oldest.decode_worker) == (finished.prefill_worker, finished.decode_worker)
            assert oldest.usage == finished.usage
            assert oldest.transferred_bytes == finished.transferred_bytes > 0
            assert oldest.first_token_ms == pytest.approx(finished.timings.first_token_ms)
            assert oldest.timings.prefill_ms == finished.timings.prefill_ms
            assert 0 < oldest.tpot_ms < oldest.total_ms
            assert (newest.tpot_ms, newest.usage.completion_tokens) == (0.0, 1)
            assert [r.number for r in (await client.list_requests(limit=1)).requests] == [2]
            assert [r.number for r in (await client.list_requests(after=1)).requests] == [2]

            trace = await client.get_trace(finished.request_id)
            assert trace == await client.get_trace(finished.trace_id)
            assert trace.spans[0].name == "tandem.request"
            names = [span.name for span in trace.spans]
            assert {"prefill_worker.prefill", "decode_worker.transfer", "decode_worker.decode"} <= set(names)
            starts = [span.start_ms for span in trace.spans]
            assert starts == sorted(starts)
            (candidate,) = trace.candidates
            assert candidate.chosen
            assert candidate.decode_worker == finished.decode_worker

            answers = await deployment.generate_all(make_request(text="hello over there", max_tokens=2, n=3))
            trace = await client.get_trace(answers[0].finished.request_id)
            assert [summary.choice for summary in trace.requests] == [0, 1, 2]
            assert [span.choice for span in trace.spans if span.name == "tandem.request"] == [0, 1, 2]


async def test_a_refused_request_is_in_the_ring_with_its_error_and_an_unknown_one_is_not_found() -> None:
    async with (
        deploy(tiny_config(), num_prefill=0, num_decode=0) as deployment,
        AsyncClient(deployment.router_address) as client,
    ):
        request = make_request(text="hi", temperature=-1.0, request_id="mine")
        with pytest.raises(grpc.aio.AioRpcError):
            await deployment.inference.Generate(request, timeout=10).read()
        trace = await client.get_trace("mine")
        with pytest.raises(CallFailed, match="keeps no request 'nothing': it keeps the last 512") as failure:
            await client.get_trace("nothing")
        assert failure.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match=r"limit: must be in \[1, 512\]"):
            await deployment.cluster.ListRequests(cluster_pb2.ListRequestsRequest(limit=513), timeout=5)
    (summary,) = trace.requests
    assert (summary.end, summary.attempts, summary.first_token_ms) == ("invalid_argument", 0, 0.0)
    assert not trace.candidates
    assert trace.spans[0].error.startswith("temperature: ")


async def test_each_attempt_is_in_the_trace_and_a_failed_one_has_its_error() -> None:
    async with deploy(tiny_config(), num_decode=2) as deployment, AsyncClient(deployment.router_address) as client:
        for worker in deployment.decode:
            slow_down(worker, 0.005)
        request = make_request(text="hello over there", max_tokens=300)
        request.logprobs = 1  # those of the first token come with the answer of the prefill worker
        finished, stopped = None, ""
        async for response in deployment.inference.Generate(request, timeout=60):
            if not stopped and response.HasField("tokens"):
                fleet = await client.fleet()
                stopped = next(w.worker_id for w in fleet.workers if "decode" in w.worker_id and w.num_dispatched)
                worker = next(w for w in deployment.decode if deployment.endpoints[id(w)].service_id == stopped)
                await worker.stop()
            finished = response.finished if response.HasField("finished") else None
        assert finished is not None
        assert finished.attempts == 2
        trace = await client.get_trace(finished.trace_id)
    first, second = [span for span in trace.spans if span.name == "router.attempt"]
    assert first.attributes["tandem.decode_worker"] == stopped
    assert first.error
    assert first.attributes["error.type"] == "unavailable"
    assert second.attributes["tandem.decode_worker"] != stopped
    assert not second.error
    stages = {(span.name, span.attributes["tandem.attempt"]) for span in trace.spans if "worker." in span.name}
    assert ("prefill_worker.prefill", "1") in stages, "the prefill of the first attempt had ended"
    assert ("decode_worker.decode", "2") in stages
    assert ("decode_worker.decode", "1") not in stages
