"""Tandem's choice of tokens inside vLLM: a logits processor that leaves one token for vLLM's argmax.

The token is that of engine/sampling.py: a function of the logits, the request, the seed and the absolute position. So a
stream that continues on another worker, or on another engine with the same logits, goes on with the same tokens.

The logits of the rows with a draw are copied to the host, all of a step at once: on a GPU about 0.6 MB a row for a
vocabulary of 150,000. A draw takes up to 2 ms of one core there. Plain greedy requests cost nothing.

vLLM loads this class by name (`logits_processors`) in its worker processes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from engine.quick_draw import QuickDraw
from text.grammars import GrammarReader
from text.tokenizer import load_tokenizer
from vllm_worker.drawn_row import DrawnRow
from vllm_worker.sampling import EXTRA_ARG, decode_draw_params

logger = logging.getLogger(__name__)


class TandemDraws(LogitsProcessor):  # type: ignore[misc]  # vllm is not installed where mypy runs
    """A grammar that becomes too complex ends its output: vLLM cannot fail one request of a step.

    A grammar that is new to this process is compiled inside the first step of its request: about 100 ms at most.
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._rows: dict[int, DrawnRow] = {}  # by place in the batch
        self._draw = QuickDraw()
        self._grammars = GrammarReader(partial(load_tokenizer, vllm_config.model_config.model, own_engine=False))
        self._grammars.warm_up()  # else the first grammar would hold up a step for a second

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """# [batch, vocab], changed in place"""
        if not self._rows:
            return logits
        places = sorted(self._rows)
        rows = [self._rows[place] for place in places]
        for row in rows:
            row.update()
        masks_of = self._grammars.begin([found for row in rows if (found := row.grammar_row) is not None])
        on_host = logits[places].float().cpu().numpy()
        masks = masks_of()
        for error in masks.failed.values():
            logger.warning("an output ends early: %s", error)
        allowed = [masks.allowed.get(row.name, (None,))[0] for row in rows]
        chosen = [
            row.end if row.name in masks.failed else row.choose(found, mask, self._draw)
            for row, found, mask in zip(rows, on_host, allowed, strict=True)
        ]
        logits[places] = -float("inf")
        logits[places, chosen] = 0.0
        return logits


def _row_of(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> DrawnRow | None:
    wire = (params.extra_args or {}).get(EXTRA_ARG)
    return None if wire is None else DrawnRow(decode_draw_params(wire), prompt or [], output)
