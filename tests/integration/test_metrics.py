"""What an operator sees of a deployment: the router's Prometheus page with requests, latencies and the ledger of every
worker, the holders of blocks, and the paths between workers in the fleet, in the log and on this page."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.diagnosis import doctor
from cli.diagnosis.doctor_findings import Health
from cli.screens.path_lines import path_lines, paths_of
from core.config import TandemConfig, TelemetryConfig, TransferConfig
from core.paths import PathState, PathStatus
from core.scheduling.block_pool import Column
from router.operations.request_metrics import PHASES, TRANSFER_PHASES
from tandem_client.stubs import cluster_pb2, worker_pb2
from tests.integration.transfer_owner_process import real_transport
from tests.support.deployment import Deployment, deploy, machine_of, tiny_config, transfers, wait_until_known
from tests.support.steps import slow_down
from tests.support.waiting import until

Page = dict[str, list[tuple[dict[str, str], float]]]  # name -> (labels, value) of each series


async def scrape(port: int) -> Page:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            return page.read().decode()

    found: Page = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


async def when_counted(port: int, name: str, role: str) -> tuple[Page, dict[str, float]]:
    """The page, and the metric by role, as soon as a worker of `role` has reported some of it."""
    async with asyncio.timeout(20):
        while True:
            page = await scrape(port)
            values = {labels["role"]: value for labels, value in page[name]}
            if values[role]:
                return page, values
            await asyncio.sleep(0.02)


async def test_requests_latencies_and_ledgers_are_on_the_page(metrics_port: int) -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=metrics_port))
    async with deploy(config) as deployment:
        await deployment.router.set_workers([deployment.endpoints[id(deployment.decode[0])]])
        await deployment.generate(text="hey", max_tokens=5)
        await deployment.router.set_workers(list(deployment.endpoints.values()))
        await wait_until_known(deployment.router, 2)
        await deployment.generate(text="long enough for two workers", max_tokens=5)
        await deployment.settle()
        page, pulled = await when_counted(metrics_port, "tandem_worker_transferred_bytes_total", "decode")
        size = machine_of(deployment.decode[0]).core.pool.num_blocks
    assert pulled["prefill"] == 0
    by_path = {labels["path"]: value for labels, value in page["tandem_requests_total"]}
    assert by_path == {"disaggregated": 1, "local": 1}
    assert page["gen_ai_server_time_to_first_token_seconds_count"][0][1] == 2
    assert page["tandem_inter_token_latency_seconds_count"][0][1] == 2 * 4
    assert page["tandem_router_decision_seconds_count"][0][1] == 2
    tokens = {labels["kind"]: value for labels, value in page["tandem_tokens_total"]}
    assert tokens["output"] == page["vllm:generation_tokens_total"][0][1] == 10
    columns = {labels["column"] for labels, _ in page["tandem_worker_blocks"]}
    assert columns == {"free", "cached", "held", "leased", "incoming"}
    num_blocks: Counter[str] = Counter()
    for labels, value in page["tandem_worker_blocks"]:
        num_blocks[labels["role"]] += int(value)
    assert num_blocks == {"prefill": size, "decode": size}
    predicted = {labels["path"]: value for labels, value in page["tandem_router_ttft_prediction_ratio_count"]}
    assert predicted == {"disaggregated": 1, "local": 1}
    steps = {labels["role"]: value for labels, value in page["tandem_worker_step_seconds"]}
    assert all(0 < steps[role] < 10 for role in ("prefill", "decode"))
    assert {labels["role"]: value for labels, value in page["tandem_worker_prompt_seconds"]} == {
        "prefill": 0,
        "decode": 0,
    }
    phases = {labels["phase"]: value for labels, value in page["tandem_phase_duration_seconds_count"]}
    assert phases == dict.fromkeys(PHASES, 2) | dict.fromkeys(TRANSFER_PHASES, 1)


def config_of(transport: str, port: int = 0, expected_bytes_per_s: float = 0.0) -> TandemConfig:
    if transport != "memory":
        real_transport(transport)  # or the test is skipped
    config = tiny_config(transport=transport, telemetry=TelemetryConfig(metrics_port=port))
    return replace(
        config,
        transfer=replace(config.transfer, expected_path_bytes_per_s=expected_bytes_per_s),
        worker=replace(config.worker, idle_report_interval_s=0.05),
    )


async def fleet_with_paths(deployment: Deployment) -> tuple[Any, list[PathStatus]]:
    """Once every path has been reported as it is now."""
    num_pairs = len(deployment.prefill) * len(deployment.decode)
    async with asyncio.timeout(20):
        while True:
            fleet = await deployment.cluster.GetFleet(cluster_pb2.GetFleetRequest())
            paths = [path for _, path in paths_of(fleet)]
            if len(paths) == num_pairs and not any(path.state is PathState.CONNECTING for path in paths):
                return fleet, paths
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
async def test_a_path_below_its_promise_is_in_the_log_in_status_and_on_the_metrics_page(
    transport: str, metrics_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with deploy(config_of(transport, metrics_port, expected_bytes_per_s=1e15)) as deployment:
        fleet, (path,) = await fleet_with_paths(deployment)
        page = await scrape(metrics_port)
        reader = deployment.endpoints[id(deployment.decode[0])].service_id
    assert path.state is PathState.SLOW
    summary, line = path_lines(fleet)
    assert summary == "paths: 1 slow"
    assert line.endswith(str(path))
    (finding,) = doctor.paths(fleet)
    assert (finding.health, finding.text) == (Health.WARN, str(path))
    told = [record for record in caplog.records if f"-> {reader} is slow" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    states = {labels["state"]: value for labels, value in page["tandem_transfer_paths"] if labels["worker"] == reader}
    assert states == {state.value: float(state is PathState.SLOW) for state in PathState}
    ((labels, bandwidth),) = page["tandem_transfer_path_bandwidth_bytes_per_second"]
    assert labels == {"worker": reader, "peer": path.peer, "lane": "shared memory"}
    assert bandwidth == pytest.approx(path.bytes_per_s)


@pytest.mark.parametrize(("transport", "lanes"), [("nixl", "tcp,self"), ("ucxx", "tcp,self"), ("ucxx", "")])
async def test_the_doctor_sees_that_two_processes_of_one_machine_talk_over_tcp(
    transport: str, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_transport(transport)
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    # The speed is the machine's mood today; the lane is not.
    finding = await asyncio.to_thread(doctor.transport, TransferConfig(transport=transport, slow_path_share=1e-6))
    assert finding.health is (Health.WARN if lanes else Health.OK), finding.text
    assert ("fallback: TCP, " if lanes else "fine: shared memory, ") in finding.text
    assert bool(finding.fix) == bool(lanes)


# ---- `DescribeLedger` and `GetLedger`: the holders of a worker's blocks add up to its ledger, at every look.

COLUMN_OF_KIND = {
    worker_pb2.HOLDER_KIND_SEQUENCE: "held",
    worker_pb2.HOLDER_KIND_OFFER: "leased",
    worker_pb2.HOLDER_KIND_PULL: "incoming",
}
PATIENCE_S = 20.0


def assert_adds_up(described: worker_pb2.DescribeLedgerResponse, num_blocks: int) -> None:
    sums: Counter[str] = Counter()
    for holder in described.holders:
        assert holder.num_counted <= holder.num_blocks
        assert holder.age_ms >= 0
        sums[COLUMN_OF_KIND[holder.kind]] += holder.num_counted
    ledger = described.ledger
    assert (sums["held"], sums["leased"], sums["incoming"]) == (ledger.held, ledger.leased, ledger.incoming)
    assert ledger.free + ledger.cached + ledger.held + ledger.leased + ledger.incoming == num_blocks
    ages = [holder.age_ms for holder in described.holders]
    assert ages == sorted(ages, reverse=True), "the oldest first"


async def look(deployment: Deployment, **request: object) -> dict[str, cluster_pb2.WorkerLedger]:
    """By role and number of the worker."""
    asked = cluster_pb2.GetLedgerRequest(**request)  # type: ignore[arg-type]
    answer = await deployment.cluster.GetLedger(asked, timeout=PATIENCE_S)
    return {worker.worker_id.partition(".")[0]: worker for worker in answer.workers}


async def test_at_every_moment_of_many_requests_the_holders_add_up_to_the_ledger() -> None:
    async with deploy(tiny_config(), num_prefill=1, num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.005)
        num_blocks = {sum(ledger.values()) for ledger in deployment.ledgers()}
        assert len(num_blocks) == 1
        seen: set[int] = set()
        prompts = [f"story {number % 3}: " + "once upon a time " * (2 + number) for number in range(8)]
        asking = asyncio.gather(*(deployment.generate(text=text, max_tokens=24) for text in prompts))
        while not asking.done():
            workers = await look(deployment)
            assert sorted(name[:-2] for name in workers) == ["decode", "decode", "prefill"]
            for listed in workers.values():
                assert not listed.error
                assert listed.ledger.num_left_out == 0
                assert_adds_up(listed.ledger, *num_blocks)
                seen |= {holder.kind for holder in listed.ledger.holders}
        await asking
        assert worker_pb2.HOLDER_KIND_SEQUENCE in seen
        await deployment.settle()
        for listed in (await look(deployment)).values():
            assert_adds_up(listed.ledger, *num_blocks)
            assert list(listed.ledger.holders) == []
        (listed,) = (await look(deployment, worker_ids=[deployment.id_of(deployment.decode[0])])).values()
        assert listed.ledger.worker_id == listed.worker_id
        with pytest.raises(grpc.aio.AioRpcError, match="decode-9") as refused:
            await look(deployment, worker_ids=["decode-9"])
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_decode_call_that_is_cancelled_on_its_way_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy(tiny_config()) as deployment:

        async def stay_on_the_way(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        (prefill,), (decode,) = deployment.prefill, deployment.decode
        link = deployment.router._shell.links[deployment.id_of(decode)]
        monkeypatch.setattr(link._decode, "Decode", stay_on_the_way)
        call = asyncio.create_task(deployment.generate(text="an offer for nobody", max_tokens=4))
        await until(lambda: machine_of(prefill).core.pool.ledger()[Column.LEASED], "the blocks are offered")
        await until(lambda: not machine_of(prefill).load().num_calls, "the prompt is computed")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        within_s = deployment.config.transfer.heartbeat_s
        await until(lambda: not transfers(prefill).alive, "the offer has ended", within_s)
        await deployment.settle()
