"""The differences between the two roles of a worker: the events of a sequence, and the actions that answer them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from core.errors import InvalidRequest, TandemError
from core.handoff import AgentAddress, TransferId
from core.lifecycle import FinishReason
from core.request import Request
from core.step import SampledToken
from decode_worker.machine import DecodeArrived, DecodeCancelled, DecodeDone, DecodeEvent, DecodeFailed, EmitTokens
from prefill_worker.machine import PrefillArrived, PrefillCancelled, PrefillDone, PrefillEvent, PrefillFailed


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one sequence: tokens, its end, or its failure."""

    sequence_id: str
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: TandemError | None = None


class Role(Protocol):
    kv_role: str  # in GetServerInfo

    def check(self, request: Request, num_choices: int) -> None:
        """Raise `InvalidRequest` for a request that only the other role can serve."""
        ...

    def arrival(
        self, request: Request, deadline: float, ticket: TransferId | None, owner: AgentAddress | None
    ) -> PrefillEvent | DecodeEvent:
        """`ticket`: of an open offer, which a prefill worker makes and a decode worker binds at its `owner`."""
        ...

    def cancellation(self, sequence_id: str) -> PrefillEvent | DecodeEvent: ...

    def progress(self, action: object) -> Iterable[Progress]: ...


class PrefillRole:
    kv_role = "kv_producer"

    def check(self, request: Request, num_choices: int) -> None:
        if request.sampling.max_tokens != 1:
            raise InvalidRequest(
                "sampling_params.max_tokens", f"must be 1 on a prefill worker, is {request.sampling.max_tokens}"
            )
        if num_choices != 1:
            raise InvalidRequest("sampling_params.n", f"must be 1 on a prefill worker, is {num_choices}")

    def arrival(
        self, request: Request, deadline: float, ticket: TransferId | None, owner: AgentAddress | None
    ) -> PrefillArrived:
        assert owner is None
        return PrefillArrived(request, ticket, None, deadline)

    def cancellation(self, sequence_id: str) -> PrefillCancelled:
        return PrefillCancelled(sequence_id)

    def progress(self, action: object) -> Iterable[Progress]:
        match action:
            case PrefillDone(request_id=request_id, token=token, cached_tokens=cached):
                yield Progress(request_id, (token,), action.finish_reason or FinishReason.LENGTH, cached)
            case PrefillFailed(request_id, error):
                yield Progress(request_id, error=error)


class DecodeRole:
    kv_role = "kv_consumer"

    def check(self, request: Request, num_choices: int) -> None:
        """A decode worker serves every request."""

    def arrival(
        self, request: Request, deadline: float, ticket: TransferId | None, owner: AgentAddress | None
    ) -> DecodeArrived:
        source = None if ticket is None or owner is None else (ticket, owner)
        return DecodeArrived(request, source, deadline, binds=source is not None)

    def cancellation(self, sequence_id: str) -> DecodeCancelled:
        return DecodeCancelled(sequence_id)

    def progress(self, action: object) -> Iterable[Progress]:
        match action:
            case EmitTokens(tokens):
                for event in tokens:
                    yield Progress(event.sequence_id, (event.token,))
            case DecodeDone(request_id=request_id):
                yield Progress(request_id, (), action.finish_reason, action.cached_tokens)
            case DecodeFailed(request_id, error):
                yield Progress(request_id, error=error)
