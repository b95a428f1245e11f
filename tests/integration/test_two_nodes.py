"""The systemd units make one cluster of machines (loopback addresses here); each pool lands on its own kind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from core.lifecycle import ServiceRole
from tests.integration.fake_services import Journal
from tests.support.ports import kept_port
from tests.support.ray_cluster import RayCluster, driver, machine, ray_environment
from tests.support.units import Unit

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD_IP, PREFILL_IP, DECODE_IP, OTHER_DECODE_IP = "127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[RayCluster]:
    with ray_environment() as environment, kept_port(HEAD_IP) as port:
        head = f"{HEAD_IP}:{port}"
        # One after the other: on one real machine two starts at the same time fight for socket names.
        async with (
            machine(Unit.read("tandem-head.service"), environment, HEAD_IP, PORT=str(port)),
            machine(Unit.read("tandem-worker@.service", "prefill"), environment, PREFILL_IP, HEAD=head, PLACES="1"),
            machine(Unit.read("tandem-worker@.service", "decode"), environment, DECODE_IP, HEAD=head, PLACES="2"),
        ):
            yield RayCluster(head, environment)


HOSTS = {"router-0": HEAD_IP, "prefill-0": PREFILL_IP, "decode-0": DECODE_IP}


@pytest.mark.timeout(240)
async def test_each_pool_lands_on_its_own_machine_and_outlives_its_driver_until_the_next_one_adopts_it(
    tmp_path: Path, cluster: RayCluster
) -> None:
    path = tmp_path / "journal"
    async with Journal.open(path) as journal:
        async with driver(cluster, path, KINSHIP="one") as earlier:
            started = {name: await journal.start_of(name) for name in HOSTS}
            assert {name: start["host"] for name, start in started.items()} == HOSTS
            assert str(started["router-0"]["shared"]).startswith(f"{HEAD_IP}:"), "the supervisor claimed no port"
            assert {start["niceness"] for start in started.values()} == {os.nice(0)}, "a service loses to others"
            first = {name: start["pid"] for name, start in started.items()}
            assert await earlier.scale(ServiceRole.PREFILL, 1) == ["prefill"]
        async with driver(cluster, path, KINSHIP="one") as heir:
            assert await heir.scale(ServiceRole.ROUTER, 1) == ["prefill"], "what an operator has set stays"
            await journal.wait_for(name="router-0", event="workers", workers=["decode-0", "prefill-0"])
            assert {name: journal.started[name]["pid"] for name in HOSTS} == first, "nothing has started again"
            psutil.Process(first["decode-0"]).kill()  # type: ignore[arg-type]
            again = await journal.wait_for(name="decode-0", event="started")
            await journal.wait_for(name="router-0", event="workers", workers=["decode-0", "prefill-0"])
            earlier_starts = [journal.started[name] for name in HOSTS]
        async with driver(cluster, path, KINSHIP="another", ADOPTION_S="4"):
            # The line "ready" may overtake their messages.
            second = [(await journal.start_after(start))["pid"] for start in earlier_starts]
            assert not {*second} & {*first.values(), again["pid"]}, "services of another config are ended"
            services = [psutil.Process(pid) for pid in second]  # type: ignore[arg-type]
        _, left = await asyncio.to_thread(psutil.wait_procs, services, 1)
        assert len(left) == 3, "they wait for a driver"
        _, left = await asyncio.to_thread(psutil.wait_procs, services, 40)
        assert not left, "nobody came"


async def test_routers_with_a_resource_run_where_it_is_and_services_without_kinship_die_with_their_driver(
    tmp_path: Path, cluster: RayCluster
) -> None:
    async with Journal.open(tmp_path / "journal") as journal:
        async with driver(cluster, tmp_path / "journal", "decode"):  # the other place there is for a decode worker
            started = await journal.start_of("router-0")
            assert (started["host"], started["shared"]) == (DECODE_IP, "")
            await journal.wait_for(name="router-0", event="workers", workers=["decode-0", "prefill-0"])
            services = [psutil.Process(pid) for pid in journal.pids]
        assert len(services) == 3
        _, left = await asyncio.to_thread(psutil.wait_procs, services, 40)
        assert left == [], "what a driver started ends with it, also on other machines"


async def test_a_machine_that_gets_sigterm_ends_after_its_worker_is_replaced_and_has_drained(
    tmp_path: Path, cluster: RayCluster
) -> None:
    """Stands last: one of the machines of the fixture may end."""
    async with (
        machine(
            Unit.read("tandem-worker@.service", "decode"),
            cluster.environment,
            OTHER_DECODE_IP,
            HEAD=cluster.head,
            PLACES="2",
        ),
        Journal.open(tmp_path / "journal") as journal,
        driver(cluster, tmp_path / "journal"),
    ):
        leaving = (await journal.start_of("decode-0"))["host"]
        await journal.wait_for(event="workers", workers=["decode-0", "prefill-0"])
        ray_start = ray_start_on(str(leaving))
        ray_start.send_signal(signal.SIGTERM)
        replacement = await journal.start_of("decode-1")
        assert {leaving, replacement["host"]} == {DECODE_IP, OTHER_DECODE_IP}
        await journal.wait_for(event="workers", workers=["decode-0", "decode-1", "prefill-0"])
        await journal.wait_for_drains({"decode-0"})
        await journal.wait_for(event="workers", workers=["decode-1", "prefill-0"])
        gone, _ = await asyncio.to_thread(psutil.wait_procs, [ray_start], 25)
        assert gone, "Ray ends an empty machine long before its time limit of 30 s"


def ray_start_on(ip: str) -> psutil.Process:
    """The process of `ray start` on this machine."""
    return next(
        process for process in psutil.Process().children() if {"start", "--block", ip} <= set(process.cmdline())
    )
