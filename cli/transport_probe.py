"""Measures and judges the path of a transport between two processes of this machine, for `tandem doctor`.

The probe runs this module in a second process, the owner. The owner registers a pool and prints its address as one line
of hex. It reads the address of the reader from standard input, and returns every notification until that input ends.
The reader copies the whole pool, in random order as a worker does. kv_transfer/protocol/path_verdict.py judges the
result, as for workers.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import secrets
import select
import statistics
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from cli.compose import open_transport
from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.paths import PathState, PathStatus
from kv_transfer.location import locate
from kv_transfer.path_probe import keep_for_probes, seen, traffic
from kv_transfer.protocol.path_verdict import expected_bytes_per_s, judge, lane_of
from kv_transfer.protocol.plan import Run
from kv_transfer.transports.transport import Notification, PoolMemory, ReadBroken, ReadDone, Transport
from protos import codec
from tandem_client.stubs import worker_pb2

LAYOUT = KVLayout("probe", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
NUM_BLOCKS, PROBE_BYTES = keep_for_probes(200, LAYOUT)  # 73 MB
BLOCKS_PER_READ = 16
NUM_SINGLE_READS = 30
NUM_ROUND_TRIPS = 20
TIMEOUT_S = 20.0
PAUSE_S = 0.0002  # between two polls
FILL = 0x5A


@dataclass(frozen=True, slots=True)
class ProbeResult:
    path: PathStatus
    single_read_s: float  # median of one 360 KB block


_Side = tuple[Transport, AgentAddress, mmap.mmap]


def _open(config: TransferConfig, fill: int) -> _Side:
    memory = mmap.mmap(-1, NUM_BLOCKS * LAYOUT.block_bytes + PROBE_BYTES)
    pool_array = np.frombuffer(memory, dtype=np.uint8)
    pool_array[:] = fill  # map every page before the measurement
    base = int(pool_array.ctypes.data)
    incarnation = secrets.randbits(63) | 1
    transport = open_transport(config, f"probe.{incarnation:x}")
    pool = PoolMemory(base, NUM_BLOCKS, LAYOUT, memoryview(memory), probe_bytes=PROBE_BYTES)
    transport.register(pool)
    address = AgentAddress(
        transport.name, incarnation, transport.metadata(), base, NUM_BLOCKS, LAYOUT, config.lease_s, PROBE_BYTES,
        locate(pool),
    )  # fmt: skip
    return transport, address, memory


def _to_hex(address: AgentAddress) -> str:
    return codec.encode_agent(address).SerializeToString().hex()


def _from_hex(line: str) -> AgentAddress:
    return codec.decode_agent(worker_pb2.AgentAddress.FromString(bytes.fromhex(line)))


def run_owner(config: TransferConfig) -> None:
    """The second process: offer the pool, and echo notifications, until standard input ends."""
    transport, address, _memory = _open(config, FILL)
    print(_to_hex(address), flush=True)
    reader = _from_hex(sys.stdin.readline())
    transport.connect(reader)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        for event in transport.poll():
            if isinstance(event, Notification):
                transport.notify(reader.name, event.payload)


def _read(transport: Transport, peer: str, runs: list[Run]) -> float:
    """Seconds from the start to the end of a read. Raises `TransportError`."""
    start = time.perf_counter()
    handle = transport.start_read(peer, runs)
    while time.perf_counter() < start + TIMEOUT_S:
        for event in transport.poll():
            if event == ReadDone(handle):
                return time.perf_counter() - start
            if isinstance(event, ReadBroken):
                raise event.error
        time.sleep(0 if time.perf_counter() < start + 0.1 else PAUSE_S)
    raise TransportError(f"a read of {sum(run.num_bytes for run in runs)} bytes took more than {TIMEOUT_S:g} s")


def _round_trip(transport: Transport, peer: str) -> float:
    """Seconds until a notification returns. Raises `TransportError`."""
    start = time.perf_counter()
    transport.notify(peer, b"?")
    while time.perf_counter() < start + TIMEOUT_S:
        if any(isinstance(event, Notification) for event in transport.poll()):
            return time.perf_counter() - start
    raise TransportError(f"a notification did not come back within {TIMEOUT_S:g} s")


def _measure(config: TransferConfig, reader: _Side, owner: AgentAddress) -> ProbeResult:
    transport, ours, memory = reader
    transport.connect(owner)
    size = LAYOUT.block_bytes
    order = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    _read(transport, owner.name, [Run(0, 0, size)])  # the first read also connects
    latency_s = min(_round_trip(transport, owner.name) for _ in range(NUM_ROUND_TRIPS))
    before, seconds = traffic(), 0.0
    for first in range(0, NUM_BLOCKS, BLOCKS_PER_READ):
        runs = [Run(block * size, block * size, size) for block in order[first : first + BLOCKS_PER_READ]]
        seconds += _read(transport, owner.name, runs)
    lane = lane_of(seen(before, traffic(), NUM_BLOCKS * size), ours.location, owner.location)
    single = [_read(transport, owner.name, [Run(0, 0, size)]) for _ in range(NUM_SINGLE_READS)]
    if memory[: NUM_BLOCKS * size] != bytes([FILL]) * (NUM_BLOCKS * size):
        raise TransportError("the bytes that arrived differ from the bytes that were sent")
    transport.close()
    expected = expected_bytes_per_s(ours.location, owner.location, config.expected_path_bytes_per_s)
    path = PathStatus(owner.name, PathState.FINE, lane, NUM_BLOCKS * size / seconds, expected, latency_s)
    state = judge(path, ours.location, owner.location, config.slow_path_share)
    return ProbeResult(replace(path, state=state), statistics.median(single))


async def probe(config: TransferConfig) -> ProbeResult:
    """Raises `TransportError` if the transport does not work between two processes of this machine."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.transport_probe", config.transport,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            _, said = await process.communicate()
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            raise TransportError(f"the peer process ended: {' '.join(last)}")
        reader = await asyncio.to_thread(_open, config, 0)
        process.stdin.write(_to_hex(reader[1]).encode() + b"\n")
        return await asyncio.to_thread(_measure, config, reader, _from_hex(line.decode()))
    except TimeoutError:
        raise TransportError(f"the peer process did not start within {TIMEOUT_S:g} s") from None
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()


if __name__ == "__main__":
    run_owner(TransferConfig(transport=sys.argv[1]))
