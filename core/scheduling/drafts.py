"""Which guessed tokens a step computes.

A runner proposes guesses of the next tokens of a sequence. A step that computes some of them, the *drafts*, may sample
several tokens of the sequence. Each draft makes the step longer, so a step takes a draft only if its expected tokens
per second exceed those of the step without it:

    chance that the draft and all before it are right                tokens of the step
    -------------------------------------------------  >  MARGIN x  --------------------
                    seconds of a row                                seconds of the step

A guess is likelier to be right after a longer match: the number of newest tokens that equal those before the place
where the guess was found, right guesses included. `DraftChances` learns the chance for each length of match from all
sequences of a worker, and for each sequence how far its guesses have lately been better than those of others. A token
that a grammar forces has a chance of its own, which says nothing about the sequence.
Proposals that no step computes count, too: their first token is compared with the sampled one.

A step that is planned ahead has no drafts, because the proposals for it come with the output of the step in flight. So
`DraftGain` decides whether to plan ahead.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from core.scheduling.sequence import Sequence
from core.step import FORCED, NO_PROPOSAL, Proposal

MAX_DRAFTS = 15  # guessed tokens of one sequence in one step; beyond: the rest is guessed anew
# Texts of Spec-Bench, written by SmolLM2-135M: shares of right guesses after matches of 1, 2, ... tokens
FIRST_CHANCES = (0.2, 0.45, 0.55, 0.65, 0.7, 0.75, 0.75, 0.77, 0.78, 0.8, 0.82, 0.85, 0.85, 0.9, 0.9, 0.95, 0.95)
MAX_MATCH = len(FIRST_CHANCES)  # longer matches are as good
FIRST_FORCED_CHANCE = 0.97
LEARNING_RATE = 0.02  # weight of the newest guess
BIAS_RATE = 0.15  # ... in the bias of its sequence
LEAST_CHANCE, MOST_CHANCE = 0.02, 0.99
MARGIN = 1.25  # chances and seconds are estimates, and the best of many estimates are mostly too high
WAIT_S = 1e-3  # of the model for a step that is planned at the end of the step before
GAIN_RATE = 0.05  # weight of the newest output in the mean of what drafts gain
GAIN_MARGIN = 2.0  # of this mean: outputs whose own proposals are worth a wait are in it, too
FIRST_ROW_COST = 2.0  # of a draft, as a multiple of the cost of a sequence, until drafts have been measured
MOST_ROW_COST = 4.0  # likewise: one slow step must not end all drafts
ROW_COST_RATE = 0.2  # weight of the newest step with a draft for each decode
MAX_SURPRISE = 2.0  # a step counts as at most this factor from what is known


def has_proposal(sequence: Sequence) -> bool:
    """Whether there are guesses for the tokens behind those that are known."""
    return bool(sequence.proposal.token_ids) and sequence.proposed_at == len(sequence.token_ids)


class DraftChances:
    """The chances of the guesses of one worker."""

    def __init__(self) -> None:
        self._chances = [FIRST_FORCED_CHANCE, *FIRST_CHANCES]  # by the length of the match

    def learn(self, sequence: Sequence, sampled: Items[int], proposal: Proposal = NO_PROPOSAL) -> None:
        """Judge the guesses for `sampled`, the newest tokens of the sequence, and note those for the tokens behind."""
        num_tokens, judged = len(sequence.token_ids), sequence.proposal
        if sequence.proposed_at == num_tokens - len(sampled):
            for place, (guess, token_id) in enumerate(zip(judged.token_ids, sampled, strict=False)):
                length, is_right = min(judged.matches[place], MAX_MATCH), guess == token_id
                surprise = is_right - self._chances[length]
                self._chances[length] += LEARNING_RATE * surprise
                if length != FORCED:
                    sequence.draft_bias += BIAS_RATE * (surprise - sequence.draft_bias)
                if not is_right:
                    break
        sequence.proposal, sequence.proposed_at = proposal, num_tokens

    def cumulative(self, sequence: Sequence, num_drafts: int) -> list[float]:
        """Element i is the chance that drafts 0 to i are all right. It falls from draft to draft."""
        chances, chance = [], 1.0
        for match in sequence.proposal.matches[:num_drafts]:
            right = self._chances[min(match, MAX_MATCH)] + (0.0 if match == FORCED else sequence.draft_bias)
            chance *= min(max(right, LEAST_CHANCE), MOST_CHANCE)
            chances.append(chance)
        return chances


class RowCosts:
    """Seconds of a draft, by the number of other decodes in its step: a row costs more where the step is no longer
    bound by reading the weights."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def record(self, num_decodes: int, num_drafts: int, extra_s: float, sequence_s: float) -> None:
        """Learn from a step with drafts, which took `extra_s` more than it would have taken without."""
        known = self.row_s(num_decodes, sequence_s)
        found = min(max(extra_s / num_drafts, known / MAX_SURPRISE), known * MAX_SURPRISE)
        rate = ROW_COST_RATE * min(1.0, num_drafts / num_decodes)
        self._seconds[num_decodes.bit_length()] = known + rate * (found - known)

    def row_s(self, num_decodes: int, sequence_s: float) -> float:
        known = self._seconds.get(num_decodes.bit_length(), FIRST_ROW_COST * sequence_s)
        return min(max(known, sequence_s / 2), MOST_ROW_COST * sequence_s)


class DraftGain:
    """Learns how many seconds drafts save in a step, and says whether the next step waits for the newest output."""

    def __init__(self) -> None:
        self._mean_s = 0.0  # seconds that a step saves
        self._newest_gains = False

    def learn(self, counts: Items[int], saved_s: float) -> None:
        """Of each output: the drafts that a step would take of its proposals, and the seconds that they save."""
        self._newest_gains = any(counts)
        self._mean_s += GAIN_RATE * (saved_s - self._mean_s)

    @property
    def is_worth_a_wait(self) -> bool:
        """Whether the next step waits. A grammar forces a name only once the token before it is drawn, so an output
        without forced tokens may come right before one with many: the mean counts, too."""
        return self._newest_gains or self._mean_s > GAIN_MARGIN * WAIT_S


def saved_s(chances: Items[Items[float]], counts: Items[int], num_tokens: int, step_s: float, row_s: float) -> float:
    """By these drafts: the time of steps without drafts for their expected tokens, less the time of their rows."""
    gained = sum(sum(of_one[:count]) for of_one, count in zip(chances, counts, strict=True))
    return gained * step_s / num_tokens - sum(counts) * row_s


def choose_drafts(
    chances: Items[Items[float]], num_tokens: int, step_s: float, row_s: float, spare_s: float
) -> list[int]:
    """The number of drafts of each sequence in a step that samples `num_tokens` in `step_s` seconds without drafts.

    `chances` has those of `DraftChances.cumulative` for each sequence. All rows of drafts take at most `spare_s`.
    """
    ranked = [(chance, place) for place, of_one in enumerate(chances) for chance in of_one]
    ranked.sort(key=lambda draft: -draft[0])  # stable, and chances fall: the first draft of a sequence comes first
    counts, gained, spent_s = [0] * len(chances), 0.0, 0.0
    for chance, place in ranked:
        if chance * (step_s + spent_s) <= MARGIN * row_s * (num_tokens + gained) or spent_s + row_s > spare_s:
            break
        counts[place] += 1
        gained += chance
        spent_s += row_s
    if gained * step_s <= MARGIN * (spent_s + WAIT_S) * num_tokens:
        return [0] * len(chances)
    return counts
