"""`tandem config`: its TOML can be applied again, its options are read as TOML, and it waits for every service."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib

import pytest
from rich.console import Console

from cli import fleet_config
from cli.fleet_config import options_as_json, toml_lines
from cli.roll_config import as_json
from core.config import ApiKeyConfig, RouterConfig, TandemConfig, VllmConfig, from_mapping
from core.errors import InvalidRequest, TandemError
from tandem_client.stubs import cluster_pb2

CONFIG = TandemConfig(
    router=RouterConfig(max_queued=7, policy="a:b"),
    vllm=VllmConfig(args=("--enforce-eager", "--max-logprobs=5")),
    api_keys=(ApiKeyConfig('bob "ü"', "0" * 64, operator=True), ApiKeyConfig("eve", "1" * 64)),
)


def test_the_printed_config_is_the_config_and_marks_live_options() -> None:
    lines = list(toml_lines(json.loads(as_json(CONFIG))))
    assert from_mapping(tomllib.loads("\n".join(lines))) == CONFIG
    marked = [line.split()[0] for line in lines if line.endswith("# live")]
    assert {"max_queued", "max_running", "slo_ttft_ms"} <= set(marked)
    assert set(marked).isdisjoint({"policy", "dtype", "port"})


def test_options_are_read_as_toml_and_else_as_text() -> None:
    text = options_as_json(["router.max_queued = 7", "router.admission=shed", "scheduler.slo_itl_ms=5e1"])
    assert json.loads(text) == {
        "router": {"max_queued": 7, "admission": "shed"},
        "scheduler": {"slo_itl_ms": 50.0},
    }


@pytest.mark.parametrize("text", ["max_queued=7", "router.max_queued", "router.=7", ".max_queued=7"])
def test_an_option_without_table_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be TABLE\.OPTION=VALUE"):
        options_as_json([text])


class Router:
    """A router of a fleet with two services, of which one takes a change late."""

    def __init__(self, num_calls_late: int, changes: tuple[str, ...] = ("[router] max_queued 1024 -> 7",)) -> None:
        self._num_calls_late, self._changes = num_calls_late, changes

    async def change_config(self, config: str, options: str) -> cluster_pb2.ChangeConfigResponse:
        assert (config, options) == ("", "{}")
        return cluster_pb2.ChangeConfigResponse(config_revision=2, changes=self._changes)

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        self._num_calls_late -= 1
        serving = cluster_pb2.SLOT_STATE_SERVING
        slots = [
            cluster_pb2.FleetSlot(name="decode-0", state=serving, config_revision=1 if self._num_calls_late > 0 else 2),
            cluster_pb2.FleetSlot(name="decode-1", state=cluster_pb2.SLOT_STATE_WAITING, config_revision=1),
        ]
        return cluster_pb2.GetFleetResponse(slots=slots, config_revision=2)


async def shown(router: Router) -> list[str]:
    out = io.StringIO()
    await fleet_config.change(contextlib.nullcontext(router), Console(file=out), options="{}")  # type: ignore[arg-type]
    return out.getvalue().splitlines()


async def test_the_command_ends_when_every_serving_service_has_the_change() -> None:
    changed, told = await shown(Router(num_calls_late=3))
    assert changed == "[router] max_queued 1024 -> 7"
    assert told.startswith("config 2: every service has it after 0.")


async def test_a_change_of_nothing_says_so() -> None:
    assert await shown(Router(0, changes=())) == ["config 2: it has these values already"]


async def test_a_service_that_does_not_take_the_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "PATIENCE_S", 0.05)
    with pytest.raises(TandemError, match=r"not every service has config 2 after 0\.05 s: decode-0$"):
        await shown(Router(num_calls_late=1000))
