"""One open call of a vLLM worker."""

from __future__ import annotations

from dataclasses import dataclass

from core.handoff import PrefixSource, TransferId
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.sequence import Sequence
from core.step import SampledToken, TokenEvent
from vllm_worker.engine import EngineOutput, EngineTransfer


@dataclass(slots=True)
class EngineCall:
    request: Request
    is_prefill: bool
    transfer_id: TransferId | None  # of a hand-off that vLLM's connector reads
    transfer: EngineTransfer | None = None  # of our protocol
    prefix: PrefixSource | None = None  # a peer that has cached a part of the prompt
    submitted: bool = False
    num_tokens: int = 0  # from this engine, and from its pull
    num_pulled_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def first_index(self) -> int:
        return len(self.request.token_ids) - self.request.num_prompt_tokens

    @property
    def next_index(self) -> int:
        return self.first_index + self.num_tokens

    @property
    def num_tokens_left(self) -> int:
        return self.request.max_total_tokens - len(self.request.token_ids) - self.num_tokens

    @property
    def awaited_move(self) -> TransferId | None:
        """The move that brings the KV of this call, until the engine has sampled."""
        transfer = self.transfer
        is_awaited = transfer is not None and transfer.is_move and not self.num_tokens
        return transfer.transfer_id if transfer is not None and is_awaited else None

    def take(self, output: EngineOutput) -> tuple[TokenEvent, ...]:
        """Number the sampled tokens of an output."""
        first = self.next_index
        self.num_tokens += len(output.tokens)
        return tuple(TokenEvent(output.request_id, first + k, token, None) for k, token in enumerate(output.tokens))

    @property
    def pull_id(self) -> TransferId | None:
        transfer = self.transfer
        return None if transfer is None or transfer.is_offer else transfer.transfer_id

    def pulled(self, token_ids: tuple[int, ...]) -> tuple[TokenEvent, ...]:
        """Number the tokens that came with the pull. The router has them from the owner, if that has not died."""
        return tuple(
            TokenEvent(self.request.request_id, self.first_index + k, SampledToken(token_id), None)
            for k, token_id in enumerate(token_ids)
        )

    def finish_reason_after(self, token: SampledToken, eos_token_ids: frozenset[int]) -> FinishReason | None:
        token_ids = [*self.request.token_ids, token.token_id]
        return Sequence(self.request, 0, token_ids=token_ids).finish_reason_after(token.token_id, eos_token_ids)
