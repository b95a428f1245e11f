"""Probes of paths: timed reads of bytes that the peer keeps for probes alone.

The devices' counters tell the lane, whatever the transport: TCP if a network device received as many bytes during the
probe, RDMA if an InfiniBand or RoCE port did. No device counts bytes that move through memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.paths import BROKEN, Lane, PathStatus
from kv_transfer.protocol.events import PathProbed, ProbeFailed, ProbePath
from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.transport import PoolMemory, ReadBroken, ReadDone, Transport

MAX_PROBE_BYTES = 4_194_304
MAX_DEVICE_PROBE_BYTES = 134_217_728  # a GPU copies 4 MiB in less time than the start and the poll of a copy take
MAX_POOL_SHARE = 1 / 64
SEEN_SHARE = 0.9  # of a probe's bytes; devices also count other traffic
NET_DEVICES = Path("/proc/self/net/dev")
RDMA_PORTS = Path("/sys/class/infiniband")

logger = logging.getLogger(__name__)

Traffic = dict[Lane, int]


def keep_for_probes(num_blocks: int, layout: KVLayout, on_device: bool = False) -> tuple[int, int]:
    """(usable blocks, bytes behind them for probes) of a pool; a very small pool keeps no bytes for probes."""
    most = MAX_DEVICE_PROBE_BYTES if on_device else MAX_PROBE_BYTES
    kept = min(max(1, most // layout.block_bytes), int(MAX_POOL_SHARE * num_blocks))
    return num_blocks - kept, kept * layout.block_bytes


def traffic(net_devices: Path = NET_DEVICES, rdma_ports: Path = RDMA_PORTS) -> Traffic:
    """Bytes received so far by the devices of this machine, in this network namespace."""
    lines = net_devices.read_text().splitlines()[2:] if net_devices.exists() else []
    by_tcp = sum(int(line.partition(":")[2].split()[0]) for line in lines)
    words = [int(counter.read_text()) for counter in rdma_ports.glob("*/ports/*/counters/port_rcv_data")]
    return {Lane.TCP: by_tcp, Lane.RDMA: 4 * sum(words)}


def seen(before: Traffic, after: Traffic, num_bytes: int) -> Lane:
    """RDMA or TCP where a device of that kind has counted the bytes, else UNKNOWN."""
    for lane in (Lane.RDMA, Lane.TCP):
        if after[lane] - before[lane] >= SEEN_SHARE * num_bytes:
            return lane
    return Lane.UNKNOWN


@dataclass(slots=True)
class _Probe:
    action: ProbePath
    before: Traffic
    began_at: float
    is_cancelled: bool = False


class PathProber:
    """Runs on the agent's thread, which gives it the ends of its reads (`owns`)."""

    def __init__(self, pool: PoolMemory, count: Callable[[], Traffic] = traffic) -> None:
        self._pool = pool
        self._count = count
        self.probes: dict[int, _Probe] = {}  # by the transport's handle

    def start(self, transport: Transport, peer: AgentAddress, action: ProbePath) -> list[ProbeFailed]:
        """Returns the failure of a probe that cannot start."""
        source = peer.num_bytes - peer.probe_bytes
        target = self._pool.num_blocks * self._pool.layout.block_bytes
        before, began_at = self._count(), time.monotonic()  # over shared memory the copy happens inside start_read
        try:
            handle = transport.start_read(peer.name, [ByteRun(source, target, action.num_bytes)])
        except TransportError as error:
            return [ProbeFailed(action.peer, str(error))]
        self.probes[handle] = _Probe(action, before, began_at)
        return []

    def owns(self, handle: int) -> bool:
        return handle in self.probes

    def end(self, end: ReadDone | ReadBroken) -> PathProbed | ProbeFailed:
        ended_at = time.monotonic()
        probe = self.probes.pop(end.handle)
        peer, num_bytes, seconds = probe.action.peer, probe.action.num_bytes, ended_at - probe.began_at
        if isinstance(end, ReadBroken):
            return ProbeFailed(peer, f"{num_bytes} bytes in {seconds:.1f} s: {end.error}")
        return PathProbed(peer, num_bytes, seconds, seen(probe.before, self._count(), num_bytes))

    def time_out(self, transport: Transport, now: float) -> None:
        for handle, probe in self.probes.items():
            if not probe.is_cancelled and now >= probe.began_at + probe.action.timeout_s:
                probe.is_cancelled = True
                transport.cancel(handle)


def log_path(us: str, path: PathStatus) -> None:
    level, hint = (logging.WARNING, ": `tandem doctor` may say why") if path.state in BROKEN else (logging.INFO, "")
    logger.log(level, "path %s -> %s is %s%s", path.peer, us, path, hint)
