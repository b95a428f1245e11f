"""Requests of a trace: token ids that share prefixes as the hash ids do, rates, an infinite cache."""

from __future__ import annotations

import random
from itertools import pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.trace import TraceRequest, at_rate, infinite_cache_tokens


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
