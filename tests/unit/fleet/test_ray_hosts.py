"""A worker without a GPU, on a machine that has some, does not start on the CPU. An actor has its role in its name."""

from __future__ import annotations

from typing import Any

import pytest
import ray.exceptions

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from fleet.host.host import LocalRank
from fleet.host.service_host import StartFault
from fleet.law.claims import Claim, Claims, GpuUse
from fleet.law.events import Member, SlotId
from fleet.ray import hosts
from fleet.ray.hosts import HostActor, RayHost
from fleet.supervisor.spec import FleetSpec


async def test_a_machine_with_gpus_that_joined_later_makes_the_next_start_ask_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = {"Resources": {"decode": 1.0, "GPU": 8.0}}
    monkeypatch.setattr(hosts, "node_here", lambda: node)
    claims = Claims(ClusterConfig(), GpuUse.IF_PRESENT)
    member = Member(SlotId(ServiceRole.DECODE, 0), ServiceRole.DECODE, 1)
    earlier = claims.of(ServiceRole.DECODE, [])
    assert earlier == Claim("decode"), "no machine of the pool was there"
    fault = await HostActor(claims, earlier, member, "", None).start_placed(b"", "", LocalRank(0, 1))
    assert isinstance(fault, StartFault)
    assert not fault.permanent
    assert claims.of(ServiceRole.DECODE, [node["Resources"]]) == Claim("decode", 1.0)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (ServiceRole.ROUTER, "Router"),
        (ServiceRole.PREFILL, "PrefillWorker"),
        (ServiceRole.DECODE, "DecodeWorker"),
    ],
)
def test_an_actor_carries_the_role_of_its_service_in_its_name(
    monkeypatch: pytest.MonkeyPatch, role: ServiceRole, name: str
) -> None:
    """`ps` shows ray:: and the name of the class: each service was a ray::HostActor."""
    made: list[type] = []

    class Remote:
        def options(self, **_: object) -> Remote:
            return self

        def remote(self, *_: object) -> Remote:
            return self

    def remote(actor: type) -> Remote:
        made.append(actor)
        return Remote()

    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr(hosts, "live_nodes", list)
    monkeypatch.setattr(hosts, "on_this_machine", lambda: None)
    monkeypatch.setattr(hosts, "this_supervisor", lambda: None)
    service: Any = None  # is never started
    spec = FleetSpec(ClusterConfig(), service, service, service, lambda _: "", 0, 1.0, 1.0)
    RayHost(Member(SlotId(role, 0), role, 1), spec)
    assert [actor.__name__ for actor in made] == [name]
    assert issubclass(made[0], HostActor)


async def test_a_host_of_a_version_that_cannot_answer_is_killed_and_the_start_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Actor:
        adopt: Any

        async def remote(self, *_: object) -> None:
            raise ray.exceptions.RaySystemError(TypeError("adopt() takes 2 arguments"))

    actor, killed = Actor(), list[object]()
    actor.adopt = actor
    monkeypatch.setattr("ray.get_actor", lambda _: actor)
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr(hosts, "_names_of_hosts", lambda: ["host-decode-0"])
    monkeypatch.setattr(hosts, "this_supervisor", lambda: None)
    service: Any = None
    spec = FleetSpec(ClusterConfig(), service, service, service, lambda _: "", 0, 1.0, 1.0)
    assert await hosts.find_services(spec) == []
    assert killed == [actor]
