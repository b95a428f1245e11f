"""Where a pool is, and the speed that its hardware promises: of copies in memory, and of the network.

The speed of shared memory is the speed of the kernel's copy between processes (process_vm_readv), measured within this
process: from the pool into the bytes kept for probes, so no block changes. `copy_speed` does not measure a pool that
may fit into the CPU's caches. A device measures a copy within itself.

The speed of the network is the speed that its device states. Many virtual machines state none; then no speed is
expected between machines.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from core.handoff import Location
from kv_transfer.transports.host_address import machine_id
from kv_transfer.transports.transport import PoolMemory

COPIED_BYTES = 67_108_864
NUM_PARTS = 4  # the fastest counts: other processes may use the CPU meanwhile
PIECE_BYTES = 262_144
NET_DEVICES = Path("/sys/class/net")
RDMA_PORTS = Path("/sys/class/infiniband")


def locate(pool: PoolMemory, clock: Callable[[], float] = time.perf_counter) -> Location:
    """Takes about 10 ms."""
    if pool.memory is not None:
        memory = pool.memory
        return Location(machine_id(), True, memory.copy_bytes_per_s, link_speed(), memory.uuid)
    return Location(machine_id(), pool.device is not None, copy_speed(pool, clock), link_speed())


class _IoVector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_speed(pool: PoolMemory, clock: Callable[[], float]) -> float:
    """Bytes per second; 0 where the pool is too small, is on a device, or keeps no bytes for probes."""
    end = pool.num_bytes - pool.probe_bytes
    if pool.view is None or not pool.probe_bytes or end < COPIED_BYTES:
        return 0.0
    piece = min(PIECE_BYTES, pool.probe_bytes)
    num_targets, num_pieces = pool.probe_bytes // piece, COPIED_BYTES // NUM_PARTS // piece
    speeds = []
    for part in range(NUM_PARTS):
        begun = clock()
        for number in range(part * num_pieces, (part + 1) * num_pieces):
            _copy(pool, number * piece, end + number % num_targets * piece, piece)
        speeds.append(num_pieces * piece / (clock() - begun))
    return max(speeds)


def _copy(pool: PoolMemory, source: int, target: int, num_bytes: int) -> None:
    """Copy by the kernel, or in Python where the kernel refuses."""
    assert pool.view is not None
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    into, out_of = (ctypes.byref(_IoVector(pool.address + at, num_bytes)) for at in (target, source))
    done = -1 if read is None else read(os.getpid(), into, 1, out_of, 1, 0)
    if done != num_bytes:
        pool.view[target : target + num_bytes] = pool.view[source : source + num_bytes]


def link_speed(net_devices: Path = NET_DEVICES, rdma_ports: Path = RDMA_PORTS) -> float:
    """Bytes per second of the fastest device that UCX may use; 0 where no device states its speed."""
    allowed = {name.partition(":")[0] for name in os.environ.get("UCX_NET_DEVICES", "").split(",")} - {"", "all"}
    stats = {name: found for name, found in psutil.net_if_stats().items() if found.isup and name != "lo"}
    hardware = {name for name in stats if (net_devices / name / "device").exists()}  # bridges overstate their speed
    usable = stats.keys() & allowed or hardware or stats.keys()
    bits = [stats[name].speed * 1e6 for name in usable]
    bits += [_rate(path) for path in rdma_ports.glob("*/ports/*/rate") if not allowed or path.parts[-4] in allowed]
    return max(bits, default=0.0) / 8


def _rate(path: Path) -> float:
    """Bits per second, from e.g. "100 Gb/sec (4X EDR)"."""
    number, unit = path.read_text().split()[:2]
    return float(number) * 1e9 if unit.startswith("Gb") else 0.0
