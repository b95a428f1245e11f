"""Runs one seed, from its scenario to the last check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.law.events import Member
from router.requests.machine import RouterMachine
from simulator.search.checks import Oracle, check_leases, check_left_clean, check_paths
from simulator.search.clients import ResumingClients
from simulator.search.scenario import SCENARIOS, Scenario
from simulator.search.world_fleet import NOTICE_S, PUBLISH_S, WorldFleet
from simulator.shells.agent import SimulatedAgent
from simulator.shells.authorship import Authorship
from simulator.shells.disk import Slots
from simulator.shells.links import RECONNECT_S, BreakableLinks
from simulator.shells.router_shell import RouterShell
from simulator.shells.vllm_shell import VllmShell
from simulator.shells.worker_shell import WorkerShell
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.faults import Fault, RouterDeath
from simulator.virtual.line import Line
from simulator.virtual.network import Network
from simulator.virtual.world import SimulationError, World
from vllm_worker.fake_engine import FakeCluster

LATEST_END_S = 100.0
FAILED_RESTART_S = 0.5  # after a worker has ended because of its engine
DISKS_REST_S = 2.0  # a disk of 200 slots takes 0.23 s to fill, and its worker reports within 0.4 s
SETTLE_S = 6.0  # after the last request, so that leases expire, kept messages expire and reports arrive


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    counts: Counter[str]  # of events, by name
    log_hash: int
    num_events: int
    ended_at: float  # virtual seconds


class Simulation:
    """A fleet, its routers and clients in one world."""

    def __init__(self, scenario: Scenario, print_line: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, print_line)
        self.network = Network(self.world, scenario.network)
        self.fleet: dict[str, WorkerShell] = {}  # newest incarnation of each worker, dead or alive
        self.oracle = Oracle(self.world, scenario, self.fleet)
        self.authorship = Authorship(self.world)
        self._agents: dict[str, SimulatedAgent] = {}  # by name, also dead ones
        self._disks: dict[str, Slots] = {}  # of each worker id
        self._kept = FakeCluster()  # KV that the vLLM workers keep for each other
        self._ended: list[WorkerShell] = []
        self.clients = ResumingClients(self.world, self.oracle)
        self.routers: list[RouterShell] = []
        self.links: list[BreakableLinks] = []  # of each router
        self._publishing: list[Line] = []  # likewise, from the supervisor
        for _ in range(scenario.num_routers):
            self._add_router()
        self.clients.routers = self.routers
        self._shell: WorldFleet | None = None
        if scenario.fleet is not None:
            roles = [ServiceRole.ROUTER] * scenario.num_routers + [spec.role for spec in scenario.workers]
            sizes = {role: roles.count(role) for role in ServiceRole}
            self._shell = WorldFleet(self.world, sizes, scenario.fleet, self, self)

    def _add_router(self) -> None:
        router = RouterShell(f"router-{len(self.routers)}", self.world, self.scenario.router, self.clients)
        router.links = links = BreakableLinks(self.world, router, self.network, self.fleet)
        self.routers.append(router)
        self.links.append(links)
        self._publishing.append(Line(self.world, lambda: self.world.random.uniform(0.0, PUBLISH_S)))

    def run(self) -> Result:
        """Raises `SimulationError` at the first broken rule, or if a machine raises an exception."""
        try:
            return self._run()
        except SimulationError:
            raise
        except Exception as error:
            where = f"seed {self.scenario.seed}, {self.world.now:.6f} s"
            raise SimulationError(f"{where}: {type(error).__name__}: {error}") from error

    def _run(self) -> Result:
        world, scenario = self.world, self.scenario
        if self._shell is None:
            endpoints = [Endpoint(spec.worker_id, "", spec.role) for spec in scenario.workers]
            for number, spec in enumerate(scenario.workers, 1):
                self._start(spec)
                for links in self.links:
                    links.set_workers(endpoints[:number])
        else:
            self._shell.start()
            for order in scenario.fleet.orders if scenario.fleet else ():
                world.at(order.at, partial(self._shell.order, order))
        for number, client in enumerate(scenario.requests):
            world.at(client.arrives_at, partial(self.clients.arrive, client, number % len(self.routers)))
            if client.cancel_at is not None:
                world.at(client.cancel_at, partial(self.clients.cancel, client))
        for fault in scenario.faults:
            world.at(fault.at, partial(self._inject, fault))
        for death in scenario.router_deaths:
            world.at(death.at, partial(self._kill_router, death))
        last_arrival = max(client.arrives_at for client in scenario.requests)
        breaks: tuple[Fault | RouterDeath, ...] = (*scenario.faults, *scenario.router_deaths)
        last_fault = max((fault.at + fault.duration_s for fault in breaks), default=0.0)
        world.run_until(max(last_arrival, last_fault))
        world.run_until(LATEST_END_S, done=lambda: self.oracle.num_open == 0)
        ended_at = world.now
        if self._shell is not None:
            world.run_until(LATEST_END_S, done=lambda: self._shell is None or self._shell.is_at_rest)
            self._shell.check_at_rest()
        world.run_until(world.now + SETTLE_S)
        if any(spec.disk_slots for spec in scenario.workers):
            world.run_until(world.now + DISKS_REST_S, done=self._disks_rest)
        alive = [node for node in self.fleet.values() if node.alive]
        for router in self.routers:
            if router.alive:
                check_left_clean(scenario.seed, router.machine, alive)
        if scenario.calm:
            check_paths(scenario.seed, alive)
            check_leases(scenario.seed, alive)
        self._count(alive + self._ended)
        return Result(scenario.seed, world.counts, world.log_hash, world.num_events, ended_at)

    def _disks_rest(self) -> bool:
        """Nothing is copied to a disk, and the routers know what lies there. A pause of writes may end at any time."""
        indexes = [router.machine.workers.index for router in self.routers if router.alive]
        return not any(
            any(node.kept_blocks.values()) or any(index.held(name) != node.cached_blocks for index in indexes)
            for name, node in self.fleet.items() if node.alive
        )  # fmt: skip

    def _start(self, spec: WorkerSpec) -> None:
        chance = self.world.random
        start = (chance.getrandbits(64), chance.uniform(0.0, 1000.0))
        if spec.has_vllm:
            node: WorkerShell = VllmShell(self.world, spec, self._kept, self._restart_failed, *start)
        else:
            slots = self._disks.setdefault(spec.worker_id, {})
            node = WorkerShell(self.world, spec, *start, self.authorship, slots)
        node.join(self.network, self._agents, self.scenario.reads)
        self.fleet[spec.worker_id] = node
        self.world.note(f"{node.name} starts")

    # ---- faults

    def _inject(self, fault: Fault) -> None:
        node, world = self._victim(fault.worker_id), self.world
        if node is None or not node.alive or node.stopped:
            return
        if fault.kind != "loses its token stream":  # counted where a stream was open
            world.counts[fault.kind] += 1
        worker_id = node.spec.worker_id
        world.trouble(worker_id, until=world.now + fault.duration_s)
        world.note(f"{node.name} {fault.kind} for {fault.duration_s} s")
        match fault.kind:
            case "dies" | "vanishes":
                node.die(silent=fault.kind == "vanishes", killed=True)
                self._remove_dead(node, restart_after_s=fault.duration_s)
            case "drains":
                self.oracle.num_drains += 1
                node.drain()
                world.after(0.05, partial(self._end_when_drained, node, fault.duration_s))
            case "stops":
                node.stop()
                world.after(fault.duration_s, partial(self._resume, node))
            case "loses its report stream":
                for links in self.links:
                    links.subscribe(worker_id)
            case "loses its token stream":
                for links in self.links:
                    links.break_tokens(worker_id)
            case _:
                raise SimulationError(f"unknown fault {fault.kind}")

    def _victim(self, worker_id: str) -> WorkerShell | None:
        """In a fleet, the present service of a slot."""
        if self._shell is None:
            return self.fleet[worker_id]
        found = [known for member, known in self._shell.ids.items() if member.name == worker_id]
        return self.fleet[found[0]] if found else None

    def _kill_router(self, death: RouterDeath) -> None:
        router = self.routers[death.router]
        if not router.alive:
            return
        self.world.counts["router dies"] += 1
        self.world.note(f"{router.name} dies for {death.duration_s} s")
        self.world.trouble(*self.fleet, until=self.world.now + death.duration_s + RECONNECT_S)
        self._end_router(death.router)
        if self._shell is None:
            self.world.after(death.duration_s, router.start)
        else:
            self.world.after(NOTICE_S, partial(self._shell.died, router.name))

    def _end_router(self, number: int) -> None:
        self.routers[number].die()
        self.clients.lose_router(number)
        self.links[number].close()

    def _remove_dead(self, node: WorkerShell, restart_after_s: float) -> None:
        self._ended.append(node)
        self._trouble_until_joined(node.spec.worker_id)
        for links in self.links:
            if not node.silent:
                self.world.after(NOTICE_S, partial(links.notice_death, node))
        if self._shell is None:
            self.world.after(restart_after_s, partial(self._start, node.spec))
        else:
            self.world.after(
                restart_after_s if node.silent else NOTICE_S, partial(self._shell.died, node.spec.worker_id)
            )

    def _trouble_until_joined(self, worker_id: str) -> None:
        """Until each router knows that the worker serves, or its next incarnation."""
        for router in self.routers:
            if router.alive:
                self.world.trouble(worker_id, until=math.inf, router=router.name)

    def _restart_failed(self, node: WorkerShell) -> None:
        self._remove_dead(node, FAILED_RESTART_S)

    def _end_when_drained(self, node: WorkerShell, restart_after_s: float) -> None:
        if not node.alive:
            return
        self.world.trouble(node.spec.worker_id)
        if node.is_idle:
            self.world.counts["drained to the end"] += 1
            node.die(silent=False, killed=False)
            self._remove_dead(node, restart_after_s)
        else:
            self.world.after(0.05, partial(self._end_when_drained, node, restart_after_s))

    def _resume(self, node: WorkerShell) -> None:
        self.world.note(f"{node.name} resumes")
        node.resume()

    # ---- the services of a fleet, as FleetShell wants them: workers, and routers by the numbers of their slots

    def start_service(self, service_id: str, member: Member) -> None:
        if member.role is ServiceRole.ROUTER:
            self._start_router(member.ordinal)
            return
        models = [spec for spec in self.scenario.workers if spec.role is member.role] or self.scenario.workers
        self._start(replace(models[member.ordinal % len(models)], worker_id=service_id, role=member.role))
        self._trouble_until_joined(service_id)

    def _start_router(self, number: int) -> None:
        while len(self.routers) <= number:
            self._add_router()
            self.routers[-1].die()  # it may start later than this one
        if not self.routers[number].alive:
            self.routers[number].start()
        for worker_id in self.fleet:
            self.world.trouble(worker_id, until=math.inf, router=self.routers[number].name)

    def _router_number(self, service_id: str) -> int | None:
        return next((number for number, router in enumerate(self.routers) if router.name == service_id), None)

    def drain_service(self, service_id: str) -> None:
        number = self._router_number(service_id)
        if number is not None:
            self.routers[number].draining = True
            return
        self.oracle.num_drains += 1
        self._trouble_until_joined(service_id)
        self.fleet[service_id].drain()

    def is_idle(self, service_id: str) -> bool:
        number = self._router_number(service_id)
        return self.fleet[service_id].is_idle if number is None else self.routers[number].is_idle

    def switch_service(self, service_id: str) -> None:
        self.world.counts["switches its role"] += 1
        self.fleet[service_id].switch_role()

    def end_service(self, service_id: str, killed: bool) -> None:
        number = self._router_number(service_id)
        if number is not None:
            self._end_router(number)
            self.links[number].set_workers(())
            return
        node = self.fleet[service_id]
        if node.alive:
            node.die(silent=False, killed=killed)
            self._remove_dead(node, 0.0)

    def publish(self, router: Member, workers: Sequence[Endpoint]) -> None:
        number = router.ordinal
        machine, line = self.routers[number].machine, self._publishing[number]
        line.send(lambda: self._take_workers(number, machine, workers))

    def _take_workers(self, number: int, machine: RouterMachine, workers: Sequence[Endpoint]) -> None:
        if self.routers[number].alive and self.routers[number].machine is machine:
            self.links[number].set_workers(workers)

    # ---- counting

    def _count(self, nodes: list[WorkerShell]) -> None:
        for node in nodes:
            node.count(self.world.counts)


def run_scenario(scenario: Scenario, print_line: Callable[[str], None] | None = None) -> Result:
    return Simulation(scenario, print_line).run()


def run_seed(seed: int, print_line: Callable[[str], None] | None = None, *, kind: str = "plain") -> Result:
    return run_scenario(SCENARIOS[kind](seed), print_line)
