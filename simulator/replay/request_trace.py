"""Dynamo's request traces, `dynamo.request.trace.v1`: one JSON object a line, as its file sink writes them.

    {"timestamp": 12, "event": {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {
        "request_id": "a", "request_received_ms": 1764234000123, "output_tokens": 80,
        "replay": {"trace_block_size": 64, "input_length": 900, "input_sequence_hashes": [7, 8, ...]}}}}

The envelope may be missing. Events other than `request_end` are not read. Each hash names a block and all blocks before
it; the last one may be partial. Fields as in lib/llm/src/request_trace/types.rs of Dynamo, rules as in
lib/data-gen/src/request_trace/load.rs: one block size, and as many hashes as the prompt has blocks.
"""

from __future__ import annotations

from pathlib import Path

from simulator.replay.trace import TraceRequest
from simulator.replay.trace_rows import MAX_TIME_S, BlockCount, Row, json_rows, number, tokens
from simulator.replay.workloads import Workload, from_zero

SCHEMA = "dynamo.request.trace.v1"


def request_trace(path: Path, limit: int | None = None) -> Workload:
    """The requests of the first `limit` rows. The requests of an agent's session are its turns.

    Raises `ValueError` naming file, line and field, and `OSError`.
    """
    requests: list[TraceRequest] = []
    ids: dict[int, int] = {}  # hash -> id; those of Dynamo have 64 bits
    sessions: dict[str, int] = {}
    count = BlockCount()
    for where, row in json_rows(path, limit):
        event = _object(where, row, "event") if "event" in row else row
        if event.get("schema") != SCHEMA:
            raise ValueError(f"{where}: schema must be {SCHEMA!r}, is {event.get('schema')!r:.40}")
        if event.get("event_type") != "request_end":
            continue
        request = _object(where, event, "request")
        replay = _object(where, request, "replay")
        size, num_tokens = tokens(where, replay, "trace_block_size"), tokens(where, replay, "input_length")
        for field, value in (("trace_block_size", size), ("input_length", num_tokens)):
            if not value:
                raise ValueError(f"{where}: {field} must be at least 1, is 0")
        if requests and size != requests[0].tokens_per_hash_id:
            raise ValueError(f"{where}: trace_block_size must be {requests[0].tokens_per_hash_id} as before, is {size}")
        hashes = replay.get("input_sequence_hashes")
        num_blocks = -(-num_tokens // size)
        if not isinstance(hashes, list) or len(hashes) != num_blocks or any(type(one) is not int for one in hashes):
            raise ValueError(f"{where}: input_sequence_hashes must be {num_blocks} integers, is {hashes!r:.40}")
        count.add(where, num_blocks)
        at = number(where, request, "request_received_ms", float) / 1e3
        if not 0.0 <= at <= MAX_TIME_S:
            raise ValueError(f"{where}: request_received_ms must be in [0, {MAX_TIME_S * 1e3:g}] ms, is {at * 1e3:g}")
        session = None
        if event.get("agent_context") is not None:
            name = _object(where, event, "agent_context").get("session_id")
            if not isinstance(name, str):
                raise ValueError(f"{where}: session_id must be text, is {name!r:.40}")
            session = sessions.setdefault(name, len(sessions))
        hash_ids = tuple(ids.setdefault(one, len(ids)) for one in hashes)
        num_output = max(1, tokens(where, request, "output_tokens"))
        requests.append(TraceRequest(at, hash_ids, num_tokens, num_output, size, session))
    return Workload(path.stem, from_zero(requests) if requests else [])


def _object(where: str, row: Row, field: str) -> Row:
    value = row.get(field)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {field} must be a JSON object, is {value!r:.40}")
    return value
