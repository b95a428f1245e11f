"""Ray actors: one hosts each service, one is the supervisor.

The supervisor places every actor by the resource of its pool, and routers without a resource on its own machine. A call
that waits inside an actor fails when its process dies; so a death is noticed without polling. Requests, tokens and
blocks never pass through Ray.

In a joined cluster a host is detached from its supervisor: it has a name, by which the next supervisor finds it. A
thread of the host looks for its supervisor, and ends the process if none comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from core.config import LiveConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from core.traffic import RouterTraffic
from fleet.host.by_name import ByName, answer_by_name, pack
from fleet.host.cores import cpu_quota, num_threads_for, share_of_cores, usable_cores
from fleet.host.host import Adoption, Host, HostDied, LocalRank, OtherVersion
from fleet.host.kinship import are_kin
from fleet.host.service_host import Placement, ServiceHost, StartFault
from fleet.law.claims import GPU, Claim, Claims, show_only_own_gpu
from fleet.law.events import MachineId, Member
from fleet.ray.calls import await_actor, begin_call, log_dir
from fleet.ray.machines import host_of, leaving_machines, live_nodes, machine_here, node_here
from fleet.ray.store import RayStore
from fleet.ray.supervisor_control import SupervisorControl
from fleet.supervisor.spec import FleetSpec
from fleet.supervisor.supervisor import Supervisor

HOST_PREFIX = "host-"  # of the names of detached hosts
LOOK_S = 30.0  # between two looks for the supervisor
ANSWER_TIMEOUT_S = 10.0  # the answer of a host that a supervisor may adopt; beyond: killed, and started again


class HostActor(ServiceHost):
    """A `ServiceHost` inside a Ray actor, which looks up its own placement."""

    def __init__(self, claims: Claims, claim: Claim, member: Member, kinship: str, supervisor: Any) -> None:
        """`claim`: of this member; Ray has placed it accordingly. `kinship`: as in the spec. `supervisor` is the actor
        handle of the caller."""
        super().__init__()
        self._claims, self._claim, self._member, self._kinship = claims, claim, member, kinship
        self._control = SupervisorControl(supervisor)
        self._rank = 0
        self._endpoint: Endpoint | None = None  # of a started service that neither drains nor changes its role
        if kinship:
            threading.Thread(target=self._end_without_supervisor, name="supervisor", daemon=True).start()

    def _end_without_supervisor(self) -> None:
        import ray

        limit_s = self._claims.config.adoption_timeout_s
        last_seen = time.monotonic()
        while time.monotonic() < last_seen + limit_s:
            time.sleep(min(LOOK_S, limit_s / 4))
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._control.supervisor.alive.remote(), timeout=ANSWER_TIMEOUT_S)
                last_seen = time.monotonic()
        os._exit(1)

    @answer_by_name
    async def adopt(self, kinship: str, supervisor: Any) -> Adoption | None:
        """Follow this supervisor from now on. None if its fleet is another one, or if no service serves here."""
        if self._endpoint is None or not are_kin(kinship, self._kinship):
            return None
        self._control.supervisor = supervisor
        return Adoption(self._member, self._endpoint, machine_here(self._claims.config), self._rank)

    @answer_by_name
    async def machine(self) -> MachineId:
        return machine_here(self._claims.config)

    async def drain(self, timeout_s: float) -> None:
        self._endpoint = None
        await super().drain(timeout_s)

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        endpoint, self._endpoint = self._endpoint, None
        reason = await super().switch_role(role, timeout_s)
        if not reason and endpoint is not None:
            self._member, self._endpoint = replace(self._member, role=role), replace(endpoint, role=role)
        return reason

    traffic = answer_by_name(ServiceHost.traffic)

    @answer_by_name
    async def start_placed(self, factory: bytes, address: str, local_rank: LocalRank) -> Endpoint | StartFault:
        import ray

        member, self._rank = self._member, local_rank.rank
        config, node = self._claims.config, node_here()
        if self._claims.of(member.role, [node["Resources"]]).gpus > self._claim.gpus:
            return StartFault("its machine joined later and has GPUs; the next start asks for one", permanent=False)
        show_only_own_gpu(ray.get_runtime_context().get_accelerator_ids()[GPU], os.environ)
        room = sum(node["Resources"].get(name, 0.0) for name in {config.prefill_resource, config.decode_resource})
        num_sharers = min(local_rank.num_workers, int(room) or local_rank.num_workers)
        is_router = member.role is ServiceRole.ROUTER
        cores = () if is_router else share_of_cores(usable_cores(), local_rank.rank, num_sharers)
        placement = Placement(
            ordinal=member.ordinal,
            host=host_of(node, config),
            address=address,
            num_threads=num_threads_for(cores, num_sharers, cpu_quota()),
            control=self._control if is_router else None,
            cores=cores,
            gpus=self._claim.gpus,
            slot=member.name,
        )
        started = await self.start(factory, placement)
        if isinstance(started, Endpoint):
            self._endpoint = started
        return started


class Router(HostActor):
    """`ps` shows the name of an actor's class: ray::Router. A process keeps its name when its role changes."""


class PrefillWorker(HostActor):
    """ray::PrefillWorker"""


class DecodeWorker(HostActor):
    """ray::DecodeWorker"""


ACTORS = {
    ServiceRole.ROUTER: Router,
    ServiceRole.PREFILL: PrefillWorker,
    ServiceRole.DECODE: DecodeWorker,
}


