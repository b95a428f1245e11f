"""A config comes from defaults, the file and flags; what follows when the config of a fleet changes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.commands.serve import fleet_spec
from cli.config_file import load_config
from cli.credentials import with_cluster_token
from core.config import (
    ARRAYS,
    ApiKeyConfig,
    ClusterConfig,
    ConfigText,
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    TandemConfig,
    WorkerConfig,
    from_mapping,
)
from core.errors import ConfigError, InvalidRequest
from fleet.supervisor.spec import FleetSpec, NextSpec

EXAMPLE = Path(__file__).parents[3] / "deploy" / "tandem.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    return path


def test_a_flag_overrides_the_file_and_the_file_overrides_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster]\nnum_prefill = 3\nnum_decode = 4\n")
    cluster = load_config(path, {"prefill": 7, "decode": None}).cluster
    assert (cluster.num_prefill, cluster.num_decode) == (7, 4)


def test_the_example_file_lists_every_option_with_its_default() -> None:
    example = tomllib.loads(EXAMPLE.read_text())
    assert from_mapping(example) == TandemConfig()
    for table in dataclasses.fields(TandemConfig):
        if table.name in ARRAYS:
            continue  # its entries stand in comments
        options = {option.name for option in dataclasses.fields(getattr(TandemConfig(), table.name))}
        assert set(example[table.name]) == options, f"[{table.name}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[router]\nprot = 1\n", r"tandem.toml: \[router\] prot is not an option; known: .*port"),
        ("port = 1\n", "port is outside a table"),
        ("[router\n", "is not valid TOML"),
        (f"[router]\nport = {'9' * 5000}\n", "is not valid TOML: Exceeds the limit"),
        (f"[router]\nport = 0x{'f' * 5000}\n", r"\[router\] port must be in .*, is int of a size that cannot be shown"),
        (f"[router]\nport = {'[' * 5000}\n", "is not valid TOML"),
    ],
)
def test_the_error_for_a_wrong_file_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml: No such file"):
        load_config(Path("nowhere.toml"), {})


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    path = write(tmp_path, '[security]\ntls_cert = "c"\ntls_key = "k"\ntls_ca = "a"\n')
    config = load_config(path, {"model": "model.gguf", "trace_file": "spans.jsonl"})
    security = config.security
    assert [Path(each) for each in (security.tls_cert, security.tls_key, security.tls_ca)] == [
        tmp_path / name for name in "cka"
    ]
    assert security.cluster_token_file == "", "an empty path stays empty"
    assert config.engine.model == str(tmp_path / "model.gguf")
    assert config.telemetry.trace_file == str(tmp_path / "spans.jsonl")
    assert load_config(None, {"model": "smollm2-135m"}).engine.model == "smollm2-135m"


def test_a_linked_file_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of Hugging Face, a GGUF file is a link to a file with a hash for a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5fa3").touch()
    for link in ("model.gguf", "key"):
        (tmp_path / link).symlink_to("5fa3")
    (tmp_path / "tandem.toml").write_text('[security]\ncluster_token_file = "key"\n')
    config = load_config(Path("tandem.toml"), {"model": "model.gguf"})
    assert config.engine.model == str(tmp_path / "model.gguf")
    assert config.security.cluster_token_file == str(tmp_path / "key")


STARTED = with_cluster_token(
    TandemConfig(engine=EngineConfig(device="cpu"), router=RouterConfig(port=7000, slo_ttft_ms=500.0))
)
SPEC = fleet_spec(STARTED, {"port": 7000, "slo_ttft_ms": 500.0})


def file_of(config: TandemConfig) -> str:
    return json.dumps(ConfigText.of(config).tables)


def after(spec: FleetSpec, config: str = "", restart: bool = False, **tables: dict[str, object]) -> NextSpec:
    """As the supervisor finds it, in another process."""
    spec = pickle.loads(pickle.dumps(spec))
    return spec.after(config, json.dumps(tables) if tables else "", restart)


def test_live_options_reach_services_and_the_time_limits_of_the_supervisor_without_a_new_start() -> None:
    new = after(SPEC, cluster={"restart_backoff_s": 7}, worker={"drain_timeout_s": 8}, router={"slo_ttft_ms": 50})
    assert new.changes == (
        "[worker] drain_timeout_s 30.0 -> 8.0",
        "[router] slo_ttft_ms 500.0 -> 50.0",
        "[cluster] restart_backoff_s 1.0 -> 7.0",
    )
    assert not new.restarts
    assert (new.spec.rules.config.restart_backoff_s, new.spec.rules.drain_timeout_s) == (7.0, 8.0)
    assert (new.spec.live.worker.drain_timeout_s, new.spec.live.router.slo_ttft_ms) == (8.0, 50.0)
    assert after(new.spec, worker={"drain_timeout_s": 8}).changes == ()


def test_any_other_option_and_an_order_to_do_so_start_every_service_again_with_the_token_of_the_start() -> None:
    key = ApiKeyConfig("bob", "0" * 64)
    file = TandemConfig(engine=EngineConfig(device="cpu"), worker=WorkerConfig(drain_timeout_s=3.0), api_keys=(key,))
    new = after(SPEC, file_of(file))
    assert (new.restarts, new.changes) == (True, ("[worker] drain_timeout_s 30.0 -> 3.0", "[[api_keys]]"))
    built: Any = new.spec.decode
    assert built.args[0] == replace(STARTED, worker=file.worker, api_keys=(key,)), "flags and the token stay"
    assert SPEC.after("", "", restart=True) == NextSpec(SPEC, (), True)
    assert after(SPEC, restart=True, router={"max_queued": 7}).restarts


def test_a_fixed_option_and_a_size_are_refused_with_the_way_to_change_them_and_a_file_leaves_the_sizes() -> None:
    with pytest.raises(
        InvalidRequest, match=r"start `tandem serve` again to change \[engine\] dtype, \[gateway\] port"
    ):
        after(SPEC, engine={"dtype": "float32"}, gateway={"port": 80}, router={"max_queued": 7})
    with pytest.raises(InvalidRequest, match=r"use `tandem scale` in place of \[cluster\] num_decode"):
        after(SPEC, cluster={"num_decode": 3})
    sized = replace(STARTED, cluster=ClusterConfig(num_decode=3))
    assert (after(SPEC, file_of(sized)).changes, after(SPEC, file_of(sized)).restarts) == ((), False)


def test_another_token_is_refused_by_its_option_and_the_present_one_changes_nothing() -> None:
    token = STARTED.security.cluster_token
    orders = {"cluster_token": "another-token-of-a-fleet", "cluster_token_file": "/etc/tandem/token"}
    for name, value in orders.items():
        text = json.dumps({"security": {name: value}})
        for config, options in ((text, ""), ("", text)):
            with pytest.raises(InvalidRequest, match=rf"\[security\] {name}: the token of a running fleet never") as no:
                SPEC.after(config, options, restart=False)
            assert value not in str(no.value)
    with pytest.raises(InvalidRequest, match="never changes"):
        after(SPEC, security={"cluster_token": ""})
    assert after(SPEC, security={"cluster_token": token, "cluster_token_file": ""}).changes == ()


def test_engines_are_built_for_the_steps_of_their_start_so_that_a_limit_may_rise_again() -> None:
    low = after(SPEC, scheduler={"max_running": 2})
    built: list[Any] = [low.spec.decode, SPEC.decode]
    assert built[0].args == built[1].args
    assert (low.restarts, low.spec.live.scheduler) == (False, SchedulerConfig(max_running=2))
    high = after(low.spec, scheduler={"max_running": 64})
    assert (high.restarts, high.spec.live.scheduler.max_running) == (False, 64)
    higher = after(high.spec, scheduler={"max_running": 65})
    assert higher.restarts
    built = [higher.spec.decode]
    assert built[0].args[0].scheduler == SchedulerConfig(max_running=65)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"security": 1}', "config: security must be a table"),
        ('{"router": {"prot": 1}}', r"config: \[router\] prot is not an option"),
        ('{"router": {"max_queued": "many"}}', r"config: \[router\] max_queued must be int"),
        ('{"scheduler": {"max_running": 9, "max_batched_tokens": 8}}', r"max_batched_tokens \(8\) must be at least"),
        (r'{"telemetry": {"trace_file": "\ud800"}}', "config: .*surrogates"),
        (r'{"telemetry": {"trace_file": "\u0000"}}', "config: .*null"),
        ('{"telemetry": {"trace_file": "~nobody-here/x"}}', "config: .*home directory"),
    ],
)
def test_a_config_that_cannot_be_read_names_the_fault(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        after(SPEC, text)


def test_a_config_that_does_not_fit_into_a_message_of_a_router_is_refused() -> None:
    large = after(SPEC, telemetry={"service_namespace": "x" * 3_000_000})
    assert large.names == ("[telemetry] service_namespace",)
    assert len(large.changes[0]) < 300
    with pytest.raises(InvalidRequest, match=r"at most 4190208 fit into a message \(\[router\] max_message_bytes\)"):
        after(large.spec, telemetry={"otlp_endpoint": "y" * 3_000_000 + ":1"})
    with pytest.raises(InvalidRequest, match="at most 1044480 fit into a message"):
        after(large.spec, router={"max_message_bytes": 1024**2})
    assert after(large.spec, telemetry={"service_namespace": "tandem"}).restarts


def test_a_fleet_without_a_maker_of_specs_restarts_and_changes_nothing() -> None:
    fixed = replace(SPEC, make=None)
    assert fixed.after("", "", True).restarts
    with pytest.raises(InvalidRequest, match="cannot change its config"):
        fixed.after("{}", "", False)
