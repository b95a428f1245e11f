"""The words of transcripts (tests/support/transcripts.py) for PrefillMachine and DecodeMachine.

    prefill, decode      a new worker; the options are its sizes
    arrive NAME TOKENS   a prompt that counts up from `first`; `ticket` is the id of its hand-off or offer
    step, run            end one step, or up to N: a run shows the tokens of a sequence together, and its last step only
    reads                end the reads in flight
    wait, later          let time pass with the Ticks that are due on the way, or without
    want, ready, ...     messages of the peer, which is the other side of every hand-off

A step is written as NAME START+TOKENS for each sequence. A number that has its usual value is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.config import SchedulerConfig, WorkerConfig
from core.handoff import AbortReason, Heartbeat, HeartbeatEntry, OfferedBlocks, Ready, Release, Want
from core.lifecycle import Stage, Timeline
from core.machine import Tick
from core.scheduling.ledger import SequenceState
from decode_worker import events
from decode_worker.machine import DecodeMachine
from kv_transfer.protocol.events import MessageReceived, PeerLost, ReadFailed, ReadFinished, StartRead
from prefill_worker.machine import OfferWithdrawn, PrefillArrived, PrefillCancelled, PrefillDone, PrefillFailed
from tests.support.driven_worker import LAYOUT, DrivenWorker, address, request
from tests.support.transcripts import Replay, counts, error_words, numbers_of, runs, transcripts_of
from tests.support.transfer_words import seen_transfer
from worker.core import ConfigChanged, DrainRequested, Planned, RunStep

Actions = list[Any]
PLANNED = {Planned.AHEAD: "step ahead", Planned.AT_END: "step", Planned.IDLE: "first step"}


def transcripts(text: str, setup: str = "") -> Callable[[str], None]:
    return transcripts_of(WorkerReplay, text, setup)


class WorkerReplay(DrivenWorker, Replay):
    """Each message of the peer gets the next counter."""

    def __init__(self, *events: str) -> None:
        for event in events:
            self.line(event)

    def begin(self, **options: Any) -> None:
        super().begin(**options)
        self._counter = 0
        self._num_ready: dict[int, int] = {}  # blocks in the READYs of the peer, by transfer
        self._reads: list[StartRead] = []  # in flight

    def check(self) -> None:
        self.machine.check()

    def seen(self, action: Any) -> str:
        return seen(action)

    def post(self, event: Any) -> Actions:
        actions = super().post(event)
        self._reads += [action for action in actions if isinstance(action, StartRead)]
        return actions

    def decode(self, **options: int) -> Actions:
        self.begin(is_prefill=False, **options)
        return []

    def prefill(self, **options: int) -> Actions:
        self.begin(is_prefill=True, **options)
        return []

    # ---- calls

    def arrive(self, name: str, tokens: int, **options: Any) -> Actions:
        """`known`: tokens behind the prompt that the reader of a move knows. `dtype`: of the pool of the owner."""
        ticket, known, dtype = options.pop("ticket", 0), options.pop("known", 0), options.pop("dtype", "")
        deadline = self.now + options.pop("timeout", 60)
        others = {field: options.pop(field) for field in ("age_s", "adapter") if field in options}
        resumed = range(tokens + 1, tokens + known + 1)
        prompt = request(name, tokens, options.pop("max", 4), resumed=resumed, **options).derive(**others)
        if isinstance(self.machine, DecodeMachine):
            owner = address("other", layout=replace(LAYOUT, dtype=dtype)) if dtype else self.peer
            source = (ticket, owner) if ticket else None
            return self.post(events.DecodeArrived(prompt, source, deadline, is_move=bool(known)))
        return self.post(PrefillArrived(prompt, ticket or 1, self.peer, deadline))

    def cancel(self, name: str) -> Actions:
        is_decode = isinstance(self.machine, DecodeMachine)
        return self.post(events.DecodeCancelled(name) if is_decode else PrefillCancelled(name))

    def withdraw(self, ticket: int) -> Actions:
        return self.post(OfferWithdrawn(ticket))

    def move(self, name: str, ticket: int, known: int) -> Actions:
        return self.post(events.MoveArrived(name, ticket, self.peer, known))

    def resume(self, name: str, ticket: int) -> Actions:
        return self.post(events.ResumeArrived(name, ticket))

    def drain(self) -> Actions:
        return self.post(DrainRequested())

    def limits(self, pulls: int = 4, **limits: int) -> Actions:
        config = SchedulerConfig(**({"max_batched_tokens": 8} | limits))
        return self.post(ConfigChanged(config, WorkerConfig(max_pulls_waiting=pulls)))

    # ---- steps and time

    def run(self, limit: int = 200) -> Actions:
        tokens: dict[str, list[int]] = {}  # of each sequence, behind the first index
        others: Actions = []
        for _ in range(limit):
            for action in self.step() if self.plans else ():
                if isinstance(action, events.EmitTokens):
                    for token in action.tokens:
                        tokens.setdefault(token.sequence_id, [token.index]).append(token.token.token_id)
                elif not isinstance(action, RunStep):
                    others.append(action)
        assert limit < 200 or not self.plans, "still not idle after 200 steps"
        joined = [f"tokens {name} {first}: {runs(token_ids)}" for name, (first, *token_ids) in tokens.items()]
        return [*joined, *others, *(f"step {_chunks(plan)}" for plan in self.plans)]

    def preempt(self, name: str) -> Actions:
        """Another sequence takes the blocks."""
        sequence = self.core.scheduler.get(name)
        assert sequence is not None
        self.core.scheduler.preempt(sequence)
        return []

    def tick(self) -> Actions:
        return self.post(Tick())

    def later(self, seconds: float) -> Actions:
        self.now += seconds
        return []

    # ---- the transfer agent and the peer

    def hear(self, make: Any, *words: Any, **fields: Any) -> Actions:
        self._counter += 1
        stamps = {"incarnation": self.peer.incarnation, "counter": self._counter}
        return self.post(MessageReceived(self.peer.name, make(*words, **stamps, **fields)))

    def want(self, ticket: int, *positions: int | str) -> Actions:
        fields = {"layout_fingerprint": LAYOUT.fingerprint(), "positions": tuple(numbers_of(*positions))}
        return self.hear(Want, ticket, **fields)

    def ready(self, ticket: int, *positions: int | str, tokens: int | str = "", last: int = 0) -> Actions:
        """The owner announces positions, each in its block of the same number. The READY with `tokens` is the last."""
        ack = next(want.counter for want in reversed(self.of(Want)) if want.transfer_id == ticket)
        blocks, token_ids = OfferedBlocks.of((p, p, 0) for p in numbers_of(*positions)), tuple(numbers_of(tokens))
        first = self._num_ready.get(ticket, 0)
        self._num_ready[ticket] = first + len(blocks)
        fields = {"ack": ack, "first_block": first, "blocks": blocks, "token_ids": token_ids}
        return self.hear(Ready, ticket, last=bool(last or token_ids), **fields)

    def beat(self, ticket: int, ready: int, unplaced: int = 0, verified: int = 0) -> Actions:
        return self.hear(Heartbeat, ack=None, entries=(HeartbeatEntry(ticket, ready, unplaced, verified),))

    def release(self, ticket: int, reason: str = "") -> Actions:
        return self.hear(Release, ticket, reason=AbortReason(reason) if reason else None)

    def reads(self) -> Actions:
        ended, self._reads = self._reads, []
        return [action for read in ended for action in self.post(ReadFinished(read.read_id, (), 0.01))]

    def read_fails(self, reason: str = "read_failed") -> Actions:
        return self.post(ReadFailed(self._reads.pop(0).read_id, AbortReason(reason), "broken"))

    def peer_lost(self) -> Actions:
        return self.post(PeerLost(self.peer.name, "gone"))

    # ---- questions

    def blocks(self) -> list[str]:
        return [f"{column} {count}" for column, count in self.ledger.items()]

    def idle(self) -> list[str]:
        return ["yes" if self.machine.idle else "no"]

    def load(self) -> list[str]:
        load = self.machine.load()
        numbers = counts(
            [("waiting", load.num_waiting), ("pulls", load.num_pulls_waiting), ("promised", load.num_promised_blocks)]
        )
        return [load.state.value, *numbers, *counts([("preemptions", load.num_preemptions)])]

    def targets(self) -> list[str]:
        return [f"{pull.sequence.sequence_id} {len(pull.targets)}" for pull in self.decoder.pulls.by_id.values()]

    def claims(self) -> list[str]:
        claims = self.machine.claims()
        return [f"{claim.name} {claim.state.value}" for claim in claims if isinstance(claim.state, SequenceState)]

    def deadline(self) -> list[str]:
        deadline = self.machine.next_deadline()
        return [] if deadline is None else [f"in {deadline - self.now:.6g}"]


def seen(action: Any) -> str:
    match action:
        case RunStep(plan, planned):
            return f"{PLANNED[planned]} {_chunks(plan)}"
        case events.EmitTokens(tokens):
            return "tokens " + ", ".join(f"{each.sequence_id} {each.index}: {each.token.token_id}" for each in tokens)
        case PrefillDone():
            reason = [] if action.finish_reason is None else [action.finish_reason.value]
            cost = [("cached", action.cached_tokens), ("block seconds", action.kv_block_seconds)]
            words = [f"{action.index}: {action.token.token_id}", *reason, *counts(cost), *_stages(action.timeline)]
            return f"done {action.request_id} {', '.join(words)}"
        case events.DecodeDone():
            pulled = 0 if action.pull is None else action.pull.num_blocks
            cost = [
                ("pulled", pulled), ("cached", action.cached_tokens), ("skipped", action.num_skipped_blocks),
                ("recomputed", action.num_recomputed_tokens), ("preempted", action.num_preemptions),
                ("moved bytes", action.moved_bytes), ("block seconds", action.kv_block_seconds),
            ]  # fmt: skip
            words = [action.finish_reason.value, *counts(cost), *_stages(action.timeline)]
            return f"done {action.request_id} {', '.join(words)}"
        case PrefillFailed(request_id, error) | events.DecodeFailed(request_id, error):
            return f"fail {request_id} {error_words(error)}"
        case events.AskToMove(request_ids, reason):
            return f"ask to move {' '.join(request_ids)} ({reason.value})"
        case events.HandedOver(request_id, first_index):
            return f"handed over {request_id} {first_index}"
        case _:
            return seen_transfer(action)


def _chunks(plan: Any) -> str:
    return ", ".join(f"{chunk.sequence.sequence_id} {chunk.start}+{chunk.num_tokens}" for chunk in plan.chunks)


def _stages(timeline: Timeline) -> list[str]:
    return counts((stage.value, timeline.seconds_in(stage)) for stage in Stage if stage is not Stage.FINISHED)
