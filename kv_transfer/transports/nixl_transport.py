"""Reads over UCX by nixl: RDMA, shared memory, cuda_ipc or TCP, whichever UCX finds.

- UCX runs in error mode `peer`: the death of a peer raises an exception within milliseconds and never aborts our
  process.
- There is no progress thread, which would take a core. The `poll` calls of both sides drive every read.
- Without that thread nixl takes no locks, so two threads inside nixl crash the process. One thread owns a transport.
- Descriptor lists are prepared once: ours at `register`, a peer's at `connect`. A read of whole blocks only picks
  indices; nixl merges indices that are adjacent on both sides. Any other read makes its own descriptors.
- A descriptor names the kind of memory and the device of its own side: ours from our pool, a peer's from its address.
- UCX reads memory of a device by cuda_ipc or RDMA where it can, and through host memory where it cannot, and does not
  tell which: the measured speed shows it (kv_transfer/protocol/path_verdict.py).
- Over shared memory a read copies before its start returns, so the caller bounds its size.
- Neither nixl nor UCX can withdraw a read in flight. A released read writes when the bytes arrive, even after its peer
  was removed (seen over TCP, from a process that had been stopped). So the transport releases a read, and removes its
  peer, only once nixl reports the read done or broken; until then a cancelled read continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from core.errors import PeerDisconnected, TransportError
from core.handoff import AgentAddress
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.nixl_package import import_nixl
from kv_transfer.transports.poll_time import PollTime
from kv_transfer.transports.transport import Notification, PoolMemory, TransportEvent, read_end

# The most bytes that one system call copies over shared memory; UCX's default of 512 KB costs 8 % of the speed of 2 MiB
# blocks. UCX_CMA_SEG_SIZE in the environment overrides the option.
UCX_OPTIONS = "CMA_SEG_SIZE=64m"
# Where UCX sees no NVLink, it turns reads of device memory over cuda_ipc off, and they fall back to TCP.
DEVICE_UCX_OPTIONS = f"{UCX_OPTIONS},CUDA_IPC_ENABLE_GET_ZCOPY=y"
# UCX listens on each network device without asking for credentials; UCX_NET_DEVICES in the environment has precedence.
LOCAL_UCX_OPTIONS = ",NET_DEVICES=lo"
CLOSE_TIMEOUT_S = 0.5  # for reads in flight

_raise_exceptions = logging.raiseExceptions
_nixl = import_nixl()
logging.raiseExceptions = _raise_exceptions  # importing nixl turns it off for the whole process
logging.getLogger("nixl").setLevel(logging.WARNING)

_bindings = _nixl._bindings
_NIXL_ERRORS = tuple(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))


@contextmanager
def _errors_mapped(doing: str) -> Iterator[None]:
    try:
        yield
    except _bindings.nixlRemoteDisconnectError as error:
        raise PeerDisconnected(f"{doing}: the peer is gone") from error
    except _NIXL_ERRORS as error:
        raise TransportError(f"{doing}: {error}") from error


def _head_of_metadata(name: str) -> bytes:
    """The first bytes of an agent's metadata, as nixl 1.5 writes them. nixl acts on the name in them, whose peer may be
    connected, before it returns that name."""
    encoded = name.encode()
    return b"nixlSerDes|Agent" + len(encoded).to_bytes(8, "little") + encoded + b"|"


@dataclass(frozen=True, slots=True)
class _Memory:
    """The kind of memory that holds a pool, in nixl's words."""

    kind: str
    device: int

    @classmethod
    def of(cls, device: int | None) -> _Memory:
        return cls("DRAM", 0) if device is None else cls("VRAM", device)


@dataclass(frozen=True, slots=True)
class _RemoteAgent:
    address: AgentAddress
    memory: _Memory
    blocks: Any  # prepared descriptors of the agent's blocks; None: they are not as large as ours


@dataclass(slots=True)
class _NixlRead:
    peer: str
    transfer: Any
    done: bool = False  # at its start
    broken: TransportError | None = None  # also after `cancel` and `disconnect`


