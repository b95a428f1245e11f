"""Judges the tokens of pairs of answers, and the codes in them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.findings import Finding, Question, Severity
from conformance.oracle import ASSUMED_BOUND, MAX_NOISE, Match, bound_of, compare, noise
from conformance.prompts import Prompt, foreign_code
from conformance.stack import Record

CANARY = Question("tokens: no answer has the code of another prompt", Severity.OUTPUT)


@dataclass(frozen=True, slots=True)
class Bound:
    """`value` in units of a log-probability; None: no margin can be believed."""

    value: float | None
    source: str


def bound_from(control: Sequence[tuple[Record, Record]]) -> Bound:
    """From pairs of answers of the reference to one prompt. Without a reference, a wide bound is assumed."""
    if not control:
        return Bound(ASSUMED_BOUND, "assumed: no reference")
    good = [(one.answer, other.answer) for one, other in control if one.is_good and other.is_good]
    if not good:
        one, other = control[0]
        return Bound(None, f"the reference does not answer: {(other if one.is_good else one).what}")
    measured = noise(good)
    if measured is None:  # texts alone are compared
        return Bound(bound_of(0.0), "no log-probabilities")
    if measured > MAX_NOISE:
        return Bound(None, f"the reference differs from itself by {measured:.2f} nats")
    return Bound(bound_of(measured), f"the control has noise of {measured:.3f} nats")


def judge_tokens(question: Question, pairs: Sequence[tuple[Record, Record]], bound: Bound, note: str = "") -> Finding:
    """Of (expected, found); answers that are not good, or have nothing to compare, are left to other questions."""
    if bound.value is None:
        return question.not_shown(bound.source)
    whole = [
        (one, other)
        for one, other in pairs
        if all(record.is_good and (record.answer.text or record.answer.tokens) for record in (one, other))
    ]
    compared = [(compare(one.answer, other.answer, bound.value), other) for one, other in whole]
    wrong = [(comparison, record) for comparison, record in compared if comparison.match is Match.OTHER]
    if wrong:
        comparison, record = wrong[0]
        return question.fails(f"{len(wrong)} of {len(whole)} answers; the first: {comparison.what}", record.curl)
    counts = Counter(comparison.match for comparison, _ in compared)
    judged = sum(comparison.num_judged for comparison, _ in compared)
    if not compared:
        return question.not_shown("no pair of complete answers")
    if counts[Match.UNJUDGED]:
        return question.not_shown(
            f"{counts[Match.UNJUDGED]} texts differ, and no log-probabilities came to judge them by"
        )
    if not judged and any(one.answer.tokens for one, _ in whole):
        return question.not_shown(f"no margin exceeds {bound.value:.2f} nats ({bound.source})")
    shown = (
        f"{judged} tokens with a margin beyond {bound.value:.2f} nats" if judged else "compared by their texts alone"
    )
    why = f"{len(whole)} answers, {shown} ({bound.source})"
    return question.holds(why + f", {counts[Match.TIE]} ties" * bool(counts[Match.TIE]) + note)


def judge_canaries(answers: Sequence[tuple[Prompt, Record]]) -> Finding:
    prompts = [prompt for prompt, _ in answers]
    good = [(prompt, record) for prompt, record in answers if record.is_good]
    for prompt, record in good:
        other = foreign_code(record.answer.text, prompt, prompts)
        if other is not None:
            why = f"the answer to note {prompt.number} ({prompt.code}) has {other.code!r}, of note {other.number}"
            return CANARY.fails(why, record.curl)
    own = sum(prompt.code in record.answer.text for prompt, record in good)
    why = f"{own} of {len(good)} answers have the code of their own prompt, and none another one"
    return CANARY.holds(why) if own * 2 > len(good) else CANARY.not_shown(f"the model does not repeat codes: {why}")
