"""Resources that a member of the fleet claims from Ray: a place in its pool, memory, and on a GPU its share of one GPU.

Ray never places more than 1.0 of shares on a GPU. It puts a fraction on the GPU with the least room that suffices, and
a whole share on an empty GPU.

    shares .5 .5 .5 1, in this order:   GPU 0 [.5|.5]   GPU 1 [.5|  ]   GPU 2 [ 1 ]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from core.config import ClusterConfig
from core.errors import ConfigError
from core.lifecycle import ServiceRole
from core.service import PoolSizes

GPU = "GPU"  # Ray's name of the resource
ACCELERATOR = "accelerator_type:"  # a machine with an H100 has 1.0 of the resource accelerator_type:H100
MEMORY = "memory"  # Ray's name of the memory of the host, in bytes
MIB = 1024 * 1024
ROOM_TOLERANCE = 1e-6  # ten tenths are one GPU

Resources = Mapping[str, float]  # of one machine, by Ray's names


class GpuUse(Enum):
    """Whether workers run on GPUs."""

    NEVER = "never"
    IF_PRESENT = "if present"  # once a machine of the pool has a GPU, every worker of the pool needs one
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources of one member. A member without a resource runs on the machine of the supervisor."""

    resource: str = ""  # 1.0 of this
    gpus: float = 0.0  # a share of one GPU in [0, 1], or a whole number of GPUs
    accelerator: str = ""  # Ray's name for the type of the GPU; empty = any
    memory_mb: int = 0  # of the host

    def options(self) -> dict[str, Any]:
        """Options of the Ray actor."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.gpus}
        options["resources"] = {self.resource: 1.0} if self.resource else {}
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        if self.memory_mb:
            options["memory"] = self.memory_mb * MIB
        return options

    def __str__(self) -> str:
        kind = f"{self.accelerator or GPU}"
        gpu = kind if self.gpus == 1 else f"{self.gpus:g} {kind}s" if self.gpus > 1 else f"{self.gpus:g} of one {kind}"
        parts = [repr(self.resource)] * bool(self.resource) + [gpu] * bool(self.gpus)
        parts += [f"{self.memory_mb} MB of memory"] * bool(self.memory_mb)
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of every role."""

    config: ClusterConfig
    gpu_use: GpuUse = GpuUse.NEVER
    gpus_per_worker: int = 1  # more than 1: of workers with tensor parallelism, whose claims have whole GPUs

    def of(self, role: ServiceRole, machines: Collection[Resources]) -> Claim:
        """The claim of a member that starts now, while these machines are alive."""
        if role is ServiceRole.ROUTER:
            return Claim(self.config.router_resource, memory_mb=self.config.router_memory_mb)
        claim = self._on_gpu(role)
        present = any(machine.get(GPU, 0) > 0 for machine in machines if machine.get(claim.resource, 0) > 0)
        if self.gpu_use is GpuUse.ALWAYS or (self.gpu_use is GpuUse.IF_PRESENT and (present or claim.accelerator)):
            return claim
        return Claim(claim.resource, memory_mb=claim.memory_mb)

    def _on_gpu(self, role: ServiceRole) -> Claim:
        """The claim of a worker that uses a GPU if its pool may."""
        config = self.config
        if role is ServiceRole.PREFILL:
            gpus = config.prefill_gpus * self.gpus_per_worker
            return Claim(config.prefill_resource, gpus, config.prefill_accelerator, config.prefill_memory_mb)
        gpus = config.decode_gpus * self.gpus_per_worker
        return Claim(config.decode_resource, gpus, config.decode_accelerator, config.decode_memory_mb)

    def settled(self, machine: Resources) -> Claims:
        """The claims of a fleet that has only this machine."""
        use = self.gpu_use
        if use is GpuUse.IF_PRESENT:
            wanted = self.config.prefill_accelerator or self.config.decode_accelerator
            use = GpuUse.ALWAYS if wanted or machine.get(GPU, 0) > 0 else GpuUse.NEVER
        return replace(self, gpu_use=use)

    def wait_reason(self, role: ServiceRole) -> str:
        """The reason why Ray may not have placed a member. A Ray of our own has room for all services but for GPUs."""
        claim = self.of(role, ())
        if not self.config.address or not claim.resource:
            lacking = ["no GPU is free"] * bool(claim.gpus)
            lacking += [f"{claim.memory_mb} MB of memory are not free"] * bool(claim.memory_mb)
            return " or ".join(lacking) or "Ray has not placed it yet"
        may = role is not ServiceRole.ROUTER and self.gpu_use is GpuUse.IF_PRESENT and self._on_gpu(role).gpus
        return f"no machine has a free {claim}{', and a free GPU if it has any' if may and not claim.gpus else ''}"


