"""Measures the path of a transport between two processes of this machine, for `tandem doctor`.

Both processes run the transfer agent and machine of a worker, over a pool of one block. The probe starts this module as
the second process, the owner, and announces it to the reader, which measures the path as the workers of a fleet do
(kv_transfer/protocol/paths.py). Each process gets the address of the other as one line of hex.
"""

from __future__ import annotations

import mmap
import queue
import secrets
import subprocess
import sys
import threading
import time

import numpy as np

from cli.compose import open_transport
from core.config import TransferConfig
from core.errors import TransportError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.machine import Tick
from core.paths import PathState, PathStatus, PeerJoined
from core.scheduling.block_pool import BlockPool
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.path_probe import MAX_PROBE_BYTES
from kv_transfer.protocol.events import AgentAction, AgentEvent, AgentFailed, TransferEvent
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.transports.transport import PoolMemory
from protos import codec
from tandem_client.stubs import worker_pb2

LAYOUT = KVLayout("probe", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
TIMEOUT_S = 20.0
TICK_S = 0.05
FILL = 0x5A


class ProbeWorker:
    """The part of a worker that measures paths."""

    def __init__(self, config: TransferConfig, name: str, fill: int) -> None:
        """Start the agent. Blocks. Raises `TransportError`."""
        memory = mmap.mmap(-1, LAYOUT.block_bytes + MAX_PROBE_BYTES)
        self.bytes = np.frombuffer(memory, dtype=np.uint8)
        self.bytes[:] = fill  # map every page before the measurement
        pool = PoolMemory(int(self.bytes.ctypes.data), 1, LAYOUT, memoryview(memory), probe_bytes=MAX_PROBE_BYTES)
        identity = AgentIdentity(name, secrets.randbits(63) | 1)
        self._events: queue.Queue[list[AgentEvent]] = queue.Queue()
        self.agent = TransferAgent(config, identity, pool, lambda name: open_transport(config, name), self._events.put)
        self.machine = TransferMachine(config, BlockPool(1), self.agent.start())

    def handle(self, event: TransferEvent) -> None:
        actions = self.machine.handle(event, time.monotonic())
        self.agent.perform([action for action in actions if isinstance(action, AgentAction)], active=True)

    def handle_next(self) -> None:
        """Handle what the agent reports, or a tick after TICK_S. Raises `TransportError` if the agent failed."""
        try:
            events = self._events.get(timeout=TICK_S)
        except queue.Empty:
            return self.handle(Tick())
        for event in events:
            if isinstance(event, AgentFailed):
                raise TransportError(event.detail)
            self.handle(event)


def _to_hex(address: AgentAddress) -> str:
    return codec.encode_agent(address).SerializeToString().hex()


def _from_hex(line: str) -> AgentAddress:
    return codec.decode_agent(worker_pb2.AgentAddress.FromString(bytes.fromhex(line)))


def run_owner(config: TransferConfig) -> None:
    """The second process: answers the reader until standard input ends."""
    owner = ProbeWorker(config, "owner", FILL)
    print(_to_hex(owner.agent.address), flush=True)
    owner.handle(PeerJoined(_from_hex(sys.stdin.readline()), is_owner=False))
    until_input_ends = threading.Thread(target=sys.stdin.read, daemon=True)
    until_input_ends.start()
    while until_input_ends.is_alive():
        owner.handle_next()


def _measure(reader: ProbeWorker, owner: AgentAddress) -> PathStatus:
    reader.handle(PeerJoined(owner, is_owner=True))
    while reader.machine.paths[0].state is PathState.CONNECTING:
        reader.handle_next()
    (path,) = reader.machine.paths
    reader.agent.close()
    if path.state is PathState.UNREACHABLE:
        raise TransportError(path.detail)
    arrived = reader.bytes[LAYOUT.block_bytes :] == FILL  # a slow path is measured with the first part of these bytes
    num_arrived = int(arrived.argmin()) if not arrived.all() else len(arrived)
    if num_arrived == 0 or (reader.bytes[LAYOUT.block_bytes + num_arrived :] != 0).any():
        raise TransportError("the bytes that arrived differ from the bytes that were sent")
    return path


def probe(config: TransferConfig) -> PathStatus:
    """Raises `TransportError` if the transport does not work between two processes of this machine."""
    command = [sys.executable, "-P", "-m", "cli.diagnosis.transport_probe", config.transport]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
    assert process.stdin is not None
    assert process.stdout is not None
    too_late = threading.Timer(TIMEOUT_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        if not line:
            last = process.communicate()[1].strip().splitlines()[-1:]
            raise TransportError(f"the peer process ended: {' '.join(last) or f'no answer in {TIMEOUT_S:g} s'}")
        reader = ProbeWorker(config, "reader", 0)
        print(_to_hex(reader.agent.address), file=process.stdin, flush=True)
        return _measure(reader, _from_hex(line))
    finally:
        process.communicate()
        too_late.cancel()


if __name__ == "__main__":
    run_owner(TransferConfig(transport=sys.argv[1]))
