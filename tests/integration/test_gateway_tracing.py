"""An HTTP request is one trace: client, gateway, router, prefill, transfer, decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from core.config import TelemetryConfig
from gateway.fleets import Fleets
from tandem_client import AsyncClient
from tandem_client.stubs.inference_pb2 import GenerateRequest, StopConditions
from tests.support.deployment import deploy, tiny_config
from tests.support.gateway import serving_gateway

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
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
