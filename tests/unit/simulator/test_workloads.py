"""Workloads and traces: arrivals, lengths, and token ids that share prefixes."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from datetime import UTC, datetime
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.replay import trace_rows
from simulator.replay.request_log import request_log
from simulator.replay.request_trace import SCHEMA, request_trace
from simulator.replay.trace import TraceRequest, at_rate, cached_tokens, infinite_cache_tokens, poisson_arrivals
from simulator.replay.trace_rows import MAX_TOKENS
from simulator.replay.workload_files import read_workload
from simulator.replay.workloads import (
    Synthetic,
    Workload,
    agent_sessions,
    azure,
    mooncake,
    repeated_sessions,
    synthetic,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,600,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.2224670,91,16"""
TURN = {"session": 0, "timestamp": 0, "input_length": 40, "output_length": 9, "hash_ids": [0, 1, 2]}


# ---- Azure


def test_the_prompts_of_azure_are_distinct_and_in_order_of_time(tmp_path: Path) -> None:
    requests = azure(written(tmp_path, AZURE)).requests
    assert [(r.num_tokens, r.num_output_tokens) for r in requests] == [(374, 44), (600, 109), (91, 16)]
    assert [r.arrives_at for r in requests] == pytest.approx([0.0, 4.314579, 4.541877])
    hash_ids = [hash_id for request in requests for hash_id in request.hash_ids]
    assert sorted(hash_ids) == [0, 1, 2, 3]


def test_a_file_that_excel_has_saved_is_read(tmp_path: Path) -> None:
    requests = azure(written(tmp_path, AZURE)).requests
    assert azure(written(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n"))).requests == requests


def test_the_lengths_of_azure_are_divided_and_limited(tmp_path: Path) -> None:
    requests = azure(written(tmp_path, AZURE), limit=2, divisor=100, output_divisor=50).requests
    assert [(r.num_tokens, r.num_output_tokens) for r in requests] == [(3, 1), (6, 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("374", "many"), "line 3: ContextTokens must be a whole number, is 'many'"),
        ((",91,16", ",91"), "line 4: GeneratedTokens is missing"),
        (("TIMESTAMP", "TIME"), "line 2: TIMESTAMP is missing"),
        (("2023-11-16 18:15:46", "yesterday"), "line 3: TIMESTAMP must be a time, in seconds or .*, is 'yesterday"),
    ],
)
def test_a_malformed_row_of_azure_is_named(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"log\.jsonl, {message}"):
        azure(written(tmp_path, AZURE.replace(*changed)))


# ---- Mooncake


def test_divided_prompts_keep_their_blocks(tmp_path: Path) -> None:
    line = {"timestamp": 3000, "input_length": 1000, "output_length": 9, "hash_ids": [7, 8]}
    path = written(tmp_path, line, line | {"timestamp": 1000}, line | {"timestamp": 0})
    requests = mooncake(path, limit=2, divisor=32, output_divisor=4).requests
    assert requests == [TraceRequest(at, (7, 8), 31, 2, tokens_per_hash_id=16) for at in (1.0, 3.0)]


@pytest.mark.parametrize(
    ("divisor", "message"), [(0, "must be at least 1"), (3, "must divide 512"), (1024, "must divide 512")]
)
def test_a_divisor_must_divide_a_block(tmp_path: Path, divisor: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"divisor {message}, is {divisor}"):
        mooncake(written(tmp_path, TURN), divisor=divisor)


# ---- agent sessions


def test_the_turns_of_a_session_keep_their_distance(tmp_path: Path) -> None:
    rows = [TURN, TURN | {"timestamp": 2500}, TURN | {"session": 1}, TURN | {"session": 1, "timestamp": 1000}]
    by_session: dict[int | None, list[TraceRequest]] = {}
    for request in agent_sessions(written(tmp_path, *rows), seed=3).requests:
        by_session.setdefault(request.session, []).append(request)
    gaps = {session: turns[1].arrives_at - turns[0].arrives_at for session, turns in by_session.items()}
    assert gaps == pytest.approx({0: 2.5, 1: 1.0})
    assert by_session[0][0].conversation != by_session[1][0].conversation
    assert by_session[0][0].tokens_per_hash_id == 16


def test_sessions_begin_at_the_given_rate_as_the_seed_decides(tmp_path: Path) -> None:
    path = written(tmp_path, *(TURN | {"session": number} for number in range(400)))
    requests = agent_sessions(path, sessions_per_s=2.0, seed=1).requests
    assert requests[-1].arrives_at == pytest.approx(200, rel=0.15)
    assert requests == agent_sessions(path, sessions_per_s=2.0, seed=1).requests
    assert requests != agent_sessions(path, sessions_per_s=2.0, seed=2).requests


def test_divided_sessions_keep_their_blocks(tmp_path: Path) -> None:
    (request,) = agent_sessions(written(tmp_path, TURN), divisor=4, output_divisor=3).requests
    assert (request.num_tokens, request.num_output_tokens, request.tokens_per_hash_id) == (10, 3, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hash_ids": [0]}, "too few"),
        ({"hash_ids": [0, "1", 2]}, "hash_ids must be a list of integers"),
        ({"session": None}, "session is missing"),
        ({"timestamp": "late"}, "timestamp must be a number, is 'late'"),
        ({"output_length": []}, "output_length must be a whole number, is"),
        ({"timestamp": -1}, "timestamp must be in "),
        ({"timestamp": 1e300}, "timestamp must be in "),
    ],
)
def test_a_malformed_turn_is_named(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"log\.jsonl, line 2: .*{message}"):
        agent_sessions(written(tmp_path, TURN, TURN | changed))


# ---- synthetic


