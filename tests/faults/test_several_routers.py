"""Two routers on one port, as `tandem serve --routers 2` starts them: `tandem apply` reaches every process and fails no
request; one router is killed or drains, and the other one serves on. In the end Ray itself dies.

The kernel gives each new connection to one of the routers, so every client here is at one router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cli.credentials import client_of, find_credentials
from cli.screens.fleet_health import services_without
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import worker_pb2
from tests.support.command import PATIENCE_S, Served, line_with, said, serving
from tests.support.faults import Prompt, prompt_of
from tests.support.served_answers import Answer, Load
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CLIENTS = 3  # of each router
NUM_OUTPUT = 3500  # 7 s at least, at 2 ms a step
HTTP_PORT = 18_490  # shared by the routers; below the ports that the kernel gives away
CONFIG = """
[engine]
dtype = "float32"
kv_memory_mb = 64

[router]
drain_timeout_s = 60.0
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp("fleet") / "tandem.toml"
    path.write_text(CONFIG)
    async with serving("--routers", "2", "--config", str(path), "--http", str(HTTP_PORT)) as fleet:
        yield fleet


async def router_of(client: AsyncClient) -> str:
    """The router that answers this client."""
    fleet = await client.fleet()
    (answering,) = [router.router_id for router in fleet.routers if router.HasField("num_queued")]
    return answering


async def router_after_a_loss(client: AsyncClient) -> str:
    """As `router_of`. The first call may be the one that learns of the end of its connection."""
    try:
        return await router_of(client)
    except CallFailed as error:
        if not error.lost:
            raise
        return await router_of(client)


@contextlib.asynccontextmanager
async def clients_of_each_router(address: str, num_routers: int) -> AsyncIterator[dict[str, list[AsyncClient]]]:
    """At least NUM_CLIENTS clients at each router, by router id."""
    found: dict[str, list[AsyncClient]] = {}
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < num_routers or min(map(len, found.values())) < NUM_CLIENTS:
                client = await stack.enter_async_context(client_of(address, find_credentials(None, address)))
                found.setdefault(await router_of(client), []).append(client)
        yield found


