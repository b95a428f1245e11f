"""The process of one service: a stop or a fault ends the wait of the supervisor, and nothing else does."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from fleet.host.service_host import ServiceHost

PATIENCE_S = 10.0


async def waiting_for(service: Any) -> tuple[ServiceHost, asyncio.Task[str]]:
    host = ServiceHost()
    host._service = service
    waiting = asyncio.create_task(host.wait())
    for _ in range(10):  # turns of the loop
        await asyncio.sleep(0)
    return host, waiting


async def test_a_router_hears_of_the_workers_and_of_the_routers() -> None:
    host, workers, routers = ServiceHost(), Mock(), Mock()
    router = Mock(set_workers=AsyncMock(), set_routers=AsyncMock())
    host._service = router
    await host.set_fleet(workers, routers)
    router.set_workers.assert_awaited_once_with(workers)
    router.set_routers.assert_awaited_once_with(routers)


@pytest.mark.parametrize("fault", [None, OSError("it cannot drain")])
async def test_a_service_that_has_drained_or_cannot_is_stopped_and_ends_the_wait(fault: OSError | None) -> None:
    service = Mock(drain=AsyncMock(side_effect=fault), stop=AsyncMock(), failed=asyncio.Event().wait)
    host, waiting = await waiting_for(service)
    assert not waiting.done(), "it serves"
    (answer,) = await asyncio.gather(host.drain(1.0), return_exceptions=True)
    assert answer is fault
    service.stop.assert_awaited_once()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ""


async def test_a_fault_of_the_service_ends_the_wait_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, waiting = await waiting_for(Mock(failed=AsyncMock(return_value=ValueError("no room\nfor more"))))
    assert await asyncio.wait_for(waiting, PATIENCE_S) == "ValueError: no room"
    assert "for more" in capsys.readouterr().err, "the log has the rest"
