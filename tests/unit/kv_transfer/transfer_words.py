"""The words of transcripts (tests/support/transcripts.py) for two TransferMachines, an owner and a puller.

    pair                     two new ones, with the options of their config
    offer, add               the owner offers blocks for these positions, or more of them; `last=1` ends the list
    pull                     `reserve_pull`, and `start` with a target for each of these positions
    grow N                   the puller wants N blocks of a growing sequence of which it knows 10 tokens
    place                    a target for each block that lacks one
    deliver, double, lose    all messages that are on the way, or those of one kind
    reads, run               end the reads in flight; deliver and read until nothing is left to do

An action begins with the side that returns it. Heartbeats are due after 2 s, and a lease ends after 12 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.handoff import AbortReason
from core.machine import Tick
from core.scheduling.block_pool import Column
from kv_transfer.protocol.events import PeerLost, StartRead, TransferAction
from tests.support.transcripts import Replay, counts, numbers_of, transcripts_of
from tests.support.transfer_words import seen_transfer
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Mail, Pair, Side


def transcripts(text: str, setup: str = "") -> Callable[[str], None]:
    return transcripts_of(PairReplay, text, setup)


class LoggedPair(Pair):
    def __init__(self, digests: int = 1, **options: Any) -> None:
        self.log: list[str] = []
        super().__init__(replace(CONFIG, **options), bool(digests))

    def act(self, side: Side, actions: list[TransferAction]) -> None:
        for read in (action for action in actions if isinstance(action, StartRead)):
            assert read.timeout_s == len(read.pairs) * LAYOUT.block_bytes / CONFIG.min_bytes_per_s + CONFIG.read_grace_s
        self.log += [f"{side.name} {seen_transfer(action)}".replace(f" {ID}", "") for action in actions]
        super().act(side, actions)


class PairReplay(Replay):
    """A word returns None, or what it has found. A word without arguments may be a method of `Pair`."""

    def __init__(self) -> None:
        self.both = LoggedPair()

    def __getattr__(self, word: str) -> Any:
        return getattr(self.both, word)

    def do(self, word: str, *words: str) -> list[Any]:
        self.both.log.clear()
        found = super().do(word, *words)
        return [*self.both.log, *(found or [])]

    def pair(self, **options: Any) -> None:
        self.both = LoggedPair(**options)

    # ---- the workers

    def offer(self, *positions: int | str, last: int = 0) -> None:
        self.both.offer(numbers_of(*positions), bool(last))

    def add(self, *positions: int | str, last: int = 0, tokens: str = "") -> None:
        owner = self.both.owner
        token_ids = tuple(numbers_of(tokens)) if tokens else (42,) * last
        blocks = owner.computed_blocks(numbers_of(*positions))
        self.both.do(owner, owner.machine.owner.add_ready, ID, blocks, bool(last), token_ids)

    def start(self, *positions: int | str) -> None:
        self.both.start_pull(numbers_of(*positions))

    def pull(self, *positions: int | str) -> None:
        self.both.pull(numbers_of(*positions))

    def grow(self, num_blocks: int) -> None:
        puller = self.both.puller
        self.both.reserve_pull()
        self.both.act(
            puller, puller.machine.puller.start(ID, range(num_blocks), self.both.now(puller), 20, 10, max_new_tokens=20)
        )

    def place(self) -> None:
        self.both.add_targets(self.both.puller.targets(self.both.puller.needed.pop(ID, [])))

    # ---- messages

    def take(self, kind: str) -> list[Mail]:
        taken = [mail for mail in self.both.mail if kind in ("", type(mail.message).__name__.lower())]
        assert taken, f"no {kind} is on the way"
        self.both.mail = [mail for mail in self.both.mail if mail not in taken]
        return taken

    def deliver(self, kind: str = "") -> None:
        if not kind:
            self.both.deliver_all()
        else:
            for mail in self.take(kind):
                self.both.deliver(mail)

    def double(self) -> None:
        for mail in self.take(""):
            self.both.deliver(mail)
            self.both.deliver(mail)

    def lose(self, kind: str = "") -> None:
        self.take(kind)

    def reverse(self) -> None:
        self.both.mail.reverse()

    # ---- reads, time and peers

    def reads(self) -> None:
        for read_id in list(self.both.puller.reads):
            self.both.end_read(self.both.puller, read_id)

    def read_fails(self, read_id: int, reason: str = "read_failed") -> None:
        self.both.fail_read(self.both.puller, read_id, AbortReason(reason))

    def read_times_out(self, read_id: int) -> None:
        self.both.time_out_read(self.both.puller, read_id)

    def wait(self, seconds: float, deliver: int = 1) -> None:
        self.both.wait(seconds, bool(deliver))

    def later(self, seconds: float, side: str) -> None:
        """Time passes without a Tick, but for one of this side at the end."""
        self.both.time += seconds
        self.both.event(self.both.sides[side], Tick())

    def lost(self, name: str) -> None:
        """A side notices that its connection to this one is gone."""
        side = self.both.owner if name == "puller" else self.both.puller
        self.both.event(side, PeerLost(name, "reset"))

    # ---- questions

    def blocks(self) -> list[str]:
        incoming = self.both.puller.pool.ledger()[Column.INCOMING]
        return counts([("leased", self.both.num_leases()), ("incoming", incoming)])

    def state(self) -> list[str]:
        return [self.both.puller.pull_state(ID).value]

    def dropped(self) -> list[str]:
        sides = [(side.name, side.machine.counters.dropped) for side in self.both.sides.values()]
        return [f"{name} {why}" for name, dropped in sides for why in counts((d.value, n) for d, n in dropped.items())]
