"""The fleet on Ray, from the side of `tandem serve`.

`tandem serve` starts a Ray (`fleet/ray/head.py`) or joins one, and creates the supervisor actor, which creates one
actor for each service (`fleet/ray/hosts.py`). Each link of the chain driver, supervisor, hosts ends with the link
before it; in a joined cluster, hosts outlive their supervisor for a while, and the next one adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.config import ClusterConfig
from core.errors import ConfigError, WorkerUnavailable
from core.service import Endpoint
from fleet.host.host import HostDied
from fleet.law.claims import GpuUse, check_accelerators, check_memory, check_room
from fleet.ray.calls import await_actor, log_dir
from fleet.ray.head import RayHead
from fleet.ray.hosts import SupervisorActor, kill_hosts, on_this_machine
from fleet.ray.machines import live_nodes
from fleet.ray.supervisor_control import SupervisorControl
from fleet.supervisor.notes import FleetUpdate
from fleet.supervisor.spec import FleetSpec

NAMESPACE = "tandem"
SUPERVISOR_NAME = "supervisor"
SHARED_MEMORY = "/dev/shm"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # close to the minimum of Ray; no request uses the object store
LOG_BYTES = 1 << 20  # more than the logs of Ray take while it starts
JOIN_TIMEOUT_S = 5.0

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAKE = signal.SIGURG  # nothing else in this process takes it

MIN_FILES = 256  # that a process may open, connections included; fewer: `ConfigError`
MIN_BYTES = (  # fewer: `ConfigError`, where Ray hangs or aborts
    (resource.RLIMIT_FSIZE, OBJECT_STORE_BYTES, "a file may have", "f"),
    (resource.RLIMIT_AS, 2_000_000_000, "a process may map", "v"),
    (resource.RLIMIT_DATA, 700_000_000, "the data of a process may have", "d"),
)
MIN_THREADS = 256  # that this user, or this container, can still start; fewer: `ConfigError`
THREAD_BYTES = 1 << 18  # of a stack, while they are counted
MAX_FILES = 65_536  # to which a lower limit is raised, as far as the system allows it
# Ray reads these when it is imported.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # the operator has not agreed to usage reports
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # hides Ray's paragraph about each death; `tandem serve` prints one line
}

logger = logging.getLogger(__name__)


class Cluster:
    """The handle of a fleet: call `begin`, then `join`, then the other methods.

    Ray starts between `begin` and `join`: do slow work that needs no Ray there.
    """

    def __init__(self, address: str = "", head: RayHead | None = None) -> None:
        self._address = address  # empty: the head's
        self._head = head
        self._entered_ray = False
        self._supervisor: Any = None
        self._pending_updates: Any = None
        with _signals_held_back():  # else a thread of numpy takes a signal, and a Ray that joins aborts
            importlib.import_module("numpy")

    def join(self) -> None:
        """Wait for Ray and become one of its drivers. Raises `ConfigError` if Ray does not start; call `close` then."""
        import ray  # the slow import runs while Ray starts

        del ray
        try:
            address = self._head.address() if self._head is not None else self._address
            self._entered_ray = True  # also after a failure: Ray then has threads that `close` must end
            _join(address)
        except RuntimeError as error:
            raise ConfigError(
                f"Ray does not start on this machine: {error}; its logs are in {_ray_place()}/ray"
            ) from error

    async def start(self, spec: FleetSpec) -> None:
        """Begin to start the fleet; `updates` reports progress.

        Raises `ConfigError` if a fleet runs there already, or if the GPUs or the memory that it asks for cannot exist.
        """
        import ray

        if self._head is not None:
            check_memory(spec.claims, spec.sizes, live_nodes()[0]["Resources"])
        spec = self._with_settled_gpus(spec)
        actor = ray.remote(SupervisorActor).options(
            name=SUPERVISOR_NAME, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=on_this_machine()
        )
        self._pending_updates = None
        try:
            self._supervisor = actor.remote(spec)
        except ValueError as error:
            raise ConfigError("a fleet runs in this Ray cluster already; resize it with `tandem scale`") from error
        await self._ask(self._supervisor.start.remote())

    def _with_settled_gpus(self, spec: FleetSpec) -> FleetSpec:
        """Raises `ConfigError` for an unknown accelerator type, and on a Ray of our own for too few GPUs."""
        if spec.gpu_use is GpuUse.NEVER:
            return spec
        from ray.util.accelerators import accelerators  # the package itself omits newer types, such as H200

        machines = [node["Resources"] for node in live_nodes()]
        names = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}
        check_accelerators(spec.claims, names, machines)
        if self._head is None:
            return spec
        claims = spec.claims.settled(machines[0])
        check_room(claims, spec.sizes, machines[0])
        return replace(spec, gpu_use=claims.gpu_use)

    async def updates(self) -> list[FleetUpdate]:
        """The updates since the last call. Waits until there is one."""
        if self._pending_updates is None:
            self._pending_updates = self._supervisor.updates.remote()
        # If this wait is cancelled, the call goes on and answers the next `updates`.
        updates: list[FleetUpdate] = await self._ask(self._pending_updates)
        self._pending_updates = None
        return updates

    async def routers(self) -> list[Endpoint]:
        """The endpoints of the routers that serve, by their numbers."""
        endpoints: list[Endpoint] = await self._ask(self._supervisor.routers.remote())
        return endpoints

    @property
    def log_dir(self) -> str:
        """Logs of every process of Ray on this machine."""
        return log_dir()

    async def failed(self) -> str:
        """Wait until Ray itself fails, and return the reason. Waits for ever in a cluster that was joined."""
        if self._head is None:
            await asyncio.Event().wait()
        assert self._head is not None
        return f"Ray cannot go on: {await self._head.died()} has ended; the logs are in {log_dir()}"

    @property
    def control(self) -> SupervisorControl:
        """Call `start` first."""
        return SupervisorControl(self._supervisor)

    async def shutdown(self) -> float:
        """As `Supervisor.shutdown`.

        Raises `WorkerUnavailable` if no fleet has started, or if its supervisor is dead.
        """
        if self._supervisor is None:
            raise WorkerUnavailable("no fleet has started")
        limit_s: float = await self._ask(self._supervisor.shutdown.remote())
        return limit_s

    async def _ask(self, call: Any) -> Any:
        """Raises `WorkerUnavailable` if the supervisor is dead."""
        try:
            return await await_actor(call)
        except HostDied as death:
            raise WorkerUnavailable(f"the fleet's supervisor died: {death}") from death

    def kill_services(self) -> None:
        """Kill what would outlive the supervisor."""
        if self._address and self._entered_ray:
            kill_hosts()

    async def leave(self) -> None:
        """End the supervisor, and with it the rest of the fleet. Another fleet may start afterwards."""
        import ray

        ray.kill(self._supervisor)
        self.kill_services()
        with contextlib.suppress(HostDied):
            await await_actor(self._supervisor.updates.remote())

    def close(self) -> None:
        """Leave Ray, and end a Ray that `begin` started. A second call does nothing."""
        if self._entered_ray:
            import ray

            with _signals_held_back():
                ray.shutdown()
        if self._head is not None:
            self._head.close()


def begin(config: ClusterConfig) -> Cluster:
    """Begin to start a Ray on this machine, or find the Ray at `config.address`.

    Raises `ConfigError` if no Ray answers at that address, or if this process cannot start one.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _require_directory()
    if config.address:
        _require_reachable(config.address)
        return Cluster(config.address)
    _require_python()
    _require_loopback()
    _require_room()
    _require_limits()
    _require_threads()
    _shut_ray_in()
    names = filter(None, (config.prefill_resource, config.decode_resource, config.router_resource))
    resources = dict.fromkeys(names, config.max_workers)
    num_processes = 1 + config.num_routers + config.num_prefill + config.num_decode  # and the supervisor
    return Cluster(head=RayHead(num_processes, resources, OBJECT_STORE_BYTES))


