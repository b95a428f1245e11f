"""A change of live options: what it may change, what wins, and with which config services start afterwards."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from cli.credentials import with_cluster_token
from cli.live_config import amended
from cli.roll_config import as_json
from cli.serve import fleet_spec
from core.config import (
    ApiKeyConfig,
    ClusterConfig,
    EngineConfig,
    LiveConfig,
    RouterConfig,
    SchedulerConfig,
    TandemConfig,
    WorkerConfig,
)
from core.errors import InvalidRequest
from fleet.handover import KeptConfig
from fleet.spec import FleetSpec

STARTED = with_cluster_token(
    TandemConfig(router=RouterConfig(slo_ttft_ms=500.0), api_keys=(ApiKeyConfig("a", "0" * 64),))
)
FLAGS = {"slo_ttft_ms": 500.0}


def options(**tables: dict[str, object]) -> str:
    return json.dumps(tables)


def test_named_options_change_and_all_others_stay_also_those_of_flags() -> None:
    new = amended(STARTED, FLAGS, "", options(router={"max_queued": 7, "slo_ttft_ms": 50}))
    assert new == replace(STARTED, router=RouterConfig(max_queued=7, slo_ttft_ms=50.0))


def test_flags_win_over_a_whole_config_and_the_token_stays() -> None:
    new = amended(STARTED, FLAGS, as_json(replace(STARTED, router=RouterConfig(max_queued=7))), "")
    assert new == replace(STARTED, router=RouterConfig(max_queued=7, slo_ttft_ms=500.0))


def test_every_option_that_is_not_live_is_named_with_the_way_to_change_it() -> None:
    new = replace(
        STARTED,
        router=RouterConfig(slo_ttft_ms=500.0, max_queued=7, local_prefill="never", policy="a:b"),
        cluster=ClusterConfig(num_decode=3),
        engine=EngineConfig(dtype="float32"),
        api_keys=(),
    )
    with pytest.raises(InvalidRequest) as refused:
        amended(STARTED, FLAGS, as_json(new), "")
    assert str(refused.value) == (
        "config: these options are not live: [engine] dtype: start `tandem serve` again; "
        "[router] local_prefill, [router] policy, [[api_keys]]: use `tandem roll --config FILE`; "
        "[cluster] num_decode: use `tandem scale`"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "options: is not JSON"),
        ('{"router": 1}', "options: must be an object of tables"),
        (options(api_keys={"name": "b"}), r"options: \[\[api_keys\]\] has several entries"),
        (options(router={"max_queued": "many"}), r"config: \[router\] max_queued must be int"),
        (options(scheduler={"max_running": 9, "max_batched_tokens": 8}), r"max_batched_tokens \(8\) must be at least"),
        ("", "config: either config or options must be set"),
    ],
)
def test_a_change_that_cannot_be_read_or_is_out_of_range_names_the_fault(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        amended(STARTED, FLAGS, "", text)


def change(spec: FleetSpec, **scheduler: object) -> FleetSpec:
    """As the supervisor does it, in another process."""
    amend = pickle.loads(pickle.dumps(spec)).amend
    changed: FleetSpec = amend("", options(scheduler=scheduler))[0]
    return changed


def test_services_start_with_their_first_config_and_then_take_the_newest_so_that_a_limit_may_rise_again() -> None:
    spec = fleet_spec(replace(STARTED, engine=EngineConfig(device="cpu")), FLAGS)
    low = change(spec, max_running=2)
    built: list[Any] = [low.decode, spec.decode]
    assert built[0].args == built[1].args, "engines are built for the steps of the start"
    assert low.live == LiveConfig(SchedulerConfig(max_running=2), STARTED.worker, STARTED.router)
    assert json.loads(low.text)["scheduler"]["max_running"] == 2
    high = change(low, max_running=64)
    assert high.live.scheduler.max_running == 64
    with pytest.raises(
        InvalidRequest, match=r"max_running must be at most 64, .* is 65; .*`tandem roll --config FILE`"
    ):
        change(high, max_running=65)


def test_another_supervisor_makes_the_same_spec_again_also_where_a_change_has_won_over_a_flag() -> None:
    started = replace(STARTED, engine=EngineConfig(device="cpu"))
    spec = fleet_spec(started, FLAGS)
    assert spec.amend is not None
    changed, _ = spec.amend("", options(router={"slo_ttft_ms": 50}, scheduler={"max_running": 2}))
    again = KeptConfig.of(2, changed).spec(spec)
    assert (again.text, again.built_text, again.live) == (changed.text, spec.text, changed.live)
    assert again.decode.args == spec.decode.args  # type: ignore[attr-defined]
    rolled = fleet_spec(replace(started, worker=WorkerConfig(drain_timeout_s=7.0)), FLAGS)
    assert KeptConfig.of(2, rolled).spec(spec).text == rolled.text


def test_the_time_limits_of_the_supervisor_are_those_of_the_newest_config() -> None:
    spec = fleet_spec(STARTED, FLAGS)
    assert spec.amend is not None
    changed, told = spec.amend("", options(cluster={"restart_backoff_s": 7}, worker={"drain_timeout_s": 8}))
    assert (changed.rules.config.restart_backoff_s, changed.rules.drain_timeout_s) == (7.0, 8.0)
    assert told == ("[worker] drain_timeout_s 30.0 -> 8", "[cluster] restart_backoff_s 1.0 -> 7")
    assert changed.amend is not None
    assert changed.amend("", options(worker={"drain_timeout_s": 8}))[1] == ()
