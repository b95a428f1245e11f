"""The fleet on a real Ray: placed, watched, started again, resized, and gone with its driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cli.commands.serve import fleet_spec
from core.config import ClusterConfig, EngineConfig, RouterConfig, TandemConfig
from core.errors import ConfigError
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.cores import share_of_cores, usable_cores
from fleet.law.events import FleetFailed, FleetReady, FleetStopped
from fleet.ray.cluster import Cluster, connect
from tests.integration.fake_services import (
    Journal,
    build_nothing,
    fake_fleet,
    wait_for_message,
    wait_for_update,
)
from tests.support.ray_cluster import RayCluster, driver

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = ClusterConfig(max_workers=4, restart_backoff_s=0.2)
P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
SIZES = {P: 1, D: 1, R: 1}
SMALLEST = ["decode-0", "prefill-0"]
Fleet = tuple[Cluster, Journal]


@pytest.fixture(scope="module")
def forks() -> list[str]:
    """One entry for each fork of this process that ran Python before it executed the new program."""
    seen: list[str] = []
    os.register_at_fork(before=lambda: seen.append("fork"))
    return seen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ray_here(forks: list[str]) -> AsyncIterator[Cluster]:
    """One Ray for all tests of this file: each start takes seconds."""
    del forks
    cluster = connect(CONFIG)
    yield cluster
    cluster.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_here(ray_here: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One fleet of a router, a prefill and a decode worker that serve; drained at the end."""
    path = tmp_path_factory.mktemp("fleet") / "journal"
    async with Journal.open(path) as journal:
        await ray_here.start(fake_fleet(path, CONFIG))
        await wait_for_update(ray_here, FleetReady)
        await journal.wait_for(event="workers", workers=SMALLEST)
        yield ray_here, journal
        await ray_here.shutdown()
        await wait_for_update(ray_here, FleetStopped)
        await journal.wait_for_drains({"router-0", *SMALLEST})
        await ray_here.leave()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(fleet_here: Fleet) -> AsyncIterator[Fleet]:
    """The same fleet for every test, brought back to its first size after each."""
    cluster, journal = fleet_here
    yield cluster, journal
    if await cluster.control.scale({}) != SIZES:
        await cluster.control.scale(SIZES)
        await journal.wait_for(event="workers", workers=SMALLEST)


async def test_ray_is_started_without_a_fork_of_this_process_and_its_threads(
    ray_here: Cluster, forks: list[str]
) -> None:
    del ray_here
    assert forks == []
    await asyncio.to_thread(subprocess.run, ["true"], preexec_fn=lambda: None, check=True)
    assert forks == ["fork"], "what would have been seen"


async def test_ray_runs_without_the_processes_that_nothing_here_asks(ray_here: Cluster) -> None:
    del ray_here
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    programs = {command.partition(" --")[0].rpartition("/")[2] for command in commands}
    assert {"gcs_server", "raylet"} <= programs, "where Ray's programs are looked for"
    assert not programs & {"dashboard.py", "monitor.py", "log_monitor.py"}


async def test_a_ray_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr("fleet.ray.cluster.OBJECT_STORE_BYTES", 1)
    with pytest.raises(ConfigError, match=r"Ray does not start on this machine: .*bytes"):
        connect(CONFIG)
    # Another test's Ray may live beside it, and starts processes when it likes.
    new = set(psutil.Process().children(recursive=True)) - before
    families = [family for process in new if (family := family_of(process))]
    assert not [family[0] for family in families if before.isdisjoint(family)]


def family_of(process: psutil.Process) -> list[psutil.Process]:
    """It and its ancestors; nothing where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.parents()] if process.is_running() else []
    return []


async def test_a_start_that_cannot_succeed_is_one_line_that_says_why(ray_here: Cluster, tmp_path: Path) -> None:
    """The first test of this file, since the fleet of the others needs the whole Ray."""
    async with Journal.open(tmp_path / "journal"):
        spec = replace(fake_fleet(tmp_path / "journal", CONFIG), decode=build_nothing)
        await ray_here.start(spec)
        failed = await wait_for_update(ray_here, FleetFailed)
        assert failed == FleetFailed("decode-0: no model of that name for worker 0")
        await ray_here.shutdown()
        await wait_for_update(ray_here, FleetStopped)
        await ray_here.leave()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers on one core share it")
async def test_prefill_and_decode_workers_compute_on_cores_of_their_own(ray_here: Cluster) -> None:
    """Real workers; stands before the first use of the other tests' fleet."""
    everything = frozenset(os.sched_getaffinity(0))
    engine = EngineConfig(model="random:llama-tiny", dtype="float32", device="cpu", kv_memory_mb=4)
    config = TandemConfig(engine=engine, cluster=CONFIG, router=RouterConfig(port=0))
    await ray_here.start(fleet_spec(config))
    try:
        await wait_for_update(ray_here, FleetReady)
        allowed = {process.pid: cores_of_threads(process.pid) for process in psutil.Process().children(recursive=True)}
        await ray_here.shutdown()
        await wait_for_update(ray_here, FleetStopped)
    finally:
        await ray_here.leave()  # or the other tests' fleet would be refused
    workers = {pid: threads for pid, threads in allowed.items() if set(threads.values()) - {everything}}
    assert len(workers) == 2
    shares = [frozenset(threads.values()) - {everything} for threads in workers.values()]
    assert set.union(*map(set, shares)) == {
        frozenset(share_of_cores(usable_cores(), local_rank, 2)) for local_rank in range(2)
    }
    for pid, threads in workers.items():
        assert threads[pid] == everything, "the event loop runs wherever there is room"


