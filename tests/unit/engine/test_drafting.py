"""Guesses by lookup, and the tokens of runners that compute guesses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import SamplingParams
from core.scheduling.drafts import MAX_DRAFTS, MAX_MATCH
from core.step import NO_PROPOSALS, SampledToken, ScheduledChunk, SequenceView, StepPlan
from engine.drafting import MAX_COPIES, MIN_MATCH, Lookup, Proposer


def view_of(token_ids: Sequence[int], **sampling: object) -> SequenceView:
    return SequenceView("a", token_ids, 1, (), SamplingParams(max_tokens=100, **sampling))  # type: ignore[arg-type]


def copies(tokens: Sequence[int]) -> dict[int, int]:
    """The place behind each of the latest copies of the two newest tokens, with the length of that copy."""
    ends = [
        at for at in range(MIN_MATCH, len(tokens)) if list(tokens[at - MIN_MATCH : at]) == list(tokens[-MIN_MATCH:])
    ]
    found = {}
    for end in ends[-MAX_COPIES:]:
        length = next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)
        found[end] = min(length, MAX_MATCH)
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_guess_follows_a_longest_copy_of_the_newest_tokens(tokens: list[int]) -> None:
    found = Lookup().propose(view_of(tokens), len(tokens), ())
    known = copies(tokens)
    assert bool(found.token_ids) == bool(known)
    if known:
        best = max(known.values())
        assert found.matches == tuple(range(best, best + MAX_DRAFTS))
        at = max(place for place, length in known.items() if length == best)
        assert list(found.token_ids[: len(tokens) - at]) == tokens[at:][:MAX_DRAFTS]


@given(st.lists(st.integers(0, 2), min_size=4, max_size=80), st.lists(st.integers(1, 6), min_size=1, max_size=30))
def test_the_text_may_come_in_any_parts(tokens: list[int], parts: list[int]) -> None:
    """The copy that a drafter follows depends on the parts, its guesses stay a continuation of a copy."""
    lookup, view = Lookup(), view_of(tokens)
    end = 0
    for part in parts:
        known, end = end, min(end + part, len(tokens))
        if end == known:
            break
        found = lookup.propose(view, known, tokens[known:end])
        if found.token_ids:
            assert copies(tokens[:end])


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.lists(st.integers(0, 2), max_size=6))
def test_assumed_tokens_are_looked_up_like_known_ones_and_forgotten(tokens: list[int], assumed: list[int]) -> None:
    """The tokens before are followed first, so the copy need not be the longest one."""
    lookup, view = Lookup(), view_of(tokens)
    before = lookup.propose(view, len(tokens), ())
    behind = lookup.propose(view, len(tokens), (), assumed)
    known = view_of(tokens)
    really = Lookup()
    really.propose(known, len(tokens), ())
    assert behind == really.propose(known, len(tokens), assumed)
    assert lookup.propose(view, len(tokens), ()) == before


def test_what_repeats_is_guessed_beyond_its_end() -> None:
    found = Lookup().propose(view_of([7, 1, 2, 3, 1, 2, 3]), 7, ())
    assert found.token_ids == (1, 2, 3) * (MAX_DRAFTS // 3)


def test_a_sequence_that_is_gone_keeps_no_text() -> None:
    lookup = Lookup()
    view = view_of([1, 2, 3] * 9)
    lookup.propose(view, 27, ())
    assert len(lookup._texts) == 1
    del view
    assert len(lookup._texts) == 0


def step_of(view: SequenceView, num_tokens: int, *, promised: bool = False, wants: bool = True) -> StepPlan:
    chunk = ScheduledChunk(view, 0 if not promised else num_tokens - 1, 1 if promised else num_tokens, True, promised)
    return StepPlan(0, (chunk,), wants)


@pytest.mark.parametrize("promised", [False, True])
def test_a_proposal_counts_the_promised_and_the_sampled_tokens(promised: bool) -> None:
    text = [5, 6, 7, 8, 5, 6, 7]
    known = text[:6] if promised else text
    plan = step_of(view_of(known[:], temperature=0.0), len(text), promised=promised)
    proposed = Proposer(Lookup()).propose(plan, {"a": 7}, {"a": (SampledToken(8), SampledToken(5))})
    assert proposed["a"].token_ids[:3] == (6, 7, 8)
    assert proposed["a"].matches[0] == 5


@pytest.mark.parametrize("why", ["no drafter", "the step wants none", "the request refuses", "nothing was sampled"])
def test_nothing_is_proposed_where_nobody_would_use_it(why: str) -> None:
    view = view_of([1, 2] * 9, speculation=why != "the request refuses")
    plan = step_of(view, 18, wants=why != "the step wants none")
    sampled = {} if why == "nothing was sampled" else {"a": (SampledToken(1),)}
    proposer = Proposer(None if why == "no drafter" else Lookup())
    assert proposer.propose(plan, {}, sampled) == NO_PROPOSALS


def test_a_copy_is_found_however_long_ago_it_was() -> None:
    text = [1, 2, 3, *range(100, 9_000), 1, 2]
    found = Lookup().propose(view_of(text), len(text), ())
    assert (found.token_ids[0], found.matches[0]) == (3, 2)
