"""The simulated transfer agent: performs a machine's actions on simulated memory, in virtual time.

It keeps the promises of kv_transfer/protocol/events.py: a READY carries the blocks' digests, and each `StartRead`
has one end, after which nothing writes into its targets. A read copies one half of its blocks in the middle of its time
and the other half at its end, so whatever is reused meanwhile shows in what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core.handoff import Abort, AbortReason, HandoffMessage, Ready, Release
from core.paths import Lane
from core.scheduling.block_pool import BlockPool, Column
from kv_transfer.protocol.events import (
    AgentAction,
    ComputeDigests,
    Connect,
    Disconnect,
    LogPath,
    MessageReceived,
    PathProbed,
    PeerLost,
    ProbeFailed,
    ProbePath,
    ReadFailed,
    ReadFinished,
    ReadTimedOut,
    SendMessage,
    StartRead,
)
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.faults import PROBED_BYTES_PER_S, ReadFaults
from simulator.virtual.memory import WHOLE_BLOCK, Memory
from simulator.virtual.network import Network
from simulator.virtual.world import SimulationError, World

AgentEvents = MessageReceived | ReadFinished | ReadTimedOut | ReadFailed | PeerLost | PathProbed | ProbeFailed


class SimulatedAgent:
    """The agent of one worker. `post` sends its events to the worker; `directory` has every agent by name."""

    def __init__(
        self,
        name: str,
        pool: BlockPool,
        memory: Memory,
        spec: WorkerSpec,
        post: Callable[[AgentEvents], None],
    ) -> None:
        self.name = name
        self.pool = pool
        self.memory = memory
        self.alive = True  # a peer learns of a death when it next sends a message or finishes a read
        self._config, self._link, self._block_bytes = spec.transfer, spec.link, spec.layout.block_bytes
        self._gives_until = self._reads_until = 0.0  # over its link, which carries both ways at full speed
        self._post = post
        self._peers: set[str] = set()
        self._digests: dict[int, int] = {}  # of offered blocks

    def join(self, world: World, network: Network, directory: dict[str, SimulatedAgent], faults: ReadFaults) -> None:
        self._world, self._network, self._directory, self._faults = world, network, directory, faults
        directory[self.name] = self

    def perform(self, action: AgentAction) -> None:
        if not self.alive:
            return
        match action:
            case Connect(peer):
                self._peers.add(peer.name)
                if not self._is_alive(peer.name):
                    self._lose(peer.name, self._config.connect_timeout_s)
            case Disconnect(peer):
                self._peers.discard(peer)
            case SendMessage(peer, message):
                self._send(peer, message)
            case StartRead():
                self._start_read(action)
            case ComputeDigests(blocks):
                self._digests.update((block, self.memory.digest(block)) for block in blocks)
            case ProbePath():
                self._probe(action)
            case LogPath(path):
                self._world.counts[f"path {path.state.value}"] += 1
                self._world.note(f"{self.name}: path from {path.peer} is {path}")

    # ---- messages

    def _send(self, peer: str, message: HandoffMessage) -> None:
        if peer not in self._peers:
            return  # its PeerLost is on the way
        withdrawn = isinstance(message, Abort | Release) and message.reason is AbortReason.OVERLOADED
        self._world.counts["hand-off gives way"] += withdrawn and isinstance(message, Release)
        if withdrawn and self.pool.num_available < self.pool.num_blocks:
            self._world.trouble(self.name)  # somebody waits for the blocks of another sequence
        if isinstance(message, Ready) and self._config.verify_digests:
            digests = self._digests_for(peer, message)
            message = replace(message, blocks=replace(message.blocks, digests=digests))
        if not self._is_alive(peer):
            self._lose(peer, self._network.delay(self.name, peer))
            return
        receiver, sender = self._directory[peer], self.name
        self._network.notify(sender, peer, message, lambda: receiver.receive(sender, message))

    def _digests_for(self, peer: str, message: Ready) -> tuple[int, ...]:
        if self._directory[peer].memory.block_size == self.memory.block_size:
            return tuple(self._digests[block] for block in message.blocks.blocks)
        return tuple(self.memory.digest(block, self._slots_of(piece, peer)) for piece, block, _ in message.blocks)

    def _slots_of(self, piece: int, peer: str) -> slice:
        """Of a piece in a block of this worker. The smaller of the two block sizes is the size of a piece."""
        size = min(self.memory.block_size, self._directory[peer].memory.block_size)
        first = piece % (self.memory.block_size // size) * size
        return slice(first, first + size)

    def receive(self, sender: str, message: HandoffMessage) -> None:
        if self.alive:
            self._post(MessageReceived(sender, message))

    def _is_alive(self, peer: str) -> bool:
        return peer in self._directory and self._directory[peer].alive

    def _lose(self, peer: str, delay_s: float) -> None:
        """Report the loss of a connection, once. The report may also say that the process has died."""
        self._peers.discard(peer)
        lost = PeerLost(peer, "connection reset", died=not self._is_alive(peer) and self._world.chance(0.5))
        self._world.after(delay_s, lambda: self._report(lost))

    def _report(self, event: AgentEvents) -> None:
        if self.alive:
            self._world.counts[type(event).__name__] += 1
            self._post(event)

    # ---- reads

    def _probe(self, probe: ProbePath) -> None:
        world, faults = self._world, self._faults
        duration = probe.num_bytes / PROBED_BYTES_PER_S * world.random.uniform(0.5, 3.0)
        if world.chance(faults.slow):
            duration *= 1000
        if not self._is_alive(probe.peer) or probe.peer not in self._peers or world.chance(faults.broken):
            world.counts["broken probe"] += 1
            failed = ProbeFailed(probe.peer, "no end in time")
            world.after(probe.timeout_s, lambda: self._report(failed))
        else:
            probed = PathProbed(probe.peer, probe.num_bytes, duration, Lane.UNKNOWN)
            world.after(duration, lambda: self._report(probed))

    def read_seconds(self, read: StartRead) -> float:
        """The time of a read without faults. Over a link, a read waits for earlier reads of its two agents."""
        if self._link is None:
            return self._faults.seconds_per_block * len(read.pairs) * self._world.random.uniform(0.5, 3.0)
        owner = self._directory[read.peer]
        begins_at = max(self._world.now, self._reads_until, owner._gives_until)
        ends_at = begins_at + len(read.targets) * self._block_bytes / self._link.bytes_per_s
        self._reads_until = owner._gives_until = ends_at
        return ends_at - self._world.now + self._link.latency_s

    def _start_read(self, read: StartRead) -> None:
        world, faults = self._world, self._faults
        duration = self.read_seconds(read)
        if world.chance(faults.slow):
            world.counts["slow read"] += 1
            world.trouble(self.name, read.peer, until=world.now + 6.0 * read.timeout_s)
            duration = read.timeout_s * world.random.choice((0.5, 0.9, 1.1, 1.5, 6.0))
        world.counts["read of pieces"] += bool(read.pieces)
        half = len(read.pairs) // 2
        world.after(duration / 2, lambda: self._copy(read, 0, half))
        if duration > read.timeout_s or world.chance(faults.broken):
            world.counts["broken read"] += 1
            world.trouble(self.name, read.peer, until=world.now + duration)
            if duration > read.timeout_s:
                world.after(read.timeout_s, lambda: self._report(ReadTimedOut(read.read_id, "no end in time")))
            failed = ReadFailed(read.read_id, AbortReason.READ_FAILED, "no end in time")
            world.after(duration, lambda: self._report(failed))
        else:
            world.after(duration, lambda: self._finish_read(read, half, duration))

    def _copy(self, read: StartRead, first: int, end: int) -> None:
        """Copy pairs [first, end) unless one of the two workers has died; the end of the read reports a death."""
        if not self.memory.has_content or not self.alive or not self._is_alive(read.peer):
            return
        source = self._directory[read.peer]
        for index in range(first, end):
            source_block, target_block = read.pairs[index]
            if self.pool.column_of(target_block) is not Column.INCOMING:
                raise SimulationError(
                    f"seed {self._world.seed}: {self.name} read into block {target_block}, which is not reserved"
                )
            from_slots = source._slots_of(read.pieces[index], self.name) if read.pieces else WHOLE_BLOCK
            content = source.memory.read(source_block, from_slots)
            if self._world.chance(self._faults.corrupted):
                self._world.counts["corrupted block"] += 1
                self._world.trouble(self.name, read.peer)
                content[0] ^= 1
            self.memory.write(target_block, content, self._target_slots(read, index))

    def _target_slots(self, read: StartRead, index: int) -> slice:
        return self._slots_of(read.pieces[index], read.peer) if read.pieces else WHOLE_BLOCK

    def _finish_read(self, read: StartRead, half: int, seconds: float) -> None:
        if not self.alive:
            return
        if read.peer not in self._peers:
            self._report(ReadFailed(read.read_id, AbortReason.PEER_LOST, "not connected"))
        elif not self._is_alive(read.peer):
            self._report(ReadFailed(read.read_id, AbortReason.PEER_LOST, "the peer has died"))
            self._lose(read.peer, 0.0)
        else:
            self._copy(read, half, len(read.pairs))
            targets = read.targets if self._config.verify_digests else ()
            digests = tuple(
                self.memory.digest(block, self._target_slots(read, index)) for index, block in enumerate(targets)
            )
            self._report(ReadFinished(read.read_id, digests, seconds))
