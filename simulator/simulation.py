"""Runs one seed, from its scenario to the last check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from simulator.agent import SimulatedAgent
from simulator.authorship import Authorship
from simulator.checks import Oracle, check_left_clean, check_paths
from simulator.clients import ResumingClients
from simulator.links import RECONNECT_S, BreakableLinks
from simulator.network import Network
from simulator.router_shell import RouterShell
from simulator.scenario import SCENARIOS, Fault, RouterDeath, Scenario
from simulator.vllm_shell import VllmShell
from simulator.worker_shell import WorkerShell
from simulator.worker_spec import WorkerSpec
from simulator.world import SimulationError, World
from vllm_worker.fake_engine import FakeCluster

LATEST_END_S = 100.0
FAILED_RESTART_S = 0.5  # after a worker has ended because of its engine
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
        self.oracle = Oracle(self.world, scenario)
        self.authorship = Authorship(self.world)
        self.fleet: dict[str, WorkerShell] = {}  # newest incarnation of each worker, dead or alive
        self._agents: dict[str, SimulatedAgent] = {}  # by name, also dead ones
        self._kept = FakeCluster()  # KV that the vLLM workers keep for each other
        self._ended: list[WorkerShell] = []
        self.clients = ResumingClients(self.world, self.oracle)
        self.routers: list[RouterShell] = []
        self.links: list[BreakableLinks] = []  # of each router
        for number in range(scenario.num_routers):
            router = RouterShell(f"router-{number}", self.world, scenario.router, self.clients)
            router.links = links = BreakableLinks(self.world, router, self.network, self.fleet)
            self.routers.append(router)
            self.links.append(links)
        self.clients.routers = self.routers

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
        for spec in scenario.workers:
            self._start(spec)
            for links in self.links:
                links.keep_connected(spec.worker_id)
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
        world.run_until(world.now + SETTLE_S)
        alive = [node for node in self.fleet.values() if node.alive]
        for router in self.routers:
            check_left_clean(scenario.seed, router.machine, alive)
        if scenario.calm:
            check_paths(scenario.seed, alive)
        self._count(alive + self._ended)
        return Result(scenario.seed, world.counts, world.log_hash, world.num_events, ended_at)

    def _start(self, spec: WorkerSpec) -> None:
        chance = self.world.random
        start = (chance.getrandbits(64), chance.uniform(0.0, 1000.0))
        if spec.has_vllm:
            node: WorkerShell = VllmShell(self.world, spec, self._kept, self._restart_failed, *start)
        else:
            node = WorkerShell(self.world, spec, *start, self.authorship)
        node.join(self.network, self._agents, self.scenario.reads)
        self.fleet[spec.worker_id] = node
        self.world.note(f"{node.name} starts")

    # ---- faults

    def _inject(self, fault: Fault) -> None:
        node, world = self.fleet[fault.worker_id], self.world
        if not node.alive or node.stopped:
            return
        if fault.kind != "loses its token stream":  # counted where a stream was open
            world.counts[fault.kind] += 1
        world.trouble(fault.worker_id, until=world.now + fault.duration_s)
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
                    links.subscribe(fault.worker_id)
            case "loses its token stream":
                for links in self.links:
                    links.break_tokens(fault.worker_id)
            case _:
                raise SimulationError(f"unknown fault {fault.kind}")

    def _kill_router(self, death: RouterDeath) -> None:
        router = self.routers[death.router]
        if not router.alive:
            return
        self.world.counts["router dies"] += 1
        self.world.note(f"{router.name} dies for {death.duration_s} s")
        self.world.trouble(*self.fleet, until=self.world.now + death.duration_s + RECONNECT_S)
        router.die()
        self.clients.lose_router(death.router)
        self.links[death.router].close()
        self.world.after(death.duration_s, router.start)

    def _remove_dead(self, node: WorkerShell, restart_after_s: float) -> None:
        self._ended.append(node)
        for router, links in zip(self.routers, self.links, strict=True):
            # until the router knows the next incarnation
            self.world.trouble(node.spec.worker_id, until=math.inf, router=router.name)
            if not node.silent:
                self.world.after(0.05, partial(links.notice_death, node))
        self.world.after(restart_after_s, partial(self._start, node.spec))

    def _restart_failed(self, node: WorkerShell) -> None:
        self._remove_dead(node, FAILED_RESTART_S)

    def _end_when_drained(self, node: WorkerShell, restart_after_s: float) -> None:
        if not node.alive:
            return
        self.world.trouble(node.spec.worker_id)
        if node.machine.idle and not node.stopped:
            self.world.counts["drained to the end"] += 1
            node.die(silent=False, killed=False)
            self._remove_dead(node, restart_after_s)
        else:
            self.world.after(0.05, partial(self._end_when_drained, node, restart_after_s))

    def _resume(self, node: WorkerShell) -> None:
        self.world.note(f"{node.name} resumes")
        node.resume()

    # ---- counting

    def _count(self, nodes: list[WorkerShell]) -> None:
        for node in nodes:
            node.count(self.world.counts)


def run_scenario(scenario: Scenario, print_line: Callable[[str], None] | None = None) -> Result:
    return Simulation(scenario, print_line).run()


def run_seed(seed: int, print_line: Callable[[str], None] | None = None, *, kind: str = "plain") -> Result:
    return run_scenario(SCENARIOS[kind](seed), print_line)
