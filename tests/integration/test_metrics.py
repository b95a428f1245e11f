"""The router's Prometheus page shows requests by path, latencies, and every worker's ledger."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from cli.compose import FABRIC
from core.config import TelemetryConfig
from core.handoff import Abort, AbortReason
from kv_transfer.transports.memory_transport import MemoryTransport
from protos.handoff_codec import encode
from tests.support.deployment import deploy, tiny_config


async def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            return page.read().decode()

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if not name.startswith("otel_")}
            found.setdefault(sample.name, []).append((labels, sample.value))
    return found


async def test_requests_latencies_and_ledgers_are_on_the_page(metrics_port: int) -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=metrics_port), local_prefill_tokens=4)
    async with deploy(config) as deployment:
        await deployment.generate(text="long enough for two workers", max_tokens=5)
        await deployment.generate(text="hey", max_tokens=5)
        await deployment.assert_pools_settle()
        page = await scrape(metrics_port)
    by_path = {labels["path"]: value for labels, value in page["tandem_requests_total"]}
    assert by_path == {"disaggregated": 1, "local": 1}
    assert page["gen_ai_server_time_to_first_token_seconds_count"][0][1] == 2
    tokens = {labels["kind"]: value for labels, value in page["tandem_tokens_total"]}
    assert tokens["output"] == 10
    columns = {labels["column"] for labels, _ in page["tandem_worker_blocks"]}
    assert columns == {"free", "cached", "held", "leased", "incoming"}
    assert {labels["role"] for labels, _ in page["tandem_worker_blocks"]} == {"prefill", "decode"}
    assert page["tandem_transfer_bytes_total"][0][1] > 0


async def test_transfers_by_state_and_what_strangers_sent_are_on_the_page(metrics_port: int) -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=metrics_port))
    config = replace(config, worker=replace(config.worker, idle_report_interval_s=0.05))
    async with deploy(config) as deployment:
        agent = deployment.prefill[0]._parts.agent
        stranger = MemoryTransport("stranger", FABRIC)
        stranger.connect(agent.address)
        for payload in (b"", b"nonsense", bytes(99)):
            stranger.notify(agent.address.name, payload)
        stranger.notify(agent.address.name, encode(Abort(1, 2, 3, AbortReason.CANCELLED)))  # a message, for no transfer
        stranger.close()
        async with asyncio.timeout(10):
            while True:
                page = await scrape(metrics_port)
                dropped = {labels["role"]: value for labels, value in page["tandem_worker_dropped_messages"]}
                if dropped["prefill"]:
                    break
    malformed = {labels["role"]: value for labels, value in page["tandem_worker_malformed_messages"]}
    assert malformed == {"prefill": 3, "decode": 0}
    assert dropped == {"prefill": 1, "decode": 0}
    states = {(labels["side"], labels["state"]) for labels, _ in page["tandem_worker_transfers"]}
    assert states == {
        *(("offer", state) for state in ("computing", "offered")),
        *(("pull", state) for state in ("reserved", "wanting", "reading", "verifying")),
    }
