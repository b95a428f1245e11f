"""A worker that Ray placed without a GPU, on a machine that has some, does not start on the CPU."""

from __future__ import annotations

import pytest

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from fleet import ray_hosts
from fleet.claims import Claim, Claims, GpuUse
from fleet.events import Member, SlotId
from fleet.host import LocalRank
from fleet.ray_hosts import HostActor
from fleet.service_host import StartFault


async def test_a_machine_with_gpus_that_joined_later_makes_the_next_start_ask_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = {"Resources": {"decode": 1.0, "GPU": 8.0}}
    monkeypatch.setattr(ray_hosts, "node_here", lambda: node)
    claims = Claims(ClusterConfig(), GpuUse.IF_PRESENT)
    member = Member(SlotId(ServiceRole.DECODE, 0), ServiceRole.DECODE, 1)
    earlier = claims.of(ServiceRole.DECODE, [])
    assert earlier == Claim("decode"), "no machine of the pool was there"
    fault = await HostActor(claims, earlier).start_placed(b"", member, "", LocalRank(0, 1), None)
    assert isinstance(fault, StartFault)
    assert not fault.permanent
    assert claims.of(ServiceRole.DECODE, [node["Resources"]]) == Claim("decode", 1.0)
