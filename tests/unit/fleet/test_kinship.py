"""The services that the next supervisor adopts, also one of another version."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core.config import ClusterConfig, EngineConfig, RouterConfig, SecurityConfig, TandemConfig
from fleet.host.kinship import are_kin, kinship_of

CONFIG = TandemConfig(
    cluster=ClusterConfig(address="10.0.0.1:6379"), security=SecurityConfig(cluster_token="0123456789abcdef")
)
OURS = kinship_of(CONFIG)


@pytest.mark.parametrize(
    ("change", "kin"),
    [
        ({"router": RouterConfig(max_queued=7)}, True),
        ({"router": RouterConfig(port=7000)}, False),
        ({"engine": EngineConfig(dtype="bfloat16")}, False),
        ({"security": SecurityConfig(cluster_token="another token 16".replace(" ", "-"))}, False),
    ],
)
def test_services_are_kin_whose_fixed_options_have_one_value(change: dict[str, object], kin: bool) -> None:
    other = kinship_of(replace(CONFIG, **change))  # type: ignore[arg-type]
    assert are_kin(OURS, other) is are_kin(other, OURS) is kin


@pytest.mark.parametrize("name", json.loads(OURS))
def test_an_option_that_one_version_lacks_ends_no_service_unless_it_is_set(name: str) -> None:
    """Else an upgrade would end every service of a fleet at once."""
    options = json.loads(OURS)
    is_default = options.pop(name)[1]
    other = json.dumps(options)
    assert are_kin(OURS, other) is are_kin(other, OURS) is is_default


def test_what_another_version_writes_otherwise_is_no_kin() -> None:
    for other in ("", "ab" * 32, "[]", "{}", '{"engine.model": 3}', "null"):
        assert not are_kin(OURS, other)
        assert not are_kin(other, OURS)
    assert are_kin("", "")
    assert "0123456789abcdef" not in OURS, "the token is secret"
