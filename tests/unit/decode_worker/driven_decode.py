"""A DecodeMachine that a test drives."""

from __future__ import annotations

from functools import partial

from core.config import SchedulerConfig
from core.handoff import OfferedBlocks, Ready, Want
from core.request import Request
from decode_worker.events import DecodeArrived, DecodeDone, EmitTokens
from decode_worker.machine import DecodeMachine
from decode_worker.pull_queue import MAX_STALL_S
from kv_transfer.protocol.events import ReadFinished, StartRead
from tests.support.driven_worker import DrivenWorker


class Decode(DrivenWorker):
    machine: DecodeMachine
    num_reads_ended = 0

    def __init__(
        self,
        num_blocks: int = 16,
        max_pulls_waiting: int = 4,
        scheduler: SchedulerConfig | None = None,
        plans_ahead: bool = False,
    ) -> None:
        build = partial(DecodeMachine, max_pulls_waiting=max_pulls_waiting)
        super().__init__(build, num_blocks, scheduler, plans_ahead)

    def arrive(self, arriving: Request, ticket: int = 1, timeout_s: float = 60.0) -> list[object]:
        return self.post(DecodeArrived(arriving, (ticket, self.peer), self.now + timeout_s))

    def arrive_alone(self, arriving: Request, timeout_s: float = 60.0) -> list[object]:
        return self.post(DecodeArrived(arriving, None, self.now + timeout_s))

    def wanted(self, ticket: int = 1) -> tuple[int, ...]:
        """The positions in the newest WANT."""
        return next(want.positions for want in reversed(self.sent(Want)) if want.transfer_id == ticket)

    def is_wanted(self, ticket: int) -> bool:
        """The hand-off has been admitted."""
        return any(want.transfer_id == ticket for want in self.sent(Want))

    def finished(self) -> set[str]:
        return {done.request_id for done in self.of(DecodeDone)}

    def ready(
        self, *positions: int, ticket: int = 1, first_block: int = 0, token: int | None = None, last: bool = False
    ) -> list[object]:
        """The owner announces positions, each in its block of the same number. With a `token`, they are the last."""
        ack = next(want.counter for want in reversed(self.sent(Want)) if want.transfer_id == ticket)
        blocks = OfferedBlocks.of((position, position, 0) for position in positions)
        tokens = () if token is None else (token,)
        return self.hear(lambda i, c: Ready(ticket, i, c, ack, first_block, blocks, last or token is not None, tokens))

    def finish_reads(self) -> None:
        reads = self.of(StartRead)[self.num_reads_ended :]
        self.num_reads_ended += len(reads)
        for read in reads:
            self.post(ReadFinished(read.read_id, (), 0.01))

    def ready_all(self, ticket: int = 1, token: int = 20) -> None:
        self.ready(*self.wanted(ticket), ticket=ticket, token=token)

    def pull(self, ticket: int = 1, token: int = 20) -> None:
        """Run the whole hand-off."""
        self.ready_all(ticket, token)
        self.finish_reads()

    def run_steps_and_reads(self) -> None:
        """Until neither is left, even after a stall has passed its limit."""
        for _ in range(200):
            self.finish_reads()
            if self.plans:
                self.finish_step()
                continue
            self.pass_time(MAX_STALL_S)
            if not self.plans and len(self.of(StartRead)) == self.num_reads_ended:
                return
        raise AssertionError("still not idle after 200 steps")

    def emitted(self, name: str) -> list[int]:
        """The token ids of a call. Checks that the indices have no gap."""
        tokens: list[int] = []
        first = None
        for event in (event for action in self.of(EmitTokens) for event in action.tokens):
            if event.sequence_id == name:
                first = event.index if first is None else first
                assert event.index == first + len(tokens)
                tokens.append(event.token.token_id)
        return tokens
