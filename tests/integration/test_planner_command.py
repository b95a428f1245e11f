"""The planner of a real `tandem serve`: from zero workers and back, also for a pool that an operator has pinned and
released."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2
from tests.support.command import Served, said, serving
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer, fleet_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = """
[engine]
dtype = "float32"
kv_memory_mb = 128

[router]
worker_wait_s = 0.5  # shorter than the start of a worker: only the planner's word lets requests wait

[planner]
enabled = true
min_decode = 0
idle_s = 2.0
start_s = 60.0
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp("fleet") / "tandem.toml"
    path.write_text(CONFIG)
    async with serving("--config", str(path)) as fleet:
        yield fleet
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ended() == (0, [])


def client(served: Served) -> AsyncClient:
    return client_of(served.address, find_credentials(None, served.address))


async def planned(connection: AsyncClient) -> list[cluster_pb2.FleetNote]:
    return [note for note in (await connection.events()).events if note.subject == "planner"]


async def test_an_idle_fleet_has_no_worker_until_a_request_comes_or_an_operator_sizes_a_pool(served: Served) -> None:
    async with client(served) as connection:
        fleet = await fleet_with(connection, 0)
        assert (fleet.wanted_prefill, fleet.wanted_decode) == (0, 0)
        [note] = await planned(connection)
        assert (note.what, note.reason) == ("wants 0 prefill, 0 decode", "no request for 2 s")
        answers = [Answer(connection, prompt_of(seed), 5) for seed in range(4)]
        await asyncio.gather(*(answer.right() for answer in answers))
        note = (await planned(connection))[1]
        assert note.what == "wants 1 prefill, 1 decode"
        assert note.reason.endswith("requests wait")
        await fleet_with(connection, 0)
        await said("scale", "--decode", "1", "--router", served.address)
        fleet = await fleet_with(connection, 1)
        assert (fleet.wanted_prefill, fleet.wanted_decode) == (0, 1)
        planner = json.loads(await said("status", "--json", "--router", served.address))["planner"]
        assert (planner["enabled"], planner["pinned"]) == (True, ["decode"])
        await said("scale", "--auto", "--router", served.address)
        await fleet_with(connection, 0)