def check_accelerators(claims: Claims, known: Collection[str], machines: Collection[Resources]) -> None:
    """Raise `ConfigError` for a type that neither Ray (`known`) nor a machine names: its workers would never start."""
    names = {*known, *_accelerators(machines)}
    for role in (ServiceRole.PREFILL, ServiceRole.DECODE):
        accelerator = claims.of(role, machines).accelerator
        if accelerator and accelerator not in names:
            alike = sorted(name for name in names if name.lower() == accelerator.lower())
            hint = f"did you mean {alike[0]}?" if alike else f"it knows {', '.join(sorted(names))}"
            raise ConfigError(
                f"[cluster] {role.value}_accelerator = {accelerator!r} is no accelerator type of Ray: {hint}"
            )


def check_room(claims: Claims, sizes: PoolSizes, machine: Resources) -> None:
    """Raise `ConfigError` if the GPUs of the only machine cannot hold a fleet of these sizes."""
    members = [
        (role, claims.of(role, [machine]))
        for ordinal in range(max(sizes.values()))  # the order in which they start
        for role in (ServiceRole.PREFILL, ServiceRole.DECODE)
        if ordinal < sizes[role]
    ]
    here = sorted(_accelerators([machine]))
    for role, claim in members:
        if claim.accelerator and claim.accelerator not in here:
            kind = f"the GPU of this machine is {here[0]}" if here else "this machine has no GPU"
            raise ConfigError(f"[cluster] {role.value}_accelerator = {claim.accelerator!r}, but {kind}")
    wanted = num_gpus([claim.gpus for _, claim in members])
    found = int(machine.get(GPU, 0))
    if wanted and not found:
        raise ConfigError(
            "[engine] device = cuda, but Ray finds no GPU on this machine: set device to cpu or auto, "
            "or run `tandem doctor`"
        )
    if wanted > found:
        raise ConfigError(
            f"the workers need {wanted} GPUs, but this machine has {found}: start fewer workers, let workers share "
            "a GPU ([cluster] prefill_gpus and decode_gpus, e.g. 0.5), or use --device cpu"
        )


def check_memory(claims: Claims, sizes: PoolSizes, machine: Resources) -> None:
    """Raise `ConfigError` if the only machine has less memory than a fleet of these sizes asks for."""
    wanted_mb = sum(size * claims.of(role, [machine]).memory_mb for role, size in sizes.items())
    found_mb = int(machine.get(MEMORY, 0) / MIB)
    if wanted_mb > found_mb:
        raise ConfigError(
            f"the services ask for {wanted_mb} MB of memory, but Ray has {found_mb} MB on this machine: start fewer of "
            "them, or lower [cluster] prefill_memory_mb, decode_memory_mb and router_memory_mb"
        )


def num_gpus(shares: Sequence[float]) -> int:
    """The number of GPUs of one machine onto which Ray places these shares, in this order."""
    room: list[float] = []  # left on each GPU in use
    for share in filter(None, shares):
        if share > 1.0:
            room += [0.0] * round(share)
            continue
        fitting = [gpu for gpu, left in enumerate(room) if left + ROOM_TOLERANCE >= share]
        if fitting:
            room[min(fitting, key=room.__getitem__)] -= share
        else:
            room.append(1.0 - share)
    return len(room)


def show_only_own_gpu(gpu_ids: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Let CUDA see only the GPU that Ray gave this process, or none. Call before the first library that uses CUDA.

    Ray sets CUDA_VISIBLE_DEVICES too, but leaves every GPU visible to an actor without one, and to every actor with
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES. Ray numbers GPUs like the driver, CUDA by default the fastest first.
    """
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)


def _accelerators(machines: Collection[Resources]) -> set[str]:
    names = {name for machine in machines for name, amount in machine.items() if amount > 0}
    return {name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR)}
