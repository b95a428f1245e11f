"""Are two answers to one prompt the same, up to rounding? Pure.

In bfloat16, the shape of a batch changes the last bits of a logit. Where the two best tokens are closer than that, an
engine without any transfer differs from itself. So a position is judged only if its margin exceeds a bound, and the
bound is measured on a control: the same engine, no transfer, the same prompt twice in unlike batches.

    margin of the expected token   > bound: another token is a fault; the same token may drift by the bound
                                  <= bound: nothing is judged; after another token the texts differ rightly

    bound = max(MIN_BOUND, SAFETY x the control's largest drift of a log-probability, or margin of a changed token)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from conformance.answers import Answer, Token

MIN_BOUND = 0.02  # of a log-probability: what float32 and rounded JSON may differ
SAFETY = 4.0  # a margin has the noise of two tokens, and a control does not meet the largest noise
ASSUMED_BOUND = 1.0  # without a control
MAX_NOISE = 1.0  # beyond: the control is not one engine


class Match(Enum):
    SAME = "the same"
    TIE = "the same up to a tie"
    OTHER = "another answer"
    UNJUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Comparison:
    match: Match
    num_judged: int  # positions with a margin beyond the bound
    what: str = ""


def compare(expected: Answer, found: Answer, bound: float) -> Comparison:
    if not expected.tokens or not found.tokens:
        same = expected.text == found.text
        return Comparison(Match.SAME if same else Match.UNJUDGED, 0, "no log-probabilities came")
    num_judged = 0
    for place, (one, other) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        judged = one.margin is not None and one.margin > bound
        num_judged += judged
        if one.text != other.text:
            if not judged:
                return Comparison(Match.TIE, num_judged)
            return Comparison(Match.OTHER, num_judged, _tokens_differ(place, one, other, bound))
        if judged and abs(one.logprob - other.logprob) > bound:
            what = f"token {place} has log-probability {other.logprob:.3f} in place of {one.logprob:.3f}"
            return Comparison(Match.OTHER, num_judged, what)
    if len(expected.tokens) != len(found.tokens):
        what = f"{len(found.tokens)} tokens in place of {len(expected.tokens)}"
        return Comparison(Match.OTHER, num_judged, what)
    if expected.text != found.text:
        return Comparison(Match.OTHER, num_judged, "the text differs, and the tokens of its log-probabilities do not")
    return Comparison(Match.SAME, num_judged)


def _tokens_differ(place: int, one: Token, other: Token, bound: float) -> str:
    return (
        f"token {place} is {other.text!r} in place of {one.text!r}, which leads by {one.margin:.2f} (bound {bound:.2f})"
    )


def noise(pairs: Iterable[tuple[Answer, Answer]]) -> float | None:
    """The largest drift, or margin of a changed token, between two answers of the control; None without tokens."""
    found: list[float] = []
    for one, other in pairs:
        for left, right in zip(one.tokens, other.tokens, strict=False):
            if left.text != right.text:
                found.append(max(left.margin or 0.0, right.margin or 0.0))
                break
            found.append(abs(left.logprob - right.logprob))
    return max(found, default=None)


def bound_of(measured: float) -> float:
    return max(MIN_BOUND, SAFETY * measured)
