"""The token counts of an answer, and on request its promise and its receipt, summed over all choices."""

from __future__ import annotations

from typing import Any

from core.wire_names import short_name
from tandem_client.stubs.inference_pb2 import Finished, RequestPath


class UsageSum:
    """Collects the last message of each choice. `num_choices`: of each prompt."""

    def __init__(self, num_choices: int, with_receipt: bool) -> None:
        self._num_choices = num_choices
        self._with_receipt = with_receipt
        self._finished: dict[int, Finished] = {}

    def add(self, finished: Finished) -> None:
        self._finished[finished.choice] = finished

    def counts(self) -> tuple[int, int, int]:
        """(prompt, completion, cached) tokens. A prompt counts once, by the first of its choices that has ended.

        A choice that a guardrail ends is cancelled, and a cancelled choice has no counts.
        """
        of_prompts = {choice // self._num_choices: end.usage for choice, end in sorted(self._finished.items())[::-1]}
        return (
            sum(usage.prompt_tokens for usage in of_prompts.values()),
            sum(end.usage.completion_tokens for end in self._finished.values()),
            sum(usage.cached_tokens for usage in of_prompts.values()),
        )

    def chat(self) -> dict[str, Any]:
        """As completions and chat completions have it."""
        prompt, completion, cached = self.counts()
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": self._predictions(),
        }
        return usage | self._tandem()

    def _predictions(self) -> dict[str, int]:
        """Guessed tokens, under OpenAI's names."""
        drafted = sum(end.usage.drafted_tokens for end in self._finished.values())
        accepted = sum(end.usage.accepted_drafts for end in self._finished.values())
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    def responses(self) -> dict[str, Any]:
        """As responses have it."""
        prompt, completion, cached = self.counts()
        usage: dict[str, Any] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        return usage | self._tandem()

    def _tandem(self) -> dict[str, Any]:
        if not self._with_receipt or not self._finished:
            return {}
        ends = [self._finished[choice] for choice in sorted(self._finished)]
        first = ends[0]
        receipts = [end.receipt for end in ends]
        promise = {
            "ttft_ms": round(first.promise.ttft_ms, 3),
            "tpot_ms": round(first.promise.tpot_ms, 3),
            "path": _path(first.promise.path),
        }
        receipt = {
            "ttft_ms": round(first.timings.first_token_ms, 3),
            "path": _path(first.path),
            "attempts": max(end.attempts for end in ends),
            "queue_ms": round(sum(receipt.queue_ms for receipt in receipts), 3),
            "prefill_ms": round(sum(receipt.prefill_ms for receipt in receipts), 3),
            "decode_ms": round(sum(receipt.decode_ms for receipt in receipts), 3),
            "kv_block_seconds": round(sum(receipt.kv_block_seconds for receipt in receipts), 6),
            "transferred_bytes": sum(receipt.transferred_bytes for receipt in receipts),
        }
        return {"tandem": {"promise": promise, "receipt": receipt, "trace_id": first.trace_id}}


def _path(path: int) -> str:
    return short_name(RequestPath, path)
