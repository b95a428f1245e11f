"""One request of vLLM's batch, and Tandem's choice of its next token. Imports neither torch nor vLLM."""

from __future__ import annotations

import numpy as np

from core.output_grammar import GrammarRow
from core.step import SequenceView
from engine.histories import History
from engine.sampling import Draw, adjust, choose_at, has_penalties, is_plain
from vllm_worker.sampling import DrawParams


class DrawnRow:
    """`output` grows while vLLM samples."""

    def __init__(self, params: DrawParams, prompt: list[int], output: list[int]) -> None:
        self._params, self._num_prompt, self._output = params, len(prompt), output  # of vLLM's prompt
        self._token_ids = list(prompt)
        self.view = SequenceView(str(id(self)), self._token_ids, params.num_prompt_tokens, (), params.sampling)
        self._history = History()

    def update(self) -> None:
        self._token_ids += self._output[len(self._token_ids) - self._num_prompt :]

    @property
    def grammar_row(self) -> GrammarRow | None:
        return GrammarRow(self.view, len(self._token_ids)) if self._params.sampling.grammar else None

    @property
    def name(self) -> str:
        return self.view.sequence_id

    @property
    def end(self) -> int:
        """A token that ends the output."""
        return min(self._params.ends)

    def choose(self, logits: np.ndarray, allowed: bytes | None, draw: Draw | None = None) -> int:
        """# float32 [vocab], left unchanged"""
        params, position = self._params, len(self._token_ids)
        if has_penalties(params.sampling):
            self._history.extend(self.view, position)
            logits = adjust(logits, params.sampling, self._history.counts())
        elif not is_plain(params.sampling):
            logits = adjust(logits, params.sampling)
        late = position - params.num_prompt_tokens >= params.sampling.min_tokens
        return choose_at(logits, params.sampling, position, () if late else params.barred, draw, allowed)
