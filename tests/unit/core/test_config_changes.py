"""What differs between two configs, how a fleet takes each option, and what an operator's change makes of a text."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from core.config import (
    ARRAYS,
    ApiKeyConfig,
    ConfigText,
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    SecurityConfig,
    Taken,
    TandemConfig,
    TelemetryConfig,
    changes,
    steps_fit,
    taken,
    with_live,
)
from core.errors import ConfigError, InvalidRequest

# Every option that does not restart the services, by table.
LIVE = {
    "scheduler": "max_batched_tokens max_running max_waiting slo_itl_ms",
    "worker": "report_interval_s idle_report_interval_s drain_timeout_s max_pulls_waiting default_timeout_s "
    "step_timeout_s",
    "router": "max_queued max_in_flight_per_worker default_timeout_s max_attempts retry_pause_s slo_ttft_ms admission "
    "report_stale_s worker_lost_s worker_wait_s max_prompt_chars drain_timeout_s peer_prefixes",
    "cluster": "start_timeout_s restart_backoff_s",
    "planner": "enabled min_prefill max_prefill min_decode max_decode max_workers prefill_price decode_price start_s "
    "idle_s",
}
NEVER = {
    "engine": "name model dtype quantization kv_dtype device block_size prefill_block_size",
    "router": "host port",
    "cluster": "address",
    "gateway": "host port",
    "security": "cluster_token cluster_token_file tls_cert tls_key tls_ca tls_server_name require_client_certs",
}
SIZE = {"cluster": "num_prefill num_decode num_routers"}


def options_taken(config: TandemConfig, how: Taken) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table in fields(TandemConfig):
        for option in () if table.name in ARRAYS else fields(getattr(config, table.name)):
            if taken(config, table.name, option.name) is how:
                found.setdefault(table.name, []).append(option.name)
    return found


@pytest.mark.parametrize(("how", "options"), [(Taken.LIVE, LIVE), (Taken.NEVER, NEVER), (Taken.SIZE, SIZE)])
def test_how_a_fleet_takes_each_option(how: Taken, options: dict[str, str]) -> None:
    found = {table: set(names) for table, names in options_taken(TandemConfig(), how).items()}
    assert found == {table: set(names.split()) for table, names in options.items()}


def test_an_array_of_tables_and_the_step_sizes_of_vllm_restart_the_services() -> None:
    config = TandemConfig(engine=EngineConfig(name="vllm"))
    assert {taken(config, table, "") for table in ARRAYS} == {Taken.RESTART}
    assert taken(config, "scheduler", "max_running") is Taken.RESTART, "vLLM plans the steps"
    assert taken(config, "scheduler", "max_waiting") is Taken.LIVE


def test_a_service_takes_live_options_and_keeps_the_others() -> None:
    present = RouterConfig(port=1, max_queued=2)
    assert with_live(present, RouterConfig(port=9, max_queued=3)) == RouterConfig(port=1, max_queued=3)


def test_each_option_that_differs_is_named_with_its_values_unless_they_are_secret() -> None:
    old = TandemConfig()
    new = replace(
        old,
        router=RouterConfig(max_queued=7, local_prefill="never"),
        security=SecurityConfig(cluster_token="a-token-that-nobody-reads"),
        api_keys=(ApiKeyConfig("bob", "0" * 64),),
    )
    assert [str(change) for change in changes(old, new)] == [
        "[router] max_queued 1024 -> 7",
        "[router] local_prefill auto -> never",
        "[security] cluster_token",
        "[[api_keys]]",
    ]
    assert changes(old, old) == []


def test_a_long_value_is_cut_and_one_with_control_characters_is_escaped() -> None:
    new = replace(TandemConfig(), telemetry=TelemetryConfig(service_namespace="\x1b[2J" + "x" * 3_000_000))
    (line,) = map(str, changes(TandemConfig(), new))
    assert line.startswith(r"[telemetry] service_namespace tandem -> \x1b[2Jxxx")
    assert line.endswith("x...")
    assert len(line) < 300


@pytest.mark.parametrize(
    ("built", "new", "on_gpu", "fits"),
    [
        (SchedulerConfig(), SchedulerConfig(max_running=64, max_batched_tokens=512), False, True),
        (SchedulerConfig(), SchedulerConfig(max_running=65), False, False),
        (SchedulerConfig(), SchedulerConfig(max_running=65), True, True),
        (SchedulerConfig(max_running=8), SchedulerConfig(), False, False),
        (SchedulerConfig(), SchedulerConfig(max_batched_tokens=513), False, False),
    ],
)
def test_an_engine_computes_no_larger_steps_than_those_that_it_was_built_for(
    built: SchedulerConfig, new: SchedulerConfig, on_gpu: bool, fits: bool
) -> None:
    assert steps_fit(built, new, on_gpu) is fits


PRESENT = ConfigText.of(
    TandemConfig(router=RouterConfig(slo_ttft_ms=500.0), api_keys=(ApiKeyConfig("a", "0" * 64),)),
    flags={"router": {"slo_ttft_ms": 500.0}},
    steps={"max_batched_tokens": 0, "max_running": 8},
)


def test_a_text_can_be_read_again_and_has_no_token() -> None:
    assert ConfigText.read(PRESENT.as_json()) == PRESENT
    assert PRESENT.config.api_keys == (ApiKeyConfig("a", "0" * 64),)
    assert PRESENT.built == SchedulerConfig(max_running=8)
    secret = TandemConfig(security=SecurityConfig(cluster_token="a-token-that-nobody-reads"))
    assert "nobody-reads" not in ConfigText.of(secret).as_json()


def test_flags_win_over_a_file_and_named_options_win_over_flags() -> None:
    file = PRESENT.merged(json.dumps({"router": {"max_queued": 7, "slo_ttft_ms": 50.0}}), "")
    assert file.config == TandemConfig(router=RouterConfig(max_queued=7, slo_ttft_ms=500.0))
    options = PRESENT.merged("", json.dumps({"router": {"slo_ttft_ms": 50.0}}))
    assert options.config == replace(PRESENT.config, router=RouterConfig(slo_ttft_ms=50.0))
    assert file.flags == options.flags == PRESENT.flags
    assert options.built == SchedulerConfig(), "engines are built anew, unless every option is live"


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        ("{", "", "config: is not JSON"),
        ("[]", "", "config: must be an object of tables"),
        ("[" * 100_000, "", "config: is not JSON"),
        ("", "1", "options: must be an object of tables"),
        ("", '{"router": 1}', "options: must be an object of tables"),
        ("", '{"api_keys": {"name": "b"}}', r"options: \[\[api_keys\]\] has several entries"),
        ("{}", "{}", "options: must be empty with config"),
    ],
)
def test_a_change_that_cannot_be_read_names_the_fault(config: str, options: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        PRESENT.merged(config, options)


@pytest.mark.parametrize("text", ["", "[]", "1", '{"tables": 1}', '{"steps": {"max_running": 1}}'])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="config: "):
        ConfigText.read(text)


def test_an_option_that_this_version_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[router\] prot is not an option"):
        _ = ConfigText({"router": {"prot": 1}}).config
