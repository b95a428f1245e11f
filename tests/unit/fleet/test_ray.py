"""Ray: actors of hosts, the calls of a router to its supervisor, and the process that keeps a Ray of our own."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import ray.exceptions

from core.config import ClusterConfig
from core.errors import ConfigError, InvalidRequest, WorkerUnavailable
from core.lifecycle import ServiceRole
from fleet.host.host import Adoption, HostDied, LocalRank
from fleet.host.service_host import ServiceHost, StartFault
from fleet.law.claims import Claim, Claims, GpuUse
from fleet.law.events import MachineId, Member, SlotId
from fleet.ray import cluster, hosts, machines, supervisor_control
from fleet.ray.calls import await_actor
from fleet.ray.cluster import Cluster, begin
from fleet.ray.head import RayHead
from fleet.ray.hosts import HostActor, RayHost
from fleet.ray.store import RayStore
from fleet.ray.supervisor_control import SupervisorControl
from fleet.supervisor.handover import Handover
from fleet.supervisor.refusal import Refusal
from fleet.supervisor.spec import FleetSpec
from tests.support.limits import no_file_larger_than

MEMBER = Member(SlotId(ServiceRole.DECODE, 0), ServiceRole.DECODE, 1)
OTHER_MEMBER = Member(SlotId(ServiceRole.PREFILL, 0), ServiceRole.PREFILL, 1)
NO_SERVICE = Mock()  # is never started
SPEC = FleetSpec(ClusterConfig(), NO_SERVICE, NO_SERVICE, NO_SERVICE, lambda _: "", 0, 1.0, 1.0)


async def test_a_machine_with_gpus_that_joins_later_makes_a_start_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Resources": {"decode": 1.0, "GPU": 8.0}}
    monkeypatch.setattr(hosts, "node_here", lambda: node)
    claims = Claims(ClusterConfig(), GpuUse.IF_PRESENT)
    earlier = claims.of(ServiceRole.DECODE, [])
    assert earlier == Claim("decode"), "no machine of the pool was there"
    fault = (await HostActor(claims, earlier, MEMBER, "", None).start_placed(b"", "", LocalRank(0, 1))).value
    assert isinstance(fault, StartFault)
    assert not fault.permanent
    assert claims.of(ServiceRole.DECODE, [node["Resources"]]) == Claim("decode", 1.0)


def test_what_ray_or_a_worker_cannot_use_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as few:
        few.setattr("resource.getrlimit", lambda _: (64, 255))
        with pytest.raises(ConfigError, match="a process may open 255 files here, fewer than the 256"):
            begin(ClusterConfig())
    with monkeypatch.context() as optimized:
        optimized.setattr("sys.flags", Mock(optimize=2))
        with pytest.raises(ConfigError, match="PYTHONOPTIMIZE=2"):
            begin(ClusterConfig())
    with (
        no_file_larger_than(1 << 20),
        pytest.raises(ConfigError, match="a file may have 1048576 bytes here, and"),
    ):
        begin(ClusterConfig())
    for limit, option in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        with monkeypatch.context() as small:
            small.setattr("resource.getrlimit", lambda asked, limit=limit: (1 << 29 if asked == limit else -1, 1 << 20))
            with pytest.raises(ConfigError, match=f"a process may (map|have) 536870912 bytes here.*`ulimit -{option}`"):
                begin(ClusterConfig())
    with monkeypatch.context() as alone:
        alone.setattr("threading.Thread.start", Mock(side_effect=[None, None, RuntimeError("can't start new thread")]))
        alone.setattr("threading.Thread.join", Mock())
        with pytest.raises(ConfigError, match="only 2 threads can start here, fewer than the 256 of a fleet"):
            begin(ClusterConfig())
    with monkeypatch.context() as read_only:
        read_only.setattr("os.access", lambda path, mode: (path, mode) != ("/dev/shm", os.W_OK))
        with pytest.raises(ConfigError, match="/dev/shm is not writable"):
            begin(ClusterConfig())
    with monkeypatch.context() as without_ipv4:
        without_ipv4.setattr("socket.socket.bind", Mock(side_effect=OSError(errno.EADDRNOTAVAIL, "no such address")))
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1 here, as workers do \(no such address\)"):
            begin(ClusterConfig())
    with (
        no_file_larger_than(1 << 19),
        pytest.raises(ConfigError, match=r"its logs into /.*\(File too large\)"),
    ):
        begin(ClusterConfig())
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    with pytest.raises(ConfigError, match="set RAY_TMPDIR"):
        begin(ClusterConfig())
    monkeypatch.delenv("RAY_TMPDIR")
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    for address in ("", "127.0.0.1:9"):
        with pytest.raises(ConfigError, match="the current directory was removed"):
            begin(ClusterConfig(address=address))


def test_only_the_main_thread_takes_the_signals_that_are_held_back_while_ray_joins() -> None:
    """In a thread of numpy, SIGTERM met the handler of Ray, which ends the process by SIGABRT."""
    program = """if True:
        import os, pathlib, signal
        from fleet.ray.cluster import Cluster
        Cluster()
        import numpy
        for task in os.listdir("/proc/self/task"):
            status = pathlib.Path(f"/proc/self/task/{task}/status").read_text()
            print(int(task) != os.getpid(), int(status.split("SigBlk:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
    others = [b"True 1"] if len(os.sched_getaffinity(0)) > 1 else []  # numpy has a thread for each core
    assert sorted(out.split(b"\n")) == [b"", b"False 0", *others]


JOINING = """if True:
    import sys, threading, types
    def init(**_):
        print("joining", flush=True)
        sys.stdin.read(1) or threading.Event().wait()
    sys.modules["ray"] = types.SimpleNamespace(init=init)
    from fleet.ray.cluster import Cluster
    Cluster("127.0.0.1:9").join()
    print("joined", threading.active_count(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_ends_a_process_that_joins_a_silent_cluster_unless_it_is_ignored(
    number: signal.Signals, ignored: bool
) -> None:
    """`tandem serve` was deaf to Ctrl-C and SIGTERM for as long as Ray tried, more than 150 s."""
    ignoring = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)\n" if ignored else ""
    with subprocess.Popen(
        [sys.executable, "-c", ignoring + JOINING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as joining:
        assert joining.stdout is not None
        assert joining.stdin is not None
        try:
            assert joining.stdout.readline() == b"joining\n"
            joining.send_signal(number)
            if ignored:
                joining.stdin.write(b"1")
                joining.stdin.close()
                assert joining.stdout.read() == b"joined 1\n"
            assert joining.wait(20.0) == (0 if ignored else 130)
        finally:
            joining.kill()


@pytest.mark.parametrize(
    ("given", "mode", "has_token"),
    [
        ({}, "token", True),
        ({"RAY_AUTH_TOKEN_PATH": "/etc/token"}, "token", False),  # Ray reads that file only without RAY_AUTH_TOKEN
        ({"RAY_AUTH_MODE": "disabled"}, "disabled", False),
    ],
)
def test_a_ray_of_our_own_wants_a_token_unless_the_operator_says_otherwise(
    given: dict[str, str], mode: str, has_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray listens on every address, and its clients can run code."""
    head = Mock()
    monkeypatch.setattr(cluster, "RayHead", head)
    monkeypatch.delitem(sys.modules, "ray")  # Ray reads its settings when it is imported
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **given})
    begin(ClusterConfig(num_prefill=2, num_decode=3, num_routers=1, decode_resource="gpus", max_workers=5))
    assert os.environ["RAY_AUTH_MODE"] == mode
    assert len(os.environ.get("RAY_AUTH_TOKEN", "")) == 64 * has_token
    num_processes, resources, _ = head.call_args.args
    assert num_processes == 7, "with the supervisor"
    assert resources["gpus"] == 5


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, [(4096, 4096)]),
        (1024, resource.RLIM_INFINITY, [(65_536, resource.RLIM_INFINITY)]),
        (70_000, 80_000, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_fleet_may_open_as_many_files_as_the_system_allows_it(
    soft: int, hard: int, raised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, changed = {resource.RLIMIT_NOFILE: (soft, hard)}, Mock()
    infinite = (resource.RLIM_INFINITY,) * 2
    with monkeypatch.context() as patched:
        patched.setattr("resource.getrlimit", lambda kind: limits.get(kind, infinite))
        patched.setattr("resource.setrlimit", changed)
        patched.setattr(cluster, "RayHead", Mock())
        begin(ClusterConfig())
    assert [call.args for call in changed.call_args_list] == [(resource.RLIMIT_NOFILE, each) for each in raised]


async def test_machines_that_leave_have_the_seconds_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1e12
    ends_at_ms = {"a": now_ms + 30_000, "b": 0, "c": now_ms - 1, "gone": now_ms}
    nodes = [{"NodeID": name, "NodeManagerAddress": f"at-{name}"} for name in "abcd"]
    monkeypatch.setattr("ray._private.state.state", Mock(get_draining_nodes=lambda: ends_at_ms))
    monkeypatch.setattr(machines, "live_nodes", lambda: nodes)
    monkeypatch.setattr("time.time", lambda: now_ms / 1e3)
    found = await machines.leaving_machines(ClusterConfig(address="head:1"))
    assert found == {MachineId("a", "at-a"): 30.0, MachineId("b", "at-b"): None, MachineId("c", "at-c"): 0.0}


@pytest.mark.parametrize(
    ("role", "name"),
    [(ServiceRole.ROUTER, "Router"), (ServiceRole.PREFILL, "PrefillWorker"), (ServiceRole.DECODE, "DecodeWorker")],
)
def test_an_actor_is_named_by_its_role(monkeypatch: pytest.MonkeyPatch, role: ServiceRole, name: str) -> None:
    """`ps` shows ray:: and the name of the class: each service was a ray::HostActor."""
    remote = Mock()
    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr(hosts, "live_nodes", list)
    monkeypatch.setattr(hosts, "on_this_machine", Mock())
    monkeypatch.setattr(hosts, "this_supervisor", Mock())
    RayHost(Member(SlotId(role, 0), role, 1), SPEC)
    (actor,) = remote.call_args.args
    assert (actor.__name__, issubclass(actor, HostActor)) == (name, True)


class Refusing:
    """The handle of an actor whose version has other calls, as Ray answers."""

    def __init__(self, fault: Exception, is_late: bool) -> None:
        self.fault, self.is_late = fault, is_late

    def __getattr__(self, method: str) -> Mock:
        if isinstance(self.fault, AttributeError):
            raise self.fault
        side_effect = AsyncMock(side_effect=self.fault) if self.is_late else Mock(side_effect=self.fault)
        return Mock(remote=side_effect)


OTHER_VERSIONS = [
    Refusing(ray.exceptions.RaySystemError(TypeError("adopt() takes 2 arguments")), is_late=True),
    Refusing(TypeError("too many positional arguments"), is_late=False),
    Refusing(AttributeError("'ActorHandle' object has no attribute"), is_late=False),
]


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr("ray.kill", kill := Mock())
    monkeypatch.setattr(hosts, "_names_of_hosts", lambda: ["host-decode-0-5eed"])
    monkeypatch.setattr(hosts, "this_supervisor", Mock())
    return kill


@pytest.mark.parametrize("actor", OTHER_VERSIONS)
async def test_a_host_of_another_version_is_killed_and_the_start_goes_on(
    monkeypatch: pytest.MonkeyPatch, kill: Mock, actor: Refusing
) -> None:
    monkeypatch.setattr("ray.get_actor", lambda _: actor)
    found, ended = await hosts.find_services(SPEC)
    assert found == []
    assert ended.startswith("decode-0 cannot answer (")
    kill.assert_called_once_with(actor)
    with pytest.raises(HostDied):
        await RayHost(MEMBER, SPEC, actor).wait()
    assert kill.call_count == 2


@pytest.mark.parametrize(
    ("adopt", "why"),
    [
        (AsyncMock(return_value=None), "does not serve, or has another config"),
        (AsyncMock(return_value=("decode-0", "10.0.0.2")), "answers as another version of Tandem"),
        (lambda *_: asyncio.Event().wait(), "does not answer within 0.01 s"),
    ],
)
async def test_a_host_that_is_not_adopted_is_killed_and_the_operator_gets_the_reason(
    monkeypatch: pytest.MonkeyPatch, kill: Mock, adopt: Callable[..., Awaitable[object]], why: str
) -> None:
    actor = Mock(adopt=Mock(remote=adopt))
    monkeypatch.setattr("ray.get_actor", lambda _: actor)
    monkeypatch.setattr(hosts, "ANSWER_TIMEOUT_S", 0.01)
    assert await hosts.find_services(SPEC) == ([], f"decode-0 {why}")
    kill.assert_called_once_with(actor)


async def test_of_two_services_of_one_slot_one_is_adopted_and_the_other_killed(
    monkeypatch: pytest.MonkeyPatch, kill: Mock
) -> None:
    actors = {}
    for name, member in (("first", MEMBER), ("second", MEMBER), ("other", OTHER_MEMBER)):
        adoption = Adoption(member, Mock(), MachineId("here", ""), 0)
        actors[name] = Mock(adopt=Mock(remote=AsyncMock(return_value=adoption)))
    monkeypatch.setattr("ray.get_actor", actors.__getitem__)
    monkeypatch.setattr(hosts, "_names_of_hosts", lambda: list(actors))
    found, ended = await hosts.find_services(SPEC)
    assert [adoption.member for _, adoption in found] == [MEMBER, OTHER_MEMBER]
    assert not ended
    kill.assert_called_once()
    (killed,) = kill.call_args.args
    (kept,) = {"first", "second"} - {name for name, actor in actors.items() if actor is killed}
    assert found[0][0]._actor is actors[kept]  # type: ignore[attr-defined]


async def test_a_router_of_a_later_version_says_what_its_supervisor_lacks() -> None:
    for actor in OTHER_VERSIONS[1:]:
        with pytest.raises(WorkerUnavailable, match=r"version of Tandem does not take the call notes: .*serve` again"):
            await SupervisorControl(actor).notes(1, 0)


async def test_an_answer_of_the_supervisor_that_this_version_cannot_read_is_a_typed_error() -> None:
    odd = ray.exceptions.RaySystemError(
        ConfigError("Tandem 7.2 cannot read what Tandem 7.1 has sent"), "in line 1\nodd"
    )
    with pytest.raises(WorkerUnavailable, match=r"^the fleet's supervisor: odd$"):
        await SupervisorControl(Refusing(odd, is_late=True)).status()


async def test_a_record_that_is_no_text_is_read_as_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Mock(internal_kv_get=Mock(return_value=b"{\xff"))
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: table)
    assert Handover.from_json(await RayStore().read()) is None


async def test_a_host_that_drains_is_adopted_by_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceHost, "drain", AsyncMock())
    monkeypatch.setattr(hosts, "machine_here", Mock())
    host = HostActor(Mock(), Claim(), MEMBER, "", None)
    host._endpoint = Mock()
    assert (await host.adopt("", Mock())).value is not None
    await host.drain(1.0)
    assert (await host.adopt("", Mock())).value is None