def cores_of_threads(pid: int) -> dict[int, frozenset[int]]:
    """Of each thread of a process, by its id, but for those that are gone meanwhile."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                found[int(path.name)] = frozenset(os.sched_getaffinity(int(path.name)))
    return found


async def test_a_dead_worker_is_published_away_and_comes_back_in_a_new_process(
    fleet: Fleet,
) -> None:
    cluster, journal = fleet
    await cluster.control.scale({D: 2})
    second = await journal.wait_for(name="decode-1", event="started")
    cores: list[int] = second["cores"]  # type: ignore[assignment]
    assert (second["num_threads"], second["omp"]) == (len(cores), str(len(cores)))
    await journal.wait_for(event="workers", workers=["decode-0", "decode-1", "prefill-0"])
    os.kill(int(str(second["pid"])), signal.SIGKILL)
    await journal.wait_for(event="workers", workers=SMALLEST)
    await journal.start_after(second)
    await wait_for_message(cluster, "decode-1 died: its process ended")
    await journal.wait_for(event="workers", workers=["decode-0", "decode-1", "prefill-0"])


async def test_a_worker_that_fails_by_its_own_fault_is_ended_and_the_operator_told(fleet: Fleet) -> None:
    cluster, journal = fleet
    await cluster.control.scale({P: 2})
    started = await journal.wait_for(name="prefill-1", event="started")
    await journal.wait_for(event="workers", workers=[*SMALLEST, "prefill-1"])
    host, port = str(started["address"]).split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await wait_for_message(cluster, "prefill-1 died: RuntimeError: somebody connected")
    writer.close()
    await journal.start_after(started)
    await journal.wait_for(event="workers", workers=[*SMALLEST, "prefill-1"])


async def test_a_dead_router_comes_back_at_its_address_and_hears_of_every_worker(
    fleet: Fleet,
) -> None:
    cluster, journal = fleet
    (router,) = await cluster.routers()
    pid = pid_of(router)
    os.kill(pid, signal.SIGKILL)
    again = await journal.wait_for(name="router-0", event="started")
    assert again["address"] == router.address
    assert again["pid"] != pid
    assert (await journal.wait_for(event="workers"))["workers"] == SMALLEST


def pid_of(service: Endpoint) -> int:
    """The process of a fake service."""
    return int(service.service_id.rpartition("-")[2], 16)


async def test_the_router_alone_can_ask_the_supervisor_for_the_wanted_sizes(fleet: Fleet) -> None:
    _, journal = fleet
    wanted = {name: journal.started[name]["wanted"] for name in ("router-0", *SMALLEST)}
    assert wanted == dict.fromkeys(SMALLEST) | {"router-0": {role.value: 1 for role in SIZES}}


async def test_a_second_fleet_in_the_same_cluster_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    del fleet
    with pytest.raises(ConfigError, match="tandem scale"):
        await Cluster().start(fake_fleet(tmp_path / "other", CONFIG))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "no Ray cluster at"),
        ("here", "must be host:port"),
        (":9", "must be host:port"),
        ("127.0.0.1:ray", "must be host:port"),
    ],
)
async def test_joining_what_is_not_there_says_so_at_once(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(ClusterConfig(address=address))


async def test_kill_nine_of_the_driver_leaves_no_process(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal") as journal:
        async with driver(RayCluster("", dict(os.environ)), tmp_path / "journal") as killed:
            family = psutil.Process(killed.process.pid).children(recursive=True)
        assert len(family) > 6, "Ray's own processes, the supervisor, three services"
        assert journal.pids <= {process.pid for process in family}
    _, left = await asyncio.to_thread(psutil.wait_procs, family, 40)
    assert left == []
