"""A member claims a place in its pool and a share of a GPU. A claim that no machine can meet is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from core.config import ClusterConfig
from core.errors import ConfigError
from core.lifecycle import ServiceRole
from fleet.law.claims import (
    Claim,
    Claims,
    GpuUse,
    check_accelerators,
    check_memory,
    check_room,
    num_gpus,
    show_only_own_gpu,
)

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
CPU_MACHINE = {"CPU": 8.0, "prefill": 4.0, "decode": 4.0}
GPU_MACHINE = CPU_MACHINE | {"GPU": 2.0, "accelerator_type:H100": 1.0}
KNOWN = {"H100", "H200", "A100"}
WANTS_H200 = ClusterConfig(decode_accelerator="H200")


@pytest.mark.parametrize(
    ("use", "machine", "gpus"),
    [
        (GpuUse.NEVER, GPU_MACHINE, 0.0),
        (GpuUse.IF_PRESENT, CPU_MACHINE, 0.0),
        (GpuUse.IF_PRESENT, GPU_MACHINE, 1.0),
        (GpuUse.ALWAYS, CPU_MACHINE, 1.0),
    ],
)
def test_a_worker_claims_a_gpu_by_device_and_machines(use: GpuUse, machine: dict[str, float], gpus: float) -> None:
    claims = Claims(ClusterConfig(), use)
    assert claims.of(P, [machine]) == Claim("prefill", gpus)
    assert claims.of(R, [machine]) == Claim(), "a router needs no GPU"


def test_the_gpus_of_another_pool_do_not_count() -> None:
    claims = Claims(ClusterConfig(), GpuUse.IF_PRESENT)
    machines = [{"prefill": 1.0, "GPU": 1.0}, {"decode": 1.0}]
    assert [claims.of(role, machines).gpus for role in (P, D)] == [1.0, 0.0]


def test_each_pool_asks_for_its_own_share_and_type() -> None:
    config = ClusterConfig(prefill_gpus=0.25, decode_gpus=0.75, prefill_accelerator="H100", decode_accelerator="H200")
    claims = Claims(config, GpuUse.IF_PRESENT)
    assert claims.of(P, []) == Claim("prefill", 0.25, "H100"), "a type is a wish for a GPU"
    assert claims.of(D, []).options() == {
        "num_cpus": 0, "num_gpus": 0.75, "resources": {"decode": 1.0}, "accelerator_type": "H200",
    }  # fmt: skip
    assert Claim().options() == {"num_cpus": 0, "num_gpus": 0.0, "resources": {}}


def test_each_role_asks_for_its_own_memory_with_a_gpu_and_without() -> None:
    config = ClusterConfig(prefill_memory_mb=512, decode_memory_mb=2048, router_memory_mb=64)
    for use in (GpuUse.NEVER, GpuUse.ALWAYS):
        claims = Claims(config, use)
        assert [claims.of(role, []).memory_mb for role in (P, D, R)] == [512, 2048, 64]
    assert claims.of(D, []).options()["memory"] == 2048 * 1024 * 1024
    assert str(claims.of(D, [])) == "'decode' and GPU and 2048 MB of memory"


def test_a_single_machine_with_too_little_memory_is_refused_by_name() -> None:
    claims, machine = Claims(ClusterConfig(decode_memory_mb=500)), {"memory": 1000.0 * 1024 * 1024}
    check_memory(claims, {P: 1, D: 2, R: 1}, machine)
    with pytest.raises(ConfigError, match=r"1500 MB of memory, but Ray has 1000 MB .* lower \[cluster\] prefill"):
        check_memory(claims, {P: 1, D: 3, R: 1}, machine)


@pytest.mark.parametrize(("machine", "use"), [(CPU_MACHINE, GpuUse.NEVER), (CPU_MACHINE | {"GPU": 1.0}, GpuUse.ALWAYS)])
def test_a_single_machine_settles_whether_its_workers_use_gpus(machine: dict[str, float], use: GpuUse) -> None:
    assert Claims(ClusterConfig(), GpuUse.IF_PRESENT).settled(machine).gpu_use is use
    with pytest.raises(ConfigError, match="decode_accelerator = 'H200'"):  # a wanted type is not forgotten
        check_room(Claims(WANTS_H200, GpuUse.IF_PRESENT).settled(machine), {P: 0, D: 1}, machine)


def test_shares_fill_one_gpu_before_they_take_another_and_need_one_more_in_an_unlucky_order() -> None:
    for shares in ([1, 1], [0.5, 0.5, 1], [0.1] * 20, [0.25, 0.75, 0.25, 0.75], [0.6, 0.4, 0, 0.6, 0.4]):
        assert num_gpus(shares) == 2
    assert num_gpus([0.25, 0.25, 0.75, 0.75]) == 3


ROOM_REFUSED = [
    ({}, CPU_MACHINE, r"device = cuda, but Ray finds no GPU on this machine: .* `tandem doctor`"),
    (
        {"num_decode": 2},
        GPU_MACHINE,
        r"the workers need 3 GPUs, but this machine has 2: .* prefill_gpus and decode_gpus",
    ),
    ({"decode_accelerator": "H200"}, GPU_MACHINE, r"decode_accelerator = 'H200', but the GPU of this machine is H100"),
    ({"prefill_accelerator": "H200"}, CPU_MACHINE, r"prefill_accelerator = 'H200', but this machine has no GPU"),
]


@pytest.mark.parametrize(("options", "machine", "message"), ROOM_REFUSED)
def test_a_fleet_without_room_is_refused(options: dict[str, object], machine: dict[str, float], message: str) -> None:
    config = ClusterConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check_room(Claims(config, GpuUse.ALWAYS), {P: config.num_prefill, D: config.num_decode}, machine)


@pytest.mark.parametrize("options", [{}, {"prefill_gpus": 0.5, "decode_gpus": 0.5}, {"prefill_accelerator": "H100"}])
def test_a_fleet_that_fits_its_machine_is_accepted(options: dict[str, object]) -> None:
    config = ClusterConfig(num_prefill=1, num_decode=1, **options)  # type: ignore[arg-type]
    check_room(Claims(config, GpuUse.ALWAYS), {P: 1, D: 1}, GPU_MACHINE)
    check_room(Claims(config, GpuUse.NEVER), {P: 9, D: 9}, CPU_MACHINE)


@pytest.mark.parametrize(
    ("accelerator", "message"),
    [
        ("h100", r"prefill_accelerator = 'h100' is no .*: did you mean H100\?$"),
        ("H1000", "it knows A100, H100, H200, L99$"),
    ],
)
def test_an_unknown_accelerator_type_is_refused_by_name(accelerator: str, message: str) -> None:
    claims = Claims(ClusterConfig(prefill_accelerator=accelerator), GpuUse.ALWAYS)
    with pytest.raises(ConfigError, match=message):
        check_accelerators(claims, KNOWN, [{"accelerator_type:L99": 1.0}])


@pytest.mark.parametrize("accelerator", ["", "H200", "L99"])
def test_a_type_of_ray_or_of_a_machine_is_accepted(accelerator: str) -> None:
    claims = Claims(ClusterConfig(decode_accelerator=accelerator), GpuUse.ALWAYS)
    check_accelerators(claims, KNOWN, [{"accelerator_type:L99": 1.0}])


REASONS: list[tuple[GpuUse, dict[str, Any], str]] = [
    (GpuUse.NEVER, {}, "Ray has not placed it yet"),
    (GpuUse.ALWAYS, {}, "no GPU is free"),
    (GpuUse.ALWAYS, {"decode_memory_mb": 64}, "no GPU is free or 64 MB of memory are not free"),
    (
        GpuUse.NEVER,
        {"address": "head:6379", "decode_memory_mb": 64},
        "no machine has a free 'decode' and 64 MB of memory",
    ),
    (GpuUse.NEVER, {"address": "head:6379"}, "no machine has a free 'decode'"),
    (GpuUse.ALWAYS, {"address": "head:6379"}, "no machine has a free 'decode' and GPU"),
    (
        GpuUse.ALWAYS,
        {"address": "head:6379", "decode_gpus": 0.5, "decode_accelerator": "H200"},
        "no machine has a free 'decode' and 0.5 of one H200",
    ),
    (GpuUse.IF_PRESENT, {"address": "head:6379"}, "no machine has a free 'decode', and a free GPU if it has any"),
    (GpuUse.IF_PRESENT, {"address": "head:6379", "decode_gpus": 0.0}, "no machine has a free 'decode'"),
]


ROUTER_REASONS = [
    (GpuUse.ALWAYS, {"address": "head:6379"}, "Ray has not placed it yet"),
    (GpuUse.ALWAYS, {"address": "head:6379", "router_resource": "edge"}, "no machine has a free 'edge'"),
]


@pytest.mark.parametrize(
    ("role", "use", "options", "reason"), [(D, *row) for row in REASONS] + [(R, *row) for row in ROUTER_REASONS]
)
def test_the_reason_of_a_wait_for_a_machine_names_what_may_be_missing(
    role: ServiceRole, use: GpuUse, options: dict[str, Any], reason: str
) -> None:
    assert Claims(ClusterConfig(**options), use).wait_reason(role) == reason


@pytest.mark.parametrize(("given", "visible"), [(["3"], "3"), (["GPU-8f2e"], "GPU-8f2e"), ([], "")])
def test_a_process_sees_the_gpu_that_ray_gave_it_and_no_other(given: list[str], visible: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    show_only_own_gpu(given, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_worker_with_tensor_parallelism_claims_whole_gpus() -> None:
    claims = Claims(ClusterConfig(), GpuUse.ALWAYS, gpus_per_worker=4).settled(GPU_MACHINE)
    assert claims.of(P, [GPU_MACHINE]) == Claim("prefill", 4.0)
    assert str(claims.of(P, [GPU_MACHINE])) == "'prefill' and 4 GPUs"
    assert claims.of(P, [GPU_MACHINE]).options()["num_gpus"] == 4.0
    assert num_gpus([4.0, 4.0, 0.5]) == 9
    with pytest.raises(ConfigError, match="need 8 GPUs, but this machine has 2"):
        check_room(claims, {P: 1, D: 1}, GPU_MACHINE)
