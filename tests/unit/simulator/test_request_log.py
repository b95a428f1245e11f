"""Logs of calls of OpenAI's API: what they may look like, and that malformed ones are refused by line and field."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.replay import trace_rows
from simulator.replay.request_log import request_log
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
        ({**ROW, "usage": {**USAGE, "completion_tokens": "many"}}, "line 2: completion_tokens is 'many'"),
        ({**ROW, "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 901}}}, "at most prompt_tokens, 900"),
        ({"usage": USAGE}, "line 2: none of timestamp, arrived_at, created_at, created, time is there"),
        ({**ROW, "timestamp": "yesterday"}, "line 2: timestamp is 'yesterday'"),
        ({**ROW, "timestamp": "nan"}, "line 2: timestamp must be finite"),
        ({**ROW, "timestamp": -1}, "line 2: timestamp must be a time in"),
        ('{"timestamp": 1,', "line 2: Expecting"),
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
     "prompt_tokens_details", "cached_tokens", "hash_ids", "input_length", "output_length"]
)  # fmt: skip
odd_rows = st.recursive(json_values, lambda inner: st.dictionaries(fields, inner, max_size=6), max_leaves=12)


@given(st.lists(odd_rows, max_size=4), st.sampled_from(["log.jsonl", "log.csv"]))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    ],
    ids=["log", "cached", "mooncake", "sessions", "azure"],
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
    with pytest.raises(ValueError, match="divisors are for traces"):
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
