"""A log of calls of OpenAI's API, one JSON object a line: when each came, and its usage.

    {"timestamp": "2026-11-27T09:00:00Z", "usage": {"prompt_tokens": 900, "completion_tokens": 80}}
    {"created": 1764234000, "response": {"body": {"usage": {...}}}}     as in the results of a batch

`usage` is that of the row, of its `response` or of its `response.body`. The time is the first one found of TIMES, there
or in the row: seconds, milliseconds, or ISO 8601. Messages are not read. `prompt_tokens_details.cached_tokens` become
the beginning of one prefix that all prompts share, so that a cache has the hits that the log reports.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from simulator.replay.trace import TraceRequest
from simulator.replay.trace_rows import MAX_TIME_S, MAX_TOKENS, BlockCount, Row, json_rows, number, tokens
from simulator.replay.workloads import Workload, from_zero

TOKENS_PER_BLOCK = 128
TIMES = ("timestamp", "arrived_at", "created_at", "created", "time")
FIRST_BLOCK = MAX_TOKENS // TOKENS_PER_BLOCK  # of what no other prompt has; lower ids are the common prefix
LEAST_MS = 1e11  # a later time than year 5138 in seconds is one in milliseconds


def request_log(path: Path, limit: int | None = None) -> Workload:
    """The first `limit` rows. A row whose call failed, without usage but with `error`, is left out.

    Raises `ValueError` naming file, line and field, and `OSError`.
    """
    requests: list[TraceRequest] = []
    num_blocks, count = FIRST_BLOCK, BlockCount()
    is_whole = True
    for where, row in json_rows(path, limit):
        holder = _holder_of_usage(row)
        if holder is None:
            if row.get("error"):
                continue
            raise ValueError(f"{where}: usage is missing")
        at = _time(where, row, holder)
        is_whole = is_whole and at.is_integer()
        request, num_blocks = _request(where, at, holder["usage"], num_blocks, count)
        requests.append(request)
    return Workload(path.stem, from_zero(requests) if requests else [], 1.0 if is_whole else 0.0)


def _holder_of_usage(row: Row) -> Row | None:
    holder: object = row
    for inner in ("response", "body", ""):
        if not isinstance(holder, dict):
            return None
        if isinstance(holder.get("usage"), dict):
            return holder
        holder = holder.get(inner)
    return None


def _request(where: str, at: float, usage: object, num_blocks: int, count: BlockCount) -> tuple[TraceRequest, int]:
    """With the number of blocks that all requests so far have of their own."""
    assert isinstance(usage, dict)
    num_tokens = tokens(where, usage, "prompt_tokens")
    if not num_tokens:
        raise ValueError(f"{where}: prompt_tokens must be at least 1, is 0")
    num_output = tokens(where, usage, "completion_tokens")
    details = usage.get("prompt_tokens_details")
    num_cached = 0
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        num_cached = tokens(where, details, "cached_tokens")
    if num_cached > num_tokens:
        raise ValueError(f"{where}: cached_tokens must be at most prompt_tokens, {num_tokens}, is {num_cached}")
    common = num_cached // TOKENS_PER_BLOCK
    last = num_blocks + -(-num_tokens // TOKENS_PER_BLOCK) - common
    count.add(where, common + last - num_blocks)
    hash_ids = (*range(common), *range(num_blocks, last))
    return TraceRequest(at, hash_ids, num_tokens, max(1, num_output), TOKENS_PER_BLOCK), last


def _time(where: str, row: Row, holder: Row) -> float:
    """Seconds."""
    for place in (row, holder):
        for field in TIMES:
            if place.get(field) is not None:
                value = number(where, place, field, _seconds)
                if not 0.0 <= value <= MAX_TIME_S:
                    raise ValueError(f"{where}: {field} must be a time in [0, {MAX_TIME_S:g}] s, is {value:g}")
                return value
    raise ValueError(f"{where}: none of {', '.join(TIMES)} is there")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    return value / 1e3 if value >= LEAST_MS else value
