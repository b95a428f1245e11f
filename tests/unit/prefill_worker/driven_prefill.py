"""A PrefillMachine that a test drives."""

from __future__ import annotations

from core.config import SchedulerConfig
from core.handoff import AbortReason, Ready, Release, Want
from core.request import Request
from prefill_worker.machine import PrefillArrived, PrefillMachine
from tests.support.driven_worker import LAYOUT, DrivenWorker


class Prefill(DrivenWorker):
    def __init__(
        self, num_blocks: int = 16, scheduler: SchedulerConfig | None = None, plans_ahead: bool = False
    ) -> None:
        super().__init__(PrefillMachine, num_blocks, scheduler, plans_ahead)

    def arrive(self, arriving: Request, ticket: int = 1, timeout_s: float = 60.0) -> list[object]:
        return self.post(PrefillArrived(arriving, ticket, self.peer, self.now + timeout_s))

    def want(self, *positions: int, ticket: int = 1) -> list[object]:
        return self.hear(lambda i, c: Want(ticket, i, c, LAYOUT.fingerprint(), positions))

    def release(self, ticket: int = 1, reason: AbortReason | None = None) -> list[object]:
        return self.hear(lambda i, c: Release(ticket, i, c, reason))

    def offered(self) -> list[int]:
        """The positions announced so far, in order."""
        return [block.position for ready in self.sent(Ready) for block in ready.blocks]
