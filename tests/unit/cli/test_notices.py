"""`tandem serve` prints the notices of its fleet, and ends when the supervisor fails."""

from __future__ import annotations

import pytest

from cli.commands.serve import print_notices
from core.errors import TandemError
from fleet.law.events import FleetFailed, FleetMessage
from fleet.ray.cluster import Cluster
from fleet.supervisor.notes import FleetUpdate


class FakeCluster(Cluster):
    def __init__(self, *updates: FleetUpdate) -> None:
        self._waiting = list(updates)

    async def updates(self) -> list[FleetUpdate]:
        assert self._waiting, "asked again after the failure"
        return [self._waiting.pop(0)]


async def test_a_supervisor_that_fails_ends_the_command() -> None:
    """Nothing else would: requests go on while no worker is started again."""
    printed: list[str] = []
    cluster = FakeCluster(FleetMessage("decode-0", "serves"), FleetFailed("the supervisor has a bug"))
    with pytest.raises(TandemError, match="the supervisor has a bug"):
        await print_notices(cluster, printed.append)
    assert printed == ["decode-0 serves"]
