"""Workloads: requests with arrival times, lengths and block ids instead of text.

    conversations of Mooncake    `mooncake`        shared prefixes; times in whole 3 s
    calls of OpenAI's API        `simulator/replay/request_log.py`
    requests of Dynamo           `simulator/replay/request_trace.py`
    conversations of Azure       `azure`           lengths only: every prompt is distinct
    coding agents                `agent_sessions`  turns of sessions, which begin at random times
    synthetic                    `synthetic`       random times and lengths, groups with a common prefix

A seed decides every random number. `Replay` scales a workload to another rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from simulator.replay.trace import TraceRequest
from simulator.replay.trace_rows import MAX_TIME_S, MAX_TOKENS, BlockCount, csv_rows, json_rows, number, tokens

GRANULARITY_S = 3.0  # of the times in the traces of Mooncake
MOONCAKE_TOKENS_PER_BLOCK = AZURE_TOKENS_PER_BLOCK = 512
AGENT_TOKENS_PER_BLOCK = 16
SYNTHETIC_TOKENS_PER_BLOCK = 16
MAX_SYNTHETIC_TOKENS = 1_000_000_000  # tokens of all prompts of a synthetic workload; beyond: `ValueError`


@dataclass(frozen=True, slots=True)
class Workload:
    """Raises `ValueError` without a request."""

    name: str
    requests: Sequence[TraceRequest]  # by time of arrival
    granularity_s: float = 0.0  # times are rounded to this; a replay spreads them within it

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"the workload {self.name} holds no request")


def mooncake(path: Path, limit: int | None = None, divisor: int = 1, output_divisor: int = 1) -> Workload:
    """The first `limit` rows. Prompts and blocks are divided by `divisor`, so hit ratios stay the same.

    Raises `ValueError` naming file, line and field, or for a divisor that does not divide a block of 512 tokens, and
    `OSError`.
    """
    _require_divisors(divisor, output_divisor, MOONCAKE_TOKENS_PER_BLOCK)
    size, count = MOONCAKE_TOKENS_PER_BLOCK // divisor, BlockCount()
    requests = [_traced(where, row, size, divisor, output_divisor, count) for where, row in json_rows(path, limit)]
    requests.sort(key=lambda request: request.arrives_at)
    return Workload(path.stem, requests, GRANULARITY_S)


def azure(path: Path, limit: int | None = None, divisor: int = 1, output_divisor: int = 1) -> Workload:
    """The first `limit` rows of a trace of AzurePublicDataset, 2023. Lengths are divided by the divisors.

    Raises `ValueError` naming file, line and field, and `OSError`.
    """
    _require_divisors(divisor, output_divisor)
    requests: list[TraceRequest] = []
    num_blocks, count = 0, BlockCount()
    for where, row in csv_rows(path, limit):
        num_tokens = max(1, tokens(where, row, "ContextTokens") // divisor)
        last = num_blocks + -(-num_tokens // AZURE_TOKENS_PER_BLOCK)
        count.add(where, last - num_blocks)
        at = number(where, row, "TIMESTAMP", lambda text: datetime.fromisoformat(text[:26]).timestamp())
        num_output = max(1, tokens(where, row, "GeneratedTokens") // output_divisor)
        requests.append(
            TraceRequest(at, tuple(range(num_blocks, last)), num_tokens, num_output, AZURE_TOKENS_PER_BLOCK)
        )
        num_blocks = last
    return Workload(path.stem, from_zero(requests))


def agent_sessions(
    path: Path,
    sessions_per_s: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
    divisor: int = 1,
    output_divisor: int = 1,
) -> Workload:
    """The first `limit` rows. Sessions begin by a Poisson process; turns keep their distance from the start.

    `divisor` divides prompts and blocks, so hit ratios stay the same. Raises `ValueError` naming file, line and field,
    or for a divisor that does not divide a block of 16 tokens, and `OSError`.
    """
    _require_divisors(divisor, output_divisor, AGENT_TOKENS_PER_BLOCK)
    if sessions_per_s <= 0:
        raise ValueError(f"sessions_per_s must be positive, is {sessions_per_s:g}")
    chance, size = random.Random(f"sessions of {seed}"), AGENT_TOKENS_PER_BLOCK // divisor
    starts: dict[int, float] = {}
    last_start = 0.0
    requests, count = [], BlockCount()
    for where, row in json_rows(path, limit):
        session = number(where, row, "session", int)
        if session not in starts:
            last_start = starts[session] = last_start + chance.expovariate(sessions_per_s)
        request = _traced(where, row, size, divisor, output_divisor, count)
        requests.append(replace(request, arrives_at=starts[session] + request.arrives_at, session=session))
    return Workload(path.stem, from_zero(requests))


def repeated_sessions(workload: Workload, times: int) -> Workload:
    """The sessions `times` over, one set after the other, as other work of the same agents.

    Blocks that several sessions have, as the instructions of an agent, keep their ids; others get new ones.
    """
    session_of: dict[int, int | None] = {}
    common = {
        hash_id
        for request in workload.requests
        for hash_id in request.hash_ids
        if session_of.setdefault(hash_id, request.session) != request.session
    }
    num_ids, num_sessions = max(session_of) + 1, 1 + max(r.session or 0 for r in workload.requests)
    first_turns = {request.session: request.arrives_at for request in reversed(workload.requests)}
    span_s = max(first_turns.values()) * len(first_turns) / max(1, len(first_turns) - 1)
    requests = [
        replace(
            request,
            arrives_at=request.arrives_at + turn * span_s,
            hash_ids=tuple(one if one in common else one + turn * num_ids for one in request.hash_ids),
            session=(request.session or 0) + turn * num_sessions,
        )
        for turn in range(times)
        for request in workload.requests
    ]
    return Workload(workload.name, from_zero(requests))


def by_curve(
    workload: Workload, rate_at: Callable[[float], float], highest_rate: float, duration_s: float, seed: int = 0
) -> Workload:
    """The requests in their order, by a Poisson process of `rate_at(seconds)` requests/s, at most `highest_rate`.

    After the last request they begin again, with other block ids, so that nothing of them is cached.
    """
    chance = random.Random(f"curve of {seed}")
    highest_id = max(max(request.hash_ids, default=0) for request in workload.requests) + 1
    requests: list[TraceRequest] = []
    at = 0.0
    while (at := at + chance.expovariate(highest_rate)) < duration_s:
        if chance.random() * highest_rate < rate_at(at):
            turn, place = divmod(len(requests), len(workload.requests))
            request = workload.requests[place]
            hash_ids = tuple(hash_id + turn * highest_id for hash_id in request.hash_ids)
            requests.append(replace(request, arrives_at=at, hash_ids=hash_ids))
    return Workload(workload.name, requests)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Raises `ValueError` naming the field."""

    num_requests: int = 1000
    rate: float = 1.0  # requests/s
    burstiness: float = 1.0  # squared coefficient of variation of the gaps: 1 = Poisson, more = Gamma with bursts
    prompt_tokens: int = 1024  # mean, with the shared prefix
    output_tokens: int = 128  # mean
    spread: float = 0.5  # lengths lie within mean x (1 +- spread), with equal probability
    num_groups: int = 0  # each request belongs to a random group; 0 = no shared prefixes
    prefix_tokens: int = 0  # that the prompts of a group have in common

    def __post_init__(self) -> None:
        for name in ("num_requests", "rate", "burstiness", "prompt_tokens", "output_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, is {getattr(self, name):g}")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) > MAX_TOKENS:
                raise ValueError(f"{name} must be at most {MAX_TOKENS:,}, is {getattr(self, name):,}")
        if self.num_requests * self.prompt_tokens > MAX_SYNTHETIC_TOKENS:
            raise ValueError(f"num_requests x prompt_tokens must be at most {MAX_SYNTHETIC_TOKENS:,}")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread must be in [0, 1], is {self.spread:g}")
        if self.num_groups < 0 or (self.num_groups == 0) != (self.prefix_tokens == 0):
            raise ValueError("num_groups and prefix_tokens must be set together, or both be 0")
        shortest = math.ceil(self.prompt_tokens * (1 - self.spread))
        if not 0 <= self.prefix_tokens <= shortest:
            raise ValueError(
                f"prefix_tokens must be in [0, {shortest:,}], the length of the shortest prompt, is "
                f"{self.prefix_tokens:,}"
            )


