"""The puller's half of a hand-off: ask, read what is ready, verify, and be sure the lease was ours all the while.

    RESERVED --targets, WANT--> WANTING <--READY, reads--> READING --all read--> VERIFYING --lease sure--> COMPLETE
        `---------------------------+--------------------------+---------------------+--> FAILED | CANCELLED

Whatever ends a pull early, its own reads end first: only then does the RELEASE go to the owner and the result to the
worker, which may use the target blocks again. How long a read that was cancelled can still write is not ours to say, so
the worker hears at once that the pull is given up, and answers its caller.

What we know of the lease is in kv_transfer/pull.py. One heartbeat per owner renews all pulls from it that are not given
up; three without an answer mean that the owner is lost. A WANT is repeated with the heartbeat until its first READY has
come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from core.block_pool import BlockPool, Column
from core.config import TransferConfig, heartbeat_s
from core.errors import QueueFull, TransferFailed
from core.handoff import (
    Abort,
    AbortReason,
    AgentAddress,
    Heartbeat,
    HeartbeatEntry,
    PullerState,
    Ready,
    Release,
    TransferId,
    Want,
)
from kv_transfer.events import PullCompleted, PullFailed, PullGivenUp, ReadFailed, ReadFinished, ReadTimedOut, StartRead
from kv_transfer.paths import Paths
from kv_transfer.peers import Drop, Peers, TransferMessage, transfer_name
from kv_transfer.plan import TransferPlan, plan_from
from kv_transfer.pull import Pull
from protos.handoff_codec import MAX_POSITIONS

MAX_UNANSWERED_HEARTBEATS = 3


@dataclass(slots=True)
class _Pulse:
    """The heartbeat to one owner, for all pulls from it."""

    next_at: float
    unanswered: int = 0
    newest: int = 0  # counter of its newest answer


class Puller:
    def __init__(self, config: TransferConfig, pool: BlockPool, peers: Peers, paths: Paths) -> None:
        self.config = config
        self.pool = pool
        self.pulls: dict[TransferId, Pull] = {}  # alive
        self._peers = peers
        self._paths = paths
        self._pull_of_read: dict[int, Pull] = {}
        self._pulses: dict[str, _Pulse] = {}  # by owner's name
        self._ended: OrderedDict[TransferId, None] = OrderedDict()
        self._next_read_id = 0

    # ---- told by the worker

    def refuse_pull(self, transfer_id: TransferId, owner: AgentAddress) -> None:
        """Raise `LayoutMismatch`; `TransferFailed` where the id was used before; `QueueFull` without room."""
        plan_from(owner.layout, self._peers.address.layout)
        if transfer_id in self.pulls or transfer_id in self._ended:
            raise TransferFailed(f"{transfer_name(transfer_id)} was pulled before")
        if len(self.pulls) >= self.config.max_transfers:
            raise QueueFull(f"{len(self.pulls)} transfers are pulled already (max_transfers)")

    def reserve(self, transfer_id: TransferId, owner: AgentAddress, now: float) -> None:
        plan = plan_from(owner.layout, self._peers.address.layout)
        self.pulls[transfer_id] = Pull(transfer_id, owner, plan, created_at=now)
        self._pulses.setdefault(owner.name, _Pulse(now + heartbeat_s(owner.lease_s)))

    def start(
        self, transfer_id: TransferId, targets: Mapping[int, int], now: float, num_tokens: int | None = None
    ) -> None:
        pull = self.pulls[transfer_id]
        pull.targets = dict(targets)
        parts = pull.plan.target_parts
        pieces = targets if parts == 1 else [position * parts + part for position in targets for part in range(parts)]
        pull.wanted = frozenset(pieces)
        if num_tokens is not None:
            pull.wanted = pull.wanted.intersection(range(-(-num_tokens // pull.plan.piece_tokens)))
        pull.step(PullerState.WANTING)
        if len(pull.wanted) > MAX_POSITIONS:
            detail = f"{len(pull.wanted)} pieces, and a WANT lists at most {MAX_POSITIONS}"
            self._fail(pull, AbortReason.READ_FAILED, detail, now)
        else:
            self._send_want(pull, now)

    def cancel(self, transfer_id: TransferId, reason: AbortReason, now: float) -> None:
        pull = self.pulls.get(transfer_id)
        if pull is not None:
            self._fail(pull, reason, "", now, PullerState.CANCELLED)

    # ---- told by the owner

    def on_ready(self, sender: str, ready: Ready, now: float) -> None:
        pull = self._pull_for(sender, ready)
        if pull is None:
            return
        if pull.state is PullerState.RESERVED:
            self._peers.drop(Drop.UNEXPECTED)
            return
        pull.renew(ready.ack)
        num_known = len(pull.heard) - ready.first_block
        if num_known < 0:
            self._peers.drop(Drop.GAP)
            return
        pull.newest = ready.counter
        new = ready.blocks.cut(num_known)
        if not pull.can_read(new):
            self._fail(pull, AbortReason.READ_FAILED, "the owner announced blocks that cannot be read", now)
            return
        pull.hear(new, self.config.blocks_per_read(pull.plan.piece_bytes))
        if ready.last:
            if not pull.last_heard:
                pull.last_heard_at = now
            pull.last_heard, pull.first_token_id = True, ready.first_token_id
            if len(pull.heard) < len(pull.wanted):
                detail = f"the owner ended with {len(pull.heard)} of {len(pull.wanted)} blocks"
                self._fail(pull, AbortReason.PREFILL_FAILED, detail, now)
                return
        self._go_on(pull, now)

    def on_answer(self, sender: str, answer: Heartbeat, now: float) -> None:
        """The owner's answer to our heartbeat `answer.ack` lists the transfers whose lease that heartbeat renewed."""
        assert answer.ack is not None
        pulse = self._pulses.get(sender)
        if pulse is None:
            self._peers.drop(Drop.LATE)
        elif not self._peers.knows(sender, answer.incarnation):
            self._peers.drop(Drop.FOREIGN)
        elif answer.counter <= pulse.newest:
            self._peers.drop(Drop.OLD)
        else:
            pulse.newest, pulse.unanswered = answer.counter, 0
            renewed = {entry.transfer_id for entry in answer.entries}
            for pull in self._pulls_from(sender):
                if pull.transfer_id in renewed:
                    pull.renew(answer.ack)
                    if pull.state is PullerState.VERIFYING:
                        self._go_on(pull, now)
                elif pull.first_heartbeat is not None and pull.first_heartbeat <= answer.ack:
                    self._missing_from_answer(pull, now)

    def on_abort(self, sender: str, abort: Abort, now: float) -> None:
        pull = self._pull_for(sender, abort)
        if pull is not None:
            pull.newest = abort.counter
            self._fail(pull, abort.reason, abort.detail or "the owner ended it", now)

    def on_peer_lost(self, name: str, detail: str, now: float) -> None:
        for pull in self._pulls_from(name):
            self._fail(pull, AbortReason.PEER_LOST, detail, now)

    # ---- told by the agent

    def on_read_finished(self, event: ReadFinished, now: float) -> None:
        pull = self._pull_of_read.pop(event.read_id)
        blocks = pull.end_read(event.read_id, now)
        pull.read_s += event.seconds
        assert len(event.digests) in (0, len(blocks))
        self._peers.counters.num_bytes_read += len(blocks) * pull.plan.piece_bytes
        wrong = pull.verify(blocks, event.digests)
        self._peers.counters.num_digest_mismatches += len(wrong)
        for position in wrong:
            if pull.mismatches[position] >= self.config.max_read_attempts:
                detail = f"position {position}, read {pull.mismatches[position]} times"
                self._fail(pull, AbortReason.DIGEST_MISMATCH, detail, now)
                return
        self._go_on(pull, now)

    def on_read_timed_out(self, event: ReadTimedOut, now: float) -> None:
        self._fail(self._pull_of_read[event.read_id], AbortReason.READ_FAILED, event.detail, now)

    def on_read_failed(self, event: ReadFailed, now: float) -> None:
        pull = self._pull_of_read.pop(event.read_id)
        pull.end_read(event.read_id, now)
        self._fail(pull, event.reason, event.detail, now)

    # ---- time

    def on_tick(self, now: float) -> None:
        for name, pulse in list(self._pulses.items()):
            if now < pulse.next_at:
                continue
            pulls = self._pulls_from(name)
            if pulse.unanswered >= MAX_UNANSWERED_HEARTBEATS:
                for pull in pulls:
                    self._fail(pull, AbortReason.PEER_LOST, f"{pulse.unanswered} heartbeats without an answer", now)
            self._beat(name, now)
            for pull in self._pulls_from(name):
                if pull.state is PullerState.WANTING and not pull.want_arrived:
                    self._send_want(pull, now)

    def deadlines(self) -> list[float]:
        return [pulse.next_at for pulse in self._pulses.values()]

    # ---- inside

    def _pulls_from(self, name: str) -> list[Pull]:
        return [pull for pull in self.pulls.values() if pull.owner.name == name]

    def _pull_for(self, sender: str, message: TransferMessage) -> Pull | None:
        pull = self.pulls.get(message.transfer_id)
        if pull is None:
            self._peers.drop(Drop.LATE if message.transfer_id in self._ended else Drop.UNKNOWN_TRANSFER)
            return None
        return pull if self._peers.accept(pull.owner, pull.newest, sender, message) else None

    def _send_want(self, pull: Pull, now: float) -> None:
        incarnation, counter = self._peers.stamp()
        pull.sent[counter] = now
        fingerprint = self._peers.address.layout.fingerprint()
        self._peers.post(
            pull.owner, Want(pull.transfer_id, incarnation, counter, fingerprint, tuple(sorted(pull.wanted)))
        )

    def _beat(self, name: str, now: float) -> None:
        """One heartbeat for all pulls from this owner, but those given up."""
        pulls = self._pulls_from(name)
        if not pulls:
            return
        pulse = self._pulses[name]
        pulse.next_at = now + heartbeat_s(pulls[0].owner.lease_s)
        alive = [pull for pull in pulls if pull.ending is None]
        if not alive:
            return
        incarnation, counter = self._peers.stamp()
        for pull in alive:
            pull.sent[counter] = now
            if pull.first_heartbeat is None:
                pull.first_heartbeat = counter
        entries = tuple(HeartbeatEntry(pull.transfer_id, len(pull.heard)) for pull in alive)
        self._peers.post(pulls[0].owner, Heartbeat(incarnation, counter, None, entries))
        pulse.unanswered += 1

    def _missing_from_answer(self, pull: Pull, now: float) -> None:
        """The owner does not know the transfer: not any more, or not yet, since the router calls both at once."""
        if pull.known_to_owner or now - pull.created_at > pull.owner.lease_s / 2:
            self._fail(pull, AbortReason.UNKNOWN_TRANSFER, "the owner does not know it", now)

    def _go_on(self, pull: Pull, now: float) -> None:
        """Everything that follows from what is known: reads, the next state, the end."""
        if pull.ending is not None:
            if not pull.reads:
                self._end(pull, pull.ending.state, pull.ending)
            return
        while pull.to_read and len(pull.reads) < self.config.max_reads_in_flight:
            self._start_read(pull)
        if pull.reads:
            pull.step(PullerState.READING)
        elif not pull.everything_verified:
            pull.step(PullerState.WANTING)
        else:
            first_look = pull.state is not PullerState.VERIFYING
            pull.step(PullerState.VERIFYING)
            if pull.lease_covers_reads:
                self._complete(pull, now)
            elif first_look:
                self._beat(pull.owner.name, now)  # its answer will tell

    def _start_read(self, pull: Pull) -> None:
        blocks = pull.to_read.popleft()
        read_id, self._next_read_id = self._next_read_id, self._next_read_id + 1
        pull.begin_read(read_id, blocks)
        self._pull_of_read[read_id] = pull
        self._peers.counters.num_reads += 1
        num_bytes = len(blocks) * pull.plan.piece_bytes
        timeout_s = num_bytes / self.config.min_bytes_per_s + self.config.read_grace_s
        targets, parts = pull.targets, pull.plan.target_parts
        into = tuple([targets[position // parts] for position in blocks.positions])
        pieces = () if pull.plan.moves_whole_blocks else blocks.positions
        self._peers.act(StartRead(read_id, pull.transfer_id, pull.owner.name, blocks.blocks, into, timeout_s, pieces))

    def _complete(self, pull: Pull, now: float) -> None:
        stats = pull.stats(now)
        self._end(pull, PullerState.COMPLETE, PullCompleted(pull.transfer_id, pull.first_token_id, stats))
        for action in self._paths.on_hand_off(pull.owner, stats.num_bytes, stats.read_s, now):
            self._peers.act(action)

    def _fail(
        self, pull: Pull, reason: AbortReason, detail: str, now: float, state: PullerState = PullerState.FAILED
    ) -> None:
        if pull.ending is None:
            pull.ending = PullFailed(pull.transfer_id, state, reason, detail)
            if pull.reads:
                self._peers.act(PullGivenUp(pull.transfer_id, reason, detail))
        self._go_on(pull, now)

    def _end(self, pull: Pull, state: PullerState, result: PullCompleted | PullFailed) -> None:
        """The only way out. No read is in flight any more."""
        assert not pull.reads
        pull.step(state)
        self._peers.counters.read_seconds += pull.read_s
        del self.pulls[pull.transfer_id]
        if not self._pulls_from(pull.owner.name):
            del self._pulses[pull.owner.name]
        self._ended[pull.transfer_id] = None
        while len(self._ended) > self.config.max_transfers:
            self._ended.popitem(last=False)
        reason = result.reason if isinstance(result, PullFailed) else None
        self._peers.post(pull.owner, Release(pull.transfer_id, *self._peers.stamp(), reason))
        self._peers.counters.pulls[state.value] += 1
        self._peers.act(result)

    def check(self) -> None:
        """No two pulls share a byte of a target, targets stay reserved until the end, every read is accounted for."""
        targets: dict[int, list[TransferPlan]] = {}
        for transfer_id, pull in self.pulls.items():
            assert transfer_id == pull.transfer_id
            pull.check()
            assert len(pull.reads) <= self.config.max_reads_in_flight
            assert pull.owner.name in self._pulses
            for block in pull.targets.values():
                targets.setdefault(block, []).append(pull.plan)
            assert all(self._pull_of_read[read_id] is pull for read_id in pull.reads)
        for block, plans in targets.items():
            disjoint = all(not a.overlaps(b) for a, b in combinations(plans, 2))  # as for two shards of the owner
            assert disjoint, f"block {block} is the target of {len(plans)} pulls"
            assert self.pool.column_of(block) is Column.INCOMING, f"block {block}"
        assert len(self._pull_of_read) == sum(len(pull.reads) for pull in self.pulls.values())
        assert self._pulses.keys() == {pull.owner.name for pull in self.pulls.values()}
        assert max(len(self.pulls), len(self._ended)) <= self.config.max_transfers
