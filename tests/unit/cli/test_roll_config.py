"""The config of a roll: what travels, what may not change, and what wins."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from cli.credentials import with_cluster_token
from cli.roll_config import as_json, read_again
from cli.serve import fleet_spec
from core.config import ApiKeyConfig, ClusterConfig, RouterConfig, SecurityConfig, TandemConfig, WorkerConfig
from core.errors import InvalidRequest

STARTED = with_cluster_token(TandemConfig())


def test_the_token_does_not_travel_and_stays_and_every_other_option_is_that_of_the_file() -> None:
    key = ApiKeyConfig(name="bob", sha256="0" * 64)
    new = TandemConfig(
        security=SecurityConfig(cluster_token="another-token-of-the-file"),
        router=RouterConfig(max_queued=7),
        worker=WorkerConfig(drain_timeout_s=3.0),
        api_keys=(key,),
    )
    text = as_json(new)
    assert "another-token" not in text
    assert read_again(STARTED, {}, text) == replace(new, security=STARTED.security)


def test_the_flags_of_the_start_win_over_the_file() -> None:
    started = replace(STARTED, router=RouterConfig(port=7000))
    config = read_again(started, {"port": 7000, "max_batched_tokens": 256}, as_json(TandemConfig()))
    assert (config.router.port, config.scheduler.max_batched_tokens) == (7000, 256)


@pytest.mark.parametrize(
    ("new", "named"),
    [
        (TandemConfig(router=RouterConfig(port=1)), r"\[router\] port must stay"),
        (TandemConfig(cluster=ClusterConfig(address="a:1")), r"\[cluster\] address must stay"),
        (
            TandemConfig(security=SecurityConfig(tls_cert="/a", tls_key="/b", tls_ca="/c")),
            r"\[security\] tls_cert must stay as it is in a roll; to change it, start `tandem serve` again",
        ),
    ],
)
def test_an_option_that_services_of_a_fleet_share_must_stay(new: TandemConfig, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read_again(STARTED, {}, as_json(new))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "config: is not JSON"),
        ("[]", "config: must be an object of tables"),
        ('{"security": 1}', "config: must be an object of tables"),
        ('{"router": {"prot": 1}}', r"config: \[router\] prot is not an option"),
        (r'{"telemetry": {"trace_file": "\ud800"}}', "config: .*surrogates"),
        (r'{"telemetry": {"trace_file": "\u0000"}}', "config: .*null"),
        ('{"telemetry": {"trace_file": "~nobody-here/x"}}', "config: .*home directory"),
    ],
)
def test_a_config_that_cannot_be_read_names_the_fault(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read_again(STARTED, {}, text)


def test_the_spec_of_a_fleet_reads_a_config_again_in_another_process() -> None:
    spec = pickle.loads(pickle.dumps(fleet_spec(STARTED, {"decode": 2})))
    again = spec.reread(json.dumps({"worker": {"drain_timeout_s": 3.0}}))
    assert (spec.drain_timeout_s, again.drain_timeout_s) == (30.0, 3.0)
    assert again.config.num_decode == 2
    assert again.decode.args[0].security == STARTED.security
