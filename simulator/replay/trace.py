"""The requests of a trace: arrival times, lengths and block ids instead of text.

A hash id names the content of one block of tokens and of all blocks before it; the last block of a prompt may be
partial. Token i of block h of 512 tokens becomes the token id 512 h + i. So two prompts have a common prefix of tokens
exactly where they have a common prefix of hash ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrives_at: float  # seconds
    hash_ids: tuple[int, ...]
    num_tokens: int  # of the prompt
    num_output_tokens: int
    tokens_per_hash_id: int = 512
    session: int | None = None  # None: the trace does not tell

    @property
    def conversation(self) -> int:
        """Equal for the turns of a conversation. Block 0 of the conversation trace begins every prompt."""
        return self.hash_ids[min(1, len(self.hash_ids) - 1)] if self.session is None else self.session

    def token_ids(self) -> tuple[int, ...]:
        size = self.tokens_per_hash_id
        blocks = (range(hash_id * size, (hash_id + 1) * size) for hash_id in self.hash_ids)
        return tuple(chain.from_iterable(blocks))[: self.num_tokens]


def at_rate(
    requests: Sequence[TraceRequest], duration_s: float, granularity_s: float, chance: random.Random
) -> list[TraceRequest]:
    """The same requests, by time of arrival: those without a session, and first turns, arrive within `duration_s`.

    A trace rounds its times to `granularity_s`: each request arrives at a random time of its interval.
    """
    spread = [replace(r, arrives_at=r.arrives_at + chance.uniform(0.0, granularity_s)) for r in requests]
    starts = [request.arrives_at for request in first_turns(spread)]
    first, scale = min(starts), duration_s / max(max(starts) - min(starts), 1e-9)
    return _moved(spread, lambda start: (start - first) * scale)


def poisson_arrivals(requests: Sequence[TraceRequest], duration_s: float, chance: random.Random) -> list[TraceRequest]:
    """As `at_rate`, with random gaps from one start to the next in their order, of about `duration_s` in all."""
    gap_s = duration_s / max(1, len(first_turns(requests)) - 1)
    times = accumulate((chance.expovariate(1.0) * gap_s for _ in requests), initial=0.0)
    return _moved(requests, lambda _: next(times))


def first_turns(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests without a session, and the first one of each session."""
    first = {request.session: request for request in reversed(requests)}
    return [request for request in requests if request.session is None or first[request.session] is request]


def _moved(requests: Sequence[TraceRequest], new_start: Callable[[float], float]) -> list[TraceRequest]:
    """Later turns keep their distance from the first: at a higher load more sessions are open, none acts faster."""
    starts: dict[int, tuple[float, float]] = {}  # session -> start before and now
    moved = []
    for request in requests:
        old = new = request.arrives_at
        if request.session in starts:
            old, new = starts[request.session]
        else:
            new = new_start(old)
            if request.session is not None:
                starts[request.session] = old, new
        moved.append(replace(request, arrives_at=new + request.arrives_at - old))
    return sorted(moved, key=lambda request: request.arrives_at)


def infinite_cache_tokens(requests: Iterable[TraceRequest], block_size: int) -> int:
    """Prompt tokens, in full blocks, that earlier prompts begin with: the hits of a single cache without a limit."""
    return sum(cached_tokens(requests, block_size))


def cached_tokens(requests: Iterable[TraceRequest], block_size: int) -> Iterator[int]:
    """Of each prompt, the tokens in full blocks that an earlier prompt begins with.

    The last token of a prompt is never cached: the first output token is sampled from its logits.
    """
    longest: dict[tuple[int, int], int] = {}  # (position, hash id) -> tokens of the block that some prompt had
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
        yield min(common, request.num_tokens - 1) // block_size * block_size
