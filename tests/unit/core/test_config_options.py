"""The config: defaults, tables, and errors that name the option."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields

import pytest

from core.config import (
    ARRAYS,
    ClusterConfig,
    EngineConfig,
    GatewayConfig,
    ModelRuleConfig,
    RouterConfig,
    SchedulerConfig,
    ServedModelConfig,
    TandemConfig,
    TelemetryConfig,
    TransferConfig,
    WorkerConfig,
    from_mapping,
)
from core.errors import ConfigError

DEFAULTS = TandemConfig()
TABLES = [part.name for part in fields(DEFAULTS) if part.name not in ARRAYS]
FLOATS = [
    (table, option.name)
    for table in TABLES
    for option in fields(getattr(DEFAULTS, table))
    if isinstance(getattr(getattr(DEFAULTS, table), option.name), float)
]


def test_options_outside_the_file_keep_their_defaults() -> None:
    text = """
    [scheduler]
    max_running = 8
    [router]
    default_timeout_s = 30
    [transfer]
    verify_digests = false
    [gateway]
    cors_origins = ["https://example.org"]
    """
    config = from_mapping(tomllib.loads(text))
    assert config.scheduler == SchedulerConfig(max_running=8)
    assert config.router == RouterConfig(default_timeout_s=30)
    assert config.transfer == TransferConfig(verify_digests=False)
    assert config.gateway == GatewayConfig(cors_origins=("https://example.org",))
    assert config.engine == EngineConfig()


REFUSED = [
    ({"schedular": {}}, r"\[schedular\] is not a table .*scheduler"),
    ({"router": 5}, r"router must be a table"),
    ({"scheduler": {"max_runing": 8}}, r"\[scheduler\] max_runing is not an option; known: .*max_running"),
    ({"scheduler": {"max_running": "8"}}, r"\[scheduler\] max_running must be int, is '8'"),
    ({"scheduler": {"max_running": True}}, r"max_running must be int, is True"),
    ({"worker": {"drain_timeout_s": 0}}, r"^\[worker\] drain_timeout_s must be more than 0"),
    ({"router": {"host": ""}}, r"^\[router\] host must not be empty$"),
    ({"gateway": {"cors_origins": "*"}}, r"\[gateway\] cors_origins must be an array of strings, is '\*'"),
    ({"api_keys": {}}, r"api_keys must be an array of tables"),
    ({"api_keys": [{"name": "a", "sha": ""}]}, r"\[\[api_keys\]\] sha is not an option; known: .*sha256"),
    ({"api_keys": [{"name": "a", "sha256": "0" * 64, "min_priority": -101}]}, r"min_priority must be in \[-100, 100\]"),
    ({"api_keys": [{"name": "a", "sha256": "0" * 64}] * 2}, r"name and sha256 must be unique"),
    ({"models": [{"name": "a", "aliases": ["b"]}, {"name": "b"}]}, r"names and aliases must be unique"),
    ({"model_rules": [{"name": "auto", "model": "a"}]}, r"model 'a' is not the name of one of"),
    ({"models": [{"name": "a"}], "model_rules": [{"name": "a", "model": "a"}]}, r"name 'a' is the name of one of"),
]


def test_entries_of_an_array_are_read() -> None:
    text = """
    [[models]]
    name = "small"
    aliases = ["fast"]
    [[model_rules]]
    name = "auto"
    model = "small"
    """
    config = from_mapping(tomllib.loads(text))
    assert config.models == (ServedModelConfig("small", aliases=("fast",)),)
    assert config.model_rules == (ModelRuleConfig("auto", "small"),)


@pytest.mark.parametrize(("tables", "message"), REFUSED)
def test_an_error_names_the_wrong_table_or_option(tables: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(tables)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_float_options_refuse_negative_and_infinite_values_and_nan(value: float) -> None:
    for table, option in FLOATS:
        with pytest.raises(ConfigError, match=rf"^\[{table}\] {option} must be .*is {value}$"):
            from_mapping({table: {option: value}})


POSITIVE = {
    SchedulerConfig: ["max_waiting", "slo_itl_ms"],
    EngineConfig: ["block_size"],
    TransferConfig: ["lease_s", "connect_timeout_s", "min_bytes_per_s", "max_reads_in_flight", "max_transfers"],
    WorkerConfig: ["report_interval_s", "idle_report_interval_s", "drain_timeout_s", "max_pulls_waiting"],
    RouterConfig: ["max_queued", "max_attempts", "retry_pause_s", "report_stale_s", "max_message_bytes", "slo_ttft_ms"],
    ClusterConfig: ["start_timeout_s", "restart_backoff_s", "max_workers"],
}


@pytest.mark.parametrize("part", POSITIVE)
def test_limits_and_durations_must_be_positive(part: type) -> None:
    for option in POSITIVE[part]:
        with pytest.raises(ConfigError, match=option):
            part(**{option: 0})


OUT_OF_RANGE = [
    (EngineConfig, {"dtype": "int8"}, "dtype"),
    (EngineConfig, {"device": "tpu"}, "device"),
    (EngineConfig, {"prefill_block_size": 24}, r"prefill_block_size must be .* of block_size \(16\), is 24"),
    (EngineConfig, {"num_threads": 100_000}, r"num_threads must be in \[0, 4096\] .*is 100000"),
    (EngineConfig, {"max_context": -1}, "max_context"),
    (EngineConfig, {"kv_memory_mb": -1}, r"kv_memory_mb must be 0 \(automatic\) or more, is -1"),
    (EngineConfig, {"gpu_memory_margin_mb": -1}, "gpu_memory_margin_mb"),
    (TransferConfig, {"transport": "pigeon"}, "transport"),
    (TransferConfig, {"slow_path_share": 1.0}, "slow_path_share"),
    (TransferConfig, {"max_transfers": 16_385}, "max_transfers must be at most 16384"),
    (RouterConfig, {"port": 65536}, "port"),
    (RouterConfig, {"admission": "drop"}, "admission must be queue or shed: drop"),
    (RouterConfig, {"local_prefill": "always"}, "local_prefill must be auto or never: always"),
    (ClusterConfig, {"num_decode": 257}, "num_decode"),
    (ClusterConfig, {"num_routers": 0}, r"num_routers must be in \[1, 256\] \(max_workers\), is 0"),
    (ClusterConfig, {"num_routers": 5, "max_workers": 4}, r"num_routers must be in \[1, 4\]"),
    (ClusterConfig, {"prefill_gpus": 2.0}, r"prefill_gpus must be 0 .* or in \[0.01, 1\] .*, is 2$"),
    (ClusterConfig, {"decode_gpus": 0.001}, r"decode_gpus must be 0 .*, is 0.001$"),
    (ClusterConfig, {"prefill_gpus": 0.5, "decode_gpus": 0.75}, r"prefill_gpus \+ decode_gpus is 1.25: .* at most 1"),
    (
        ClusterConfig,
        {"decode_gpus": 0.0, "decode_accelerator": "H200"},
        "decode_accelerator = 'H200' needs decode_gpus",
    ),
    (TelemetryConfig, {"metrics_port": 65536}, "metrics_port"),
    (TelemetryConfig, {"otlp_endpoint": "collector"}, "otlp_endpoint must be http://host:port .*'collector'"),
    (TelemetryConfig, {"trace_sample_ratio": 1.5}, r"trace_sample_ratio must be in \[0, 1\], is 1.5"),
    (TelemetryConfig, {"otlp_endpoint": "ftp://collector:4317"}, "otlp_endpoint"),
    (TelemetryConfig, {"otlp_endpoint": "http://collector"}, "otlp_endpoint"),
    (SchedulerConfig, {"max_batched_tokens": 63, "max_running": 64}, "max_batched_tokens"),
    (SchedulerConfig, {"max_batched_tokens": -1}, "max_batched_tokens must be 0"),
    (SchedulerConfig, {"max_running": -1}, "max_running must be 0"),
    (RouterConfig, {"max_in_flight_per_worker": -1}, "max_in_flight_per_worker must be 0"),
]


@pytest.mark.parametrize(("part", "options", "named"), OUT_OF_RANGE)
def test_an_error_names_the_option_that_is_out_of_range(part: type, options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        part(**options)


def test_an_accelerator_type_needs_a_device_that_may_be_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"\[cluster\] prefill_accelerator = 'H100' needs \[engine\] device"):
        from_mapping({"engine": {"device": "cpu"}, "cluster": {"prefill_accelerator": "H100"}})
    from_mapping({"engine": {"device": "cuda"}, "cluster": {"prefill_accelerator": "H100"}})


def test_the_metrics_page_cannot_use_the_port_of_the_router() -> None:
    with pytest.raises(ConfigError, match=r"\[telemetry\] metrics_port is 9090, the router's own port"):
        from_mapping({"router": {"port": 9090}, "telemetry": {"metrics_port": 9090}})
    from_mapping({"router": {"port": 0}, "telemetry": {"metrics_port": 0}})


def test_each_router_needs_a_metrics_port_that_is_not_the_port_of_the_routers() -> None:
    def config(metrics_port: int) -> dict[str, object]:
        return {
            "router": {"port": 50051},
            "telemetry": {"metrics_port": metrics_port},
            "cluster": {"num_routers": 3},
        }

    for metrics_port in (50048, 50052, 65533):
        from_mapping(config(metrics_port))
    with pytest.raises(ConfigError, match="metrics_port is 50049: router-2 would have port 50051, the routers' own"):
        from_mapping(config(50049))
    with pytest.raises(ConfigError, match="metrics_port must be at most 65533 for 3 routers, is 65534"):
        from_mapping(config(65534))


def test_routers_of_several_machines_need_a_fixed_port() -> None:
    with pytest.raises(ConfigError, match=r"\[cluster\] router_resource needs a fixed \[router\] port"):
        from_mapping({"router": {"port": 0}, "cluster": {"router_resource": "edge"}})
    from_mapping({"router": {"port": 50051}, "cluster": {"router_resource": "edge"}})


@pytest.mark.parametrize("endpoint", ["http://localhost:4317", "https://[::1]:4317/", "localhost:4317", ""])
def test_a_collector_needs_a_host_and_a_port(endpoint: str) -> None:
    assert TelemetryConfig(otlp_endpoint=endpoint).otlp_endpoint == endpoint
