"""The router's Prometheus page shows requests by path, latencies, and every worker's ledger."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.compose import FABRIC
from core.config import TelemetryConfig
from core.handoff import Abort, AbortReason
from kv_transfer.transports.memory_transport import MemoryTransport
from protos.handoff_codec import encode
from router.operations.request_metrics import PHASES, TRANSFER_PHASES
from tests.support.deployment import deploy, generate_beside_a_full_queue, tiny_config, wait_until_known

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
        await wait_until_known(deployment, 2)
        await deployment.generate(text="long enough for two workers", max_tokens=5)
        await deployment.settle()
        page, pulled = await when_counted(metrics_port, "tandem_worker_transferred_bytes_total", "decode")
    assert pulled["prefill"] == 0
    by_path = {labels["path"]: value for labels, value in page["tandem_requests_total"]}
    assert by_path == {"disaggregated": 1, "local": 1}
    assert page["gen_ai_server_time_to_first_token_seconds_count"][0][1] == 2
    tokens = {labels["kind"]: value for labels, value in page["tandem_tokens_total"]}
    assert tokens["output"] == 10
    columns = {labels["column"] for labels, _ in page["tandem_worker_blocks"]}
    assert columns == {"free", "cached", "held", "leased", "incoming"}
    assert {labels["role"] for labels, _ in page["tandem_worker_blocks"]} == {"prefill", "decode"}
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


async def test_what_is_refused_is_on_the_page(metrics_port: int) -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=metrics_port), max_queued=1)
    async with deploy(config, num_prefill=0, num_decode=0) as deployment:
        with pytest.raises(grpc.aio.AioRpcError, match="temperature"):
            await deployment.generate(text="hey", temperature=-1)
        with pytest.raises(grpc.aio.AioRpcError, match="max_queued"):
            await generate_beside_a_full_queue(deployment)
        page = await scrape(metrics_port)
    refused = {(labels["path"], labels["end"]): value for labels, value in page["tandem_requests_total"]}
    assert refused == {("none", "invalid_argument"): 1, ("none", "resource_exhausted"): 1, ("none", "cancelled"): 1}
    ended = {labels["error_type"]: value for labels, value in page["gen_ai_server_request_duration_seconds_count"]}
    assert ended == {"resource_exhausted": 1, "cancelled": 1}


async def test_transfers_by_state_and_what_strangers_sent_are_on_the_page(metrics_port: int) -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=metrics_port))
    config = replace(config, worker=replace(config.worker, idle_report_interval_s=0.05))
    async with deploy(config) as deployment:
        parts = deployment.prefill[0]._parts
        agent = parts.agent
        stranger = MemoryTransport("stranger", FABRIC)
        stranger.connect(agent.address)
        for payload in (b"", b"nonsense", bytes(99)):
            stranger.notify(agent.address.name, payload)
        stranger.notify(agent.address.name, encode(Abort(1, 2, 3, AbortReason.CANCELLED)))  # a message, for no transfer
        stranger.close()
        page, dropped = await when_counted(metrics_port, "tandem_worker_dropped_messages_total", "prefill")
    malformed = {labels["role"]: value for labels, value in page["tandem_worker_malformed_messages_total"]}
    assert malformed == {"prefill": 3, "decode": 0}
    assert dropped == {"prefill": 1, "decode": 0}
    states = {(labels["side"], labels["state"]) for labels, _ in page["tandem_worker_transfers"]}
    assert states == {
        *(("offer", state) for state in ("computing", "offered")),
        *(("pull", state) for state in ("reserved", "wanting", "reading", "verifying")),
    }