async def test_the_supervisor_is_asked_by_its_handle_and_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_actor", Mock(side_effect=AssertionError("ray.get_actor blocks the loop")))
    supervisor = Mock()
    supervisor.scale.remote = AsyncMock(side_effect=[{ServiceRole.DECODE: 2}, Refusal("decode", "at most 4")])
    control = SupervisorControl(supervisor)
    assert await control.scale({}) == {ServiceRole.DECODE: 2}
    with pytest.raises(InvalidRequest, match="decode: at most 4"):
        await control.scale({ServiceRole.DECODE: 5})


async def test_a_supervisor_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_control, "CALL_TIMEOUT_S", 0.01)
    supervisor = Mock()
    supervisor.scale.remote = lambda *_: asyncio.Event().wait()
    with pytest.raises(WorkerUnavailable, match="does not answer within"):
        await SupervisorControl(supervisor).scale({})


async def test_an_actor_that_ray_kills_for_memory_is_dead() -> None:
    """`tandem serve` ended with a traceback of a hundred lines."""
    call = AsyncMock(side_effect=ray.exceptions.OutOfMemoryError("4 worker(s) were killed"))
    with pytest.raises(HostDied, match="short of memory"):
        await await_actor(call())


def test_a_ray_that_leaves_keeps_no_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's shutdown gives SIGTERM its default action. A second one then ended `tandem serve` while Ray closed."""
    before, joined = signal.getsignal(signal.SIGTERM), Cluster("somewhere:1")
    joined._entered_ray = True
    monkeypatch.setattr("ray.shutdown", lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        joined.close()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


# Prints the process id of its child in place of an address.
STARTER = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)
print(json.dumps({"address": str(child.pid)}), flush=True)
sys.stdin.read()
child.kill()
"""
PATIENCE_S = 10.0


@pytest.mark.parametrize("is_killed", [False, True])
def test_close_ends_the_processes_of_the_starter_also_if_the_starter_was_killed(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text(STARTER)
    monkeypatch.setattr("fleet.ray.head.STARTER", starter)
    head = RayHead(1, {}, 0)
    child = psutil.Process(int(head.address()))
    if is_killed:
        (keeper,) = [parent for parent in child.parents() if str(starter) in parent.cmdline()]
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
        assert child.is_running(), "the child ended by itself, so this test proves nothing"
    head.close()
    psutil.wait_procs([child], PATIENCE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("then", "name"),
    [
        ('print(json.dumps({"died": "raylet"}), flush=True); sys.stdin.read()', "raylet"),
        ("sys.exit(1)", "the process that keeps it"),
    ],
)
async def test_died_names_the_process(then: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text(f"import json, sys\nprint(json.dumps({{'address': 'here'}}), flush=True)\n{then}\n")
    monkeypatch.setattr("fleet.ray.head.STARTER", starter)
    head = RayHead(1, {}, 0)
    try:
        assert head.address() == "here"
        assert await asyncio.wait_for(head.died(), PATIENCE_S) == name
    finally:
        head.close()
