"""Logs of calls of OpenAI's API and traces of Dynamo: their forms, and malformed rows are refused by line and field."""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.replay import trace_rows
from simulator.replay.request_log import request_log
from simulator.replay.request_trace import SCHEMA, request_trace
from simulator.replay.trace import cached_tokens
from simulator.replay.trace_rows import MAX_TOKENS
from simulator.replay.workload_files import read_workload
from simulator.replay.workloads import azure, mooncake

USAGE = {"prompt_tokens": 900, "completion_tokens": 80}
ROW = {"timestamp": 1_764_234_000.5, "usage": USAGE}


def written(directory: Path, *rows: object, name: str = "log.jsonl") -> Path:
    path = directory / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"created": 1_764_234_000.5, "usage": USAGE, "choices": [{"message": {"content": "hello"}}]},
        {"timestamp": 1_764_234_000_500, "usage": USAGE},  # milliseconds
        {"timestamp": "1764234000.5", "usage": USAGE},
        {"timestamp": "2025-11-27T09:00:00.5Z", "usage": USAGE},
        {"time": "2025-11-27T10:00:00.5+01:00", "response": {"usage": USAGE}},
        {"custom_id": "a", "response": {"status_code": 200, "body": {"created": 1_764_234_000.5, "usage": USAGE}}},
    ],
)
def test_a_row_has_a_time_and_a_usage_in_any_of_their_places(tmp_path: Path, row: object) -> None:
    earlier = {"timestamp": 1_764_233_990.25, "usage": USAGE}
    requests = request_log(written(tmp_path, row, earlier)).requests
    assert datetime(2025, 11, 27, 9, tzinfo=UTC).timestamp() == 1_764_234_000
    assert [one.arrives_at for one in requests] == [0.0, 10.25]
    assert [(one.num_tokens, one.num_output_tokens) for one in requests] == [(900, 80), (900, 80)]
    assert not set(requests[0].hash_ids) & set(requests[1].hash_ids), "prompts share nothing"


def test_whole_seconds_are_spread(tmp_path: Path) -> None:
    whole = {"created": 1_764_234_000, "usage": USAGE}
    assert request_log(written(tmp_path, whole, whole)).granularity_s == 1.0
    assert request_log(written(tmp_path, whole, ROW)).granularity_s == 0.0


@given(st.lists(st.integers(0, 40), min_size=2, max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cache_has_the_hits_that_the_log_reports(tmp_path: Path, num_blocks: list[int]) -> None:
    """But for those of the first prompt with so long a prefix."""
    cached = [128 * blocks for blocks in num_blocks]
    rows = [
        {
            "timestamp": at + 0.5,
            "usage": {**USAGE, "prompt_tokens": 6000, "prompt_tokens_details": {"cached_tokens": c}},
        }
        for at, c in enumerate(cached)
    ]
    requests = request_log(written(tmp_path, *rows)).requests
    longest = 0
    for hits, wanted in zip(cached_tokens(requests, 16), cached, strict=True):
        assert hits == min(wanted, longest)
        longest = max(longest, wanted)


def test_failed_calls_are_left_out(tmp_path: Path) -> None:
    failed = {"timestamp": 1.0, "error": {"code": 429}}
    assert len(read_workload(written(tmp_path, failed, ROW, failed)).requests) == 1
    with pytest.raises(ValueError, match="log holds no request"):
        request_log(written(tmp_path, failed))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 1.0}, "line 2: usage is missing"),
        ({"timestamp": 1.0, "usage": {"completion_tokens": 1}}, "line 2: prompt_tokens is missing"),
        ({**ROW, "usage": {**USAGE, "prompt_tokens": 0}}, "line 2: prompt_tokens must be at least 1, is 0"),
        ({**ROW, "usage": {**USAGE, "prompt_tokens": -5}}, r"line 2: prompt_tokens must be in \[0, 4,000,000\], is -5"),
        ({**ROW, "usage": {**USAGE, "completion_tokens": MAX_TOKENS + 1}}, "line 2: completion_tokens must be in"),
        ({**ROW, "usage": {**USAGE, "completion_tokens": "many"}}, "line 2: completion_tokens must be a whole number"),
        ({**ROW, "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 901}}}, "at most prompt_tokens, 900"),
        ({"usage": USAGE}, "line 2: none of timestamp, arrived_at, created_at, created, time is there"),
        ({**ROW, "timestamp": "yesterday"}, "line 2: timestamp must be a time, in seconds or as ISO"),
        ({**ROW, "timestamp": "nan"}, "line 2: timestamp must be finite"),
        ({**ROW, "timestamp": -1}, "line 2: timestamp must be a time in"),
        ('{"timestamp": 1,', "line 2: not JSON at column 18: Expecting"),
        ("[1]", "line 2: must be a JSON object"),
        ("[" * 100_000, "line 2: "),
    ],
)  # fmt: skip
def test_a_malformed_row_is_refused_by_line_and_field(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request_log(written(tmp_path, ROW, row))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    ["usage", "timestamp", "created", "response", "body", "error", "prompt_tokens", "completion_tokens", "session",
     "prompt_tokens_details", "cached_tokens", "hash_ids", "input_length", "output_length", "event", "schema",
     "event_type", "request", "replay", "trace_block_size", "input_sequence_hashes", "request_received_ms",
     "output_tokens", "agent_context"]
)  # fmt: skip
odd_rows = st.recursive(json_values, lambda inner: st.dictionaries(fields, inner, max_size=6), max_leaves=12)
ints = st.integers(-1, 5)


