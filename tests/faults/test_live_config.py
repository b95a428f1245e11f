"""`tandem apply` on `tandem serve --routers 2`: every process has a change within a second, and no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cli.credentials import client_of, find_credentials
from cli.screens.fleet_health import services_without
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2
from tests.support.command import PATIENCE_S, Served, serving, tandem
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer, Load

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHANGED_WITHIN_S = 1.0  # the quickest one: a busy machine may delay a process by as much
NUM_CLIENTS = 6
changed_after_s: list[float] = []  # of each change of this file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serving("--routers", "2", "--slo-ttft-ms", "900", "--kv-memory-mb", "64") as fleet:
        yield fleet
        assert min(changed_after_s) < CHANGED_WITHIN_S, changed_after_s
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ended() == (0, [])


@contextlib.asynccontextmanager
async def client_at(served: Served) -> AsyncIterator[AsyncClient]:
    async with client_of(served.address, find_credentials(None, served.address)) as client:
        yield client


async def change(client: AsyncClient, **tables: dict[str, int]) -> int:
    """Change options, and wait until every service has them. Returns the revision."""
    began_at = asyncio.get_running_loop().time()
    async with asyncio.timeout(PATIENCE_S):
        revision = (await client.apply(options=json.dumps(tables))).config_revision
        while services_without(revision, await client.fleet()):
            await asyncio.sleep(0.01)
    changed_after_s.append(asyncio.get_running_loop().time() - began_at)
    return revision


async def changed(served: Served, *arguments: str) -> int:
    """The same by the command, which tells the time."""
    code, out, err = await tandem("apply", *arguments, "--router", served.address)
    assert code == 0, err
    told = out.splitlines()[-1]
    changed_after_s.append(float(told.split(" after ")[1].removesuffix(" s")))
    return int(told.split()[1].removesuffix(":"))


async def decode_load(client: AsyncClient) -> worker_pb2.LoadReport:
    (found,) = [w for w in (await client.fleet()).workers if w.role == worker_pb2.WORKER_ROLE_DECODE]
    return found.load


async def most_running(client: AsyncClient, load: Load, num_answers: int) -> int:
    """Most sequences that ran at the same time on the decode worker, in the reports of so many answers."""
    most, end = 0, load.num_right + num_answers
    async with asyncio.timeout(PATIENCE_S):
        while load.num_right < end:
            most = max(most, (await decode_load(client)).num_running)
            await asyncio.sleep(0.02)
    return most


async def several_run(client: AsyncClient) -> None:
    """Wait for load: until the decode worker has several sequences."""
    async with asyncio.timeout(PATIENCE_S):
        while (await decode_load(client)).num_running <= 1:
            await asyncio.sleep(0.02)


async def test_limits_of_a_running_fleet_fall_and_rise_within_a_second_and_no_request_fails(served: Served) -> None:
    load = Load(served.address, NUM_CLIENTS)
    async with client_at(served) as client:
        await several_run(client)
        assert await change(client, scheduler={"max_running": 1}, router={"max_in_flight_per_worker": 3}) == 2
        async with asyncio.timeout(PATIENCE_S):
            while (await decode_load(client)).num_running > 1:  # those that ran go on to their ends
                await asyncio.sleep(0.02)
        assert await most_running(client, load, num_answers=3) <= 1  # the answers show that the fleet serves on
        assert await changed(served, "scheduler.max_running=0", "router.max_in_flight_per_worker=0") == 3
        await several_run(client)
    await load.end()  # each answer is right, at its first attempt


async def test_a_lowered_queue_bound_refuses_new_requests_and_ends_none_that_waits(served: Served) -> None:
    async with client_at(served) as client:
        await change(client, router={"max_in_flight_per_worker": 1})
        runs = await Answer(client, prompt_of(1)).begun()
        wait = [Answer(client, prompt_of(seed), num_output=5) for seed in (2, 3)]
        async with asyncio.timeout(PATIENCE_S):
            while (await client.fleet()).num_queued < len(wait):
                await asyncio.sleep(0.02)
        await change(client, router={"max_queued": 1})
        refused = Answer(client, prompt_of(4), num_output=5)
        await refused.reading
        assert not runs.ended, "nothing was tested"
        assert "2 requests are queued, and max_queued is 1" in str(refused.error)
        await change(client, router={"max_queued": 1024, "max_in_flight_per_worker": 0})
        for answer in (runs, *wait):
            await answer.right()