class NixlTransport:
    def __init__(self, name: str, on_device: bool = False, is_local: bool = False) -> None:
        """`on_device`: our pool is in the memory of a device. `is_local`: all peers are on this machine."""
        self.name = name
        self.busy = False
        self._poll_time = PollTime()
        self._pool: PoolMemory | None = None
        self._memory = _Memory.of(None)  # of our pool
        self._registered: Any = None
        self._blocks: Any = None  # prepared descriptors of our blocks
        self._peers: dict[str, _RemoteAgent] = {}
        self._leaving: dict[str, _RemoteAgent] = {}  # disconnected, with reads that have not ended
        self._reads: dict[int, _NixlRead] = {}
        self._handles = count()
        with _errors_mapped("start nixl"):
            # Without a backend list nixl would create UCX with its defaults first.
            self._agent: Any = _nixl.nixl_agent(name, _nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
            options = (DEVICE_UCX_OPTIONS if on_device else UCX_OPTIONS) + (LOCAL_UCX_OPTIONS if is_local else "")
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "engine_config": options})

    def register(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._memory = _Memory.of(pool.device)
        if pool.memory is not None:
            pool.memory.enter()  # UCX registers and reads memory of the device that is current in its thread
        with _errors_mapped("register the pool"):
            region = (pool.address, pool.num_bytes, self._memory.device, "")
            self._registered = self._agent.register_memory([region], self._memory.kind)
            self._blocks = self._prepare("", self._memory, pool.address, pool.num_bytes, pool.layout.block_bytes)

    def metadata(self) -> bytes:
        with _errors_mapped("describe ourselves"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: AgentAddress) -> None:
        assert self._pool is not None
        leaving = self._leaving.pop(peer.name, None)
        if leaving is not None:  # the name holds the incarnation, so this is the same peer
            self._peers[peer.name] = leaving
            return
        if not peer.metadata.startswith(_head_of_metadata(peer.name)):
            raise TransportError(f"the metadata of {peer.name} is not that of an agent of nixl with this name")
        size, memory, blocks = peer.layout.block_bytes, _Memory.of(peer.device), None
        with _errors_mapped(f"connect to {peer.name}"):
            try:
                self._agent.add_remote_agent(peer.metadata)
                if size == self._pool.layout.block_bytes:
                    blocks = self._prepare(peer.name, memory, peer.pool_base, peer.num_bytes, size)
            except _NIXL_ERRORS:
                with suppress(*_NIXL_ERRORS):  # nixl keeps what it has read, and would refuse the next address
                    self._agent.remove_remote_agent(peer.name)
                raise
        self._peers[peer.name] = _RemoteAgent(peer, memory, blocks)

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for read in self._reads.values():
            if read.peer == peer:
                read.broken = read.broken or PeerDisconnected(f"disconnected from {peer}")
        self._leaving[peer] = known
        self._remove_left()

    def start_read(self, peer: str, runs: Runs) -> int:
        known, pool = self._connected(peer), self._pool
        assert pool is not None
        base, device = known.address.pool_base, known.memory.device
        local = [(pool.address + target, num_bytes, self._memory.device) for _, target, num_bytes in runs]
        remote = [(base + source, num_bytes, device) for source, _, num_bytes in runs]
        with _errors_mapped(f"read from {peer}"):
            ours = self._agent.get_xfer_descs(local, self._memory.kind)
            theirs = self._agent.get_xfer_descs(remote, known.memory.kind)
            return self._start(peer, self._agent.initialize_xfer("READ", ours, theirs, peer))

    def start_block_read(self, peer: str, sources: Sequence[int], targets: Sequence[int]) -> int:
        known, pool = self._connected(peer), self._pool
        if pool is not None and pool.num_parts > 1:
            return self.start_read(peer, pool.block_runs(known.address, sources, targets))
        with _errors_mapped(f"read from {peer}"):
            return self._start(
                peer, self._agent.make_prepped_xfer("READ", self._blocks, targets, known.blocks, sources)
            )

    def try_complete(self, handle: int) -> bool:
        read = self._reads[handle]
        if not read.done or read.broken is not None or not _release(read):
            return False
        del self._reads[handle]
        return True

    def cancel(self, handle: int) -> None:
        read = self._reads.get(handle)
        if read is not None and read.broken is None:
            read.broken = TransportError("cancelled")

    def notify(self, peer: str, payload: bytes) -> None:
        self._connected(peer)
        with _errors_mapped(f"notify {peer}"):
            self._agent.send_notif(peer, payload)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        with _errors_mapped("take notifications"):
            self._poll_time.begin()
            arrived = self._take_notifications()
            self.busy = self._poll_time.end() or bool(self._reads)
        events += (Notification(peer, bytes(payload)) for peer, payloads in arrived.items() for payload in payloads)
        for handle, read in list(self._reads.items()):
            if self._has_ended(read):
                del self._reads[handle]
                events.append(read_end(handle, read.broken))
        self._remove_left()
        return events

    def close(self) -> None:
        """A read that does not end keeps its buffer registered until the process ends."""
        for peer in list(self._peers):
            self.disconnect(peer)
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while self._reads and time.monotonic() < give_up_at:
            self.poll()
        if self._reads:
            raise TransportError(f"a read did not end within {CLOSE_TIMEOUT_S} s")
        with _errors_mapped("close"):
            if self._blocks is not None:
                self._blocks.release()
                self._agent.deregister_memory(self._registered)
        self._blocks = self._registered = self._agent = None

    # ---- inside

    def _take_notifications(self) -> dict[str, list[bytes]]:
        """By the sender's name, which the sender chose."""
        try:
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except UnicodeDecodeError:
            # A peer's name is not UTF-8, and nixl has dropped all notifications that arrived with it. The agent counts
            # the empty notification as malformed; the protocol repeats lost messages.
            return {"": [b""]}
        return arrived

    def _prepare(self, agent: str, memory: _Memory, base: int, num_bytes: int, block_bytes: int) -> Any:
        # One row describes all blocks: address, length, device, stride, count.
        row = [base, block_bytes, memory.device, block_bytes, num_bytes // block_bytes]
        return self._agent.prep_xfer_dlist(agent, np.array([row], dtype=np.uint64), memory.kind)

    def _connected(self, peer: str) -> _RemoteAgent:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"not connected to {peer}")
        return known

    def _start(self, peer: str, transfer: Any) -> int:
        try:
            done = self._agent.transfer(transfer) == "DONE"
        except _NIXL_ERRORS:
            with suppress(*_NIXL_ERRORS):  # nixl frees it later, with the agent
                transfer.release()
            raise
        handle = next(self._handles)
        self._reads[handle] = _NixlRead(peer, transfer, done)
        return handle

    def _has_ended(self, read: _NixlRead) -> bool:
        """Whether the read was done or broken, and is released now."""
        try:
            state = self._agent.check_xfer_state(read.transfer)
        except _bindings.nixlRemoteDisconnectError:
            state, read.broken = "ERR", PeerDisconnected(f"read from {read.peer}: the peer is gone")
        except _NIXL_ERRORS as error:
            state, read.broken = "ERR", read.broken or TransportError(f"read from {read.peer}: {error}")
        if state not in ("DONE", "ERR"):
            return False
        if state == "ERR":
            read.broken = read.broken or TransportError(f"read from {read.peer} failed")
        return _release(read)

    def _remove_left(self) -> None:
        """Forget disconnected peers without reads in flight."""
        for name in self._leaving.keys() - {read.peer for read in self._reads.values()}:
            known = self._leaving.pop(name)
            with _errors_mapped(f"disconnect from {name}"):
                if known.blocks is not None:
                    known.blocks.release()
                self._agent.remove_remote_agent(name)


def _release(read: _NixlRead) -> bool:
    """Release a read that has ended. False where nixl refuses: the next poll tries again."""
    try:
        read.transfer.release()
    except _NIXL_ERRORS:
        return False
    return True
