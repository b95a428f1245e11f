"""The sequences of a scheduler by state, with counts that are kept up to date.

    add --> WAITING --admit--> RUNNING --end--> ENDING --leave-->
               ^  |              | |
               |  +----leave---->| +---leave-->
               +---send_back-----+

A sequence is ENDING if it ended while a step in flight contains it. `send_back` follows a preemption. No method looks
at all sequences: a step must not pay for sequences that it does not change.
"""

from __future__ import annotations

from bisect import insort

from core.scheduling.prompt_queue import PromptQueue
from core.scheduling.sequence import Sequence, by_rank, remove_ranked


class SequenceQueues:
    def __init__(self, prompts: PromptQueue) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # in rank order
        self.waiting_with_blocks: list[Sequence] = []  # the part of `waiting` with a pulled prompt, in rank order
        self.running: list[Sequence] = []  # in rank order
        self.prefilling: dict[str, Sequence] = {}  # the part of `running` with more than one token to plan
        self.prompts = prompts  # `prefilling`, and the part of `waiting` that is not in decode
        self.ending: dict[str, Sequence] = {}
        self.num_waiting_tokens = 0  # to compute before every sequence that has not ended is in decode

    def add(self, sequence: Sequence) -> None:
        self.by_id[sequence.sequence_id] = sequence
        insort(self.waiting, sequence, key=by_rank)
        if sequence.block_table:
            insort(self.waiting_with_blocks, sequence, key=by_rank)
        if not _is_pulled(sequence):
            self.prompts.add(sequence)
        self.update_counts(sequence)

    def admit(self, sequence: Sequence) -> None:
        remove_ranked(self.waiting, sequence)
        remove_ranked(self.waiting_with_blocks, sequence)
        insort(self.running, sequence, key=by_rank)
        if sequence in self.prompts:
            self.prompts.update(sequence)
        self.update_counts(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """A running sequence waits again, or a waiting sequence has lost its pulled prompt."""
        if remove_ranked(self.running, sequence):
            insort(self.waiting, sequence, key=by_rank)
            self.prefilling.pop(sequence.sequence_id, None)
        else:
            remove_ranked(self.waiting_with_blocks, sequence)
        self.prompts.update(sequence)
        self.update_counts(sequence)

    def end(self, sequence: Sequence) -> None:
        self._dequeue(sequence)
        self.ending[sequence.sequence_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        if self.ending.pop(sequence.sequence_id, None) is None:
            self._dequeue(sequence)
        del self.by_id[sequence.sequence_id]

    def _dequeue(self, sequence: Sequence) -> None:
        if remove_ranked(self.running, sequence):
            self.prefilling.pop(sequence.sequence_id, None)
        else:
            remove_ranked(self.waiting, sequence)
            remove_ranked(self.waiting_with_blocks, sequence)
        self.prompts.discard(sequence)
        self.num_waiting_tokens -= sequence.num_counted_tokens
        sequence.num_counted_tokens = 0

    def update_counts(self, sequence: Sequence) -> None:
        """Call after a change of a queued sequence's computed tokens, unless the sequence stays in decode."""
        num_counted = _num_waiting(sequence)
        self.num_waiting_tokens += num_counted - sequence.num_counted_tokens
        sequence.num_counted_tokens = num_counted

    def take(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """The step that is being planned computes this chunk of a running sequence."""
        if sequence in self.prompts:
            self.prompts.take(sequence, start, num_tokens)
        self.update_phase(sequence)

    def rewind(self, sequence: Sequence) -> None:
        """A running sequence in decode has fewer computed tokens than before."""
        self.update_phase(sequence)
        self.update_counts(sequence)

    def update_phase(self, sequence: Sequence) -> None:
        """Note whether a running sequence is in prefill after the steps in flight."""
        if len(sequence.token_ids) - sequence.num_planned_tokens > 1:
            self.prefilling[sequence.sequence_id] = sequence
            self.prompts.update(sequence)
        else:
            self.prefilling.pop(sequence.sequence_id, None)
            self.prompts.discard(sequence)

    def check(self) -> None:
        """Every sequence is in one queue, in rank order, and every count is right."""
        assert self.running == sorted(self.running, key=by_rank)
        assert self.waiting == sorted(self.waiting, key=by_rank)
        assert self.waiting_with_blocks == [sequence for sequence in self.waiting if sequence.block_table]
        everywhere = [*self.running, *self.waiting, *self.ending.values()]
        assert {sequence.sequence_id: sequence for sequence in everywhere} == self.by_id
        assert len(everywhere) == len(self.by_id)
        assert self.ending == {name: s for name, s in self.by_id.items() if s.finish_reason is not None}
        assert self.num_waiting_tokens == sum(map(_num_waiting, [*self.running, *self.waiting]))
        in_prefill = [s.sequence_id for s in self.running if len(s.token_ids) - s.num_planned_tokens > 1]
        assert self.prefilling.keys() == set(in_prefill)
        self.prompts.check([*self.prefilling.values(), *(s for s in self.waiting if not _is_pulled(s))])


def _is_pulled(sequence: Sequence) -> bool:
    """A waiting sequence with a pulled prompt and one token to compute."""
    return bool(sequence.block_table) and sequence.num_uncomputed_tokens <= 1


def _num_waiting(sequence: Sequence) -> int:
    """A sequence in decode has one token to compute: the newest sampled token."""
    num_uncomputed = sequence.num_uncomputed_tokens
    return num_uncomputed if num_uncomputed > 1 else 0
