"""Request traces in the format of Mooncake: arrival times, lengths and block ids instead of text.

Each line of a trace is a JSON object: `timestamp` in ms, `input_length`, `output_length` and `hash_ids`. A hash id
names the content of one block of 512 tokens and of all blocks before it; the last block of a prompt may be partial.
Token i of block h becomes the token id 512 h + i. So two prompts have a common prefix of tokens exactly where they have
a common prefix of hash ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

TOKENS_PER_HASH_ID = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrives_at: float  # seconds
    hash_ids: tuple[int, ...]
    num_tokens: int  # of the prompt
    num_output_tokens: int
    tokens_per_hash_id: int = TOKENS_PER_HASH_ID
    session: int | None = None  # None: the trace does not tell

    @property
    def conversation(self) -> int:
        """Equal for the turns of a conversation. Block 0 of the conversation trace begins every prompt."""
        return self.hash_ids[min(1, len(self.hash_ids) - 1)] if self.session is None else self.session

    def token_ids(self) -> tuple[int, ...]:
        size = self.tokens_per_hash_id
        blocks = (range(hash_id * size, (hash_id + 1) * size) for hash_id in self.hash_ids)
        return tuple(chain.from_iterable(blocks))[: self.num_tokens]


def read_trace(path: Path, limit: int | None = None, divisor: int = 1, output_divisor: int = 1) -> list[TraceRequest]:
    """The first `limit` requests, by time. Prompts and blocks are divided by `divisor`, so hit ratios stay the same.

    Raises `ValueError` naming the line of a malformed trace, and for a divisor that does not divide a block.
    """
    if divisor < 1 or TOKENS_PER_HASH_ID % divisor:
        raise ValueError(f"divisor must divide {TOKENS_PER_HASH_ID}, is {divisor}")
    if output_divisor < 1:
        raise ValueError(f"output_divisor must be at least 1, is {output_divisor}")
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(requests) == limit:
                break
            try:
                requests.append(_request(json.loads(line), divisor, output_divisor))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    return sorted(requests, key=lambda request: request.arrives_at)


def _request(fields: dict[str, object], divisor: int, output_divisor: int) -> TraceRequest:
    hash_ids, size = fields["hash_ids"], TOKENS_PER_HASH_ID // divisor
    if not isinstance(hash_ids, list) or not all(isinstance(hash_id, int) for hash_id in hash_ids):
        raise ValueError("hash_ids must be a list of integers")
    num_tokens = max(1, int(str(fields["input_length"])) // divisor)
    if not hash_ids or num_tokens > len(hash_ids) * size:
        raise ValueError(f"{len(hash_ids)} hash_ids are too few for input_length {fields['input_length']}")
    return TraceRequest(
        arrives_at=float(str(fields["timestamp"])) / 1e3,
        hash_ids=tuple(hash_ids),
        num_tokens=num_tokens,
        num_output_tokens=max(1, int(str(fields["output_length"])) // output_divisor),
        tokens_per_hash_id=size,
    )


def at_rate(
    requests: Sequence[TraceRequest], duration_s: float, granularity_s: float, chance: random.Random
) -> list[TraceRequest]:
    """The same requests within `duration_s`, by time of arrival.

    A trace rounds its times to `granularity_s`: each request arrives at a random time of its interval.
    """
    spread = [request.arrives_at + chance.uniform(0.0, granularity_s) for request in requests]
    first, scale = min(spread), duration_s / max(max(spread) - min(spread), 1e-9)
    moved = [replace(r, arrives_at=(at - first) * scale) for r, at in zip(requests, spread, strict=True)]
    return sorted(moved, key=lambda request: request.arrives_at)


def poisson_arrivals(requests: Sequence[TraceRequest], duration_s: float, chance: random.Random) -> list[TraceRequest]:
    """The same requests in the same order, with random gaps: about `duration_s` from the first one to the last."""
    gap_s, at = duration_s / max(1, len(requests) - 1), 0.0
    moved = []
    for request in requests:
        moved.append(replace(request, arrives_at=at))
        at += chance.expovariate(1.0) * gap_s
    return moved


def infinite_cache_tokens(requests: Iterable[TraceRequest], block_size: int) -> int:
    """Prompt tokens, in full blocks, that earlier prompts begin with: the hits of a single cache without a limit.

    The last token of a prompt is never cached: the first output token is sampled from its logits.
    """
    longest: dict[tuple[int, int], int] = {}  # (position, hash id) -> tokens of the block that some prompt had
    total = 0
    for request in requests:
        size, common, is_prefix = request.tokens_per_hash_id, 0, True
        for position, hash_id in enumerate(request.hash_ids):
            num_in_block = min(size, request.num_tokens - position * size)
            if num_in_block <= 0:
                break
            known = longest.get((position, hash_id), 0)
            if is_prefix:
                common += min(known, num_in_block)
                is_prefix = known >= num_in_block == size
            longest[(position, hash_id)] = max(known, num_in_block)
        total += min(common, request.num_tokens - 1) // block_size * block_size
    return total
