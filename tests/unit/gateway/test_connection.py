"""Work beside a watch of the connection: the result, the client's disconnect and the server's cancel in every order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import ClientGone
from gateway.http.connection import while_connected


class Connection:
    """`receive` of a request whose body is read."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.closed.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ("result", "done"),
        ("result disconnect", "done"),
        ("result turn disconnect", "done"),
        ("disconnect", "gone"),
        ("disconnect turn turn result", "gone"),
        ("cancel", "cancelled"),
        ("disconnect cancel", "cancelled"),
        ("cancel disconnect", "cancelled"),
        ("disconnect turn cancel", "cancelled"),
        ("cancel turn disconnect", "cancelled"),
        ("result disconnect cancel", "cancelled"),
    ],
)
async def test_the_first_event_decides_and_no_cancellation_comes_later(events: str, outcome: str) -> None:
    connection = Connection()
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve() -> tuple[str, int]:
        try:
            found = await while_connected(connection.receive, result)
        except ClientGone:
            found = "gone"
        await asyncio.sleep(0.02)  # a late cancellation would end it
        task = asyncio.current_task()
        assert task is not None
        return found, task.cancelling()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    for event in events.split():
        match event:
            case "result":
                if not result.done():  # cancelled, with the work that awaits it
                    result.set_result("done")
            case "disconnect":
                connection.closed.set()
            case "cancel":
                task.cancel()
            case "turn":
                await asyncio.sleep(0)
    try:
        assert await task == (outcome, 0)
    except asyncio.CancelledError:
        assert outcome == "cancelled"


async def test_an_error_of_cancelled_work_leaves_the_task_as_it_was() -> None:
    connection = Connection()

    async def work() -> str:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            raise OSError("the socket is closed") from None
        return "done"

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.01, connection.closed.set)
    with pytest.raises(OSError, match="the socket is closed"):
        await while_connected(connection.receive, work())
    assert task.cancelling() == 0
    await asyncio.sleep(0)
