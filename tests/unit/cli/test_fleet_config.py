"""`tandem config` prints TOML that can be applied again. `tandem apply` reads options and waits for every service."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from cli.commands import fleet_commands, fleet_config
from cli.commands.fleet_config import Order, first_line, options_as_json, revision_of, toml_lines
from core.config import ApiKeyConfig, ConfigText, RouterConfig, TandemConfig, VllmConfig, from_mapping
from core.errors import InvalidRequest, TandemError, WorkerUnavailable
from tandem_client import CallFailed
from tandem_client.stubs import cluster_pb2
from tests.unit.cli.conftest import connection_to

CONFIG = TandemConfig(
    router=RouterConfig(max_queued=7, policy="a:b"),
    vllm=VllmConfig(args=("--enforce-eager", "--max-logprobs=5")),
    api_keys=(ApiKeyConfig('bob "ü"', "0" * 64, operator=True), ApiKeyConfig("eve", "1" * 64)),
)


def test_the_printed_config_is_the_config_and_marks_live_options() -> None:
    lines = list(toml_lines(ConfigText.of(CONFIG).tables))
    assert from_mapping(tomllib.loads("\n".join(lines))) == CONFIG
    marked = [line.split()[0] for line in lines if line.endswith("# live")]
    assert {"max_queued", "max_running", "slo_ttft_ms"} <= set(marked)
    assert set(marked).isdisjoint({"policy", "dtype", "port"})


def test_a_printed_config_names_its_revision_for_the_command_that_applies_it() -> None:
    printed = "\n".join([first_line(12, "localhost:50051"), *toml_lines(ConfigText.of(CONFIG).tables)])
    assert revision_of(printed) == 12
    assert from_mapping(tomllib.loads(printed)) == CONFIG
    for other in (
        "",
        "\n" + printed,
        "[router]\n",
        "# Config 9999999999 of the fleet at x",
        "# Config ٣ of the fleet at",
    ):
        assert revision_of(other) == 0


def test_options_are_read_as_toml_and_else_as_text() -> None:
    text = options_as_json(["router.max_queued = 7", "router.admission=shed", "scheduler.slo_itl_ms=5e1"])
    assert json.loads(text) == {
        "router": {"max_queued": 7, "admission": "shed"},
        "scheduler": {"slo_itl_ms": 50.0},
    }


def test_a_value_of_more_than_python_reads_is_text_and_of_more_than_it_writes_is_refused() -> None:
    for value in ("9" * 6000, "[" * 5000):
        assert json.loads(options_as_json([f"router.max_queued={value}"])) == {"router": {"max_queued": value}}
    with pytest.raises(InvalidRequest, match="options: have a value that is no JSON"):
        options_as_json(["router.max_queued=0x" + "f" * 6000])


@pytest.mark.parametrize("text", ["max_queued=7", "router.max_queued", "router.=7", ".max_queued=7"])
def test_an_option_without_table_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be TABLE\.OPTION=VALUE"):
        options_as_json([text])


BEFORE = cluster_pb2.FleetNote(number=1, subject="decode-0", what="serves")
NOTES = [
    cluster_pb2.FleetNote(number=2, subject="fleet", what="rolls to config 2"),
    cluster_pb2.FleetNote(number=3, subject="decode-1", what="serves"),
    cluster_pb2.FleetNote(number=4, subject="fleet", what="has rolled"),
]


DRAINING, SERVING, STARTING = (
    cluster_pb2.SLOT_STATE_DRAINING, cluster_pb2.SLOT_STATE_SERVING, cluster_pb2.SLOT_STATE_STARTING,
)  # fmt: skip
AWAY = CallFailed(grpc.StatusCode.UNAVAILABLE, "no router", retryable=True)
WRONG_TOKEN = CallFailed(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


class Router:
    """A router of a fleet that gets config 2, by a change that one service takes late, or by a roll of three events."""

    def __init__(
        self,
        num_calls_late: int = 0,
        changes: tuple[str, ...] = ("[router] max_queued 1024 -> 7",),
        rolls_to: int = 0,  # that config
        error: CallFailed | None = None,  # of the first call during the roll
        last_seen: tuple[cluster_pb2.SlotState, ...] = (),  # routers of a fleet that answers one call and goes away
    ) -> None:
        self._num_calls_late, self._changes, self._rolls_to, self._error = num_calls_late, changes, rolls_to, error
        self._last_seen = last_seen
        self._num_happened = 0

    async def apply(
        self, config: str, options: str, restart: bool, stop: bool, expected_revision: int
    ) -> cluster_pb2.ApplyResponse:
        assert (config, options, restart, stop, expected_revision) == ("", "{}", False, False, 7)
        return cluster_pb2.ApplyResponse(config_revision=2, changes=self._changes, restarts=bool(self._rolls_to))

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._last_seen:
            self.fleet = self._away  # type: ignore[method-assign]
            router = cluster_pb2.SERVICE_ROLE_ROUTER
            slots = [cluster_pb2.FleetSlot(state=state, role=router) for state in self._last_seen]
            return cluster_pb2.GetFleetResponse(slots=slots, config_revision=2, rolling=True)
        if self._rolls_to:
            self._num_happened += 1
            rolling = self._num_happened < len(NOTES)
            return cluster_pb2.GetFleetResponse(config_revision=self._rolls_to, rolling=rolling)
        self._num_calls_late -= 1
        slots = [
            cluster_pb2.FleetSlot(name="decode-0", state=SERVING, config_revision=1 if self._num_calls_late > 0 else 2),
            cluster_pb2.FleetSlot(name="decode-1", state=cluster_pb2.SLOT_STATE_WAITING, config_revision=1),
        ]
        return cluster_pb2.GetFleetResponse(slots=slots, config_revision=2)

    async def _away(self) -> cluster_pb2.GetFleetResponse:
        raise AWAY

    async def events(self, limit: int, after: int = 0) -> cluster_pb2.ListEventsResponse:
        found = [note for note in (BEFORE, *NOTES[: self._num_happened]) if note.number > after]
        return cluster_pb2.ListEventsResponse(events=found[-limit:])


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "ROLL_REFRESH_S", 0.001)


async def shown(router: Router) -> list[str]:
    out = io.StringIO()
    order = Order(options="{}", expected_revision=7)
    await fleet_config.apply(connection_to(router), order, Console(file=out))
    return out.getvalue().splitlines()


async def test_the_command_ends_when_every_serving_service_has_the_change() -> None:
    changed, told = await shown(Router(num_calls_late=3))
    assert changed == "[router] max_queued 1024 -> 7"
    assert told.startswith("config 2: every service has it after 0.")


async def test_a_change_of_nothing_says_so() -> None:
    assert await shown(Router(changes=())) == ["config 2: it has these values already"]


async def test_a_service_that_does_not_take_the_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "PATIENCE_S", 0.05)
    with pytest.raises(TandemError, match=r"not every service has config 2 after 0\.05 s: decode-0$"):
        await shown(Router(num_calls_late=1000))


async def test_each_event_of_a_roll_is_shown_once_also_if_the_router_is_replaced_meanwhile() -> None:
    changed, *events, told = await shown(Router(rolls_to=2, error=AWAY))
    assert changed == "[router] max_queued 1024 -> 7"
    assert [line.split("  ")[1] for line in events] == [
        "fleet rolls to config 2",
        "decode-1 serves",
        "fleet has rolled",
    ]
    assert told.startswith("config 2: every service has it after ")


@pytest.mark.parametrize(
    ("router", "error", "told"),
    [
        (Router(rolls_to=1), TandemError, "the change has failed: every service has config 1 again"),
        (Router(rolls_to=2, error=WRONG_TOKEN), CallFailed, "wrong token"),
        (
            Router(last_seen=(SERVING, DRAINING)),
            WorkerUnavailable,
            r"answered for 0\.05 s: the fleet has ended, .* \(no",
        ),
        # A router that starts may be the next to answer. A fleet that goes on has more routers than those that drain.
        (
            Router(last_seen=(DRAINING, STARTING)),
            WorkerUnavailable,
            r"answered for 0\.5 s: the fleet has ended, .* \(no",
        ),
        (Router(last_seen=(DRAINING, DRAINING)), WorkerUnavailable, "stops before the change to config 2 is complete"),
    ],
    ids=["undone", "wrong token", "ended", "routers start", "routers drain"],
)
async def test_a_roll_that_fails_ends_the_command(
    router: Router, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_config, "GONE_S", 0.05)
    monkeypatch.setattr(fleet_config, "SILENT_S", 0.5)
    with pytest.raises(error, match=told):
        await shown(router)


def test_a_file_that_was_printed_is_applied_to_its_own_revision_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Order] = []

    async def apply(_connection: object, order: Order, _console: Console) -> None:
        orders.append(order)

    monkeypatch.setattr(fleet_config, "apply", apply)
    for first in (first_line(12, "localhost:1"), ""):
        file = tmp_path / "tandem.toml"
        file.write_text(f"{first}\n[router]\nmax_queued = 7\n")
        fleet_commands.apply([str(file)], router="localhost:1")
    assert [order.expected_revision for order in orders] == [12, 0]
    assert {json.loads(order.config)["router"]["max_queued"] for order in orders} == {7}
