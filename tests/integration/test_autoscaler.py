"""Ray's autoscaler starts a machine for a decode worker that waits, and ends the machine after the worker has drained.

Ray's fake provider plays the cloud: each machine is one more raylet here. Ray 2.60 comes without the defaults of this
provider, `fake_multi_node/example.yaml`. Therefore `ray.cluster_utils.AutoscalingCluster` cannot start, and neither can
version 2 of the autoscaler with the provider type `fake_multinode`. The type `external` needs no such file.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from core.lifecycle import ServiceRole
from tests.integration.fake_services import Journal
from tests.support.ports import kept_port
from tests.support.ray_cluster import RayCluster, driver, machine, ray_environment
from tests.support.units import Unit

HEAD_IP = "127.0.2.1"
HEAD_ID, HEAD_TYPE = "f" * 51 + "00000", "ray.head.default"  # the provider knows no other head
IDLE_S = 3.0
FREED_WITHIN_S = 60.0
FAKE_CLOUD = {"RAY_FAKE_CLUSTER": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
VERSIONS = {
    "v1": {},  # of `ray up`
    "v2": {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID},  # of deploy/kubernetes
}


def autoscaling(head: str) -> dict[str, object]:
    """A config of the autoscaler: one machine for each place of a decode worker, at most two."""
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": head,
        "head_node_id": HEAD_ID,
        "launch_multiple": True,
        # Version 1 tells machines apart by their addresses, which are equal here. Without this option it frees none.
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    types = {
        HEAD_TYPE: {"resources": {"CPU": 0, "prefill": 1}, "node_config": {}, "max_workers": 0},
        "decode": {"resources": {"CPU": 0, "decode": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": provider,
        "head_node_type": HEAD_TYPE,
        "available_node_types": types,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in lists},
    }


@pytest.mark.parametrize("version", [pytest.param("v1", marks=pytest.mark.slow), "v2"])
async def test_a_decode_worker_that_waits_brings_a_machine_which_goes_when_it_has_drained(
    version: str, tmp_path: Path
) -> None:
    with ray_environment() as own, kept_port(HEAD_IP) as port:
        environment = own | FAKE_CLOUD | VERSIONS[version]
        head = f"{HEAD_IP}:{port}"
        config = tmp_path / "autoscaling.json"
        config.write_text(json.dumps(autoscaling(head)))
        options = f'--num-cpus 0 --resources {{"prefill":1}} --autoscaling-config {config}'
        unit = Unit.read("tandem-head.service")
        async with (
            machine(unit, environment, HEAD_IP, options, PORT=str(port)),
            Journal.open(tmp_path / "journal") as journal,
            driver(RayCluster(head, environment), tmp_path / "journal") as fleet,
        ):
            await journal.wait_for(event="workers", workers=["decode-0", "prefill-0"])
            here, there = [await raylet_of(name, journal) for name in ("prefill-0", "decode-0")]
            assert here != there, "the worker has a machine of its own"

            await fleet.scale(ServiceRole.DECODE, 0)
            await journal.wait_for_drains({"decode-0"})
            gone, _ = await asyncio.to_thread(psutil.wait_procs, [there], FREED_WITHIN_S)
            assert gone == [there], "the autoscaler does not free the machine"
            assert here.is_running()


async def raylet_of(name: str, journal: Journal) -> psutil.Process:
    """The process of the machine on which this service runs."""
    pid = (await journal.start_of(name))["pid"]
    raylet = psutil.Process(pid).parent()  # type: ignore[arg-type]
    assert raylet is not None
    assert raylet.name() == "raylet"
    return raylet
