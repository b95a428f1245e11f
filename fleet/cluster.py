"""The fleet on Ray: beside `fleet/ray_starter.py` the only module that imports it.

The driver (`tandem serve`) has a Ray of its own started (`fleet/ray_head.py`) or joins one, and creates one
supervisor actor, which creates one actor per service, placed by resource. Ownership is a chain, driver > supervisor >
hosts: each link ends with the one before it. A death is noticed because a call that waits in the dead actor fails;
nothing polls. No request ever passes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from core.config import ClusterConfig
from core.errors import ConfigError, InvalidRequest, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.cores import share_of_cores, usable_cores
from fleet.events import Member
from fleet.ray_head import RayHead
from fleet.service_host import Placement, ServiceHost, StartFault
from fleet.supervisor import FleetSpec, HostDied, News, Refusal, Seat, Supervisor

NAMESPACE = "tandem"
SUPERVISOR_NAME = "supervisor"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # close to the least that Ray accepts; no request uses it
JOIN_TIMEOUT_S = 5.0
SCALE_TIMEOUT_S = 5.0

# Read by Ray when it is imported.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody asked the operator
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray's own paragraph about each death: our one line says it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker is placed by its own resource and still sees its GPU
}

logger = logging.getLogger(__name__)


class HostActor(ServiceHost):
    """A `ServiceHost` inside a Ray actor: it looks up where it was placed."""

    async def machine(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def start_placed(
        self, factory: bytes, member: Member, address: str, config: ClusterConfig, seat: Seat, supervisor: Any
    ) -> Endpoint | StartFault:
        """`supervisor` is the handle of the actor that calls."""
        import ray

        node_id = await self.machine()
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)  # type: ignore[no-untyped-call]
        room = sum(node["Resources"].get(name, 0.0) for name in {config.prefill_resource, config.decode_resource})
        num_sharers = min(seat.num_workers, int(room) or seat.num_workers)
        is_router = member.role is ServiceRole.ROUTER
        cores = () if is_router else share_of_cores(usable_cores(), seat.number, num_sharers)
        placement = Placement(
            ordinal=member.ordinal,
            host=node["NodeManagerAddress"] if config.address else "",
            address=address,
            num_threads=max(1, len(cores)),
            scale=partial(scale_fleet, supervisor) if is_router else None,
            cores=cores,
        )
        return await self.start(factory, placement)


class RayHost:
    """A `fleet.supervisor.Host`: the supervisor's handle on one `HostActor`."""

    def __init__(self, member: Member, spec: FleetSpec) -> None:
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "resources": spec.resources(member.role)}
        if member.role is ServiceRole.ROUTER:
            options["scheduling_strategy"] = _on_this_machine()
        self._member = member
        self._spec = spec
        self._actor: Any = ray.remote(HostActor).options(**options).remote()

    async def machine(self) -> str:
        machine: str = await self._finish(self._actor.machine.remote())
        return machine

    async def start(self, address: str, seat: Seat) -> Endpoint | StartFault:
        import ray

        factory = pickle.dumps(self._spec.factory(self._member.role))
        supervisor = ray.get_runtime_context().current_actor
        call = self._actor.start_placed.remote(factory, self._member, address, self._spec.config, seat, supervisor)
        result: Endpoint | StartFault = await self._finish(call)
        return result

    async def wait(self) -> None:
        reason = await self._finish(self._actor.wait.remote())
        if reason:
            self.kill()
            raise HostDied(f"{reason}; its log is in {_log_dir()}")

    async def drain(self, timeout_s: float) -> None:
        await self._finish(self._actor.drain.remote(timeout_s))

    async def set_workers(self, workers: list[Endpoint]) -> None:
        await self._finish(self._actor.set_workers.remote(workers))

    async def _finish(self, call: Any) -> Any:
        """A service whose own method fails has a bug and cannot be trusted: its process is ended."""
        import ray

        try:
            return await _alive(call)
        except ray.exceptions.RayError as error:
            self.kill()
            raise HostDied(str(error).strip().splitlines()[-1]) from error

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


class SupervisorActor(Supervisor):
    """A `Supervisor` inside a Ray actor on the driver's machine."""

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec, lambda member: RayHost(member, spec))


async def _alive(call: Any) -> Any:
    """The result of an actor call. Raises `HostDied` where the actor is dead or dies."""
    import ray

    try:
        return await call
    except ray.exceptions.RayActorError as error:
        raise HostDied(f"its process ended; its log is in {_log_dir()}") from error


async def scale_fleet(supervisor: Any, prefill: int | None, decode: int | None) -> tuple[int, int]:
    """A `core.service.Scale`, bound to the handle of a supervisor: looking up an actor by name would block the loop.

    Raises `InvalidRequest` for sizes out of bounds, `WorkerUnavailable` where the supervisor is dead or silent.
    """
    import ray

    try:
        async with asyncio.timeout(SCALE_TIMEOUT_S):
            answer: tuple[int, int] | Refusal = await supervisor.scale.remote(prefill, decode)
    except ray.exceptions.RayActorError as error:
        raise WorkerUnavailable("the fleet's supervisor is gone; start `tandem serve` again") from error
    except TimeoutError as error:
        raise WorkerUnavailable(f"the fleet's supervisor does not answer within {SCALE_TIMEOUT_S:g} s") from error
    if isinstance(answer, Refusal):
        raise InvalidRequest(answer.field, answer.message)
    return answer


