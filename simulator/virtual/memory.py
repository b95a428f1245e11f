"""KV content as numbers, so that a stale, foreign, half-copied or unwritten block gives a wrong token.

The slot of position p holds a hash of the tokens 0 .. p. A simulated step computes each slot from the previous slot,
and each new token from *all* previous slots, as attention does. It reads the slots through the block table:

    slot[p]    = mix(slot[p - 1], token[p])
    token[p]   = drawn from mix(slot[0], ..., slot[p - 1]) and the request's seed

Workers round differently, as bf16 does in batches of different shapes: at one position of ROUNDED_POSITIONS, a token
depends on the worker. `Continuation` computes the same without a memory: whether a token follows those before it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping

from core.errors import TandemError
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.sequence import Sequence
from core.step import NO_FAILURES, Proposal, SampledToken, ScheduledChunk, StepOutput, StepPlan

VOCAB_SIZE = 64
EOS_TOKEN_IDS = frozenset({0})
ROUNDED_POSITIONS = 4
OUTPUT_TOKEN = SampledToken(2**32 - 1)  # without content; in no prompt of a trace

WHOLE_BLOCK = slice(None)
_MASK = 2**64 - 1
_ROOT = 0x243F6A8885A308D3


def mix(left: int, right: int) -> int:
    """A 64-bit hash of `left` and `right`."""
    mixed = ((left ^ (right + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def _fold(slots: Iterable[int]) -> int:
    """Each of `slots` mixed into those before; without calls of `mix`, as most of the time of a step is spent here."""
    folded = _ROOT
    for slot in slots:
        mixed = ((folded ^ (slot + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        folded = mixed ^ (mixed >> 29)
    return folded


def _token_from(folded: int, request_seed: int, rounding: int) -> int:
    drawn = mix(folded, request_seed) >> 20
    return (drawn + (rounding if folded % ROUNDED_POSITIONS == 0 else 0)) % VOCAB_SIZE


class Continuation:
    """The output of a request so far, and the tokens that may come next."""

    def __init__(self, request: Request, num_roundings: int) -> None:
        self._sequence = Sequence(request, arrival=0)
        self._num_roundings = num_roundings
        self._slot, self._folded = _ROOT, _ROOT
        self.finish_reason: FinishReason | None = None  # that the tokens so far imply
        for token_id in request.token_ids:
            self._fold(token_id)

    def allowed(self) -> set[int]:
        seed = self._sequence.request.sampling.seed
        return {_token_from(self._folded, seed, rounding) for rounding in range(self._num_roundings)}

    def take(self, token_id: int) -> None:
        self._sequence.token_ids.append(token_id)
        self._fold(token_id)
        self.finish_reason = self._sequence.finish_reason_after(token_id, EOS_TOKEN_IDS)

    def _fold(self, token_id: int) -> None:
        self._slot = mix(self._slot, token_id)
        self._folded = mix(self._folded, self._slot)


def token_behind(request: Request, token_ids: list[int]) -> int:
    """The token behind `token_ids`, of an engine without slots."""
    slot, folded = _ROOT, _ROOT
    for token_id in token_ids:
        slot = mix(slot, token_id)
        folded = mix(folded, slot)
    return _token_from(folded, request.sampling.seed, 0)


class Memory:
    """The pool of one worker: block id -> the contents of its slots."""

    has_content = True

    def __init__(
        self, num_blocks: int, block_size: int, garbage: int, draft_accuracy: float = 0.0, rounding: int = 0
    ) -> None:
        """`garbage`: seed of the content of unwritten memory; differs for each start of each worker.
        `draft_accuracy`, `rounding`: see `WorkerSpec`."""
        self.block_size, self._rounding = block_size, rounding
        self._draft_accuracy, self._guesses = draft_accuracy, random.Random(garbage)
        self._newest = StepOutput(-1, {})
        self._blocks = [
            [mix(garbage, block * block_size + slot) for slot in range(block_size)] for block in range(num_blocks)
        ]

    def digest(self, block: int, slots: slice = WHOLE_BLOCK) -> int:
        return _fold(self._blocks[block][slots]) or 1  # 0 means that digests are off

    def read(self, block: int, slots: slice = WHOLE_BLOCK) -> list[int]:
        return self._blocks[block][slots]

    def write(self, block: int, content: list[int], slots: slice = WHOLE_BLOCK) -> None:
        self._blocks[block][slots] = content

    def run(self, plan: StepPlan, failing: Mapping[str, TandemError] = NO_FAILURES) -> StepOutput:
        """Compute a step, as a Runner does. The chunks of `failing` sequences, and of those that failed in the step
        before, get wrong slots."""
        sampled: dict[str, tuple[SampledToken, ...]] = {}
        failed: dict[str, TandemError] = {}
        proposed: dict[str, Proposal] = {}
        failing = {**self._newest.failed, **failing}
        for chunk in plan.chunks:
            sequence_id = chunk.sequence.sequence_id
            if sequence_id in failing:
                failed[sequence_id] = failing[sequence_id]
                self._spoil(chunk)
                continue
            self._compute(chunk)
            if chunk.samples:
                sampled[sequence_id] = self._sample(chunk)
                if self._draft_accuracy:
                    proposed[sequence_id] = self._propose(chunk, sampled[sequence_id])
        self._newest = StepOutput(plan.step_id, sampled, failed, proposed=proposed)
        return self._newest

    def _spoil(self, chunk: ScheduledChunk) -> None:
        for position in range(chunk.start, chunk.start + chunk.num_rows):
            block = chunk.sequence.block_table[position // self.block_size]
            self._blocks[block][position % self.block_size] = mix(_ROOT, position)

    def _compute(self, chunk: ScheduledChunk) -> None:
        slot = self._slot(chunk, chunk.start - 1) if chunk.start else _ROOT
        view, start = chunk.sequence, chunk.start
        if chunk.promised:
            token_ids = [self._newest.sampled[view.sequence_id][-1].token_id]
        else:
            token_ids = [*view.token_ids[start : start + chunk.num_tokens], *chunk.drafts]
        for position, token_id in enumerate(token_ids, start):
            slot = mix(slot, token_id)
            block = chunk.sequence.block_table[position // self.block_size]
            self._blocks[block][position % self.block_size] = slot

    def _sample(self, chunk: ScheduledChunk) -> tuple[SampledToken, ...]:
        sampling, end = chunk.sequence.sampling, chunk.start + chunk.num_tokens
        folded = _fold(self._slots(chunk, end))
        logprob = None if sampling.num_logprobs is None else -1.0
        sampled = [SampledToken(_token_from(folded, sampling.seed, self._rounding), logprob)]
        for position, guess in enumerate(chunk.drafts, end):
            if guess != sampled[-1].token_id:
                break
            folded = mix(folded, self._slot(chunk, position))
            sampled.append(SampledToken(_token_from(folded, sampling.seed, self._rounding), logprob))
        return tuple(sampled)

    def _propose(self, chunk: ScheduledChunk, sampled: tuple[SampledToken, ...]) -> Proposal:
        """Guesses of the tokens behind the sampled ones: the right ones, some of them spoilt."""
        chance, view = self._guesses, chunk.sequence
        end = chunk.start + chunk.num_tokens + len(sampled) - 1
        slot = self._slot(chunk, end - 1)
        folded = _fold(self._slots(chunk, end))
        guesses: list[int] = []
        token_id = sampled[-1].token_id
        for _ in range(chance.randrange(6)):
            slot = mix(slot, token_id)
            folded = mix(folded, slot)
            token_id = _token_from(folded, view.sampling.seed, self._rounding)
            guesses.append(token_id if chance.random() < self._draft_accuracy else (token_id + 1) % VOCAB_SIZE)
        return Proposal.copied(tuple(guesses), match=8)

    def _slots(self, chunk: ScheduledChunk, end: int) -> Iterable[int]:
        """Of the first `end` positions."""
        blocks = map(self._blocks.__getitem__, chunk.sequence.block_table)
        return itertools.islice(itertools.chain.from_iterable(blocks), end)

    def _slot(self, chunk: ScheduledChunk, position: int) -> int:
        return self._blocks[chunk.sequence.block_table[position // self.block_size]][position % self.block_size]


class BlankMemory(Memory):
    """Blocks without content: each new token is the same."""

    has_content = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def run(self, plan: StepPlan, failing: Mapping[str, TandemError] = NO_FAILURES) -> StepOutput:
        sampled = {chunk.sequence.sequence_id: (OUTPUT_TOKEN,) for chunk in plan.chunks if chunk.samples}
        return StepOutput(plan.step_id, sampled, failing)
