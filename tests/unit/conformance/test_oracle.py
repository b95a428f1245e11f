"""Rounding is never a fault, and what exceeds the bound always is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from conformance.answers import Answer, Token
from conformance.oracle import Match, bound_of, compare, noise

MARGINS = st.floats(0.0, 10.0)
ANSWERS = st.lists(st.tuples(st.text(min_size=1, max_size=3), MARGINS), min_size=1, max_size=12)


def answer_of(tokens: list[Token]) -> Answer:
    return Answer(text="".join(token.text for token in tokens), tokens=tokens)


@st.composite
def rounded_twice(draw: st.DrawFn) -> tuple[Answer, Answer, float]:
    """Two answers of an engine with noise of this size in a log-probability: margins below twice it may turn over."""
    size = draw(st.floats(0.0, 0.5))
    one, other = [], []
    for text, margin in draw(ANSWERS):
        first = Token(text, -0.1, margin)
        second = replace(first, logprob=first.logprob + draw(st.floats(-size, size)))
        one.append(first)
        if margin < 2 * size and draw(st.booleans()):
            other.append(replace(second, text=text + "!"))
            break
        other.append(second)
    else:
        return answer_of(one), answer_of(other), size
    return answer_of(one), answer_of(other), size


@given(rounded_twice())
def test_rounding_is_no_fault_under_a_bound_of_twice_its_size(case: tuple[Answer, Answer, float]) -> None:
    one, other, size = case
    assert compare(one, other, bound_of(size)).match in (Match.SAME, Match.TIE)


@given(rounded_twice())
def test_an_answer_of_the_control_is_no_fault_under_the_bound_measured_on_it(
    case: tuple[Answer, Answer, float],
) -> None:
    one, other, _ = case
    measured = noise([(one, other)])
    assert measured is not None
    assert compare(one, other, bound_of(measured)).match in (Match.SAME, Match.TIE)


@given(ANSWERS, st.data())
def test_a_token_that_leads_by_more_than_the_bound_must_be_there_with_its_probability(
    drawn: list[tuple[str, float]], data: st.DataObject
) -> None:
    bound = 0.5
    right = answer_of([Token(text, -0.1, margin) for text, margin in drawn])
    place = data.draw(st.integers(0, len(drawn) - 1))
    token = right.tokens[place]
    changed = data.draw(st.sampled_from([replace(token, text="other"), replace(token, logprob=-1.0)]))
    wrong = answer_of([*right.tokens[:place], changed, *right.tokens[place + 1 :]])
    margin = right.tokens[place].margin
    assert margin is not None
    found = compare(right, wrong, bound)
    assert (found.match is Match.OTHER) == (margin > bound)
    assert found.match is not Match.OTHER or f"token {place} " in found.what


def test_a_lost_token_and_a_changed_text_are_faults_and_texts_alone_are_not_judged() -> None:
    right = answer_of([Token(text, -0.1, 3.0) for text in "abc"])
    assert compare(right, answer_of(right.tokens[:2]), 0.5).match is Match.OTHER
    assert compare(right, replace(right, text="abd"), 0.5).match is Match.OTHER
    assert compare(Answer("abc"), Answer("abd"), 0.5).match is Match.UNJUDGED
    assert compare(Answer("abc"), Answer("abc"), 0.5).match is Match.SAME
