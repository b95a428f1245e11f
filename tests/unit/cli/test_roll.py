"""`tandem roll` shows the events of its roll, also over a change of routers, and ends with the fate of the roll."""

from __future__ import annotations

import contextlib
import io

import grpc
import pytest
from rich.console import Console

from cli import roll as roll_command
from core.errors import TandemError
from tandem_client import CallFailed
from tandem_client.stubs import cluster_pb2

BEFORE = cluster_pb2.FleetNote(number=1, subject="decode-0", what="serves")
NOTES = [
    cluster_pb2.FleetNote(number=2, subject="fleet", what="rolls to config 2"),
    cluster_pb2.FleetNote(number=3, subject="decode-1", what="serves"),
    cluster_pb2.FleetNote(number=4, subject="fleet", what="has rolled"),
]


class Router:
    """A router that is replaced in the middle of the roll, which ends with the third event."""

    def __init__(self, revision: int, error: CallFailed | None = None) -> None:
        self._revision, self._error = revision, error
        self._num_happened = 0
        self.rolls: list[tuple[str, bool]] = []

    async def roll(self, config: str, stop: bool) -> cluster_pb2.RollResponse:
        self.rolls.append((config, stop))
        return cluster_pb2.RollResponse(config_revision=2)

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._num_happened += 1
        return cluster_pb2.GetFleetResponse(config_revision=self._revision, rolling=self._num_happened < len(NOTES))

    async def events(self, limit: int, after: int = 0) -> cluster_pb2.ListEventsResponse:
        found = [note for note in (BEFORE, *NOTES[: self._num_happened]) if note.number > after]
        return cluster_pb2.ListEventsResponse(events=found[-limit:])


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_command, "REFRESH_S", 0.001)


async def shown(router: Router, config: str = "{}", stop: bool = False) -> list[str]:
    out = io.StringIO()
    await roll_command.roll(contextlib.nullcontext(router), config, stop, Console(file=out))  # type: ignore[arg-type]
    return [line.split("  ")[1] for line in out.getvalue().splitlines()]


async def test_each_event_of_the_roll_is_shown_once_also_if_the_router_is_replaced_meanwhile() -> None:
    router = Router(2, CallFailed(grpc.StatusCode.UNAVAILABLE, "no router", retryable=True))
    assert await shown(router) == ["fleet rolls to config 2", "decode-1 serves", "fleet has rolled"]
    assert router.rolls == [("{}", False)]


async def test_a_roll_that_was_undone_is_an_error() -> None:
    with pytest.raises(TandemError, match="the roll has failed: every service has config 1 again"):
        await shown(Router(1))


async def test_a_call_that_cannot_succeed_ends_the_command() -> None:
    with pytest.raises(CallFailed, match="wrong token"):
        await shown(Router(2, CallFailed(grpc.StatusCode.UNAUTHENTICATED, "wrong token")))


async def test_a_router_that_stays_away_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_command, "SILENT_S", 0.0)
    with pytest.raises(CallFailed, match="no router"):
        await shown(Router(2, CallFailed(grpc.StatusCode.UNAVAILABLE, "no router", retryable=True)))
