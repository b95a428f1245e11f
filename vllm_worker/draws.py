"""Tandem's choice of tokens inside vLLM: a logits processor that leaves one token for vLLM's argmax.

The token is that of engine/sampling.py: a function of the logits, the request, the seed and the absolute position. So a
stream that continues on another worker, or on another engine with the same logits, goes on with the same tokens.

The logits of the rows with a draw are copied to the host, all of a step at once: on a GPU about 0.6 MB a row for a
vocabulary of 150,000, and a millisecond of one core. Plain greedy requests cost nothing.

vLLM loads this class by name (`logits_processors`) in its worker processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from engine.sampling import adjust, choose_at, is_plain
from vllm_worker.sampling import EXTRA_ARG, Draw, decode_draw


class _Row:
    """One request of the batch. `output` grows while vLLM samples."""

    def __init__(self, draw: Draw, prompt: list[int], output: list[int]) -> None:
        self._draw, self._prompt, self._output = draw, prompt, output

    def choose(self, logits: np.ndarray) -> int:
        """# float32 [vocab], left unchanged"""
        draw = self._draw
        position = len(self._prompt) + len(self._output)
        if not is_plain(draw.sampling):
            logits = adjust(logits, draw.sampling, [*self._prompt, *self._output], draw.num_prompt_tokens)
        late = position - draw.num_prompt_tokens >= draw.sampling.min_tokens
        return choose_at(logits, draw.sampling, position, () if late else draw.barred)


class TandemDraws(LogitsProcessor):  # type: ignore[misc]  # vllm is not installed where mypy runs
    def __init__(self, *_: Any) -> None:
        self._rows: dict[int, _Row] = {}  # by place in the batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """# [batch, vocab], changed in place"""
        if not self._rows:
            return logits
        places = sorted(self._rows)
        on_host = logits[places].float().cpu().numpy()
        chosen = [self._rows[place].choose(row) for place, row in zip(places, on_host, strict=True)]
        logits[places] = -float("inf")
        logits[places, chosen] = 0.0
        return logits


def _row_of(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
    wire = (params.extra_args or {}).get(EXTRA_ARG)
    return None if wire is None else _Row(decode_draw(wire), prompt or [], output)