def test_synthetic_lengths_and_gaps_have_the_given_means() -> None:
    requests = synthetic(Synthetic(num_requests=4000, rate=5.0, prompt_tokens=300, output_tokens=40)).requests
    assert requests[-1].arrives_at == pytest.approx(800, rel=0.1)
    assert sum(r.num_tokens for r in requests) / 4000 == pytest.approx(300, rel=0.05)
    assert all(150 <= r.num_tokens <= 450 and 20 <= r.num_output_tokens <= 60 for r in requests)
    assert len({hash_id for r in requests for hash_id in r.hash_ids}) == sum(len(r.hash_ids) for r in requests)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_squared_variation_of_the_gaps(burstiness: float) -> None:
    requests = synthetic(Synthetic(num_requests=20_000, rate=2.0, burstiness=burstiness)).requests
    gaps = [later.arrives_at - earlier.arrives_at for earlier, later in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 == pytest.approx(burstiness, rel=0.15)


def test_the_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    requests = synthetic(Synthetic(num_requests=60, num_groups=3, prefix_tokens=100, prompt_tokens=400)).requests
    by_prefix: dict[tuple[int, ...], int] = {}
    for request in requests:
        tokens = request.token_ids()
        assert len(tokens) == request.num_tokens
        by_prefix[tokens[:112]] = by_prefix.get(tokens[:112], 0) + 1  # rounded up to blocks of 16
    assert len(by_prefix) == 3
    own = [hash_id for request in requests for hash_id in request.hash_ids[7:]]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "rate must be positive"),
        ({"spread": 1.5}, "spread must be in"),
        ({"num_groups": 2}, "must be set together"),
        (
            {"num_groups": 2, "prefix_tokens": 2000},
            r"prefix_tokens must be in \[0, [\d,]+\], the length of the shortest prompt, is 2,000",
        ),
        ({"rate": math.inf}, "rate must be positive and finite, is inf"),
        ({"prompt_tokens": 10**9}, "prompt_tokens must be at most 4,000,000, is 1,000,000,000"),
        ({"num_requests": 10**9}, "num_requests x prompt_tokens must be at most 1,000,000,000"),
    ],
)
def test_a_synthetic_workload_names_a_wrong_field(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Synthetic(**changes)  # type: ignore[arg-type]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def test_a_block_may_have_any_size() -> None:
    request = TraceRequest(3.0, (7, 8), 31, 2, tokens_per_hash_id=16)
    assert request.token_ids() == (*range(7 * 16, 8 * 16), *range(8 * 16, 8 * 16 + 15))


def test_the_turns_of_a_conversation_are_known_by_their_second_block() -> None:
    assert TraceRequest(0.0, (0, 5, 6), 1200, 1).conversation == TraceRequest(0.0, (0, 5), 900, 1).conversation
    assert TraceRequest(0.0, (0,), 100, 1).conversation == 0


def test_a_trace_is_spread_over_the_asked_duration() -> None:
    trace = [TraceRequest(3.0 * (number // 4), (number,), 100, 1) for number in range(40)]
    moved = at_rate(trace, 10.0, 3.0, random.Random(0))
    times = [request.arrives_at for request in moved]
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(10.0)
    assert all(earlier < later for earlier, later in pairwise(times))
    assert {request.hash_ids for request in moved} == {request.hash_ids for request in trace}


@pytest.mark.parametrize("is_poisson", [True, False])
def test_sessions_begin_faster_at_a_higher_rate_and_their_turns_do_not(is_poisson: bool) -> None:
    trace = [TraceRequest(10.0 * n + 3.0 * turn, (n,), 9, 1, session=n) for n in range(400) for turn in range(3)]
    chance = random.Random(0)
    moved = poisson_arrivals(trace, 40.0, chance) if is_poisson else at_rate(trace, 40.0, 0.0, chance)
    times: dict[int | None, list[float]] = {}
    for request in moved:
        times.setdefault(request.session, []).append(request.arrives_at)
    assert all(later - earlier == pytest.approx(3.0) for own in times.values() for earlier, later in pairwise(own))
    assert max(own[0] for own in times.values()) == pytest.approx(40.0, rel=0.2 if is_poisson else 1e-9)
    assert [r.arrives_at for r in moved] == sorted(r.arrives_at for r in moved)


def test_repeated_sessions_share_what_the_sessions_share() -> None:
    first = [TraceRequest(1.0 * n, (0, 1 + n), 20, 1, tokens_per_hash_id=16, session=n) for n in range(2)]
    later = repeated_sessions(Workload("agents", first), 3).requests
    assert [request.arrives_at for request in later] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert {request.session for request in later} == set(range(6))
    assert {request.hash_ids[0] for request in later} == {0}
    assert len({request.hash_ids[1] for request in later}) == 6


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 8)), min_size=1, max_size=8
)


@given(prompts, st.sampled_from([2, 4, 8]))
def test_an_infinite_cache_hits_what_a_comparison_of_all_tokens_finds(
    drawn: list[tuple[list[int], int]], block_size: int
) -> None:
    """Hash ids name all blocks before them, so each path of small numbers becomes one id."""
    requests = []
    for path, num_last in drawn:
        hash_ids = tuple(int("".join(map(str, path[: depth + 1])), 3) + 81 * depth for depth in range(len(path)))
        requests.append(TraceRequest(0.0, hash_ids, 8 * (len(path) - 1) + num_last, 1, tokens_per_hash_id=8))
    expected = 0
    for number, request in enumerate(requests):
        tokens = request.token_ids()
        longest = max((common_prefix(tokens, other.token_ids()) for other in requests[:number]), default=0)
        expected += min(longest, len(tokens) - 1) // block_size * block_size
    assert infinite_cache_tokens(requests, block_size) == expected


# ---- Logs of calls of OpenAI's API and traces of Dynamo: their forms, and refusals of rows by line and field.

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