async def draining_router(fleet: Served) -> str:
    """Wait until one of two routers listens no longer, then ask the other one.

    gRPC may leave a call unanswered that arrives while its server begins to close (docs/faults.md).
    """
    await until(lambda: len(listening(fleet)) == 1, "a router has begun to drain", PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        async with client_of(fleet.address, find_credentials(None, fleet.address)) as client:
            while True:
                for router in (await client.fleet()).routers:
                    if router.state == worker_pb2.WORKER_STATE_DRAINING:
                        return router.router_id
                await asyncio.sleep(0.02)


def listening(fleet: Served) -> list[psutil.Process]:
    """The processes that listen on the port of the routers."""
    port = int(fleet.address.rpartition(":")[2])

    def listens(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.net_connections("tcp")
            return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
        return False

    return [process for process in psutil.Process(fleet.process.pid).children(recursive=True) if listens(process)]


async def answers_at_each(clients: dict[str, list[AsyncClient]]) -> dict[str, list[Answer]]:
    """A long answer to every client, under way, by router id."""
    answers = {
        router: [Answer(client, prompt_of(seed), NUM_OUTPUT) for seed, client in enumerate(found)]
        for router, found in clients.items()
    }
    for answer in chain(*answers.values()):
        await answer.begun()
    return answers


async def change(client: AsyncClient, **tables: dict[str, int]) -> int:
    """Change options, and wait until every service has them. Returns the revision."""
    revision = (await client.apply(options=json.dumps(tables))).config_revision
    async with asyncio.timeout(PATIENCE_S):
        while services_without(revision, await client.fleet()):
            await asyncio.sleep(0.01)
    return revision


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


async def test_limits_of_a_running_fleet_fall_and_rise_and_no_request_fails(served: Served) -> None:
    load = Load(served.address, 2 * NUM_CLIENTS)
    async with client_of(served.address, find_credentials(None, served.address)) as client:
        await several_run(client)
        assert await change(client, scheduler={"max_running": 1}, router={"max_in_flight_per_worker": 3}) == 2
        async with asyncio.timeout(PATIENCE_S):
            while (await decode_load(client)).num_running > 1:  # those that ran go on to their ends
                await asyncio.sleep(0.02)
        assert await most_running(client, load, num_answers=3) <= 1  # the answers show that the fleet serves on
        options = ("scheduler.max_running=0", "router.max_in_flight_per_worker=0")
        out = await said("apply", *options, "--router", served.address)
        assert out.splitlines()[-1].startswith("config 3: every service has it after "), out
        await several_run(client)
    await load.end()  # each answer is right, at its first attempt


class HttpStream:
    """A streamed completion over HTTP. `events` counts its events; `ended` tells whether the last one came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.port: int = writer.get_extra_info("sockname")[1]
        self.events, self.ended = 0, False
        self._reader, self._writer = reader, writer
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, prompt: Prompt) -> HttpStream:
        reader, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT)
        body = json.dumps({"prompt": prompt, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        return cls(reader, writer)

    async def _read(self) -> None:
        with contextlib.closing(self._writer), contextlib.suppress(ConnectionError):
            while not self.ended and (line := await self._reader.readline()):
                self.events += line.startswith(b"data: {")
                self.ended = line.startswith(b"data: [DONE]")


def peer_ports(process: psutil.Process) -> set[int]:
    return {connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr}


async def test_kill_nine_of_one_of_two_routers_breaks_its_http_streams_alone_and_calls_go_on_at_the_other_one(
    served: Served,
) -> None:
    """The kernel spreads 16 connections over both routers, but for one time in 32 768."""
    async with clients_of_each_router(served.address, 2) as clients:
        opened = await asyncio.gather(*(HttpStream.open(prompt_of(500 + seed)) for seed in range(16)))
        answers = await answers_at_each(clients)
        await until(lambda: all(stream.events for stream in opened), "every stream has an event", PATIENCE_S)
        ports = {router: peer_ports(router) for router in listening(served)}
        streams = {stream: next(router for router in ports if stream.port in ports[router]) for stream in opened}
        assert not any(stream.ended for stream in streams), "a stream had ended: nothing was tested"
        victim = next(iter(streams.values()))
        victim.kill()
        await asyncio.to_thread(victim.wait, PATIENCE_S)
        now_at = {router: {await router_after_a_loss(client) for client in found} for router, found in clients.items()}
        (survivor,) = set.union(*now_at.values())  # else a client waited for the next router
        (dead,) = answers.keys() - {survivor}

        broken, others = ([each for each in opened if (streams[each] is victim) is own] for own in (True, False))
        await asyncio.gather(*(stream.reading for stream in broken))
        assert not any(stream.ended for stream in broken)
        num_events = {stream: stream.events for stream in others}
        assert num_events, "all streams were at one router"

        def go_on() -> bool:
            return all(stream.ended or stream.events > num_events[stream] for stream in others)

        await until(go_on, "the other streams go on", PATIENCE_S)
        for stream in others:
            stream.reading.cancel()
        assert not any(answer.ended for answer in answers[dead]), "the streams had ended: nothing was tested"
        for seed, client in enumerate(clients[dead]):
            await Answer(client, prompt_of(100 + seed), num_output=5).right()
        for answer in chain(*answers.values()):
            await answer.right()

    async with clients_of_each_router(served.address, 2) as clients:
        (successor,) = clients.keys() - {survivor}
        assert successor != dead
        assert successor.partition(".")[0] == dead.partition(".")[0]
        await Answer(clients[successor][0], prompt_of(200), num_output=5).right()
        assert {process.pid for process in listening(served)}.isdisjoint({victim.pid})


async def test_a_removed_router_finishes_its_streams_and_the_other_one_serves_the_new_calls_of_its_clients(
    served: Served,
) -> None:
    async with clients_of_each_router(served.address, 2) as clients:
        answers = await answers_at_each(clients)
        assert (await clients[min(clients)][0].scale(routers=1)).wanted_routers == 1
        leaving = await draining_router(served)
        (staying,) = clients.keys() - {leaving}
        late = [Answer(client, prompt_of(300 + seed), num_output=5) for seed, client in enumerate(clients[leaving])]
        for answer in late:
            await answer.right()
        assert not any(answer.ended for answer in answers[leaving]), "the streams had ended: nothing was tested"
        for client in clients[leaving]:
            assert await router_of(client) == staying
        for answer in chain(*answers.values()):
            await answer.right()


async def test_scale_adds_a_router_and_status_shows_it(served: Served) -> None:
    out = await said("scale", "--routers", "2", "--router", served.address)
    assert "wanted: 1 prefill, 1 decode, 2 routers; " in out
    async with clients_of_each_router(served.address, 2) as clients:
        for router, found in clients.items():
            await Answer(found[0], prompt_of(400), num_output=5).right()
            ledger = await found[0].ledger()
            names = [worker.worker_id.partition(".")[0] for worker in ledger.workers]
            assert names == ["decode-0", "prefill-0"], router
        out = await said("status", "--once", "--router", served.address)
        assert "routers 2/2" in out
        assert all(router in out for router in clients)


async def test_a_roll_replaces_every_process_under_load_and_fails_and_recomputes_no_request(
    served: Served, tmp_path: Path
) -> None:
    """Stands late: the services have other names afterwards."""
    (tmp_path / "new.toml").write_text(CONFIG + "max_queued = 77\n")
    load = Load(served.address, NUM_CLIENTS)
    rolled = await said("apply", str(tmp_path / "new.toml"), "--restart", "--router", served.address)
    num_right = load.num_right
    assert num_right > 0, "no load: nothing was tested"
    await load.end()
    told = json.loads(await said("status", "--json", "--router", served.address))
    assert not told["rolling"]
    assert f"fleet has rolled: every service has config {told['config']}" in rolled
    assert [slot["config"] for slot in told["slots"]] == [told["config"]] * 4


async def end_of(fleet: Served, name: str) -> str:
    """What the fleet says in the end, after this process of Ray has died under a request."""
    victim = next(process for process in fleet.family if process.name() == name)
    async with asyncio.timeout(PATIENCE_S):
        async with client_of(fleet.address, find_credentials(None, fleet.address)) as client:
            # 3 s at least; without a raylet, Ray's processes last for about ten.
            answer = await Answer(client, prompt_of(1), num_output=1500).begun()
            victim.kill()
            await line_with(fleet.process, "Ray has failed; draining")
            assert not answer.ended, "nothing was tested"
            await answer.right()
        code, left, err = await fleet.ended_saying()
    assert (code, left) == (1, [])
    assert err.splitlines()[-1].startswith(f"error: Ray cannot go on: {name} has ended; the logs are in /")
    return err


async def test_a_gcs_server_of_ray_that_dies_takes_no_request_with_it_and_its_fleet_ends_with_the_reason(
    served: Served,
) -> None:
    """Stands behind the others: it ends the fleet of this file."""
    await end_of(replace(served, family=psutil.Process(served.process.pid).children(recursive=True)), "gcs_server")


async def test_a_raylet_that_dies_takes_no_request_with_it_and_its_fleet_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tandem.toml").write_text(CONFIG)
    async with serving("--config", str(tmp_path / "tandem.toml")) as fleet:
        said_last = (await end_of(fleet, "raylet")).splitlines()
        # On a machine without a network, Ray says first that it falls back to the name of the host.
        assert len([line for line in said_last if "network_util.cc" not in line]) == 1
