"""The config: defaults, tables, and errors that name the option."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import fields
from typing import Any

import pytest

from cli.commands.fleet_config import toml_lines
from core.config import (
    ARRAYS,
    ConfigText,
    EngineConfig,
    GatewayConfig,
    ModelRuleConfig,
    RouterConfig,
    SchedulerConfig,
    ServedModelConfig,
    TandemConfig,
    TransferConfig,
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


POSITIVE = [
    (table, option)
    for table, options in {
        "scheduler": ("max_waiting", "slo_itl_ms"),
        "engine": ("block_size",),
        "transfer": ("lease_s", "connect_timeout_s", "min_bytes_per_s", "max_reads_in_flight", "max_transfers"),
        "worker": ("report_interval_s", "idle_report_interval_s", "drain_timeout_s", "max_pulls_waiting"),
        "router": ("max_queued", "max_attempts", "retry_pause_s", "report_stale_s", "max_message_bytes", "slo_ttft_ms"),
        "cluster": ("start_timeout_s", "restart_backoff_s", "max_workers"),
    }.items()
    for option in options
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedular": {}}, r"\[schedular\] is not a table .*scheduler"),
    ({"router": 5}, r"router must be a table"),
    ({"router": 1 << 20_000}, r"router must be a table .*, is int of a size that cannot be shown"),
    ({"scheduler": {"max_runing": 8}}, r"\[scheduler\] max_runing is not an option; known: .*max_running"),
    ({"scheduler": {"max_running": "8"}}, r"\[scheduler\] max_running must be int, in \[0, .*, is '8'"),
    ({"scheduler": {"max_running": True}}, r"max_running must be int, in \[0, .*, is True"),
    ({"worker": {"drain_timeout_s": 0}}, r"^\[worker\] drain_timeout_s must be more than 0"),
    *(
        ({table: {"host": host}}, rf"^\[{table}\] host must be a host name or an IP address, in ASCII, is '")
        for table in ("worker", "router", "gateway")
        for host in ("", "10.0..1", "x" * 64, "localhost ", "a\0", "\u202e")
    ),
    ({"cluster": {"prefill_resource": " "}}, "prefill_resource must be a text that is not blank, is ' '$"),
    *(({"cluster": {"address": bad}}, "address must be host:port, is '") for bad in ("a", ":1", "a..b:1", "\n")),
    *(({"models": [{"name": "a", "router": bad}]}, "router must be host:port") for bad in ("a", ":1", "a:0", " a:1")),
    ({"gateway": {"cors_origins": "*"}}, r"\[gateway\] cors_origins must be an array of strings, is '\*'"),
    ({"api_keys": {}}, r"api_keys must be an array of tables"),
    ({"api_keys": [{"name": "a", "sha": ""}]}, r"\[\[api_keys\]\] sha is not an option; known: .*sha256"),
    ({"api_keys": [{"name": "a", "sha256": "0" * 64, "min_priority": -101}]}, r"min_priority must be in \[-100, 100\]"),
    ({"api_keys": [{"name": "a", "sha256": "0" * 64}] * 2}, r"name and sha256 must be unique"),
    ({"models": [{"name": "a", "aliases": ["b"]}, {"name": "b"}]}, r"names and aliases must be unique"),
    ({"model_rules": [{"name": "auto", "model": "a"}]}, r"model 'a' is not the name of one of"),
    ({"models": [{"name": "a"}], "model_rules": [{"name": "a", "model": "a"}]}, r"name 'a' is the name of one of"),
    ({"engine": {"dtype": "int8"}}, "dtype"),
    ({"engine": {"device": "tpu"}}, "device"),
    ({"engine": {"prefill_block_size": 24}}, r"prefill_block_size must be .* of block_size \(16\), is 24"),
    ({"engine": {"num_threads": 100000}}, r"num_threads must be in \[0, 4096\], is 100000"),
    ({"engine": {"max_context": -1}}, "max_context"),
    ({"engine": {"kv_memory_mb": -1}}, r"kv_memory_mb must be in \[0, 2147483647\], is -1"),
    ({"engine": {"gpu_memory_margin_mb": -1}}, "gpu_memory_margin_mb"),
    ({"transfer": {"transport": "pigeon"}}, "transport"),
    ({"transfer": {"slow_path_share": 1.0}}, "slow_path_share"),
    ({"transfer": {"max_transfers": 16385}}, r"max_transfers must be in \[1, 16384\], is 16385"),
    ({"router": {"port": 65536}}, "port"),
    ({"router": {"admission": "drop"}}, "admission must be queue or shed, is 'drop'"),
    ({"router": {"local_prefill": "always"}}, "local_prefill must be auto or never, is 'always'"),
    ({"cluster": {"num_decode": 257}}, "num_decode"),
    ({"cluster": {"num_routers": 0}}, r"num_routers must be in \[1, 256\] \(max_workers\), is 0"),
    ({"cluster": {"num_routers": 5, "max_workers": 4}}, r"num_routers must be in \[1, 4\]"),
    ({"cluster": {"prefill_gpus": 2.0}}, r"prefill_gpus must be 0 .* or in \[0.01, 1\] .*, is 2$"),
    ({"cluster": {"decode_gpus": 0.001}}, r"decode_gpus must be 0 .*, is 0.001$"),
    ({"cluster": {"prefill_gpus": 0.5, "decode_gpus": 0.75}}, r"prefill_gpus \+ decode_gpus is 1.25: .* at most 1"),
    ({"cluster": {"decode_gpus": 0.0, "decode_accelerator": "H200"}}, "decode_accelerator = 'H200' needs decode_gpus"),
    ({"telemetry": {"metrics_port": 65536}}, "metrics_port"),
    ({"telemetry": {"otlp_endpoint": "collector"}}, "otlp_endpoint must be http://host:port .*'collector'"),
    ({"telemetry": {"trace_sample_ratio": 1.5}}, r"trace_sample_ratio must be in \[0, 1\], is 1.5"),
    ({"telemetry": {"otlp_endpoint": "ftp://collector:4317"}}, "otlp_endpoint"),
    ({"telemetry": {"otlp_endpoint": "http://collector"}}, "otlp_endpoint"),
    ({"scheduler": {"max_batched_tokens": 63, "max_running": 64}}, "max_batched_tokens"),
    ({"scheduler": {"max_batched_tokens": -1}}, r"max_batched_tokens must be in \[0, "),
    ({"scheduler": {"max_running": -1}}, r"max_running must be in \[0, "),
    ({"router": {"max_in_flight_per_worker": -1}}, r"max_in_flight_per_worker must be in \[0, "),
    ({"engine": {"device": "cpu"}, "cluster": {"prefill_accelerator": "H100"}}, r"'H100' needs \[engine\] device"),
    *(
        (
            {table: {"port": port}, "telemetry": {"metrics_port": 9090}},
            rf"is 9090: {of} would have \[{table}\] port, {port}",
        )
        for table in ("router", "gateway")
        for port, of in ((9090, "router-0"), (9091, "router-1"))
    ),
    (
        {"telemetry": {"metrics_port": 50048}, "cluster": {"num_routers": 3}},
        r"metrics_port is 50048: router-3 would have \[router\] port, 50051 \(a roll starts one router more\)",
    ),
    (
        {"telemetry": {"metrics_port": 65533}, "cluster": {"num_routers": 3}},
        "metrics_port must be at most 65532 for 3 routers .*, is 65533",
    ),
    *(
        ({table: {option: seconds}}, rf"^\[worker\] {told}$")
        for table, option, seconds, told in (
            ("worker", "report_interval_s", 5, r"report_interval_s must be less than 3 \(\[router\] .*, is 5"),
            ("worker", "idle_report_interval_s", 3, "idle_report_interval_s must be less than 3 .*, is 3"),
            ("router", "report_stale_s", 0.5, "idle_report_interval_s must be less than 0.5 .*, is 1"),
            ("router", "worker_lost_s", 0.01, "report_interval_s must be less than 0.01 .*, is 0.05"),
        )
    ),
    ({"router": {"port": 0}, "cluster": {"router_resource": "edge"}}, r"router_resource needs a fixed \[router\] port"),
    (
        {"router": {"default_timeout_s": 2_000_000_000}},
        r"default_timeout_s must be more than 0 and at most 1000000000, is 2",
    ),
    (
        {"transfer": {"min_bytes_per_s": 1e16}},
        r"min_bytes_per_s must be more than 0 and at most 1000000000000000, is 1e\+16",
    ),
    ({"router": {"max_message_bytes": 2**31}}, r"max_message_bytes must be in \[.*, 2147483647\], is 2147483648"),
    *(
        ({"cache": {option: place}}, f"{option} must begin with / or ~, is '{place}'")
        for option in ("disk_dir", "host_dir")
        for place in ("kv", "./kv", " ")
    ),
    ({"cache": {"disk_gb": 1.0}}, "disk_gb needs disk_dir"),
    ({"cache": {"host_gb": 1.0, "disk_gb": 1.0, "disk_dir": "/d"}}, "disk_gb and host_gb"),
    *(
        ({"engine": {"name": "vllm"}, "cache": cache}, r"\[cache\] (disk|host)_gb needs .*, \[engine\] name is vllm")
        for cache in ({"disk_gb": 1.0, "disk_dir": "/d"}, {"host_gb": 1.0})
    ),
    *(({table: {option: 0}}, rf"{option} must be (more than 0|in \[[1-9])") for table, option in POSITIVE),
]
ACCEPTED: list[dict[str, Any]] = [
    {"engine": {"device": "cuda"}, "cluster": {"prefill_accelerator": "H100"}},
    {"engine": {"device": "cuda"}, "cache": {"host_gb": 1.0}},
    {"router": {"port": 0}, "telemetry": {"metrics_port": 0}},
    {"router": {"port": 50051}, "cluster": {"router_resource": "edge"}},
    {"router": {"default_timeout_s": 1e9}, "transfer": {"min_bytes_per_s": 1e12}},
    *({"telemetry": {"metrics_port": port}, "cluster": {"num_routers": 3}} for port in (50047, 50052, 65532)),
    {"worker": {"idle_report_interval_s": 20.0}, "router": {"report_stale_s": 60.0, "worker_lost_s": 90.0}},
    *({"router": {"host": host}} for host in ("localhost.", "[::1]", "fe80::1%eth0", "::ffff:10.0.0.1", "x" * 63)),
    *({"cluster": {"address": address}} for address in ("auto", "10.0.0.1:6379", "[::1]:6379", "head.ray.svc:6379")),
    *({"telemetry": {"otlp_endpoint": endpoint}} for endpoint in ("http://a:1", "https://[::1]:4317/", "a:1", "")),
]


@pytest.mark.parametrize(("tables", "message"), REFUSED)
def test_an_error_names_the_wrong_table_or_option(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(tables)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_float_options_refuse_negative_and_infinite_values_and_nan(value: float) -> None:
    for table, option in FLOATS:
        with pytest.raises(ConfigError, match=rf"^\[{table}\] {option} must be .*is {value}$"):
            from_mapping({table: {option: value}})


# Each of them is taken or refused by its option. None raises anything else, now or where a service reads it.
ODD_VALUES: list[Any] = [
    10**400, -(10**400), 1 << 20_000, 2**31, 2**63, -1, 0, 1, 1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf,
    True, "", "text", "\x00\x7f\n", "\ud800", "é" * 1000, [], ["text"], ["\udfff"], [1], [[]], {}, None,
]  # fmt: skip
TEXT_OF_KEYS = {"name": "a", "sha256": "0" * 64, "model": "a"}


def parts_with(table: str, option: str, value: object) -> dict[str, Any]:
    if table not in ARRAYS:
        return {table: {option: value}}
    needed = {name: text for name, text in TEXT_OF_KEYS.items() if name in {f.name for f in fields(ARRAYS[table])}}
    return {table: [needed | {option: value}]}


def taken_or_told(tables: dict[str, Any]) -> tuple[TandemConfig | None, str]:
    try:
        return from_mapping(tables), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize("value", ODD_VALUES, ids=range(len(ODD_VALUES)))
def test_every_option_takes_an_odd_value_as_its_own_type_or_refuses_it_by_name(value: object) -> None:
    num_taken = 0
    for table in fields(DEFAULTS):
        for option in fields(ARRAYS.get(table.name) or getattr(DEFAULTS, table.name)):
            config, told = taken_or_told(parts_with(table.name, option.name, value))
            if config is None:
                assert table.name in told or table.name == "model_rules", told
                told.encode()
                continue
            num_taken += 1
            part = getattr(config, table.name)
            kept = getattr(part[0] if table.name in ARRAYS else part, option.name)
            assert type(kept) is type(option.default), (table.name, option.name)
            assert not isinstance(kept, int | float) or abs(kept) <= (1e15 if type(kept) is float else 2**31 - 1)
            tables: dict[str, Any] = {table.name: ConfigText.of(config).tables[table.name]}
            lines = list(toml_lines(json.loads(json.dumps(tables))))
            kept_config = from_mapping(tables)
            assert from_mapping(tomllib.loads("\n".join(lines))) == kept_config, (table.name, option.name)
            assert getattr(kept_config, table.name) == part or table.name == "security", "a text has no token"
    assert num_taken or value not in (0, 1, True, "text", ["text"]), "no option takes it: the values are the wrong ones"


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "x" * 5000])
def test_the_name_of_an_unknown_table_or_option_is_shown_without_what_no_message_can_carry(name: str) -> None:
    unknown: list[dict[str, Any]] = [{name: {}}, {"router": {name: 1}}]
    for tables in unknown:
        with pytest.raises(ConfigError, match="is not a") as refused:
            from_mapping(tables)
        assert str(refused.value).encode().isascii()
        assert "\x1b" not in str(refused.value)
        assert str(refused.value).count("x") < 200


@pytest.mark.parametrize("tables", ACCEPTED)
def test_a_config_that_only_looks_wrong_is_accepted(tables: dict[str, Any]) -> None:
    config = from_mapping(tables)
    for table, options in tables.items():
        assert {name: getattr(getattr(config, table), name) for name in options} == options
