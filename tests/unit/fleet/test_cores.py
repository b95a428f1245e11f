"""A host: the cores of its machine, divided without overlap, and an address that routers can dial."""

from __future__ import annotations

import functools
import math
import os
import threading
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.by_name import pack
from fleet.host.cores import LocalRanks, cpu_quota, num_threads_for, share_of_cores, usable_cores
from fleet.host.service_host import Placement, ServiceHost, reachable
from runtime.rpc.grpc_server import GrpcServer, open_channel
from runtime.rpc.security import OPEN, ServerRules
from worker.executor import pinned


@pytest.mark.parametrize(("num_cores", "num_sharers"), [(1, 1), (2, 1), (2, 2), (3, 2), (8, 3), (8, 8), (13, 8)])
def test_shares_are_disjoint_and_use_every_core_if_there_are_enough(num_cores: int, num_sharers: int) -> None:
    cores = list(range(10, 10 + num_cores))
    shares = [share_of_cores(cores, local_rank, num_sharers) for local_rank in range(num_sharers)]
    assert [core for share in shares for core in share] == cores
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_worker_has_a_core_of_another_where_there_are_too_few_or_where_its_seat_is_beyond_the_sharers() -> None:
    assert [share_of_cores([4, 7], local_rank, 5) for local_rank in range(5)] == [(4,), (7,), (4,), (7,), (4,)]
    assert share_of_cores([0, 1, 2, 3], 2, 2) == share_of_cores([0, 1, 2, 3], 0, 2) == (0, 1)


def test_hardware_threads_of_one_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for cpu in range(8):  # two sockets of two cores; first threads are 0 to 3, second threads 4 to 7
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text(f"{cpu % 2}\n")
        (directory / "core_id").write_text(f"{cpu // 2 % 2}\n")
    cores = usable_cores(tmp_path)
    assert cores == [0, 4, 2, 6, 1, 5, 3, 7]
    halves = [set(share_of_cores(cores, local_rank, 2)) for local_rank in range(2)]
    assert halves == [{0, 2, 4, 6}, {1, 3, 5, 7}], "a share is not one socket"


def test_only_cores_that_this_process_may_use_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 3})
    assert usable_cores(tmp_path / "no topology") == [3, 9]


VERSION_2, VERSION_1 = "0::/pod/own\n", "5:memory:/other\n3:cpu,cpuacct:/pod/own\n0::/\n"
QUOTA, PERIOD = "cpu/{}cpu.cfs_quota_us", "cpu/{}cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (VERSION_2, {"cpu.max": "150000 100000\n"}, 1.5),  # in a container
        (VERSION_2, {"pod/own/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4.0),
        (VERSION_2, {"pod/own/cpu.max": "50000 100000", "pod/cpu.max": "400000 100000"}, 0.5),
        (VERSION_2, {"pod/own/cpu.max": "max 100000"}, math.inf),
        (VERSION_1, {QUOTA.format(""): "300000", PERIOD.format(""): "100000\n"}, 3.0),  # in a container
        (VERSION_1, {QUOTA.format("pod/own/"): "50000", PERIOD.format("pod/own/"): "25000"}, 2.0),
        (VERSION_1, {QUOTA.format("pod/own/"): "-1", PERIOD.format("pod/own/"): "100000"}, math.inf),
        (VERSION_1, {QUOTA.format("other/"): "100000", PERIOD.format("other/"): "100000"}, math.inf),
        (VERSION_2, {"pod/own/cpu.max": "a"}, math.inf),
        (None, {"cpu.max": "100000 100000"}, math.inf),  # no control groups
    ],
)
def test_a_quota_is_that_of_the_own_group_and_of_those_around_it(
    tmp_path: Path, membership: str | None, files: dict[str, str], expected: float
) -> None:
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == expected


@pytest.mark.parametrize(
    ("num_cores", "num_sharers", "quota", "expected"),
    [(8, 1, math.inf, 8), (8, 1, 2.0, 2), (8, 2, 5.0, 2), (4, 1, 8.0, 4), (8, 1, 0.5, 1), (0, 0, math.inf, 1)],
)
def test_a_worker_has_no_more_threads_than_cores_and_its_share_of_the_quota(
    num_cores: int, num_sharers: int, quota: float, expected: int
) -> None:
    assert num_threads_for(range(num_cores), num_sharers, quota) == expected


def test_a_pinned_thread_passes_its_cores_to_new_threads_and_is_unpinned_afterwards() -> None:
    everything = os.sched_getaffinity(0)
    core = max(everything)
    seen: list[set[int]] = []
    with pinned([core]):
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == everything


def test_a_worker_takes_the_lowest_free_seat_of_its_machine() -> None:
    local_ranks = LocalRanks()
    assert [local_ranks.take("a", who) for who in ("p", "q", "r")] == [0, 1, 2]
    assert local_ranks.take("b", "s") == 0
    local_ranks.leave("q")
    local_ranks.leave("a worker without a local_rank")
    assert [local_ranks.take("a", who) for who in ("t", "u")] == [1, 3]


MESSAGE_BYTES = 1 << 20


def endpoint(address: str, role: ServiceRole = ServiceRole.DECODE) -> Endpoint:
    return Endpoint("decode-0.1", address, role)


@pytest.mark.parametrize(
    ("listening", "host", "dialled"),
    [
        ("0.0.0.0:7", "10.0.0.3", "10.0.0.3:7"),
        ("[::]:7", "10.0.0.3", "10.0.0.3:7"),
        ("[::]:7", "fd00::3", "[fd00::3]:7"),
        ("0.0.0.0:7", "", "127.0.0.1:7"),
        ("[::]:7", "", "127.0.0.1:7"),
        ("10.0.0.3:7", "192.168.0.3", "10.0.0.3:7"),
        ("127.0.0.1:7", "", "127.0.0.1:7"),
    ],
)
def test_a_worker_on_every_address_is_dialled_at_its_machines_own(listening: str, host: str, dialled: str) -> None:
    assert reachable(endpoint(listening), host) == endpoint(dialled)
    router = endpoint(listening, ServiceRole.ROUTER)
    assert reachable(router, host) == router, "as the operator has configured it"


class Listening:
    """A worker that only listens."""

    def __init__(self, host: str, _: Placement) -> None:
        self._server = GrpcServer(host, 0, MESSAGE_BYTES, OPEN, ServerRules((), require_client_certs=False))

    async def start(self) -> Endpoint:
        return endpoint(await self._server.start())

    async def stop(self) -> None:
        await self._server.stop(0.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
async def test_the_address_that_a_host_gives_answers(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for effect in ("gc.disable", "gc.freeze", "sys.setswitchinterval"):
        monkeypatch.setattr(effect, lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the host sets it, the test puts it back
    service_host = ServiceHost()
    placement = Placement(ordinal=0, host="", address="", num_threads=1, control=None, slot="decode-1")
    with caplog.at_level("INFO"):
        found = await service_host.start(pack(functools.partial(Listening, host)), placement)
    assert isinstance(found, Endpoint)
    assert caplog.messages[0] == "decode-1 starts", "the log of a service names it first"
    assert found.address.rpartition(":")[0] in ("127.0.0.1", "[::1]")
    async with open_channel(found.address, MESSAGE_BYTES) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await service_host.stop()
