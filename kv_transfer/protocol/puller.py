"""The puller's half of a hand-off: ask, read the ready blocks, verify them, and prove that the lease covered all reads.

    RESERVED --room, WANT--> WANTING <--targets, reads--> READING --all read--> VERIFYING --lease proven--> COMPLETE
        `-----------------------+---------------------------+----------------------+--> FAILED | CANCELLED

After a READY the puller asks the worker for targets (`TargetsNeeded`), and reads the blocks once the worker has given
them. So the worker reserves no target for a block that the owner has not computed yet.

When a pull ends early, its reads end first. Then the puller sends the RELEASE to the owner and the result to the
worker, which may now use the target blocks again. A cancelled read can still write for an unknown time, so the puller
sends `PullGivenUp` at once, and the worker answers its caller.

kv_transfer/protocol/pull.py has the law of the lease. One heartbeat to each owner renews all pulls from that owner that
are not ending. The owner of a pull is lost after three unanswered heartbeats in a row that listed this pull. The puller
repeats a WANT with each heartbeat until a READY arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from core.config import TransferConfig, heartbeat_s
from core.errors import QueueFull, TransferFailed
from core.handoff import (
    MAX_POSITIONS,
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
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import (
    Actions,
    PullCompleted,
    PullFailed,
    PullGivenUp,
    ReadFailed,
    ReadFinished,
    ReadTimedOut,
    StartRead,
    TargetsNeeded,
)
from kv_transfer.protocol.leasing_pool import LeasingPool
from kv_transfer.protocol.paths import Paths
from kv_transfer.protocol.peers import Drop, Peers, TransferMessage, transfer_name
from kv_transfer.protocol.plan import TransferPlan, plan_from
from kv_transfer.protocol.pull import Pull

MAX_UNANSWERED_HEARTBEATS = 3  # heartbeats without an answer of the owner; beyond: the pull is FAILED


@dataclass(slots=True)
class _Heartbeats:
    """The heartbeats to one owner, for all pulls from that owner."""

    next_at: float
    newest_answer: int = 0  # counter of the owner's newest answer


class Puller:
    def __init__(self, config: TransferConfig, pool: LeasingPool, peers: Peers, paths: Paths, vocab_size: int) -> None:
        self.config = config
        self.pool = pool
        self.pulls: dict[TransferId, Pull] = {}  # alive
        self._peers = peers
        self._paths = paths
        self._vocab_size = vocab_size
        self._pull_of_read: dict[int, Pull] = {}
        self._heartbeats: dict[str, _Heartbeats] = {}  # by owner's name
        self._ended: OrderedDict[TransferId, None] = OrderedDict()
        self._next_read_id = 0

    # ---- from the worker

    def refuse_pull(self, transfer_id: TransferId, owner: AgentAddress) -> None:
        """Raise `LayoutMismatch`; `TransferFailed` where the id was used before; `QueueFull` without room."""
        plan_from(owner.layout, self._peers.address.layout)
        if transfer_id in self.pulls or transfer_id in self._ended:
            raise TransferFailed(f"{transfer_name(transfer_id)} was pulled before")
        if len(self.pulls) >= self.config.max_transfers:
            raise QueueFull(f"{len(self.pulls)} transfers are pulled already (max_transfers)")

    def reserve(self, transfer_id: TransferId, owner: AgentAddress, now: float) -> None:
        """Call `TransferMachine.reserve_pull` instead, which also connects to the owner."""
        plan = plan_from(owner.layout, self._peers.address.layout)
        self.pulls[transfer_id] = Pull(transfer_id, owner, plan, created_at=now)
        self._heartbeats.setdefault(owner.name, _Heartbeats(now + heartbeat_s(owner.lease_s)))

    def start(
        self,
        transfer_id: TransferId,
        positions: Iterable[int],
        now: float,
        num_tokens: int | None = None,
        num_known_tokens: int | None = None,
        *,
        max_new_tokens: int = 1,
        may_be_short: bool = False,
    ) -> Actions:
        """Ask the owner for these positions. Without positions, the pull gets only tokens, `max_new_tokens` at most.

        `num_tokens`, the length of the sequence, gives the number of pieces where the owner's blocks are smaller than
        ours: the owner may have no blocks for the end of our last one. A sequence that grows during the pull has
        `num_known_tokens` now, and `num_tokens` at most: fewer blocks may come. With `may_be_short`, the owner may have
        only the first of the blocks, and the pull completes with those.
        """
        pull = self.pulls[transfer_id]
        pull.num_known_tokens, pull.max_new_tokens = num_known_tokens, max_new_tokens
        pull.may_be_short = may_be_short
        parts = pull.plan.target_parts
        pull.wanted = frozenset(position * parts + part for position in positions for part in range(parts))
        if num_tokens is not None:
            pull.num_pieces = -(-num_tokens // pull.plan.piece_tokens)
            pull.wanted = pull.wanted.intersection(range(pull.num_pieces))
        pull.step(PullerState.WANTING)
        if len(pull.wanted) > MAX_POSITIONS:
            detail = f"{len(pull.wanted)} pieces, and a WANT lists at most {MAX_POSITIONS}"
            return self._fail(pull, AbortReason.READ_FAILED, detail, now)
        return self._send_want(pull, now)

    def add_targets(self, transfer_id: TransferId, targets: Mapping[int, int], now: float) -> Actions:
        """Read blocks into `targets`, position -> INCOMING block id, once they are announced. The pull must be wanting
        or reading, and not given up."""
        pull = self.pulls[transfer_id]
        assert pull.ending is None, "the pull has been given up"
        pull.add_targets(targets, self.config.blocks_per_read(pull.plan.piece_bytes))
        return self._advance(pull, now) if pull.to_read else []

    def cancel(self, transfer_id: TransferId, reason: AbortReason, now: float) -> Actions:
        """Give up. `PullFailed` follows once our reads have ended. Does nothing after the end of the pull."""
        pull = self.pulls.get(transfer_id)
        return [] if pull is None else self._fail(pull, reason, "", now, PullerState.CANCELLED)

    # ---- from the owner

    def on_ready(self, sender: str, ready: Ready, now: float) -> Actions:
        pull = self._pull_for(sender, ready)
        if pull is None:
            return []
        if pull.state is PullerState.RESERVED:
            self._peers.drop(Drop.UNEXPECTED)
            return []
        pull.renew(ready.ack)
        num_known = len(pull.announced) - ready.first_block
        if num_known < 0:
            self._peers.drop(Drop.GAP)
            return []
        pull.newest = ready.counter
        new = ready.blocks.cut(num_known)
        if not pull.can_read(new):
            return self._fail(pull, AbortReason.READ_FAILED, "the owner announced blocks that cannot be read", now)
        needed = pull.record_ready(new, self.config.blocks_per_read(pull.plan.piece_bytes))
        if ready.last:
            if not pull.all_announced:
                pull.all_announced_at = now
            elif ready.token_ids != pull.token_ids:
                return self._fail(pull, AbortReason.READ_FAILED, "the owner ended twice, with other tokens", now)
            if (token_id := max(ready.token_ids, default=0)) >= self._vocab_size:
                detail = f"the owner sent token id {token_id}, outside the vocabulary [0, {self._vocab_size})"
                return self._fail(pull, AbortReason.READ_FAILED, detail, now)
            if (num_new := len(ready.token_ids)) > pull.max_new_tokens:
                detail = f"the owner sent {num_new} tokens, at most {pull.max_new_tokens}"
                return self._fail(pull, AbortReason.READ_FAILED, detail, now)
            pull.all_announced, pull.token_ids = True, ready.token_ids
            if not pull.end_growth(ready.token_ids):
                return self._fail(pull, AbortReason.READ_FAILED, "the sequence has outgrown the wanted blocks", now)
            pull.end_early()
            if len(pull.announced) < len(pull.wanted):
                detail = f"the owner ended with {len(pull.announced)} of {len(pull.wanted)} blocks"
                return self._fail(pull, AbortReason.PREFILL_FAILED, detail, now)
            if not pull.announced <= pull.wanted:  # of a sequence that grew
                detail = "the owner announced more blocks than its tokens fill"
                return self._fail(pull, AbortReason.READ_FAILED, detail, now)
        asked: Actions = [TargetsNeeded(pull.transfer_id, needed, ready.last)] if needed and pull.ending is None else []
        return self._advance(pull, now) + asked

    def on_answer(self, sender: str, answer: Heartbeat, now: float) -> Actions:
        """The owner's answer to our heartbeat `answer.ack` lists the transfers whose lease that heartbeat renewed."""
        assert answer.ack is not None
        heartbeats = self._heartbeats.get(sender)
        if heartbeats is None:
            self._peers.drop(Drop.LATE)
            return []
        if not self._peers.knows(sender, answer.incarnation):
            self._peers.drop(Drop.FOREIGN)
            return []
        if answer.counter <= heartbeats.newest_answer:
            self._peers.drop(Drop.OLD)
            return []
        heartbeats.newest_answer = answer.counter
        renewed = {entry.transfer_id for entry in answer.entries}
        actions: Actions = []
        for pull in self._pulls_from(sender):
            pull.num_unanswered = 0
            if pull.transfer_id in renewed:
                pull.renew(answer.ack)
                if pull.state is PullerState.VERIFYING:
                    actions += self._advance(pull, now)
            elif pull.first_heartbeat is not None and pull.first_heartbeat <= answer.ack:
                actions += self._missing_from_answer(pull, now)
        return actions

    def on_abort(self, sender: str, abort: Abort, now: float) -> Actions:
        pull = self._pull_for(sender, abort)
        if pull is None:
            return []
        pull.newest = abort.counter
        return self._fail(pull, abort.reason, abort.detail or "the owner ended it", now)

    def on_peer_lost(self, name: str, detail: str, now: float) -> Actions:
        return self._fail_all(self._pulls_from(name), detail, now)

    # ---- from the agent

    def on_read_finished(self, event: ReadFinished, now: float) -> Actions:
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
                return self._fail(pull, AbortReason.DIGEST_MISMATCH, detail, now)
        return self._advance(pull, now)

    def on_read_timed_out(self, event: ReadTimedOut, now: float) -> Actions:
        return self._fail(self._pull_of_read[event.read_id], AbortReason.READ_FAILED, event.detail, now)

    def on_read_failed(self, event: ReadFailed, now: float) -> Actions:
        pull = self._pull_of_read.pop(event.read_id)
        pull.end_read(event.read_id, now)
        return self._fail(pull, event.reason, event.detail, now)

    # ---- time

    def on_tick(self, now: float) -> Actions:
        actions: Actions = []
        for name, heartbeats in list(self._heartbeats.items()):
            if now < heartbeats.next_at:
                continue
            silent = [p for p in self._pulls_from(name) if p.num_unanswered >= MAX_UNANSWERED_HEARTBEATS]
            actions += self._fail_all(silent, f"{MAX_UNANSWERED_HEARTBEATS} heartbeats without an answer", now)
            actions += self._send_heartbeat(name, now)
            for pull in self._pulls_from(name):
                if pull.state is PullerState.WANTING and not pull.want_arrived:
                    actions += self._send_want(pull, now)
        return actions

    def deadlines(self) -> list[float]:
        return [heartbeats.next_at for heartbeats in self._heartbeats.values()]

    # ---- inside

    def _pulls_from(self, name: str) -> list[Pull]:
        return [pull for pull in self.pulls.values() if pull.owner.name == name]

    def _pull_for(self, sender: str, message: TransferMessage) -> Pull | None:
        pull = self.pulls.get(message.transfer_id)
        if pull is None:
            self._peers.drop(Drop.LATE if message.transfer_id in self._ended else Drop.UNKNOWN_TRANSFER)
            return None
        return pull if self._peers.accept(pull.owner, pull.newest, sender, message) else None

    def _send_want(self, pull: Pull, now: float) -> Actions:
        incarnation, counter = self._peers.stamp()
        pull.sent[counter] = now
        fingerprint = self._peers.address.layout.fingerprint()
        want = Want(pull.transfer_id, incarnation, counter, fingerprint, tuple(sorted(pull.wanted)))
        return self._peers.send(pull.owner, want)

    def _send_heartbeat(self, name: str, now: float, *, is_news: bool = False) -> Actions:
        """One heartbeat for all pulls from this owner that are not ending.

        `is_news`: besides those that are due, to tell what has been verified. It counts for no silence of the owner.
        """
        pulls = self._pulls_from(name)
        if not pulls:
            return []
        if not is_news:
            self._heartbeats[name].next_at = now + heartbeat_s(pulls[0].owner.lease_s)
        alive = [pull for pull in pulls if pull.ending is None]
        if not alive:
            return []
        incarnation, counter = self._peers.stamp()
        for pull in alive:
            pull.sent[counter] = now
            pull.num_unanswered += not is_news
            if pull.has_news:
                pull.num_reported = len(pull.verified)
            if pull.first_heartbeat is None:
                pull.first_heartbeat = counter
        entries = tuple(
            HeartbeatEntry(pull.transfer_id, len(pull.announced), pull.num_unplaced, len(pull.verified))
            for pull in alive
        )
        return self._peers.send(pulls[0].owner, Heartbeat(incarnation, counter, None, entries))

    def _missing_from_answer(self, pull: Pull, now: float) -> Actions:
        """The owner does not know the transfer, because the offer has ended or is not made yet: the router calls both
        workers at once."""
        if pull.known_to_owner or now - pull.created_at > pull.owner.lease_s / 2:
            return self._fail(pull, AbortReason.UNKNOWN_TRANSFER, "the owner does not know it", now)
        return []

    def _advance(self, pull: Pull, now: float) -> Actions:
        """Start reads, take the next state, or end the pull, whichever is due."""
        if pull.ending is not None:
            return [] if pull.reads else self._end(pull, pull.ending.state, pull.ending)
        actions: Actions = []
        while pull.to_read and len(pull.reads) < self.config.max_reads_in_flight:
            actions.append(self._start_read(pull))
        if pull.reads:
            pull.step(PullerState.READING)
        elif not pull.everything_verified:
            pull.step(PullerState.WANTING)
            if pull.has_news:
                actions += self._send_heartbeat(pull.owner.name, now, is_news=True)
        else:
            was_verifying = pull.state is PullerState.VERIFYING
            pull.step(PullerState.VERIFYING)
            if pull.lease_covers_reads:
                actions += self._complete(pull, now)
            elif not was_verifying:
                actions += self._send_heartbeat(pull.owner.name, now)  # the answer proves or disproves the lease
        return actions

    def _start_read(self, pull: Pull) -> StartRead:
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
        return StartRead(read_id, pull.transfer_id, pull.owner.name, blocks.blocks, into, timeout_s, pieces)

    def _complete(self, pull: Pull, now: float) -> Actions:
        stats = replace(pull.stats(now), lane=self._paths.lane_to(pull.owner.name))
        actions = self._end(pull, PullerState.COMPLETE, PullCompleted(pull.transfer_id, pull.token_ids, stats))
        return actions + self._paths.on_hand_off(pull.owner, stats.num_bytes, stats.read_s, now)

    def _fail_all(self, pulls: Iterable[Pull], detail: str, now: float) -> Actions:
        """Fail pulls whose owner is lost."""
        actions: Actions = []
        for pull in pulls:
            actions += self._fail(pull, AbortReason.PEER_LOST, detail, now)
        return actions

    def _fail(
        self, pull: Pull, reason: AbortReason, detail: str, now: float, state: PullerState = PullerState.FAILED
    ) -> Actions:
        actions: Actions = []
        if pull.ending is None:
            pull.ending = PullFailed(pull.transfer_id, state, reason, detail)
            if pull.reads:
                actions.append(PullGivenUp(pull.transfer_id, reason, detail))
        return actions + self._advance(pull, now)

    def _end(self, pull: Pull, state: PullerState, result: PullCompleted | PullFailed) -> Actions:
        """End a pull without reads in flight. Every pull ends here, once."""
        assert not pull.reads
        pull.step(state)
        self._peers.counters.read_seconds += pull.read_s
        del self.pulls[pull.transfer_id]
        if not self._pulls_from(pull.owner.name):
            del self._heartbeats[pull.owner.name]
        self._ended[pull.transfer_id] = None
        while len(self._ended) > self.config.max_transfers:
            self._ended.popitem(last=False)
        reason = result.reason if isinstance(result, PullFailed) else None
        self._peers.counters.pulls[state.value] += 1
        return [*self._peers.send(pull.owner, Release(pull.transfer_id, *self._peers.stamp(), reason)), result]

    def check(self) -> None:
        """No two pulls write the same byte, targets stay reserved until the end, every read belongs to a pull."""
        targets: dict[int, list[TransferPlan]] = {}
        for transfer_id, pull in self.pulls.items():
            assert transfer_id == pull.transfer_id
            pull.check()
            assert len(pull.reads) <= self.config.max_reads_in_flight
            assert pull.owner.name in self._heartbeats
            for block in pull.targets.values():
                targets.setdefault(block, []).append(pull.plan)
            assert all(self._pull_of_read[read_id] is pull for read_id in pull.reads)
        for block, plans in targets.items():
            disjoint = all(not a.overlaps(b) for a, b in combinations(plans, 2))  # as for two shards of the owner
            assert disjoint, f"block {block} is the target of {len(plans)} pulls"
            assert self.pool.column_of(block) is Column.INCOMING, f"block {block}"
        assert len(self._pull_of_read) == sum(len(pull.reads) for pull in self.pulls.values())
        assert self._heartbeats.keys() == {pull.owner.name for pull in self.pulls.values()}
        assert max(len(self.pulls), len(self._ended)) <= self.config.max_transfers
