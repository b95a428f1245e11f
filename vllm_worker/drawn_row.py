"""One request of vLLM's batch, and Tandem's choice of its next token. Imports neither torch nor vLLM."""

from __future__ import annotations

import numpy as np

from core.output_grammar import GrammarRow
from core.step import SequenceView
from engine.histories import History
from engine.sampling import adjust, choose_at, has_penalties, is_plain
from vllm_worker.sampling import DrawParams


class DrawnRow:
    """`output` grows while vLLM samples."""

    def __init__(self, draw: DrawParams, prompt: list[int], output: list[int]) -> None:
        self._draw, self._num_prompt, self._output = draw, len(prompt), output  # of vLLM's prompt
        self._token_ids = list(prompt)
        self.view = SequenceView(str(id(self)), self._token_ids, draw.num_prompt_tokens, (), draw.sampling)
        self._history = History()

    def update(self) -> None:
        self._token_ids += self._output[len(self._token_ids) - self._num_prompt :]

    @property
    def grammar_row(self) -> GrammarRow | None:
        return GrammarRow(self.view, len(self._token_ids)) if self._draw.sampling.grammar else None

    @property
    def name(self) -> str:
        return self.view.sequence_id

    @property
    def end(self) -> int:
        """A token that ends the output."""
        return min(self._draw.ends)

    def choose(self, logits: np.ndarray, allowed: bytes | None) -> int:
        """# float32 [vocab], left unchanged"""
        draw, position = self._draw, len(self._token_ids)
        if has_penalties(draw.sampling):
            self._history.extend(self.view, position)
            logits = adjust(logits, draw.sampling, self._history.counts())
        elif not is_plain(draw.sampling):
            logits = adjust(logits, draw.sampling)
        late = position - draw.num_prompt_tokens >= draw.sampling.min_tokens
        return choose_at(logits, draw.sampling, position, () if late else draw.barred, allowed=allowed)
