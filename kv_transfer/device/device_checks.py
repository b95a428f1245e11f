"""Checks of a process whose pool is on a GPU, before its first transfer.

Some settings of the environment make transfers silently slow, or impossible. Whether network cards can read GPU memory
decides how UCX moves bytes between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
PEER_MEMORY_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})

RDMA_DEVICES = Path("/sys/class/infiniband")
MODULES = Path("/proc/modules")
DRIVER = Path("/proc/driver/nvidia/version")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a variable with which no GPU reads another's memory. It names variable and remedy."""
    for variable in ALLOCATOR_VARIABLES:
        options = environ.get(variable, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in options:
            raise ConfigError(
                f"{variable} has expandable_segments:True: no other process can map such memory, and transfers fall "
                "back to TCP. Remove it"
            )
    if environ.get(GET_ZCOPY, "").lower() in ("n", "no", "off", "0"):
        raise ConfigError(
            f"{GET_ZCOPY}={environ[GET_ZCOPY]} turns reads of GPU memory over cuda_ipc off. Remove it, or set it to y"
        )


def has_gpudirect(rdma_devices: Path = RDMA_DEVICES, modules: Path = MODULES, driver: Path = DRIVER) -> bool:
    """Whether an RDMA device of this machine can read GPU memory: by a peer-memory module, or by dmabuf, which the open
    kernel modules of NVIDIA export."""
    if not any(rdma_devices.glob("*")):
        return False
    loaded = {line.partition(" ")[0] for line in modules.read_text().splitlines()} if modules.exists() else set()
    return bool(loaded & PEER_MEMORY_MODULES) or (driver.exists() and "Open Kernel Module" in driver.read_text())
