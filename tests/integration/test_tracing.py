"""One trace per request, across all processes, also through the gateway, with no unexplained time in it. The router
keeps its last requests with their spans, also without any exporter; `tandem trace` prints the same spans from this ring
and from the trace file."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console
from typer.testing import CliRunner

from cli.commands.trace import show_from_router
from cli.main import app
from core.config import TelemetryConfig
from core.errors import ConfigError
from gateway.fleets import Fleets
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2
from tandem_client.stubs.inference_pb2 import GenerateRequest, StopConditions
from tests.support.deployment import Answer, Deployment, deploy, make_request, tiny_config
from tests.support.gateway import serving_gateway
from tests.support.steps import slow_down
from tests.support.waiting import until

MIN_COVERAGE = 0.98
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of the client

pytestmark = pytest.mark.asyncio(loop_scope="module")


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Traced:
    """One request through both pools, every span of it, and what `tandem trace` prints of it from the ring."""

    answer: Answer
    file: Path
    drawn: str
    verbose: str
    listed: str

    @property
    def spans(self) -> list[dict[str, Any]]:
        return spans_in(self.file)

    @property
    def root(self) -> dict[str, Any]:
        (root,) = [span for span in self.spans if span["name"] == SpanName.REQUEST.value]
        return root


async def from_router(deployment: Deployment, name: str | None, verbose: bool = False) -> str:
    console = Console(record=True, width=120, force_terminal=False)
    with console.capture() as capture:
        await show_from_router(AsyncClient(deployment.router_address), name, 20, verbose, console)
    return capture.get()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    file = tmp_path_factory.mktemp("traces") / "spans.jsonl"
    config = tiny_config("random:llama-tiny", "nixl", TelemetryConfig(trace_file=str(file)))
    async with deploy(config) as deployment:
        answer = await deployment.generate(token_ids=range(1, 81), max_tokens=16)
        await deployment.settle()
        name = answer.finished.request_id
        shown = await from_router(deployment, name), await from_router(deployment, name, verbose=True)
        with pytest.raises(CallFailed, match="keeps no request 'nothing'"):
            await from_router(deployment, "nothing")
        listed = await from_router(deployment, None)
    # Leaving the deployment has closed every exporter.
    return Traced(answer, file, *shown, listed)


def times(span: dict[str, Any]) -> tuple[float, float]:
    from datetime import datetime

    return tuple(datetime.fromisoformat(span[key]).timestamp() for key in ("start_time", "end_time"))  # type: ignore[return-value]


async def test_every_stage_of_every_process_is_a_child_of_one_root(traced: Traced) -> None:
    spans, root = traced.spans, traced.root
    children = [span for span in spans if span != root]
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
    assert root["context"]["trace_id"] == f"0x{traced.answer.finished.trace_id}"


async def test_each_stage_of_a_worker_has_its_figures(traced: Traced) -> None:
    finished = traced.answer.finished
    attributes = {span["name"]: span["attributes"] for span in traced.spans}
    prefill, transfer = attributes["prefill_worker.prefill"], attributes["decode_worker.transfer"]
    assert prefill[Attribute.WORKER] == finished.prefill_worker
    assert (prefill[Attribute.TOKENS], prefill[Attribute.CACHED_TOKENS], prefill[Attribute.BLOCKS]) == (80, 0, 5)
    assert prefill[Attribute.STEPS] == 2, "a step has at most 64 tokens"
    assert prefill[Attribute.PREDICTED] == attributes["router.attempt"][Attribute.ROUTE_PREFILL] > 0
    assert transfer[Attribute.TRANSFER_OWNER] == finished.prefill_worker
    assert (transfer[Attribute.TRANSFER_BLOCKS], transfer[Attribute.TRANSFER_SKIPPED_BLOCKS]) == (5, 0)
    assert transfer[Attribute.TRANSFER_GB_PER_S] > 0
    assert transfer[Attribute.TRANSFER_LANE]
    assert attributes["decode_worker.decode"][Attribute.TOKENS] == 16


async def test_the_children_cover_98_percent_of_the_root(traced: Traced) -> None:
    start, end = times(traced.root)
    covered, reached = 0.0, start
    for child_start, child_end in sorted(times(span) for span in traced.spans if span != traced.root):
        covered += max(0.0, min(child_end, end) - max(child_start, reached))
        reached = max(reached, min(child_end, end))
    assert covered / (end - start) >= MIN_COVERAGE


async def test_the_root_carries_the_semantic_attributes(traced: Traced) -> None:
    finished, attributes = traced.answer.finished, traced.root["attributes"]
    assert attributes[Attribute.OPERATION] == "text_completion"
    assert attributes[Attribute.REQUEST_MODEL] == "random:llama-tiny"
    assert attributes[Attribute.INPUT_TOKENS] == 80
    assert attributes[Attribute.OUTPUT_TOKENS] == 16
    assert attributes[Attribute.FINISH_REASONS] == ["length"]
    assert attributes[Attribute.PATH] == "disaggregated"
    assert attributes[Attribute.DECODE_WORKER] == finished.decode_worker
    assert attributes[Attribute.TTFT] == pytest.approx(finished.timings.first_token_ms)
    assert attributes[Attribute.PREDICTED_TTFT] == pytest.approx(finished.promise.ttft_ms)
    transfer = next(span for span in traced.spans if span["name"] == SpanName.DECODE_TRANSFER.value)["attributes"]
    assert transfer[Attribute.TRANSFERRED_BYTES] == finished.transferred_bytes > 0


async def test_a_request_that_fails_has_its_reason_on_its_root_and_in_the_ring(tmp_path: Path) -> None:
    """One breaks a rule, one asks for another model, and one goes away while it waits for a worker."""
    file = tmp_path / "spans.jsonl"
    config = tiny_config("fake:tiny", "memory", TelemetryConfig(trace_file=str(file)))
    async with (
        deploy(config, num_prefill=0, num_decode=0) as deployment,
        AsyncClient(deployment.router_address) as client,
    ):
        header = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
        requests = make_request(text="hi", temperature=-1.0), make_request(text="hi", model="gpt-17")
        requests[0].request_id = "my own"
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError):
                await deployment.inference.Generate(request, timeout=10, metadata=header).read()
        waiting = asyncio.create_task(deployment.generate(text="waits for a worker"))
        await until(lambda: deployment.router._shell.view.num_queued, "the request is queued")
        waiting.cancel()
        await until(lambda: not deployment.router._shell.num_open, "the router has dropped the request")
        trace = await client.get_trace("my own")
        with pytest.raises(
            CallFailed, match=r"router-0\.\w+ keeps no request 'nothing', only the last 512 of its own"
        ) as failure:
            await client.get_trace("nothing")
        assert failure.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match=r"limit: must be in \[1, 512\]"):
            await deployment.cluster.ListRequests(cluster_pb2.ListRequestsRequest(limit=513), timeout=5)
    roots = [span for span in spans_in(file) if span["name"] == SpanName.REQUEST.value]
    errors = [span["attributes"][Attribute.ERROR_TYPE] for span in roots]
    assert errors == ["invalid_argument", "not_found", "cancelled"]
    for span in roots:
        assert span["status"]["status_code"] == "ERROR"
        assert span["attributes"][Attribute.REQUEST_MODEL] == "fake:tiny"
        assert times(span)[0] < times(span)[1]
    invalid, unknown, _ = roots
    assert invalid["context"]["trace_id"] == unknown["context"]["trace_id"] == f"0x{TRACE_ID}"
    assert invalid["attributes"][Attribute.RESPONSE_ID] == "my own"
    assert unknown["attributes"][Attribute.RESPONSE_ID].startswith("router-")
    assert invalid["status"]["description"].startswith("temperature: ")
    (summary,) = trace.requests
    assert (summary.end, summary.attempts, summary.first_token_ms) == ("invalid_argument", 0, 0.0)
    assert not trace.candidates
    assert trace.spans[0].error.startswith("temperature: ")


BODY = {"model": "fake:tiny", "prompt": "hello over there", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
TIMEOUT_S = 10.0


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


async def test_a_slow_request_of_one_pool_is_exported_as_one_tree_whatever_the_head_says(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    telemetry = TelemetryConfig(trace_file=str(file), trace_slow_ms=0.001)
    await post(telemetry, BODY, num_prefill=0, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    spans = spans_in(file)
    assert {span["name"] for span in spans} == {
        "gateway.request", "tandem.request",
        "router.tokenize", "router.queue", "router.attempt", "router.prefill", "router.decode", "router.respond",
        "decode_worker.queue", "decode_worker.prefill", "decode_worker.decode",
    }  # fmt: skip
    ids = {span["context"]["span_id"] for span in spans}
    assert [span["name"] for span in spans if span["parent_id"] not in ids] == ["gateway.request"]
    assert len({span["context"]["trace_id"] for span in spans}) == 1


async def test_the_client_continues_the_trace_of_the_calling_program() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    async with deploy(tiny_config()) as deployment, AsyncClient(deployment.router_address) as client:
        with tracer.start_as_current_span("outer") as outer:
            request = GenerateRequest(text="hello over there", stop=StopConditions(max_tokens=2))
            finished = [r.finished async for r in client.generate(request, TIMEOUT_S) if r.HasField("finished")]
    assert finished[0].trace_id == f"{outer.get_span_context().trace_id:032x}"


# ---- The last requests, kept by the router and printed by `tandem trace`.


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


STAGES = (
    "tandem.request", "  router.queue", "  router.attempt", "    prefill_worker.prefill", "    decode_worker.transfer",
)  # fmt: skip


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


async def test_ring_and_file_draw_a_request_alike_and_list_it(traced: Traced) -> None:
    finished, verbose, drawn = traced.answer.finished, traced.verbose, traced.drawn
    lines = drawn.splitlines()
    assert finished.trace_id in lines[0]
    assert all(any(line.startswith(stage) for line in lines) for stage in STAGES)
    assert all(line.rstrip().endswith("ms") for line in lines if line.startswith("  router."))
    assert any(line.lstrip().startswith("*") for line in lines), "the chosen candidate"
    assert "tandem.transfer.gb_per_s=" in verbose
    assert "tandem.transfer.gb_per_s=" not in drawn
    from_file = [run("--file", str(traced.file), name) for name in (finished.request_id, finished.trace_id)]
    assert from_file[0] == from_file[1]
    names = [line.split()[0] for line in from_file[0].splitlines()[1:]]
    assert names == [line.split()[0] for line in lines[1 : len(names) + 1]]
    for text in (traced.listed, run("--file", str(traced.file))):
        assert finished.request_id in text
        assert "disaggregated" in text


async def test_a_file_without_the_request_and_no_file_are_errors(traced: Traced, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request 'nothing'"):
        run("--file", str(traced.file), "nothing")
    with pytest.raises(ConfigError, match=r"--file: cannot read .*: No such file or directory"):
        run("--file", str(tmp_path / "missing"))
