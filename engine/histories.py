"""How often each token is in the prompt and in the output of a sequence, for the penalties of `engine/sampling.py`.

A step counts the tokens that are new since the last one. The counts of a sequence live as long as its `SequenceView`,
so a sequence that resumes or moves here is counted from its token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from core.step import SequenceView

NOT_SEEN = -1  # count of a token that is in neither the prompt nor the output
Counts = tuple[np.ndarray, np.ndarray]  # int32 [n] distinct token ids, int32 [n] in the output; 0: in the prompt alone
NO_COUNTS: Counts = (np.zeros(0, np.int32), np.zeros(0, np.int32))


class Histories:
    """The histories of the sequences that live."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[SequenceView, History] = WeakKeyDictionary()

    def counts(self, view: SequenceView, end: int, first: Sequence[int] = (), newest: Sequence[int] = ()) -> Counts:
        """Of the first `end` tokens of the sequence, and of the output tokens `newest`, which no later call knows.

        The tokens `first` come first, and may be NOT_SEEN. Valid until the next call for this sequence.
        """
        history = self._histories.get(view)
        if history is None or history.num_tokens > end:
            history = self._histories[view] = History(first)
        history.extend(view, end)
        return history.counts(newest)


class History:
    """The counts of one sequence."""

    def __init__(self, first: Sequence[int] = ()) -> None:
        self.num_tokens = 0  # counted
        self._places = {token_id: place for place, token_id in enumerate(first)}
        self._token_ids = np.array(first, np.int32)
        self._counts = np.full(len(first), NOT_SEEN, np.int32)

    def extend(self, view: SequenceView, end: int) -> None:
        """Count the tokens before `end`."""
        new = view.token_ids[self.num_tokens : end]
        places = np.array([self._places.setdefault(token_id, len(self._places)) for token_id in new], np.int64)
        if len(self._places) > len(self._token_ids):
            size = 2 * len(self._places)
            self._token_ids, self._counts = (
                np.concatenate((old, np.full(size - len(old), NOT_SEEN, np.int32)))
                for old in (self._token_ids, self._counts)
            )
        self._token_ids[places] = new
        in_prompt = max(0, min(len(new), view.num_prompt_tokens - self.num_tokens))
        np.maximum.at(self._counts, places, 0)
        np.add.at(self._counts, places[in_prompt:], 1)
        self.num_tokens = end

    def counts(self, newest: Sequence[int] = ()) -> Counts:
        """As `Histories.counts`."""
        size = len(self._places)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        if not newest:
            return token_ids, counts
        counts = counts.copy()
        unknown: dict[int, int] = {}
        for token_id in newest:
            place = self._places.get(token_id)
            if place is None:
                unknown[token_id] = unknown.get(token_id, 0) + 1
            else:
                counts[place] = max(0, counts[place]) + 1
        more = np.array(list(unknown.items()), np.int32).reshape(-1, 2)
        return np.concatenate((token_ids, more[:, 0])), np.concatenate((counts, more[:, 1]))
