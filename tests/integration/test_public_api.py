"""tandem.v1.Inference and Cluster as a client meets them: streams, refusals, promises and receipts.

Cancellation and deadlines are in tests/faults/test_cancels_and_deadlines.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runtime.rpc.grpc_server import FIELD_KEY, RETRY_AFTER_KEY, RETRYABLE_KEY
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import GenerateRequest, StopConditions, TokenIds
from tests.support.deployment import Deployment, deploy, make_request, tiny_config, trailers_of
from tests.support.waiting import until

PATIENCE_S = 20.0  # for a busy machine; nothing here is to last so long
BURST = 2000  # gRPC by itself would end hundreds of them as CANCELLED


pytestmark = pytest.mark.asyncio(loop_scope="module")


def text(**fields: object) -> GenerateRequest:
    return GenerateRequest(**({"text": "hello", "stop": StopConditions(max_tokens=4)} | fields))  # type: ignore[arg-type]


INVALID = grpc.StatusCode.INVALID_ARGUMENT
REFUSED = [
    (GenerateRequest(token_ids=TokenIds(ids=[1, 10**6])), INVALID, "token_ids", "1000000"),
    (text(logprobs=21), INVALID, "logprobs", "[0, 20]"),
    (text(model="gpt-17"), grpc.StatusCode.NOT_FOUND, "model", "fake:tiny"),
]


async def test_invalid_requests_are_refused_by_field_and_limit(deployment: Deployment) -> None:
    """None of them may reach a worker. tests/unit/router/test_validation.py has every field."""
    num_arrived = [worker._parts.machine.core.num_arrived for worker in deployment.workers]
    for request, code, field, says in REFUSED:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await deployment.generate_all(request)
        trailers = trailers_of(caught.value)
        assert (caught.value.code(), trailers[FIELD_KEY], trailers[RETRYABLE_KEY]) == (code, field, "false")
        details = caught.value.details() or ""
        assert details.startswith(field)
        assert says in details
    assert [worker._parts.machine.core.num_arrived for worker in deployment.workers] == num_arrived
    await deployment.settle()


async def test_who_asks_for_no_length_gets_what_a_pool_smaller_than_the_context_holds() -> None:
    config = tiny_config("fake:wide")
    config = replace(config, engine=replace(config.engine, kv_memory_mb=1))
    async with deploy(config) as deployment:
        machine = deployment.decode[0]._parts.machine
        holds = machine.core.pool.num_blocks * config.engine.block_size
        request = GenerateRequest(text="hello", stop=StopConditions(ignore_eos=True))
        (answer,) = await deployment.generate_all(request)
        usage = answer.finished.usage
        assert usage.prompt_tokens + usage.completion_tokens == holds + 1  # the last token needs no slot


async def test_a_message_over_the_size_limit_is_refused(deployment: Deployment) -> None:
    request = GenerateRequest(text="a" * (5 * 1024 * 1024))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.generate_all(request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_of_a_burst_of_calls_those_beyond_the_queue_are_refused_with_a_hint_when_to_come_back() -> None:
    async with deploy(tiny_config(max_queued=10, worker_wait_s=1.0), num_decode=0) as deployment:
        calls = [deployment.inference.Generate(make_request(text="hello"), timeout=60) for _ in range(BURST)]
        codes = Counter(await asyncio.gather(*(call.code() for call in calls)))
        assert codes.keys() == {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}, "none is CANCELLED"
        for call in calls:
            if await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                assert RETRY_AFTER_KEY in {key for key, _ in await call.trailing_metadata()}


async def test_explain_names_the_candidates_with_their_terms_and_cached_tokens_and_runs_nothing() -> None:
    async with deploy(tiny_config(local_prefill="auto")) as deployment:
        request = make_request(text="where would this one go", max_tokens=4)
        explained = await deployment.cluster.Explain(request, timeout=PATIENCE_S)
        assert explained.prompt_tokens == 23
        ways = {candidate.prefill_worker.partition(".")[0] for candidate in explained.candidates}
        assert ways == {"", "prefill-0"}, "the decode worker alone, and the pair"
        assert [candidate.chosen for candidate in explained.candidates] == [True, False]
        alone = not explained.candidates[0].prefill_worker
        path = inference_pb2.REQUEST_PATH_LOCAL if alone else inference_pb2.REQUEST_PATH_DISAGGREGATED
        assert explained.path == path
        for found in explained.candidates:
            assert found.uncached_tokens == 23
            assert found.first_token_ms > found.prefill_ms > 0
            ready_ms = found.queue_ms + found.prefill_ms + found.transfer_ms + found.room_wait_ms
            assert found.cost_ms == pytest.approx(ready_ms + found.gap_ms * found.num_streams + found.evict_ms)
        for worker in deployment.workers:
            assert worker._parts.machine.core.num_arrived == 0
        await deployment.generate_all(request)
        await deployment.settle()
        async with asyncio.timeout(PATIENCE_S):
            while (explained := await deployment.cluster.Explain(request)).candidates[0].cached_tokens == 0:
                await asyncio.sleep(0.02)  # the report is on its way
        assert (explained.candidates[0].cached_tokens, explained.candidates[0].uncached_tokens) == (16, 7)


async def test_health_and_reflection_are_served(deployment: Deployment) -> None:
    health = health_pb2_grpc.HealthStub(deployment.channel)
    for service in ("", "tandem.v1.Inference", "tandem.v1.Cluster"):
        status = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(deployment.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
    )
    names = {service.name for reply in [await call.read()] for service in reply.list_services_response.service}
    assert {"tandem.v1.Inference", "tandem.v1.Cluster", "grpc.health.v1.Health"} <= names


PROMPT = "long enough for two workers, in several blocks"
RECEIPT = {
    f"tandem-{name}" for name in ("queue-ms", "prefill-ms", "decode-ms", "kv-block-seconds", "transferred-bytes")
}


async def call(
    deployment: Deployment, request: inference_pb2.GenerateRequest
) -> tuple[dict[str, str], dict[str, str], list[Any]]:
    """Initial metadata, trailing metadata and the last messages of the choices."""
    generate = deployment.inference.Generate(request, timeout=30)
    promised = dict(await generate.initial_metadata())
    finished = [response.finished async for response in generate if response.HasField("finished")]
    return promised, dict(await generate.trailing_metadata()), finished


async def test_the_promise_comes_first_and_the_receipt_last(deployment: Deployment) -> None:
    promised, took, (finished,) = await call(deployment, make_request(text=PROMPT, max_tokens=20))
    assert promised["tandem-predicted-path"] == "disaggregated"
    assert float(promised["tandem-predicted-ttft-ms"]) == pytest.approx(finished.promise.ttft_ms, abs=1e-3)
    assert 0 < float(promised["tandem-predicted-tpot-ms"]) < 10_000
    assert finished.promise.path == finished.path
    assert (finished.prefill_worker[:10], finished.decode_worker[:9]) == ("prefill-0.", "decode-0.")
    timings = finished.timings
    phases = timings.tokenize_ms, timings.router_queue_ms, timings.prefill_queue_ms, timings.prefill_ms
    assert 0 < timings.tokenize_ms < sum(phases) < timings.first_token_ms, "messages take the rest"
    assert timings.first_token_ms + timings.decode_ms <= timings.total_ms + 0.001
    assert finished.seed < 2**53, "a number of JavaScript keeps it"
    assert min(timings.prefill_ms, timings.transfer_ms, timings.decode_ms) > 0
    assert took.keys() >= RECEIPT
    assert float(took["tandem-decode-ms"]) == pytest.approx(timings.decode_ms, abs=1e-3)
    assert int(took["tandem-transferred-bytes"]) == finished.receipt.transferred_bytes == finished.transferred_bytes > 0
    busy_s = timings.total_ms / 1e3
    num_blocks = -(-(finished.usage.prompt_tokens + 20) // 16)
    assert 0 < finished.receipt.kv_block_seconds < 2 * num_blocks * busy_s, "two workers at most, for the whole call"
    assert float(took["tandem-kv-block-seconds"]) == pytest.approx(finished.receipt.kv_block_seconds, abs=1e-6)


async def test_a_call_that_waits_for_a_worker_has_no_promise_until_one_takes_it(deployment: Deployment) -> None:
    await deployment.router.set_workers([])
    generate = deployment.inference.Generate(make_request(text=PROMPT), timeout=30)
    promise = asyncio.ensure_future(generate.initial_metadata())
    shell = deployment.router._shell
    await until(lambda: shell.view.num_queued, "the call waits")
    assert not promise.done()
    await deployment.router.set_workers(list(deployment.endpoints.values()))
    assert "tandem-predicted-ttft-ms" in dict(await promise)
    generate.cancel()


async def test_the_receipt_of_a_call_is_the_sum_over_its_choices(deployment: Deployment) -> None:
    _, took, finished = await call(deployment, make_request(text=PROMPT, n=3, temperature=1.0))
    assert len(finished) == 3
    block_seconds = sum(message.receipt.kv_block_seconds for message in finished)
    assert float(took["tandem-kv-block-seconds"]) == pytest.approx(block_seconds, abs=1e-5)