def connect(config: ClusterConfig) -> Cluster:
    """`begin` and `join`; `close` if either fails."""
    cluster = begin(config)
    try:
        cluster.join()
    except BaseException:  # also after Ctrl-C during the start
        cluster.close()
        raise
    return cluster


def _join(address: str) -> None:
    import ray

    try:
        # Ray has every actor import from the current directory first, whose files may have the names of our packages.
        with _signals_held_back(), _ended_by_signals(), contextlib.chdir(Path(__file__).parents[2]):
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join Ray at {address}: {str(error).splitlines()[0]}{_about_token()}") from error


def _about_token() -> str:
    """A hint: without the right token, Ray reports only that the cluster is out of reach."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "; is its token the one that is here? (deploy/README.md)"
    return "; if it requires a token, set RAY_AUTH_MODE=token and have its token here (deploy/README.md)"


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP, which crash a Ray that joins, and restore their handlers afterwards: Ray
    replaces those of SIGTERM when it joins, and takes them away when it leaves."""
    mask, handlers = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, WAKE)), [signal.getsignal(n) for n in STOPS]
    try:
        yield
    finally:
        for number, handler in zip(STOPS, handlers, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a signal that is held back end this process: Ray joins a cluster that does not answer for minutes."""
    stops = {number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN}

    def watch() -> None:
        if signal.sigwait({*stops, WAKE}) != WAKE:
            os._exit(128 + signal.SIGINT)  # as after Ctrl-C; the process that keeps a Ray of our own ends it

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        assert watcher.ident is not None
        signal.pthread_kill(watcher.ident, WAKE)
        watcher.join()


def _shut_ray_in() -> None:
    """Let in only programs of this machine with the token of this process, because clients of Ray can run code.

    Ray listens on 127.0.0.1. Its choice would be an address of this machine, which may go, or take a DNS to find; after
    a change of the network, its processes would not reach each other.

    Ray reads these settings once, when it is imported. RAY_AUTH_... settings of the operator win.
    """
    if "ray" in sys.modules:
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning("Ray was imported before RAY_AUTH_MODE was set: any program that reaches its ports can join")
        return
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as Ray does where it keeps to one machine
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


# The next seven raise `ConfigError` where Ray or a worker would fail later, without a word about the reason.


def _require_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current directory was removed: change to another one") from error


def _require_python() -> None:
    if sys.flags.optimize > 1:
        raise ConfigError("Ray does not start without docstrings: leave PYTHONOPTIMIZE=2 and python -OO out")


def _require_loopback() -> None:
    """A machine may have IPv6 alone, and a container no interface that is up."""
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
    except OSError as error:
        raise ConfigError(f"no program can listen on 127.0.0.1 here, as workers do ({error.strerror})") from error


def _ray_place() -> str:
    return os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))  # as Ray finds it


def _require_room() -> None:
    place = _ray_place()
    if not place.isascii():
        raise ConfigError(f"Ray takes only a temporary directory with an ASCII name, not {place!r}: set RAY_TMPDIR")
    try:
        os.makedirs(place, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as logs:
            os.posix_fallocate(logs.fileno(), 0, LOG_BYTES)
    except OSError as error:
        raise ConfigError(f"Ray cannot write its logs into {place} ({error.strerror}): set RAY_TMPDIR") from error
    if os.path.isdir(SHARED_MEMORY) and not os.access(SHARED_MEMORY, os.W_OK):
        raise ConfigError(f"{SHARED_MEMORY} is not writable, and Ray needs it")


def _require_limits() -> None:
    """Raise the limit of open files of this process, which all processes of the fleet inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if most < MIN_FILES:
        raise ConfigError(f"a process may open {most} files here, fewer than the {MIN_FILES} of a worker: `ulimit -n`")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    for limit, least, what, option in MIN_BYTES:
        largest = resource.getrlimit(limit)[0]
        if largest != resource.RLIM_INFINITY and largest < least:
            raise ConfigError(f"{what} {largest} bytes here, and {least} are needed: `ulimit -{option}`")


def _require_threads() -> None:
    """Start them, because a limit may be of the user, of a container or of the memory."""
    end, threads = threading.Event(), list[threading.Thread]()
    default_bytes = threading.stack_size(THREAD_BYTES)
    try:
        for _ in range(MIN_THREADS):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise ConfigError(
            f"only {len(threads)} threads can start here, fewer than the {MIN_THREADS} of a fleet: `ulimit -u`, or the "
            "limit of processes of this container"
        ) from error
    finally:
        threading.stack_size(default_bytes)
        end.set()
        for thread in threads:
            thread.join()


def _require_reachable(address: str) -> None:
    """Raise `ConfigError` at once if nothing listens at `address`; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), JOIN_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"no Ray cluster at {address} ({why}); start its head (deploy/README.md), or leave the address out"
        ) from error
