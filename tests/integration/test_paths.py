"""Paths between real workers over every transport, as an operator sees them: the fleet, the log, the metrics page."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cli.diagnosis import doctor
from cli.screens.path_lines import path_lines, paths_of
from core.config import TandemConfig, TelemetryConfig, TransferConfig
from core.paths import Lane, PathState, PathStatus
from tandem_client.stubs import cluster_pb2
from tests.integration.test_metrics import scrape
from tests.integration.transfer_owner_process import real_transport
from tests.support.deployment import Deployment, deploy, tiny_config


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


@pytest.mark.parametrize("transport", ["memory", "nixl", "ucxx"])
async def test_every_pair_is_connected_and_measured_before_the_first_request(transport: str) -> None:
    async with deploy(config_of(transport), num_prefill=2, num_decode=2) as deployment:
        fleet, paths = await fleet_with_paths(deployment)
        assert {path.lane for path in paths} == {Lane.SHARED_MEMORY}
        assert all(path.bytes_per_s > 0 and 0 < path.latency_s < 5 for path in paths)
        assert path_lines(fleet) == ["paths: 4 fine"]
        assert (await deployment.generate(token_ids=range(1, 60), max_tokens=3)).end is not None
        await deployment.settle()


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
    assert (finding.health, finding.text) == (doctor.Health.WARN, str(path))
    told = [record for record in caplog.records if f"-> {reader} is slow" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    states = {labels["state"]: value for labels, value in page["tandem_transfer_paths"] if labels["worker"] == reader}
    assert states == {state.value: float(state is PathState.SLOW) for state in PathState}
    ((labels, bandwidth),) = page["tandem_transfer_path_bandwidth_bytes_per_second"]
    assert labels == {"worker": reader, "peer": path.peer, "lane": "shared memory"}
    assert bandwidth == pytest.approx(path.bytes_per_s)


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
@pytest.mark.parametrize(("lanes", "health"), [("", doctor.Health.OK), ("tcp,self", doctor.Health.WARN)])
async def test_the_doctor_sees_that_two_processes_of_one_machine_talk_over_tcp(
    transport: str, lanes: str, health: doctor.Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_transport(transport)
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    # The speed is the machine's mood today; the lane is not.
    finding = await asyncio.to_thread(doctor.transport, TransferConfig(transport=transport, slow_path_share=1e-6))
    assert finding.health is health, finding.text
    assert ("fallback: TCP, " if lanes else "fine: shared memory, ") in finding.text
    assert bool(finding.fix) == bool(lanes)
