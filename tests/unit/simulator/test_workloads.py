"""Workloads and traces: arrivals, lengths, and token ids that share prefixes."""

from __future__ import annotations

import math
import random
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.trace import TraceRequest, at_rate, infinite_cache_tokens, poisson_arrivals
from simulator.replay.workloads import (
    Synthetic,
    Workload,
    agent_sessions,
    azure,
    mooncake,
    repeated_sessions,
    synthetic,
)
from tests.unit.simulator.test_request_log import written

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,600,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.2224670,91,16
"""
TURN = {"session": 0, "timestamp": 0, "input_length": 40, "output_length": 9, "hash_ids": [0, 1, 2]}


def azure_file(directory: Path, text: str = AZURE) -> Path:
    path = directory / "azure.csv"
    path.write_text(text, encoding="utf-8")
    return path


# ---- Azure


def test_the_prompts_of_azure_are_distinct_and_in_order_of_time(tmp_path: Path) -> None:
    requests = azure(azure_file(tmp_path)).requests
    assert [(r.num_tokens, r.num_output_tokens) for r in requests] == [(374, 44), (600, 109), (91, 16)]
    assert [r.arrives_at for r in requests] == pytest.approx([0.0, 4.314579, 4.541877])
    hash_ids = [hash_id for request in requests for hash_id in request.hash_ids]
    assert sorted(hash_ids) == [0, 1, 2, 3]


def test_the_lengths_of_azure_are_divided_and_limited(tmp_path: Path) -> None:
    requests = azure(azure_file(tmp_path), limit=2, divisor=100, output_divisor=50).requests
    assert [(r.num_tokens, r.num_output_tokens) for r in requests] == [(3, 1), (6, 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("374", "many"), "line 3: ContextTokens must be a whole number, is 'many'"),
        ((",16\n", "\n"), "line 4: GeneratedTokens is missing"),
        (("TIMESTAMP", "TIME"), "line 2: TIMESTAMP is missing"),
        (("2023-11-16 18:15:46", "yesterday"), "line 3: TIMESTAMP must be a time, in seconds or .*, is 'yesterday"),
    ],
)
def test_a_malformed_row_of_azure_is_named(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"azure\.csv, {message}"):
        azure(azure_file(tmp_path, AZURE.replace(*changed)))


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
