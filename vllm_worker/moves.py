"""The moves of running requests from the engine of a vLLM worker that drains to the engine of another one.

    ask --MoveArrived--> MoveOut --the reader has all blocks so far--> the engine ends the request: its call has moved
                            |--ResumeArrived--> Stay: the request goes on here, and the worker asks again
            |--the engine has lost the reader--> likewise, without Stay
                            `--the request ends before--> as without a move

Law: each index of the output has one author. The engine ends the request before it gives the last tokens away, and
nothing brings it back. So whatever happens to the reader afterwards, no two engines sample for one request; a request
that has left, and whose reader fails, is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from core.errors import TransferFailed
from core.handoff import TransferId
from decode_worker.events import AskToMove, MoveArrived, ResumeArrived
from decode_worker.move_asks import MoveAsks
from vllm_worker.engine import EngineTransfer


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Give a running request to the engine of a peer."""

    request_id: str
    transfer: EngineTransfer
    num_known_tokens: int


@dataclass(frozen=True, slots=True)
class Stay:
    """End a move, unless the request has left."""

    request_id: str
    transfer_id: TransferId


@dataclass(slots=True)
class EngineMoves:
    by_id: dict[str, TransferId] = field(default_factory=dict)  # by request id
    _asks: MoveAsks = field(default_factory=MoveAsks)

    def ask_to_leave(self, movable: Iterable[str], now: float) -> list[AskToMove]:
        """Call it after each event of a worker that drains. `movable`: calls that could move."""
        return self._asks.ask_to_leave((name for name in movable if name not in self.by_id), len(self.by_id), now)

    def start(self, event: MoveArrived, transfer: EngineTransfer) -> MoveOut:
        """Raises `TransferFailed` if the request moves already, or another one by this transfer."""
        if event.request_id in self.by_id:
            raise TransferFailed(f"{event.request_id} moves already")
        if event.transfer_id in self.by_id.values():
            raise TransferFailed("another request moves by this transfer")
        self.by_id[event.request_id] = event.transfer_id
        return MoveOut(event.request_id, transfer, event.num_tokens)

    def resume(self, event: ResumeArrived, now: float) -> list[Stay]:
        """Does nothing for a move that has ended."""
        if self.by_id.get(event.request_id) != event.transfer_id:
            return []
        del self.by_id[event.request_id]
        self._asks.note_ended(event.request_id, now)
        return [Stay(event.request_id, event.transfer_id)]

    def lose(self, transfer_id: TransferId, now: float) -> None:
        """The reader has gone or has not come. Does nothing for a move that has ended."""
        for request_id in [name for name, moving in self.by_id.items() if moving == transfer_id]:
            del self.by_id[request_id]
            self._asks.note_ended(request_id, now)

    def forget(self, request_id: str) -> None:
        """The call has ended."""
        self.by_id.pop(request_id, None)
        self._asks.forget(request_id)

    def next_deadline(self) -> float | None:
        return self._asks.next_deadline()
