"""What follows from a change of a fleet's config: the spec of its services, and whether they start again."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from cli.commands.serve import fleet_spec
from cli.credentials import with_cluster_token
from core.config import (
    ApiKeyConfig,
    ClusterConfig,
    ConfigText,
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    TandemConfig,
    WorkerConfig,
)
from core.errors import InvalidRequest
from fleet.supervisor.spec import FleetSpec, NextSpec

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