def traced(**fields: object) -> dict[str, object]:
    """A row of Dynamo's file sink, with other fields at each place where they are."""
    replay = {"trace_block_size": 4, "input_length": 6, "input_sequence_hashes": [2**64 - 1, 9]}
    request = {"request_id": "a", "request_received_ms": 1_764_234_000_500, "output_tokens": 3, "replay": replay}
    event = {"schema": SCHEMA, "event_type": "request_end", "event_time_unix_ms": 1_764_234_000_900, "request": request}
    for place in (event, request, replay):
        place |= {name: value for name, value in fields.items() if name in {*place, "agent_context"}}
    return {"timestamp": 7, "event": event}


odd_traces = st.dictionaries(fields, ints | st.lists(ints, max_size=3) | json_values, max_size=3).map(
    lambda found: traced(**found)
)


@given(st.lists(odd_rows | odd_traces, max_size=4), st.sampled_from(["log.jsonl", "log.csv"]))
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_odd_file_is_read_or_refused_by_a_value_error(tmp_path: Path, rows: list[object], name: str) -> None:
    path = written(tmp_path, *rows, name=name)
    try:
        workload = read_workload(path)
    except ValueError:
        return
    assert workload.requests


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_text_are_refused_by_a_value_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + content)
    with pytest.raises(ValueError, match=r"any"):
        azure(path)


def test_a_field_that_is_too_long_for_csv_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000)
    with pytest.raises(ValueError, match=r"line \d: field larger than field limit"):
        azure(path)


def test_reading_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_rows, "MAX_ROW_BYTES", 100)
    with pytest.raises(ValueError, match="line 2: longer than 100 bytes"):
        request_log(written(tmp_path, ROW, {**ROW, "messages": "x" * 100}))
    monkeypatch.setattr(trace_rows, "MAX_ROWS", 3)
    with pytest.raises(ValueError, match="more than 3 lines: read fewer by --requests"):
        request_log(written(tmp_path, ROW, ROW, ROW, ROW))
    assert len(request_log(written(tmp_path, ROW, ROW, ROW, ROW), limit=3).requests) == 3


CACHED = {"prompt_tokens_details": {"cached_tokens": 900}}
TRACED = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [7] * 8}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("log.jsonl", json.dumps(ROW)),
        ("log.jsonl", json.dumps({**ROW, "usage": USAGE | CACHED})),
        ("log.jsonl", json.dumps(TRACED)),
        ("log.jsonl", json.dumps({**TRACED, "session": 1, "hash_ids": [0] * 40})),
        ("log.csv", "2023-11-16 18:15:50.99,4000,109"),
        ("log.jsonl", json.dumps(traced(input_length=32, input_sequence_hashes=[*range(8)]))),
    ],
    ids=["log", "cached", "mooncake", "sessions", "azure", "dynamo"],
)
def test_the_blocks_of_all_prompts_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: str
) -> None:
    """Those of a common prefix, too: each request names its own blocks."""
    header = ["TIMESTAMP,ContextTokens,GeneratedTokens"] if name.endswith("csv") else []
    path = written(tmp_path, *header, *[row] * 6, name=name)
    assert len(read_workload(path).requests) == 6
    monkeypatch.setattr(trace_rows, "MAX_BLOCKS", 41)
    with pytest.raises(ValueError, match=r"line \d: more than 41 blocks of prompts in all: read fewer by --requests"):
        read_workload(path)


