"""Places become configs: ports and names of the routers of a machine, the device and the threads of a worker."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cli.compose import _engine_config, _worker_parts, build_router, open_transport, role_option, router_host
from core.config import (
    ClusterConfig,
    EngineConfig,
    PlannerConfig,
    RouterConfig,
    SchedulerConfig,
    TelemetryConfig,
    TransferConfig,
)
from core.errors import ConfigError, TransportError
from core.lifecycle import ServiceRole
from engine.runner import StepLimits
from fleet.host.service_host import Placement
from tests.support.deployment import tiny_config
from tests.support.tiny_model_files import write_directory

PLACE = Placement(ordinal=2, host="", address="", num_threads=1, control=None)


def test_each_router_has_a_metrics_port_and_a_name_of_its_own() -> None:
    config = tiny_config(telemetry=TelemetryConfig(metrics_port=9464))
    routers = [build_router(config, replace(PLACE, ordinal=ordinal)) for ordinal in (0, 2)]
    assert [router._telemetry.config.metrics_port for router in routers] == [9464, 9466]
    assert [router._router_id.partition(".")[0] for router in routers] == ["router-0", "router-2"]
    assert build_router(tiny_config(), PLACE)._telemetry.config.metrics_port == 0
    beyond = tiny_config(telemetry=TelemetryConfig(metrics_port=65534))
    with pytest.raises(ConfigError, match=r"metrics_port must be in \[0, 65535\], is 65536"):
        build_router(beyond, PLACE)


@pytest.mark.parametrize(
    ("local_prefill", "num_prefill", "is_planned", "begins"),
    [("never", 1, False, True), ("auto", 1, False, False), ("never", 0, False, False), ("never", 1, True, False)],
)
def test_a_router_begins_with_prefill_workers_where_they_alone_compute_prompts_and_start_with_the_fleet(
    local_prefill: str, num_prefill: int, is_planned: bool, begins: bool
) -> None:
    cluster, planner = ClusterConfig(num_prefill=num_prefill), PlannerConfig(enabled=is_planned)
    config = replace(tiny_config(local_prefill=local_prefill), cluster=cluster, planner=planner)
    assert build_router(config, PLACE)._place.begins_with_prefill is begins


def test_a_router_takes_the_sampling_of_the_model_unless_told_otherwise(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "model", generation_config={"temperature": 0.01, "top_k": 1})
    for option, expected in (("auto", {"temperature": 0.01, "top_k": 1}), ("none", {})):
        config = replace(tiny_config(), engine=EngineConfig(model=model, generation_config=option))
        assert build_router(config, PLACE)._parts.load_tokenizer().info.default_sampling == expected


def test_a_router_shares_the_claimed_port_and_is_alone_on_the_configured_one() -> None:
    config = tiny_config(port=50051)
    shared = build_router(config, replace(PLACE, address="127.0.0.1:50077"))
    assert (shared._config.port, shared._place.shares_port) == (50077, True)
    alone = build_router(config, replace(PLACE, host="10.0.0.2"))
    assert (alone._config.host, alone._config.port, alone._place.shares_port) == ("10.0.0.2", 50051, False)


@pytest.mark.parametrize(
    ("configured", "machine", "host"),
    [("", "", "127.0.0.1"), ("", "10.0.0.2", "10.0.0.2"), ("0.0.0.0", "10.0.0.2", "0.0.0.0")],
)
def test_routers_listen_on_the_address_of_their_machine_unless_the_config_sets_another(
    configured: str, machine: str, host: str
) -> None:
    router = RouterConfig(host=configured) if configured else RouterConfig()
    assert router_host(replace(tiny_config(), router=router), machine) == host


@pytest.mark.parametrize(
    ("gpus", "configured", "device"),
    [
        (0.0, "auto", "cpu"), (1.0, "auto", "cuda"), (0.5, "cuda", "cuda"), (0.0, "cuda", "cpu"),
        (None, "auto", "auto"), (None, "cuda", "cuda"),
    ],
)  # fmt: skip
def test_a_worker_runs_on_the_gpu_that_its_place_has(gpus: float | None, configured: str, device: str) -> None:
    place = replace(PLACE, gpus=gpus)
    assert _engine_config(ServiceRole.DECODE, EngineConfig(device=configured), place).device == device


def test_a_prefill_worker_has_its_own_block_size_and_the_threads_of_its_place() -> None:
    config = EngineConfig(prefill_block_size=32)
    prefill, decode = (_engine_config(role, config, PLACE) for role in (ServiceRole.PREFILL, ServiceRole.DECODE))
    assert (prefill.block_size, decode.block_size, prefill.num_threads) == (32, 16, 1)
    assert _engine_config(ServiceRole.DECODE, EngineConfig(num_threads=3), PLACE).num_threads == 3


@pytest.mark.parametrize(("gpus", "share"), [(None, 1.0), (0.0, 1.0), (1.0, 1.0), (0.25, 0.25)])
@pytest.mark.parametrize(
    ("scheduler", "on_cpu", "on_gpu"),
    [
        (SchedulerConfig(), StepLimits(64, 512), StepLimits(256, 8192)),
        (SchedulerConfig(max_batched_tokens=32), StepLimits(32, 32), StepLimits(32, 32)),
        (SchedulerConfig(max_running=9000), StepLimits(9000, 9000), StepLimits(9000, 9000)),
        (SchedulerConfig(max_running=8, max_batched_tokens=32), StepLimits(8, 32), StepLimits(8, 32)),
    ],
)
def test_a_runner_gets_the_share_of_its_place_and_the_limits_of_the_scheduler(
    scheduler: SchedulerConfig,
    on_cpu: StepLimits,
    on_gpu: StepLimits,
    gpus: float | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_runner = Mock(side_effect=ConfigError("no runner here"))
    monkeypatch.setattr("engine.factory.build_runner", build_runner)
    monkeypatch.setattr("engine.backend.choose_device", lambda wanted: torch.device(wanted.replace("auto", "cpu")))
    config = replace(tiny_config("random:llama-tiny"), scheduler=scheduler)
    build = _worker_parts(ServiceRole.DECODE, config, replace(PLACE, gpus=gpus), None)
    with pytest.raises(ConfigError, match="no runner here"):
        build(Mock(), Mock())
    assert build_runner.call_args.args[2] == (on_gpu if gpus else on_cpu)
    assert build_runner.call_args.kwargs["gpu_share"] == share


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        (EngineConfig(), ""),
        (EngineConfig(prefill_block_size=16), ""),
        (EngineConfig(prefill_block_size=32), "[engine] prefill_block_size = 32 beside block_size = 16"),
        (EngineConfig(name="vllm"), "[engine] name = vllm"),
    ],
)
def test_an_option_by_which_the_workers_of_the_pools_differ_keeps_them_in_their_roles(
    engine: EngineConfig, option: str
) -> None:
    assert role_option(engine) == option


@pytest.mark.parametrize(("machine", "is_local"), [("", True), ("10.0.0.2", False)])
def test_the_transport_of_a_worker_that_listens_on_loopback_is_local(
    machine: str, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(side_effect=TransportError("not here"))
    monkeypatch.setattr("cli.compose.open_transport", opened)
    parts = _worker_parts(ServiceRole.DECODE, tiny_config(), replace(PLACE, host=machine), None)
    with pytest.raises(TransportError, match="not here"):
        parts(lambda _: None, lambda _: None)
    assert opened.call_args.kwargs["is_local"] is is_local


def test_expandable_segments_end_a_worker_on_a_gpu_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert open_transport(TransferConfig(transport="memory"), "a")
    with pytest.raises(ConfigError, match="expandable_segments"):
        open_transport(TransferConfig(transport="memory"), "a", on_device=True)
    config = replace(tiny_config(), engine=EngineConfig(model="no such model", device="cuda"))
    parts = _worker_parts(ServiceRole.DECODE, config, PLACE, None)
    with pytest.raises(ConfigError, match="expandable_segments"):
        parts(lambda _: None, lambda _: None)


def test_tandem_serve_and_a_worker_of_a_fake_model_import_no_module_that_takes_long_and_is_not_used() -> None:
    """A supervisor imports `cli.commands.serve` too. Each of these modules takes 0.5 to 3 s of CPU."""
    program = """
import os, sys
import cli.commands.serve
from core.lifecycle import ServiceRole
from tests.support.deployment import place, tiny_config

cli.compose._worker_parts(ServiceRole.DECODE, tiny_config(), place(0), None)(print, print)
print([name for name in ("torch", "transformers", "gateway.server", "vllm_worker.machine") if name in sys.modules])
sys.stdout.flush()
os._exit(0)  # without the threads of the worker
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split("\n")[-2] == "[]"
