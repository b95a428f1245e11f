"""A decode worker with a small pool, many hand-offs and local requests, any priorities, and slow owners.

Blocks are announced in any portions and any order of hand-offs. Calls are cancelled; owners abort; reads fail or end
late. Every machine checks itself after each event. At the end the owners announce all that is left. Then every call has
to end, and no block may be left: that is the proof that no two holders wait for each other.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import QueueFull
from core.handoff import Abort, AbortReason, Heartbeat, HeartbeatEntry, OfferedBlocks, Ready, Release, Want
from decode_worker.events import DecodeCancelled, DecodeDone, DecodeFailed
from decode_worker.pull_queue import MAX_STALL_S
from kv_transfer.protocol.events import ReadFailed, ReadFinished, StartRead
from simulator.shells.fairness import HandOffsAsk
from tests.support.worker_words import WorkerReplay

NUM_STEPS = 120
MAX_ROUNDS = 400  # to the end of all calls


@dataclass
class Owned:
    """A hand-off as its owner sees it."""

    ticket: int
    num_announced: int = 0
    aborted: bool = False


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_blocks = rng.choice((6, 8, 12, 20))
        self.worker = WorkerReplay()
        self.worker.decode(blocks=self.num_blocks, pulls=6, max_running=rng.choice((2, 4)))
        self.owned: dict[int, Owned] = {}
        self.num_calls = 0
        self.num_reads_seen = 0
        self.hand_offs = HandOffsAsk(self.worker.decoder)
        self.reads: list[StartRead] = []
        self.seen: Counter[str] = Counter()

    # ---- what happens

    def arrive(self) -> None:
        rng = self.rng
        num_tokens = rng.randint(1, 4 * self.num_blocks - 8)
        max_tokens = rng.randint(1, 4 * self.num_blocks - num_tokens)
        first = rng.choice((1, 1000 * self.num_calls + 1000))  # some share a prefix
        self.num_calls += 1
        name = f"r{self.num_calls}"
        options = {"max": max_tokens, "first": first, "priority": rng.choice((0, 0, 0, -1, 1)), "timeout": 1e6}
        ticket = 0 if rng.random() < 0.3 else self.num_calls
        try:
            self.worker.arrive(name, num_tokens, ticket=ticket, **options)
            if ticket:
                self.owned[ticket] = Owned(ticket)
        except QueueFull:
            self.seen["refused"] += 1

    def announce(self, portion: int) -> None:
        """Of a hand-off with a WANT."""
        wants = {want.transfer_id: want for want in self.worker.of(Want)}
        released = {release.transfer_id for release in self.worker.of(Release)}
        able = [o for o in self.owned.values() if o.ticket in wants and o.ticket not in released and not o.aborted]
        able = [o for o in able if o.num_announced <= len(wants[o.ticket].positions)]
        if not able:
            return
        owned = self.rng.choice(able)
        want = wants[owned.ticket]
        first, end = owned.num_announced, min(owned.num_announced + portion, len(want.positions))
        last = end == len(want.positions)
        blocks = OfferedBlocks.of((position, position, 0) for position in want.positions[first:end])
        tokens = (self.rng.randrange(20, 60),) if last else ()
        owned.num_announced = end + last
        fields = {"ack": want.counter, "first_block": first, "blocks": blocks, "last": last, "token_ids": tokens}
        self.worker.hear(Ready, owned.ticket, **fields)

    def answer_heartbeat(self) -> None:
        """The owner knows every transfer."""
        beats = [beat for beat in self.worker.of(Heartbeat) if beat.ack is None]
        if beats:
            entries = tuple(HeartbeatEntry(entry.transfer_id, 0) for entry in beats[-1].entries)
            self.worker.hear(Heartbeat, ack=beats[-1].counter, entries=entries)

    def end_read(self, failing: bool = False) -> None:
        started = self.worker.of(StartRead)
        self.reads += started[self.num_reads_seen :]
        self.num_reads_seen = len(started)
        if self.reads:
            read = self.reads.pop(self.rng.randrange(len(self.reads)))
            failed = ReadFailed(read.read_id, AbortReason.READ_FAILED, "the test said so")
            self.worker.post(failed if failing else ReadFinished(read.read_id, (), 0.01))

    def end_call(self) -> None:
        name = f"r{self.rng.randint(1, max(self.num_calls, 1))}"
        ticket = int(name[1:])
        if self.rng.random() < 0.5 or ticket not in self.owned:
            self.worker.post(DecodeCancelled(name))
        else:
            self.owned[ticket].aborted = True
            self.worker.hear(Abort, ticket, reason=AbortReason.PREFILL_FAILED)

    def step(self) -> None:
        rng = self.rng
        kind = rng.choices(("arrive", "announce", "read", "compute", "time", "trouble"), (6, 10, 8, 10, 2, 1))[0]
        if kind == "arrive":
            self.arrive()
        elif kind == "announce":
            self.announce(rng.choice((1, 1, 2, 8)))
        elif kind == "read":
            self.end_read(failing=rng.random() < 0.02)
        elif kind == "compute" and self.worker.plans:
            self.worker.step()
        elif kind == "time":
            self.worker.wait(rng.choice((0.1, 0.5, 1.5)))
            self.answer_heartbeat()
        elif kind == "trouble":
            self.end_call()
        self.look()

    def look(self) -> None:
        """Count what a test wants to have happened."""
        pulls = self.worker.decoder.pulls
        self.seen["half-pulled together"] += pulls.num_half_pulled > 1
        self.seen["blocked"] += pulls.blocked_rank is not None
        self.seen["stalled"] += pulls.next_deadline() is not None
        self.seen["not asked"] += self.hand_offs.check()

    # ---- the end

    def run_to_the_end(self) -> None:
        for _ in range(MAX_ROUNDS):
            if self.worker.machine.idle:
                break
            for _ in range(8):
                self.announce(64)
                self.end_read()
            if self.worker.plans:
                self.worker.step()
            else:
                self.worker.wait(MAX_STALL_S)
                self.answer_heartbeat()
            self.look()
        assert self.worker.machine.idle, f"a holder waits for ever: {self.worker.machine.claims()}"
        assert self.worker.ledger == {}
        assert self.worker.machine.next_deadline() is None
        done, failed = self.worker.of(DecodeDone), self.worker.of(DecodeFailed)
        ended = [end.request_id for end in done] + [end.request_id for end in failed]
        assert len(ended) == len(set(ended)) == self.num_calls - self.seen["refused"]
        self.seen["done"] += len(done)
        releases = self.worker.of(Release)
        self.seen["overloaded"] += sum(release.reason is AbortReason.OVERLOADED for release in releases)
        self.seen["preempted"] += self.worker.core.scheduler.num_preemptions


def run(seed: int) -> Counter[str]:
    world = World(random.Random(seed))
    for _ in range(NUM_STEPS):
        world.step()
    world.run_to_the_end()
    return world.seen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_call_ends_and_no_block_is_left(seed: int) -> None:
    run(seed)


def test_half_pulled_prompts_do_compete_in_these_worlds() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += run(seed)
    assert seen["done"] > 300
    wanted = ("half-pulled together", "blocked", "stalled", "overloaded", "preempted", "not asked")
    missing = [name for name in wanted if seen[name] < 5]
    assert not missing, f"{missing} hardly ever happened: {dict(seen)}"
