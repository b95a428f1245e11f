"""One trace per request, across all processes, also through the gateway, with no unexplained time in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider

from core.config import TelemetryConfig
from gateway.fleets import Fleets
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client import AsyncClient
from tandem_client.stubs.inference_pb2 import GenerateRequest, StopConditions
from tests.support.deployment import Answer, deploy, generate_beside_a_full_queue, make_request, tiny_config
from tests.support.gateway import serving_gateway

MIN_COVERAGE = 0.98
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of the client

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, list[dict]]:
    """One request through both pools, and every span of it."""
    path = tmp_path_factory.mktemp("traces") / "spans.jsonl"
    config = tiny_config("random:llama-tiny", "nixl", TelemetryConfig(trace_file=str(path)))
    async with deploy(config) as deployment:
        answer = await deployment.generate(token_ids=range(1, 81), max_tokens=16)
        await deployment.settle()
    # Leaving the deployment has closed every exporter.
    return answer, [json.loads(line) for line in path.read_text().splitlines()]


def times(span: dict) -> tuple[float, float]:
    from datetime import datetime

    return tuple(datetime.fromisoformat(span[key]).timestamp() for key in ("start_time", "end_time"))  # type: ignore[return-value]


async def test_every_stage_of_every_process_is_a_child_of_one_root(traced: tuple[Answer, list[dict]]) -> None:
    answer, spans = traced
    roots = [span for span in spans if span["name"] == SpanName.REQUEST.value]
    assert len(roots) == 1
    root = roots[0]
    children = [span for span in spans if span is not root]
    assert {span["name"] for span in children} == {
        "router.tokenize", "router.queue", "router.prefill", "router.decode", "router.respond", "router.attempt",
        "prefill_worker.queue", "prefill_worker.prefill",
        "decode_worker.queue", "decode_worker.transfer", "decode_worker.decode",
    }  # fmt: skip
    assert {span["context"]["trace_id"] for span in spans} == {root["context"]["trace_id"]}
    attempt = next(span for span in children if span["name"] == SpanName.ROUTER_ATTEMPT.value)
    for span in children:
        parent = root if span["name"].startswith("router.") else attempt
        assert span["parent_id"] == parent["context"]["span_id"]
    services = {span["resource"]["attributes"]["service.name"] for span in spans}
    assert services == {"tandem-router", "tandem-prefill-worker", "tandem-decode-worker"}
    assert root["context"]["trace_id"] == f"0x{answer.finished.trace_id}"


async def test_each_stage_of_a_worker_has_its_figures(traced: tuple[Answer, list[dict]]) -> None:
    answer, spans = traced
    attributes = {span["name"]: span["attributes"] for span in spans}
    prefill, transfer = attributes["prefill_worker.prefill"], attributes["decode_worker.transfer"]
    decode, attempt = attributes["decode_worker.decode"], attributes["router.attempt"]
    assert prefill[Attribute.WORKER] == answer.finished.prefill_worker
    assert (prefill[Attribute.TOKENS], prefill[Attribute.CACHED_TOKENS], prefill[Attribute.BLOCKS]) == (80, 0, 5)
    assert prefill[Attribute.STEPS] == 2, "a step has at most 64 tokens"
    assert prefill[Attribute.BATCH_SIZE] == 1
    assert prefill[Attribute.PREDICTED] == attempt[Attribute.ROUTE_PREFILL] > 0
    assert attributes["prefill_worker.queue"][Attribute.QUEUE_DEPTH] == 0
    assert transfer[Attribute.TRANSFER_OWNER] == answer.finished.prefill_worker
    assert (transfer[Attribute.TRANSFER_BLOCKS], transfer[Attribute.TRANSFER_SKIPPED_BLOCKS]) == (5, 0)
    assert transfer[Attribute.TRANSFER_GB_PER_S] > 0
    assert transfer[Attribute.TRANSFER_LANE]
    assert decode[Attribute.TOKENS] == 16
    assert decode[Attribute.STEPS] >= 15
    assert attempt[Attribute.ATTEMPT] == 1


async def test_the_children_cover_98_percent_of_the_root(traced: tuple[Answer, list[dict]]) -> None:
    _, spans = traced
    root = next(span for span in spans if span["name"] == SpanName.REQUEST.value)
    start, end = times(root)
    covered, reached = 0.0, start
    for child_start, child_end in sorted(times(span) for span in spans if span is not root):
        covered += max(0.0, min(child_end, end) - max(child_start, reached))
        reached = max(reached, min(child_end, end))
    assert covered / (end - start) >= MIN_COVERAGE


async def test_the_root_carries_the_semantic_attributes(traced: tuple[Answer, list[dict]]) -> None:
    answer, spans = traced
    attributes = next(span for span in spans if span["name"] == SpanName.REQUEST.value)["attributes"]
    assert attributes[Attribute.OPERATION] == "text_completion"
    assert attributes[Attribute.REQUEST_MODEL] == "random:llama-tiny"
    assert attributes[Attribute.INPUT_TOKENS] == 80
    assert attributes[Attribute.OUTPUT_TOKENS] == 16
    assert attributes[Attribute.FINISH_REASONS] == ["length"]
    assert attributes[Attribute.PATH] == "disaggregated"
    assert attributes[Attribute.DECODE_WORKER] == answer.finished.decode_worker
    predicted_ms, actual_ms = attributes[Attribute.PREDICTED_TTFT], attributes[Attribute.TTFT]
    assert actual_ms == pytest.approx(answer.finished.timings.first_token_ms)
    assert predicted_ms > attributes[Attribute.ROUTE_QUEUE] + attributes[Attribute.ROUTE_PREFILL] > 0
    assert (
        attributes[Attribute.ROUTE_COST]
        > attributes[Attribute.ROUTE_PREFILL] + attributes[Attribute.ROUTE_TRANSFER] - 1e-6
    )
    transfer = next(span for span in spans if span["name"] == SpanName.DECODE_TRANSFER.value)["attributes"]
    assert transfer[Attribute.TRANSFERRED_BYTES] == answer.finished.transferred_bytes > 0


async def test_a_request_that_fails_has_its_reason_on_its_root(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    config = tiny_config("fake:tiny", "memory", TelemetryConfig(trace_file=str(path)), max_queued=1)
    async with deploy(config, num_prefill=0, num_decode=0) as deployment:
        with pytest.raises(grpc.aio.AioRpcError):
            await generate_beside_a_full_queue(deployment)
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    errors = {
        span["attributes"][Attribute.ERROR_TYPE]: span["status"]["description"]
        for span in spans
        if span["name"] == SpanName.REQUEST.value
    }
    assert errors.keys() == {"resource_exhausted", "cancelled"}
    assert "max_queued" in errors["resource_exhausted"]


async def test_a_request_that_is_invalid_has_a_root_with_the_field_and_the_client_s_trace(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    config = tiny_config("fake:tiny", "memory", TelemetryConfig(trace_file=str(path)))
    async with deploy(config, num_prefill=0, num_decode=0) as deployment:
        header = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
        requests = make_request(text="hi", temperature=-1.0), make_request(text="hi", model="gpt-17")
        requests[0].request_id = "my own"
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError):
                await deployment.inference.Generate(request, timeout=10, metadata=header).read()
    invalid, unknown = [json.loads(line) for line in path.read_text().splitlines()]
    for span in (invalid, unknown):
        assert span["name"] == SpanName.REQUEST.value
        assert span["context"]["trace_id"] == f"0x{TRACE_ID}"
        assert span["status"]["status_code"] == "ERROR"
        assert span["attributes"][Attribute.REQUEST_MODEL] == "fake:tiny"
        assert times(span)[0] < times(span)[1]
    assert invalid["attributes"][Attribute.ERROR_TYPE] == "invalid_argument"
    assert invalid["attributes"][Attribute.RESPONSE_ID] == "my own"
    assert unknown["attributes"][Attribute.RESPONSE_ID].startswith("router-")
    assert invalid["status"]["description"].startswith("temperature: ")
    assert unknown["attributes"][Attribute.ERROR_TYPE] == "not_found"


BODY = {"model": "fake:tiny", "prompt": "hello over there", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
TIMEOUT_S = 10.0


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def post(
    telemetry: TelemetryConfig, body: dict[str, Any], num_prefill: int = 1, **headers: str
) -> httpx.Response:
    async with (
        deploy(tiny_config(telemetry=telemetry), num_prefill) as deployment,
        serving_gateway(Fleets([deployment.router.calls]), telemetry=telemetry) as url,
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        return await client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_continues_the_client_s_trace_through_the_gateway(tmp_path: Path, stream: bool) -> None:
    telemetry = TelemetryConfig(trace_file=str(tmp_path / "spans.jsonl"))
    answer = await post(telemetry, BODY | {"stream": stream}, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
    spans = {span["name"]: span for span in spans_in(tmp_path / "spans.jsonl")}
    gateway, root = spans["gateway.request"], spans["tandem.request"]
    assert {span["context"]["trace_id"] for span in spans.values()} == {f"0x{TRACE_ID}"}
    assert gateway["parent_id"] == f"0x{SPAN_ID}"
    assert root["parent_id"] == gateway["context"]["span_id"]
    assert {"prefill_worker.prefill", "decode_worker.transfer", "decode_worker.decode"} <= spans.keys()
    assert gateway["attributes"]["http.response.status_code"] == 200
    assert gateway["attributes"]["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert answer.headers["x-tandem-trace-id"] == TRACE_ID
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{gateway['context']['span_id'][2:]}-01"
    assert gateway["status"]["status_code"] == "UNSET"


async def test_a_request_of_one_pool_is_one_tree_with_every_stage(tmp_path: Path) -> None:
    await post(TelemetryConfig(trace_file=str(tmp_path / "spans.jsonl")), BODY, num_prefill=0)
    spans = spans_in(tmp_path / "spans.jsonl")
    assert {span["name"] for span in spans} == {
        "gateway.request", "tandem.request",
        "router.tokenize", "router.queue", "router.attempt", "router.prefill", "router.decode", "router.respond",
        "decode_worker.queue", "decode_worker.prefill", "decode_worker.decode",
    }  # fmt: skip
    ids = {span["context"]["span_id"] for span in spans}
    assert [span["name"] for span in spans if span["parent_id"] not in ids] == ["gateway.request"]
    assert len({span["context"]["trace_id"] for span in spans}) == 1


async def test_a_request_that_is_not_sampled_is_exported_only_if_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    telemetry = TelemetryConfig(trace_file=str(file), trace_sample_ratio=0.0)
    answer = await post(telemetry, BODY)
    assert answer.status_code == 200
    assert answer.headers["traceresponse"].endswith("-00")
    assert spans_in(file) == []
    answer = await post(telemetry, BODY | {"max_tokens": 100_000})
    assert answer.status_code == 400
    assert {span["name"] for span in spans_in(file)} == {"gateway.request", "tandem.request"}
    assert len({span["context"]["trace_id"] for span in spans_in(file)}) == 1
    assert all(span["status"]["status_code"] == "ERROR" for span in spans_in(file))


async def test_a_slow_request_is_exported_whatever_the_head_says(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    telemetry = TelemetryConfig(trace_file=str(file), trace_slow_ms=0.001)
    await post(telemetry, BODY, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert {"gateway.request", "tandem.request", "decode_worker.decode"} <= {span["name"] for span in spans_in(file)}


async def test_the_client_continues_the_trace_of_the_calling_program() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    async with deploy(tiny_config()) as deployment, AsyncClient(deployment.router_address) as client:
        with tracer.start_as_current_span("outer") as outer:
            request = GenerateRequest(text="hello over there", stop=StopConditions(max_tokens=2))
            finished = [r.finished async for r in client.generate(request, TIMEOUT_S) if r.HasField("finished")]
    assert finished[0].trace_id == f"{outer.get_span_context().trace_id:032x}"