class RayHost:
    """A `fleet.host.host.Host`: the handle of one `HostActor`."""

    def __init__(self, member: Member, spec: FleetSpec, actor: Any = None) -> None:
        """Without an `actor`, create one."""
        self._member, self._spec = member, spec
        self._actor: Any = actor or _host_actor(member, spec)

    async def machine(self) -> MachineId:
        machine: MachineId = await self._ask("machine")
        return machine

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint | StartFault:
        factory = pack(self._spec.factory(self._member.role))
        result: Endpoint | StartFault = await self._ask("start_placed", factory, address, ByName(local_rank))
        return result

    async def wait(self) -> None:
        reason = await self._ask("wait")
        if reason:
            self.kill()
            raise HostDied(f"{reason}; its log is in {log_dir()}")

    async def drain(self, timeout_s: float) -> None:
        await self._ask("drain", timeout_s)

    async def set_config(self, live: LiveConfig) -> None:
        await self._ask("set_config", ByName(live))

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        reason: str = await self._ask("switch_role", role, timeout_s)
        return reason

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None:
        await self._ask("set_fleet", ByName(workers), ByName(routers))

    async def traffic(self, start_s: float) -> RouterTraffic:
        traffic: RouterTraffic = await self._ask("traffic", start_s)
        return traffic

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """The result of a call. A method that raises is a bug of the service, and one that the service lacks is of
        another version, so the call also ends its process."""
        import ray

        try:
            call = begin_call(self._actor, method, *arguments)
        except OtherVersion:
            self.kill()
            raise
        try:
            return await await_actor(call)
        except ray.exceptions.RayError as error:
            self.kill()
            raise HostDied(str(error).strip().splitlines()[-1]) from error

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def _host_actor(member: Member, spec: FleetSpec) -> Any:
    import ray

    claims = spec.claims
    claim = claims.of(member.role, [node["Resources"] for node in live_nodes()])
    options = claim.options()
    if not claim.resource:
        options["scheduling_strategy"] = on_this_machine()
    if spec.interpreter is not None and member.role is not ServiceRole.ROUTER:
        python, variables = spec.interpreter.python, dict(spec.interpreter.variables)
        options["runtime_env"] = {"py_executable": python, "env_vars": variables}
    if spec.kinship:
        options |= {"lifetime": "detached", "name": f"{HOST_PREFIX}{member.name}-{secrets.token_hex(4)}"}
    actor = ray.remote(ACTORS[member.role]).options(**options)
    return actor.remote(ByName(claims), ByName(claim), ByName(member), spec.kinship, this_supervisor())


def _names_of_hosts() -> list[str]:
    """Of the detached hosts of this Ray cluster, in this namespace."""
    import ray

    return [str(name) for name in ray.util.list_named_actors() if name.startswith(HOST_PREFIX)]


def kill_hosts() -> None:
    """Kill every detached host of this Ray cluster."""
    import ray

    for name in _names_of_hosts():
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            ray.kill(ray.get_actor(name))


async def find_services(spec: FleetSpec) -> tuple[list[tuple[Host, Adoption]], str]:
    """Adopt the services that an earlier supervisor has left; kill those that cannot be adopted, and say why. Call it
    in the supervisor."""
    answers = await asyncio.gather(*(_adopt(name, spec) for name in _names_of_hosts()))
    adopted = [answer for answer in answers if not isinstance(answer, str)]
    found = {answer[1].member.slot: answer for answer in adopted}
    for answer in adopted:
        if found[answer[1].member.slot] is not answer:  # two starts of one slot
            answer[0].kill()
    return list(found.values()), "; ".join(sorted(answer for answer in answers if isinstance(answer, str) and answer))


async def _adopt(name: str, spec: FleetSpec) -> tuple[Host, Adoption] | str:
    """Else why its service was killed; empty if there was none."""
    import ray

    try:
        actor = ray.get_actor(name)
    except ValueError:  # it has ended meanwhile
        return ""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            adoption = await await_actor(begin_call(actor, "adopt", spec.kinship, this_supervisor()))
        if isinstance(adoption, Adoption):
            return RayHost(adoption.member, spec, actor), adoption
        why = "does not serve, or has another config" if adoption is None else "answers as another version of Tandem"
    except TimeoutError:
        why = f"does not answer within {ANSWER_TIMEOUT_S:g} s"
    except (HostDied, ray.exceptions.RayError) as error:  # a host of another version, too
        why = f"cannot answer ({str(error).strip().splitlines()[-1]})"
    ray.kill(actor)
    return f"{name.removeprefix(HOST_PREFIX).rpartition('-')[0]} {why}"


class SupervisorActor(Supervisor):
    """A `Supervisor` inside a Ray actor, on the machine of `tandem serve`."""

    scale, switch_role = answer_by_name(Supervisor.scale), answer_by_name(Supervisor.switch_role)
    apply, stop_roll = answer_by_name(Supervisor.apply), answer_by_name(Supervisor.stop_roll)
    status, config = answer_by_name(Supervisor.status), answer_by_name(Supervisor.config)
    notes = answer_by_name(Supervisor.notes)

    def __init__(self, spec: FleetSpec) -> None:
        joined = bool(spec.config.address)
        leaving = partial(leaving_machines, spec.config) if joined else None
        found = partial(find_services, spec) if joined else None
        store = RayStore() if spec.kinship else None
        super().__init__(spec, RayHost, machine_here(spec.config), leaving, found, store)


def this_supervisor() -> Any:
    """The handle of the actor that calls this."""
    import ray

    return ray.get_runtime_context().current_actor


def on_this_machine() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
