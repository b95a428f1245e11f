"""The router keeps its last requests with their spans, also without any exporter. `tandem trace` prints the same spans
from this ring and from the trace file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.commands.trace import show_from_router
from cli.main import app
from core.config import TelemetryConfig
from core.errors import ConfigError
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2
from tests.support.deployment import Answer, deploy, make_request, tiny_config
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


STAGES = (
    "tandem.request", "  router.queue", "  router.attempt", "    prefill_worker.prefill", "    decode_worker.transfer",
)  # fmt: skip


async def from_router(address: str, name: str | None, verbose: bool = False) -> str:
    console = Console(record=True, width=120, force_terminal=False)
    with console.capture() as capture:
        await show_from_router(AsyncClient(address), name, 20, verbose, console)
    return capture.get()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path, str, str, str]:
    """One request: its answer, the trace file, and what the command prints from the ring."""
    file = tmp_path_factory.mktemp("traces") / "spans.jsonl"

    async def serve() -> tuple[Answer, Path, str, str, str]:
        async with deploy(tiny_config(telemetry=TelemetryConfig(trace_file=str(file)))) as deployment:
            answer = await deployment.generate(text="hello over there", max_tokens=4)
            address, name = deployment.router_address, answer.finished.request_id
            shown = await from_router(address, name), await from_router(address, name, verbose=True)
            with pytest.raises(CallFailed, match="keeps no request 'nothing'"):
                await from_router(address, "nothing")
            return answer, file, *shown, await from_router(address, None)

    return asyncio.run(serve())


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_request_of_the_ring_is_drawn_with_its_candidates(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, _, drawn, verbose, _ = served
    lines = drawn.splitlines()
    assert answer.finished.trace_id in lines[0]
    assert all(any(line.startswith(stage) for line in lines) for stage in STAGES)
    assert all(line.rstrip().endswith("ms") for line in lines if line.startswith("  router."))
    assert any(line.lstrip().startswith("*") for line in lines), "the chosen candidate"
    assert "tandem.transfer.gb_per_s=" in verbose
    assert "tandem.transfer.gb_per_s=" not in drawn


def test_the_file_gives_the_same_spans(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, file, drawn, _, _ = served
    from_file = [run("--file", str(file), name) for name in (answer.finished.request_id, answer.finished.trace_id)]
    assert from_file[0] == from_file[1]
    names = [line.split()[0] for line in from_file[0].splitlines()[1:]]
    assert names == [line.split()[0] for line in drawn.splitlines()[1 : len(names) + 1]]


def test_without_an_id_the_last_requests_are_listed(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, file, _, _, listed = served
    for text in (listed, run("--file", str(file))):
        assert answer.finished.request_id in text
        assert "disaggregated" in text


def test_a_file_without_the_request_and_no_file_are_errors(
    served: tuple[Answer, Path, str, str, str], tmp_path: Path
) -> None:
    _, file, *_ = served
    with pytest.raises(ConfigError, match="has no request 'nothing'"):
        run("--file", str(file), "nothing")
    with pytest.raises(ConfigError, match=r"--file: cannot read .*: No such file or directory"):
        run("--file", str(tmp_path / "missing"))