class Cluster:
    """The driver's handle on a fleet: `begin`, `join`, then the rest.

    What is slow and needs no Ray is best done between the two, for a Ray of our own starts meanwhile.
    """

    def __init__(self, address: str = "", head: RayHead | None = None) -> None:
        self._address = address  # empty: the head's
        self._head = head
        self._entered_ray = False
        self._supervisor: Any = None
        self._pending_news: Any = None

    def join(self) -> None:
        """Wait for Ray and become one of its drivers. Raises `ConfigError` where it does not start; `close` it then."""
        import ray  # while it starts

        del ray
        try:
            address = self._head.address() if self._head is not None else self._address
            self._entered_ray = True  # also where it comes to nothing: Ray has threads then that must be ended first
            _join(address)
        except RuntimeError as error:
            raise ConfigError(f"Ray does not start on this machine: {error}; its logs are in /tmp/ray") from error

    async def start(self, spec: FleetSpec) -> None:
        """Begin to start everything; `news` says how it goes. Raises `ConfigError` where a fleet runs there already."""
        import ray

        actor = ray.remote(SupervisorActor).options(
            name=SUPERVISOR_NAME, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=_on_this_machine()
        )
        self._pending_news = None
        try:
            self._supervisor = actor.remote(spec)
        except ValueError as error:
            raise ConfigError("a fleet runs in this Ray cluster already; resize it with `tandem scale`") from error
        await self._ask(self._supervisor.start.remote())

    async def news(self) -> list[News]:
        """What has happened since the last call; waits for the first item."""
        if self._pending_news is None:
            self._pending_news = self._supervisor.news.remote()
        # Where this wait is cancelled the call goes on, and its answer belongs to the next who asks.
        news: list[News] = await self._ask(self._pending_news)
        self._pending_news = None
        return news

    async def router(self) -> Endpoint | None:
        """Where the router answers; None before its first start."""
        endpoint: Endpoint | None = await self._ask(self._supervisor.router.remote())
        return endpoint

    @property
    def log_dir(self) -> str:
        """Of everything that runs in it, on this machine."""
        return _log_dir()

    async def failed(self) -> str:
        """Waits until Ray itself can go on no more, and says why. In a cluster that was joined only Ray can tell."""
        if self._head is None:
            await asyncio.Event().wait()
        assert self._head is not None
        return f"Ray cannot go on: {await self._head.died()} has ended; the logs are in {_log_dir()}"

    async def scale(self, prefill: int | None, decode: int | None) -> tuple[int, int]:
        """As `scale_fleet`."""
        return await scale_fleet(self._supervisor, prefill, decode)

    async def shutdown(self) -> None:
        """Begin to drain everything; `FleetStopped` is the last of the news."""
        await self._ask(self._supervisor.shutdown.remote())

    async def _ask(self, call: Any) -> Any:
        """Raises `WorkerUnavailable` where the supervisor itself is dead."""
        try:
            return await _alive(call)
        except HostDied as death:
            raise WorkerUnavailable(f"the fleet's supervisor died: {death}") from death

    async def leave(self) -> None:
        """End the supervisor, and with it what is left of the fleet; another may be started."""
        import ray

        ray.kill(self._supervisor)
        with contextlib.suppress(HostDied):
            await _alive(self._supervisor.news.remote())

    def close(self) -> None:
        """Leave Ray, and end it where `begin` started it. May be called more than once."""
        if self._entered_ray:
            import ray

            ray.shutdown()
        if self._head is not None:
            self._head.close()


def begin(config: ClusterConfig) -> Cluster:
    """Begin to start a Ray on this machine, or look for the one at `config.address`.

    Raises `ConfigError` where nothing answers there.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.address:
        _require_reachable(config.address)
        return Cluster(config.address)
    _close_to_strangers()
    resources = {config.prefill_resource: config.max_workers, config.decode_resource: config.max_workers}
    num_processes = 2 + config.num_prefill + config.num_decode  # with the supervisor and the router
    return Cluster(head=RayHead(num_processes, resources, OBJECT_STORE_BYTES))


def connect(config: ClusterConfig) -> Cluster:
    """`begin` and `join`, and `close` where that fails."""
    cluster = begin(config)
    try:
        cluster.join()
    except BaseException:  # also Ctrl-C while it starts
        cluster.close()
        raise
    return cluster


def _join(address: str) -> None:
    import ray

    try:
        with _signals_left_alone():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join Ray at {address}: {str(error).splitlines()[0]}{_about_token()}") from error


def _about_token() -> str:
    """Ray does not say that it lacks one: it tries for a while, and calls the cluster out of reach."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "; is its token the one that is here? (deploy/README.md)"
    return "; if it was started by deploy/head.sh, set RAY_AUTH_MODE=token and have its token here (deploy/README.md)"


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Ctrl-C and SIGTERM come at the end, for in the middle Ray crashes of them, and then mean what they did before."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    mask, handlers = signal.pthread_sigmask(signal.SIG_BLOCK, numbers), [signal.getsignal(n) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _close_to_strangers() -> None:
    """Ray listens on every address, and who may talk to it runs code as we do: only with a token of this process.

    Ray reads these when it is imported, and never again. An operator's own RAY_AUTH_... settings win.
    """
    if "ray" in sys.modules:
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning("Ray was imported before RAY_AUTH_MODE was set: whoever reaches its ports can join it")
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _require_reachable(address: str) -> None:
    """Ray itself tries for a minute before it says so."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address must be host:port, is {address!r}")
    try:
        socket.create_connection((host, int(port)), JOIN_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"no Ray cluster at {address} ({why}); start one with deploy/head.sh, or leave the address out"
        ) from error


def _on_this_machine() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _log_dir() -> str:
    import ray

    node: Any = ray._private.worker._global_node
    return os.path.join(node.get_session_dir_path(), "logs")