def test_the_format_follows_from_the_name_and_the_first_line(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}
    path = written(tmp_path, line, name="mooncake.jsonl")
    assert read_workload(path) == mooncake(path)
    assert read_workload(written(tmp_path, {**line, "session": 1, "hash_ids": [0] * 40})).requests[0].session == 1
    with pytest.raises(ValueError, match="divisors are for published traces"):
        read_workload(written(tmp_path, ROW), divisor=2)
    with pytest.raises(ValueError, match="line 1: must have usage"):
        read_workload(written(tmp_path, {"messages": [], "timestamp": 0}))


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv"])
def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"zero-{name}").symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / f"zero-{name}"):
        with pytest.raises(ValueError, match="must be a regular file"):
            read_workload(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_trace_of_dynamo_has_the_prefixes_and_sessions_of_its_requests(tmp_path: Path, suffix: str) -> None:
    rows = [
        traced(request_received_ms=1_764_234_002_000, input_length=8, input_sequence_hashes=[2**64 - 1, 5]),
        {"schema": SCHEMA, "event_type": "tool_end", "tool": {}},
        traced(agent_context={"session_id": "s"})["event"],  # without the envelope
        traced(agent_context={"session_id": "s"}, request_received_ms=1_764_234_001_000, output_tokens=0),
    ]
    path = written(tmp_path, *rows)
    if suffix:
        path = tmp_path / "log.jsonl.gz"
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        path.write_bytes(gzip.compress(b"".join(lines[:2])) + gzip.compress(b"".join(lines[2:])))  # two members
    found = read_workload(path).requests
    assert [(one.arrives_at, one.num_tokens, one.num_output_tokens) for one in found] == [
        (0.0, 6, 3), (0.5, 6, 1), (1.5, 8, 3),
    ]  # fmt: skip
    assert [one.session for one in found] == [0, 0, None]
    assert found[0].hash_ids == found[1].hash_ids
    assert found[0].hash_ids[0] == found[2].hash_ids[0]
    assert len({id for one in found for id in one.hash_ids}) == 3
    assert max(max(one.hash_ids) for one in found) < 3, "ids are small numbers, hashes have 64 bits"
    with pytest.raises(ValueError, match="divisors are for published traces"):
        read_workload(path, divisor=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (traced(schema="dynamo.request.trace.v2"), "schema must be 'dynamo.request.trace.v1', is 'dynamo.request"),
        (traced(request=None), "request must be a JSON object, is None"),
        (traced(replay=[]), r"replay must be a JSON object, is \[\]"),
        (traced(trace_block_size=0), "trace_block_size must be at least 1, is 0"),
        (traced(trace_block_size=5), "trace_block_size must be 4 as before, is 5"),
        (traced(input_length=MAX_TOKENS + 1), "input_length must be in"),
        (traced(input_length=9), "input_sequence_hashes must be 3 integers"),
        (traced(input_sequence_hashes=[1, "2"]), "input_sequence_hashes must be 2 integers"),
        (traced(request_received_ms=-1), r"request_received_ms must be in \[0, 1e\+14\] ms, is -1"),
        (traced(request_received_ms=None), "request_received_ms is missing"),
        (traced(output_tokens=None), "output_tokens is missing"),
        (traced(agent_context="s"), "agent_context must be a JSON object, is 's'"),
        (traced(agent_context={}), "session_id must be text, is None"),
        ({"event": 5}, "event must be a JSON object, is 5"),
    ],
)
def test_a_malformed_row_of_a_trace_of_dynamo_is_refused_by_line_and_field(
    tmp_path: Path, row: object, message: str
) -> None:
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        request_trace(written(tmp_path, traced(), row))


def test_a_trace_of_azure_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.99,4000,109\n"))
    assert read_workload(path).requests[0].num_tokens == 4000


def test_a_gzip_file_that_is_none_or_ends_early_is_refused_by_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "log.jsonl.gz", gzip.compress((json.dumps(traced()) + "\n").encode() * 9)
    for content, line in ((b"{}", 1), (whole[:-30], r"\d"), (whole[:20] + b"\xff" * 40, 1)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"log.jsonl.gz, line {line}: "):
            read_workload(path)
