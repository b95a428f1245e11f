"""Ray actors: one hosts each service, one is the supervisor.

The supervisor places every actor by the resource of its pool, and routers without a resource on its own machine. A call
that waits inside an actor fails when its process dies; so a death is noticed without polling. Requests, tokens and
blocks never pass through Ray.
"""

from __future__ import annotations

import os
import pickle
from functools import partial
from typing import Any

from core.config import LiveConfig
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from core.traffic import RouterTraffic
from fleet.claims import GPU, Claim, Claims, show_only_own_gpu
from fleet.cores import share_of_cores, usable_cores
from fleet.events import MachineId, Member
from fleet.host import HostDied, LocalRank
from fleet.ray_calls import await_actor, log_dir
from fleet.ray_machines import host_of, leaving_machines, live_nodes, machine_here, node_here
from fleet.service_host import Placement, ServiceHost, StartFault
from fleet.spec import FleetSpec
from fleet.supervisor import Supervisor
from fleet.supervisor_control import SupervisorControl


class HostActor(ServiceHost):
    """A `ServiceHost` inside a Ray actor, which looks up its own placement."""

    def __init__(self, claims: Claims, claim: Claim) -> None:
        """`claim`: of this member; Ray has placed it accordingly."""
        super().__init__()
        self._claims, self._claim = claims, claim

    async def machine(self) -> MachineId:
        return machine_here(self._claims.config)

    async def start_placed(
        self, factory: bytes, member: Member, address: str, local_rank: LocalRank, supervisor: Any
    ) -> Endpoint | StartFault:
        """`supervisor` is the actor handle of the caller."""
        import ray

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
            num_threads=max(1, len(cores)),
            control=SupervisorControl(supervisor) if is_router else None,
            cores=cores,
            gpus=self._claim.gpus,
            slot=member.name,
        )
        return await self.start(factory, placement)


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
    """A `fleet.supervisor.Host`: the handle of one `HostActor`."""

    def __init__(self, member: Member, spec: FleetSpec) -> None:
        import ray

        claims = spec.claims
        claim = claims.of(member.role, [node["Resources"] for node in live_nodes()])
        options = claim.options()
        if not claim.resource:
            options["scheduling_strategy"] = on_this_machine()
        if spec.interpreter is not None and member.role is not ServiceRole.ROUTER:
            python, variables = spec.interpreter.python, dict(spec.interpreter.variables)
            options["runtime_env"] = {"py_executable": python, "env_vars": variables}
        self._member = member
        self._spec = spec
        self._actor: Any = ray.remote(ACTORS[member.role]).options(**options).remote(claims, claim)

    async def machine(self) -> MachineId:
        machine: MachineId = await self._finish(self._actor.machine.remote())
        return machine

    async def start(self, address: str, local_rank: LocalRank) -> Endpoint | StartFault:
        import ray

        factory = pickle.dumps(self._spec.factory(self._member.role))
        supervisor = ray.get_runtime_context().current_actor
        call = self._actor.start_placed.remote(factory, self._member, address, local_rank, supervisor)
        result: Endpoint | StartFault = await self._finish(call)
        return result

    async def wait(self) -> None:
        reason = await self._finish(self._actor.wait.remote())
        if reason:
            self.kill()
            raise HostDied(f"{reason}; its log is in {log_dir()}")

    async def drain(self, timeout_s: float) -> None:
        await self._finish(self._actor.drain.remote(timeout_s))

    async def set_config(self, live: LiveConfig) -> None:
        await self._finish(self._actor.set_config.remote(live))

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> str:
        reason: str = await self._finish(self._actor.switch_role.remote(role, timeout_s))
        return reason

    async def set_fleet(self, workers: list[Endpoint], routers: list[FleetRouter]) -> None:
        await self._finish(self._actor.set_fleet.remote(workers, routers))

    async def traffic(self, start_s: float) -> RouterTraffic:
        traffic: RouterTraffic = await self._finish(self._actor.traffic.remote(start_s))
        return traffic

    async def _finish(self, call: Any) -> Any:
        """The result of a call. A method that raises is a bug of the service, so the call also ends its process."""
        import ray

        try:
            return await await_actor(call)
        except ray.exceptions.RayError as error:
            self.kill()
            raise HostDied(str(error).strip().splitlines()[-1]) from error

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


class SupervisorActor(Supervisor):
    """A `Supervisor` inside a Ray actor, on the machine of `tandem serve`."""

    def __init__(self, spec: FleetSpec) -> None:
        leaving = partial(leaving_machines, spec.config) if spec.config.address else None
        super().__init__(spec, RayHost, machine_here(spec.config), leaving)


def on_this_machine() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
