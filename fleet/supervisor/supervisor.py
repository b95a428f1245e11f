"""Keeps a fleet alive: the shell of FleetMachine.

The supervisor creates one host for each member, waits until the host dies, and posts the death to the machine. A `Host`
is a process; fleet/ray/cluster.py makes Ray actors of hosts.

In a joined cluster, services outlive their supervisor, and the next one adopts them (`Host`s with an `Adoption`).

The supervisor claims the port of the routers on its own machine, until it ends (runtime/shared_port.py). So all routers
of this machine listen on one port, a restarted router gets this port again, and no second fleet can take it. On every
other machine a router listens alone, on the same port number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar, assert_never

from core.errors import InvalidRequest, WorkerUnavailable
from core.fleet_control import ConfigChange, FleetConfig, FleetNote, FleetStatus
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import Endpoint, PoolSizes, join_address
from fleet.host.cores import LocalRanks
from fleet.host.host import Adoption, Host, HostDied, LocalRank
from fleet.host.service_host import StartFault
from fleet.law import events
from fleet.law.machine import FleetMachine
from fleet.law.slots import OTHER_ROLE
from fleet.planner.planner import Planner
from fleet.planner.shell import run_planner
from fleet.supervisor.handover import Handover, HandoverKeeper, HandoverStore, take_over
from fleet.supervisor.leaving_machines import LeavingMachines, MachineWatch
from fleet.supervisor.notes import FleetUpdate, NoteRing, UpdateQueue
from fleet.supervisor.publishing import Publisher
from fleet.supervisor.refusal import refusing
from fleet.supervisor.spec import FleetSpec
from runtime.driver import Driver
from runtime.shared_port import PortClaim

# The services that serve without a supervisor, and why others were ended.
FoundServices = Callable[[], Awaitable[tuple[list[tuple[Host, Adoption]], str]]]
T = TypeVar("T")
PORT_FREE_S = 5.0  # the end of the killed routers of another fleet on the port; beyond: the fleet does not start


class Supervisor:
    """Runs on one asyncio loop. Call `start` once, before anything else."""

    def __init__(
        self,
        spec: FleetSpec,
        create_host: Callable[[events.Member, FleetSpec], Host],
        here: events.MachineId,
        leaving_machines: LeavingMachines | None = None,
        find_services: FoundServices | None = None,
        store: HandoverStore | None = None,
    ) -> None:
        """`leaving_machines` is None if no machine can leave without the supervisor, `find_services` and `store` if no
        service can outlive a supervisor."""
        self._spec = spec
        self._create_host = create_host
        self._here = here
        self._claim: PortClaim | None = None
        self._machine = FleetMachine(spec.rules)
        self._specs = {1: spec}  # by revision
        self._driver: Driver[events.FleetEvent, events.FleetAction] | None = None
        self._has_begun = False  # after the adoption
        self._hosts: dict[events.Member, Host] = {}
        self._publisher = Publisher(self._hosts)
        self._updates = UpdateQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._routers: dict[events.Member, Endpoint] = {}  # serving and draining ones
        self._local_ranks = LocalRanks()
        self._notes = NoteRing()
        self._planner = Planner(spec.planner, local_prefill=spec.local_prefill, can_switch=not spec.role_option)
        self._planning: asyncio.Task[None] | None = None
        self._leaving_machines = leaving_machines
        self._find_services = find_services
        self._keeper = None if store is None else HandoverKeeper(store, self._handover)
        self._machine_watch = MachineWatch(here, self._post)

    async def start(self) -> None:
        """Start the fleet, or report `FleetFailed` if the port of the routers is taken."""
        self._driver = Driver(self._machine, self._perform, self._fail)
        found, ended = ([], "") if self._find_services is None else await self._find_services()
        if ended:
            self._perform(events.FleetMessage("fleet", "ends services of an earlier supervisor", ended))
        host, port = self._spec.router_host(self._here.host), self._spec.router_port
        joins = any(service.member.role is ServiceRole.ROUTER and service.machine == self._here for _, service in found)
        try:
            self._claim = await self._claim_port(host, port, joins)
        except OSError as error:
            fault = f"cannot listen on {join_address(host, port)} ({error.strerror})"
            self._updates.add(events.FleetFailed(f"{fault}; choose another port with --port"))
            return
        if found:
            await self._adopt(found)
        self._has_begun = True
        self._post(Tick())
        if self._keeper is not None:
            self._spawn(self._keeper.keep_always())
        if self._leaving_machines is not None:
            self._spawn(self._machine_watch.run(self._leaving_machines))
        now, ask = self._driver.now, self._driver.ask
        self._planning = self._spawn(
            run_planner(self._planner, self._router_hosts, self._planned_status, now, ask, self._perform)
        )

    async def _claim_port(self, host: str, port: int, joins: bool) -> PortClaim:
        """Raises `OSError`. Routers that could not be adopted listen until their processes have ended."""
        waits_until = time.monotonic() + (0.0 if self._find_services is None else PORT_FREE_S)
        while True:
            try:
                return PortClaim(host, port, joins=joins)
            except OSError:
                if time.monotonic() >= waits_until:
                    raise
            await asyncio.sleep(0.1)

    async def _adopt(self, found: list[tuple[Host, Adoption]]) -> None:
        services = [(one.machine, _started(one.member, one.endpoint)) for _, one in found]
        record = "" if self._keeper is None else await self._keeper.read()
        takeover = await asyncio.to_thread(take_over, record, self._spec, services)
        self._specs, adopted = takeover.specs, takeover.adopted
        self._planner.pin(takeover.pinned)
        for note in takeover.notes:
            self._perform(note)
        for host, service in found:
            member, endpoint = service.member, service.endpoint
            self._hosts[member] = host
            if member.role is ServiceRole.ROUTER:
                self._routers[member] = endpoint
            else:
                self._local_ranks.restore(service.machine.name, member, service.rank)
            self._spawn(self._live(member, host.set_config(self._specs[adopted.revision_of(member)].live)))
        self._post(adopted)

    async def _kept(self, answer: T) -> T:
        """The next supervisor knows the order of an operator before he has his answer."""
        if self._keeper is not None:
            await self._keeper.keep()
        return answer

    def _handover(self) -> Handover:
        status, pinned = self._fleet_status(), self._planner.pinned
        return Handover.of(self._spec, self._specs, status, pinned, self._machine.can_stop_roll)

    @property
    def _driving(self) -> Driver[events.FleetEvent, events.FleetAction]:
        assert self._driver is not None, "start it first"
        return self._driver

    async def alive(self) -> None:
        """Answers while this supervisor lives."""

    async def shutdown(self) -> float:
        """Begin to drain every service; `FleetStopped` is the last update. Returns the time limit of the routers."""
        if self._driver is None:  # Ctrl-C came before `start`
            self._updates.add(events.FleetStopped())
            return 0.0
        if self._planning is not None:
            self._planning.cancel()
        self._post(events.Shutdown())
        return max(spec.router_drain_timeout_s for spec in self._specs.values())

    @refusing
    async def scale(self, sizes: PoolSizes, auto: bool = False) -> PoolSizes:
        """As `FleetControl.scale`. Raises `WorkerUnavailable` if the fleet has failed."""
        if auto and not self._specs[self._revision].planner.enabled:
            raise InvalidRequest("auto", "the planner is off; `tandem apply planner.enabled=true` starts it")
        self._ask(events.ScaleTo(sizes))
        self._planner.pin(sizes, only=auto)
        return await self._kept(self._machine.wanted)

    @refusing
    async def switch_role(self, slot: str, role: ServiceRole) -> PoolSizes:
        """As `FleetControl.switch_role`."""
        self._ask(events.SwitchRole(slot, role))
        self._planner.pin(OTHER_ROLE)  # it would switch the worker back
        return await self._kept(self._machine.wanted)

    def _ask(self, event: events.FleetEvent) -> None:
        """Hand the order of an operator to the machine. Raises `InvalidRequest`, and as `_check_begun`."""
        self._check_begun()
        self._driving.ask(event)

    def _check_begun(self) -> None:
        """Raises `WorkerUnavailable` during the adoption: a router that was adopted may forward an order before the
        machine knows any service."""
        if not self._has_begun:
            raise WorkerUnavailable("the fleet's supervisor starts; try again")

    async def status(self) -> FleetStatus:
        return replace(self._planned_status(), planner=self._planner.status(self._driving.now()))

    def _fleet_status(self) -> FleetStatus:
        return self._machine.status(self._driving.now())

    def _planned_status(self) -> FleetStatus:
        """For the planner, which follows the config of new starts."""
        status = self._fleet_status()
        spec = self._specs[status.revision]
        self._planner.config, self._planner.local_prefill = spec.planner, spec.local_prefill
        return status

    def _router_hosts(self) -> dict[str, Host]:
        return {
            endpoint.service_id: self._hosts[member]
            for member, endpoint in self._routers.items()
            if member in self._hosts
        }

    @property
    def _revision(self) -> int:
        """Of new starts."""
        return self._machine.status(self._driving.now()).revision

    async def config(self) -> FleetConfig:
        """As `FleetControl.config`."""
        return FleetConfig(self._revision, json.dumps(self._specs[self._revision].text.tables))

    @refusing
    async def apply(self, config: str, options: str, restart: bool, expected_revision: int = 0) -> ConfigChange:
        """As `FleetControl.apply`."""
        self._check_begun()
        before = self._revision
        if expected_revision not in (0, before):
            raise InvalidRequest(
                "expected_revision",
                f"is {expected_revision}, but the fleet has config {before}; `tandem config` prints it",
            )
        new = await asyncio.to_thread(self._specs[before].after, config, options, restart)
        if self._revision != before:
            raise InvalidRequest("config", "another config came meanwhile; try again")
        if new.changes or new.restarts:
            self._ask(events.NewConfig(new.spec.rules, new.restarts, ", ".join(new.names)))
            # A service runs one of the others, or a stopped roll restores the one before.
            used = {slot.revision for slot in self._fleet_status().slots} | {before}
            self._specs = {revision: spec for revision, spec in self._specs.items() if revision in used}
            self._specs[self._revision] = new.spec
        return await self._kept(ConfigChange(self._revision, new.changes, new.restarts))

    @refusing
    async def stop_roll(self) -> ConfigChange:
        """As `FleetControl.stop_roll`."""
        self._ask(events.StopRoll())
        return await self._kept(ConfigChange(self._revision, (), restarts=True))

    async def notes(self, limit: int, after: int) -> list[FleetNote]:
        """As `FleetControl.notes`."""
        return self._notes.newest(limit, after)

    async def routers(self) -> list[Endpoint]:
        """The endpoints of the routers that serve, by their numbers."""
        return [self._routers[member] for member in sorted(self._routers, key=lambda member: member.ordinal)]

    async def updates(self) -> list[FleetUpdate]:
        """The updates since the last call. Waits until there is one."""
        return await self._updates.take()

    def _post(self, event: events.FleetEvent) -> None:
        self._driving.post(event)

    def _fail(self, error: BaseException) -> None:
        self._updates.add(events.FleetFailed(f"the supervisor has a bug: {error!r}"))

    def _perform(self, action: events.FleetAction) -> None:
        match action:
            case events.StartService():
                self._spawn(self._start(action))
            case events.ConfigureService():
                self._spawn(self._configure(action))
            case events.DrainService():
                self._spawn(self._drain(action.member, action.timeout_s))
            case events.SwitchService():
                self._spawn(self._switch_role(action.member, action.timeout_s))
            case events.KillService():
                self._kill(action.member)
            case events.PublishFleet():
                if self._publisher.add(action):
                    self._spawn(self._publisher.deliver(action.router))
            case events.FleetMessage():
                self._notes.add(action, time.time())
                if action.printed:
                    self._updates.add(action)
            case events.FleetReady() | events.FleetFailed() | events.FleetStopped():
                self._updates.add(action)
            case _:
                assert_never(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    async def _start(self, start: events.StartService) -> None:
        member = start.member
        if self._machine.has(member):  # else killed in the turn of the loop in which it was to start
            spec = self._specs[start.revision]
            host = self._hosts[member] = self._create_host(member, spec)
            await self._live(member, self._begin(start, host, spec))

    async def _begin(self, start: events.StartService, host: Host, spec: FleetSpec) -> None:
        """Raises `HostDied`."""
        member = start.member
        is_router = member.role is ServiceRole.ROUTER
        machine = await host.machine()
        self._post(events.ServicePlaced(member, machine))
        self._machine_watch.report(machine)
        claim = self._claim if is_router and machine == self._here else None
        number = 0 if is_router else self._local_ranks.take(machine.name, member, start.replaces)
        local_rank = LocalRank(number, self._num_wanted_workers())
        result = await host.start("" if claim is None else claim.address, local_rank)
        if isinstance(result, StartFault):
            self._kill(member)
            self._post(events.StartFailed(member, result.reason, result.permanent))
            raise HostDied(result.reason)
        await host.set_config(spec.live)
        if is_router:
            self._routers[member] = result
        self._post(_started(member, result))

    async def _live(self, member: events.Member, begin: Awaitable[None]) -> None:
        """Follow one member from its start or its adoption to its death."""
        host = self._hosts[member]
        try:
            await begin
            await host.wait()
        except HostDied as death:
            self._hosts.pop(member, None)
            self._post(events.ServiceDied(member, str(death)))
        finally:
            self._local_ranks.leave(member)
            self._routers.pop(member, None)

    def _num_wanted_workers(self) -> int:
        return sum(size for role, size in self._machine.wanted.items() if role is not ServiceRole.ROUTER)

    async def _configure(self, action: events.ConfigureService) -> None:
        host = self._hosts.get(action.member)
        if host is None:
            return  # died just now
        with contextlib.suppress(HostDied):  # `_live` reports the death
            await host.set_config(self._specs[action.revision].live)
            self._post(events.ServiceConfigured(action.member, action.revision))

    async def _drain(self, member: events.Member, timeout_s: float) -> None:
        if member.role is not ServiceRole.ROUTER:
            await self._publisher.until_delivered()
        host = self._hosts.get(member)
        if host is None:
            return  # died just now
        with contextlib.suppress(HostDied):  # its end is wanted; `_live` reports none after the service has stopped
            await host.drain(timeout_s)
        self._kill(member)
        self._post(events.Drained(member))

    async def _switch_role(self, member: events.Member, timeout_s: float) -> None:
        await self._publisher.until_delivered()
        host = self._hosts.get(member)
        if host is None:
            return  # died just now
        with contextlib.suppress(HostDied):  # `_live` reports the death
            reason = await host.switch_role(member.role, timeout_s)
            if not reason:
                self._post(events.RoleSwitched(member))
                return
            self._kill(member)
            self._post(events.SwitchFailed(member, reason))

    def _kill(self, member: events.Member) -> None:
        host = self._hosts.pop(member, None)
        if host is None:
            return
        try:
            host.kill()
        except Exception as error:  # noqa: BLE001 (Ray may be away for a moment; the fleet goes on)
            self._perform(events.FleetMessage(member.name, "could not be killed", f"{type(error).__name__}: {error}"))


def _started(member: events.Member, endpoint: Endpoint) -> events.ServiceStarted:
    return events.ServiceStarted(member, endpoint.service_id, endpoint.address, endpoint.version)
