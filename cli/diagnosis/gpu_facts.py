"""Facts about the GPUs and RDMA devices of a machine, read from nvidia-smi, sysfs and procfs; nothing is judged here.

`nvidia-smi topo` prints matrices with tabs, the header underlined by escape codes:

            GPU0   GPU1   NIC0   CPU Affinity   ...            GPU0   GPU1
    GPU0     X     NV18   PIX    0-51                  GPU0    X      OK
    GPU1    NV18    X     SYS    52-103                GPU1    OK     X
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.device.device_checks import DRIVER, MODULES, RDMA_DEVICES, has_gpudirect

SMI_TIMEOUT_S = 30.0  # without its persistence mode, the driver wakes each GPU for the call
QUERY = "index,name,driver_version,compute_cap,memory.total,memory.free,pci.bus_id,compute_mode,mig.mode.current"
MATRICES = (("-m",), ("-p2p", "r"))  # `nvidia-smi topo`: links, and reads between GPUs
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"  # of a PCI device: a class 0x0300.. or 0x0302.. is a GPU
PTRACE_CAPABILITY = 1 << 19  # CAP_SYS_PTRACE, linux/capability.h

Pairs = dict[tuple[int, int], str]  # of two GPUs, each pair in both orders


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    driver: str
    compute_capability: tuple[int, int]
    total_mb: int
    free_mb: int
    bus_id: str  # as sysfs writes it: 0000:18:00.0
    compute_mode: str
    mig: bool
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    active: bool  # at least one of its ports
    link: str  # of the first active port, such as "InfiniBand, 400 Gb/sec (4X NDR)"
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    gpus: tuple[Gpu, ...] = ()
    undriven: bool = False  # there is a GPU, but no driver answers for it
    links: Pairs = field(default_factory=dict)  # how two GPUs are connected: NV18, PIX, PHB, SYS
    peer_reads: Pairs = field(default_factory=dict)  # whether a GPU reads another: OK, CNS, GNS, TNS, NS
    rdma: tuple[RdmaDevice, ...] = ()
    rdma_usable: bool = False  # /dev/infiniband holds devices
    gpudirect: bool = False  # RDMA devices read GPU memory
    ptrace: bool = True  # a process may read the memory of another one of its user
    environment: Mapping[str, str] = field(default_factory=dict)


def run_command(*command: str) -> str | None:
    """The output of a command; None if it is not installed, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_facts(
    root: Path = Path("/"),
    run: Callable[..., str | None] = run_command,
    environment: Mapping[str, str] = os.environ,
) -> GpuFacts:
    """`root` holds sys, proc and dev."""
    listed = run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    gpus = tuple(_gpu(line, root) for line in (listed or "").splitlines() if line.count(",") == QUERY.count(","))
    if not gpus:
        return GpuFacts(undriven=_has_pci_gpu(root), environment=environment)
    pairs = [read_matrix(run("nvidia-smi", "topo", *what) or "") for what in MATRICES] if len(gpus) > 1 else [{}, {}]
    return GpuFacts(
        gpus, False, pairs[0], pairs[1], _rdma_devices(root),
        rdma_usable=any((root / "dev/infiniband").glob("uverbs*")),
        gpudirect=has_gpudirect(*(root / path.relative_to("/") for path in (RDMA_DEVICES, MODULES, DRIVER))),
        ptrace=_may_ptrace(root),
        environment=environment,
    )  # fmt: skip


def read_matrix(text: str) -> Pairs:
    """The entries between GPUs of a matrix that `nvidia-smi topo` prints."""
    rows = [[cell.strip() for cell in line.split("\t")] for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    pairs: Pairs = {}
    for row in rows:
        reader = re.fullmatch(r"GPU(\d+)", row[0])
        for name, entry in zip(header[1:], row[1:], strict=False):
            owner = re.fullmatch(r"GPU(\d+)", name)
            if reader and owner and reader[1] != owner[1]:
                pairs[int(reader[1]), int(owner[1])] = entry
    return pairs


def _gpu(line: str, root: Path) -> Gpu:
    index, name, driver, capability, total, free, bus, mode, mig = (cell.strip() for cell in line.split(","))
    major, _, minor = capability.partition(".")
    bus_id = bus.lower()[-len("0000:18:00.0") :]  # nvidia-smi prints eight digits of the domain, sysfs four
    return Gpu(
        _number(index), name, driver, (_number(major), _number(minor)), _number(total), _number(free), bus_id, mode,
        mig == "Enabled", _numa_node(root / "sys/bus/pci/devices" / bus_id),
    )  # fmt: skip


def _rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    found = []
    for directory in sorted((root / RDMA_DEVICES.relative_to("/")).glob("*")):
        ports = [port for port in sorted((directory / "ports").glob("*")) if "ACTIVE" in _text(port / "state")]
        link = f"{_text(ports[0] / 'link_layer')}, {_text(ports[0] / 'rate')}" if ports else "no active port"
        found.append(RdmaDevice(directory.name, bool(ports), link, _numa_node(directory / "device")))
    return tuple(found)


def _has_pci_gpu(root: Path) -> bool:
    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(
        _text(device / "vendor") == NVIDIA_VENDOR and _text(device / "class").startswith(DISPLAY_CLASS)
        for device in devices
    )


def _may_ptrace(root: Path) -> bool:
    """Yama restricts reads of another process's memory to children from scope 1 on, except for this capability."""
    if not _number(_text(root / "proc/sys/kernel/yama/ptrace_scope")):
        return True
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(root / "proc/self/status"), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) & PTRACE_CAPABILITY)


def _numa_node(device: Path) -> int | None:
    node = _number(_text(device / "numa_node"), -1)
    return node if node >= 0 else None  # -1: a machine with one node


def _number(text: str, default: int = 0) -> int:
    """`default` for [N/A] and the like."""
    try:
        return int(float(text))
    except ValueError:
        return default


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