def synthetic(config: Synthetic, seed: int = 0) -> Workload:
    chance, size = random.Random(f"synthetic requests of {seed}"), SYNTHETIC_TOKENS_PER_BLOCK
    num_prefix = -(-config.prefix_tokens // size)  # a prefix is rounded up to whole blocks
    next_id, at = config.num_groups * num_prefix, 0.0
    requests = []
    for _ in range(config.num_requests):
        num_tokens = max(1, num_prefix * size + 1, _length(chance, config.prompt_tokens, config.spread))
        num_own = -(-num_tokens // size) - num_prefix
        group = chance.randrange(config.num_groups) if config.num_groups else 0
        prefix = range(group * num_prefix, (group + 1) * num_prefix)
        hash_ids = (*prefix, *range(next_id, next_id + num_own))
        num_output = _length(chance, config.output_tokens, config.spread)
        requests.append(TraceRequest(at, hash_ids, num_tokens, num_output, size))
        next_id += num_own
        at += chance.gammavariate(1 / config.burstiness, config.burstiness / config.rate)
    return Workload("synthetic", requests)


def _length(chance: random.Random, mean: int, spread: float) -> int:
    return max(1, round(chance.uniform(mean * (1 - spread), mean * (1 + spread))))


# ---- files


def _traced(
    where: str, row: Mapping[str, object], tokens_per_block: int, divisor: int, output_divisor: int, count: BlockCount
) -> TraceRequest:
    """A row with `timestamp` in ms, `input_length`, `output_length` and `hash_ids`."""
    hash_ids = row.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
        raise ValueError(f"{where}: hash_ids must be a list of integers, is {hash_ids!r:.40}")
    num_tokens = max(1, tokens(where, row, "input_length") // divisor)
    if num_tokens > len(hash_ids) * tokens_per_block:
        raise ValueError(f"{where}: {len(hash_ids)} hash_ids are too few for input_length {row['input_length']}")
    at = number(where, row, "timestamp", float) / 1e3
    if not 0.0 <= at <= MAX_TIME_S:
        raise ValueError(f"{where}: timestamp must be in [0, {MAX_TIME_S * 1e3:g}] ms, is {row['timestamp']!r:.40}")
    num_output = max(1, tokens(where, row, "output_length") // output_divisor)
    count.add(where, len(hash_ids))
    return TraceRequest(at, tuple(hash_ids), num_tokens, num_output, tokens_per_block)


def _require_divisors(divisor: int, output_divisor: int, tokens_per_block: int = 0) -> None:
    for name, value in (("divisor", divisor), ("output_divisor", output_divisor)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, is {value}")
    if tokens_per_block % divisor:
        raise ValueError(f"divisor must divide {tokens_per_block}, is {divisor}")


def from_zero(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Sorted by time; the first request arrives at 0."""
    requests.sort(key=lambda request: request.arrives_at)
    return [replace(request, arrives_at=request.arrives_at - requests[0].arrives_at) for request in requests]
