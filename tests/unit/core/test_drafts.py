"""Which guesses a step computes, and what becomes of them."""

from __future__ import annotations

import pytest

import core.scheduling.step_planner
from core.cost.step_cost import StepCost
from core.scheduling.drafts import FIRST_CHANCES, DraftChances, DraftGain, RowCosts, choose_drafts, saved_s
from core.scheduling.sequence import Sequence
from core.step import Proposal, SampledToken, StepOutput, StepPlan, TokenEvent
from tests.unit.core.driving_scheduler import BLOCK_SIZE, EOS, Driven, make_sequence

PROMPT = (1, 2, 3, 4, 5)


class Guessing(Driven):
    """Steps take every guess that there is room for. The token at position p is 10 + p."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
        super().__init__(**sizes)

        def choose(chances: list[list[float]], *_: float) -> list[int]:
            return [len(of_one) for of_one in chances]

        monkeypatch.setattr(core.scheduling.step_planner, "choose_drafts", choose)

    def finish_step(self, plan: StepPlan, proposed: dict[str, Proposal], eos_at: int | None = None) -> list[TokenEvent]:
        """`proposed`: for the next step."""
        sampled = {}
        for chunk in plan.chunks:
            position = chunk.start + chunk.num_tokens
            tokens = [self.token_at(position, eos_at)]
            for draft in chunk.drafts:
                if draft != tokens[-1]:
                    break
                position += 1
                tokens.append(self.token_at(position, eos_at))
            sampled[chunk.sequence.sequence_id] = tuple(map(SampledToken, tokens))
        events = self.scheduler.complete_step(StepOutput(plan.step_id, sampled, proposed=proposed))
        self.scheduler.check()
        self.pool.check()
        return events

    @staticmethod
    def token_at(position: int, eos_at: int | None = None) -> int:
        return EOS if position == eos_at else 10 + position


def guesses(first: int, count: int, wrong_at: int | None = None) -> Proposal:
    """For positions from `first` on."""
    return Proposal.copied(tuple(Guessing.token_at(p) + (p == wrong_at) for p in range(first, first + count)), 1)


@pytest.mark.parametrize(("wrong_at", "num_tokens"), [(None, 5), (6, 1), (8, 3), (9, 4)])
def test_a_step_ends_at_a_wrong_guess(monkeypatch: pytest.MonkeyPatch, wrong_at: int | None, num_tokens: int) -> None:
    driven = Guessing(monkeypatch)
    sequence = driven.add("a", PROMPT, max_tokens=20)
    driven.finish_step(driven.begin(), {"a": guesses(6, 4, wrong_at)})
    plan = driven.begin()
    assert [chunk.num_rows for chunk in plan.chunks] == [5]
    events = driven.finish_step(plan, {})
    assert [event.token.token_id for event in events] == [16 + i for i in range(num_tokens)]
    assert [event.index for event in events] == list(range(1, 1 + num_tokens))
    assert sequence.num_computed_tokens == len(sequence.token_ids) - 1 == 5 + num_tokens
    assert len(driven.pool.registered_hashes()) == sequence.num_computed_tokens // BLOCK_SIZE
    assert (driven.scheduler.num_drafts, driven.scheduler.num_right_drafts) == (4, num_tokens - 1)
    assert driven.begin().chunks[0].start == sequence.num_computed_tokens


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(3, 0), (4, 4)])
def test_guesses_leave_each_sequence_a_block(monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_drafts: int) -> None:
    """The next token fills the second block."""
    driven = Guessing(monkeypatch, num_blocks=num_blocks)
    driven.add("a", range(1, 8), max_tokens=5)
    driven.finish_step(driven.begin(), {"a": guesses(8, 6)})
    assert driven.begin().num_drafts == min(num_drafts, 3), "three tokens at most come behind the next one"


def test_sequences_and_drafts_of_a_step_are_no_more_than_a_runner_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Guessing(monkeypatch, num_blocks=64, max_running=17)
    names = [str(number) for number in range(4)]
    for name in names:
        driven.add(name, PROMPT, max_tokens=30)
    driven.finish_step(driven.begin(), {name: guesses(6, 10) for name in names})
    chunks = driven.begin().chunks
    assert [(chunk.num_rows, len(chunk.sequence.block_table)) for chunk in chunks] == [(7, 3), (7, 3), (2, 2), (1, 2)]


def test_drafts_take_the_tokens_that_decodes_and_other_drafts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Guessing(monkeypatch, budget=10)
    for name in "ab":
        driven.add(name, PROMPT, max_tokens=30)
    driven.finish_step(driven.begin(), {name: guesses(6, 10) for name in "ab"})
    driven.add_pulled("pulled", PROMPT)
    assert [chunk.num_rows for chunk in driven.begin().chunks] == [7, 2, 1]


def test_no_step_is_planned_ahead_of_one_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Guessing(monkeypatch)
    driven.add("a", PROMPT, max_tokens=20)
    driven.finish_step(driven.begin(), {"a": guesses(6, 4)})
    plan = driven.begin()
    assert plan.num_drafts == 4
    assert driven.scheduler.schedule() is None, "the start of the next chunk is not known"
    driven.finish_step(plan, {})
    assert driven.begin().num_drafts == 0
    assert driven.scheduler.schedule() is not None


def test_a_step_ahead_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known proposals are for the tokens of the step in flight."""
    monkeypatch.setattr(DraftGain, "is_worth_a_wait", False)
    driven = Guessing(monkeypatch)
    driven.add("a", PROMPT, max_tokens=20)
    first, _ = driven.begin(), driven.begin()
    driven.finish_step(first, {"a": guesses(6, 4)})
    assert driven.begin().num_drafts == 0


def test_steps_wait_for_outputs_that_often_have_forced_tokens_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest output has none. The token of the step in flight may be one that forces others."""
    driven = Guessing(monkeypatch)
    sequence = driven.add("a", PROMPT, max_tokens=100)

    def plans_ahead_behind(share: int, num_outputs: int) -> bool:
        for number in range(num_outputs):
            end = len(sequence.token_ids) + 1
            has_forced = share and number % share == 0
            driven.finish_step(driven.begin(), {"a": Proposal.forced((Guessing.token_at(end),))} if has_forced else {})
        plan = driven.begin()
        assert not plan.num_drafts
        ahead = driven.scheduler.schedule()
        for step in (plan, ahead):
            if step is not None:
                driven.finish_step(step, {})
        return ahead is not None

    assert plans_ahead_behind(share=0, num_outputs=2)
    assert not plans_ahead_behind(share=3, num_outputs=12)
    assert plans_ahead_behind(share=0, num_outputs=40)


def test_guesses_for_a_token_that_came_from_elsewhere_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal made before another step of the sequence is out of date."""
    driven = Guessing(monkeypatch)
    driven.add("a", PROMPT, max_tokens=20)
    driven.add("b", (7, 8, 9), max_tokens=20)
    driven.finish_step(driven.begin(), {"a": guesses(6, 4)})
    sequence = driven.scheduler.get("a")
    assert sequence is not None
    sequence.proposed_at -= 1
    assert driven.begin().num_drafts == 0


# ---- the choice


def test_a_step_takes_the_guesses_that_give_more_tokens_a_second() -> None:
    sure, half, hopeless = [0.9, 0.81, 0.73], [0.5, 0.25], [0.1]
    assert choose_drafts([sure, half, hopeless], 3, 0.030, 0.002, 1.0) == [3, 1, 0]
    assert choose_drafts([sure, half, hopeless], 3, 0.030, 0.005, 1.0) == [2, 0, 0]
    assert choose_drafts([sure, half, hopeless], 3, 0.030, 0.030, 1.0) == [0, 0, 0]
    assert choose_drafts([[0.99] * 15], 1, 0.030, 0.001, 0.0045) == [4], "the limit of the step"
    assert choose_drafts([[0.2]], 1, 0.001, 0.00001, 1.0) == [0], "the gain is not worth the wait for the step before"


def test_drafts_save_the_steps_of_their_tokens_less_their_rows() -> None:
    assert saved_s([[0.9, 0.6], [0.5]], [2, 0], 3, 0.030, 0.002) == pytest.approx(1.5 * 0.010 - 2 * 0.002)
    assert saved_s([], [], 3, 0.030, 0.002) == 0.0


def test_guesses_that_are_right_become_more_likely_and_wrong_ones_less_in_their_own_sequence() -> None:
    chances = DraftChances()
    lucky, unlucky = (make_sequence(name, PROMPT, max_tokens=1000) for name in "ab")
    for _ in range(40):
        for sequence, guess in ((lucky, 50), (unlucky, 51)):
            chances.learn(sequence, (), Proposal.copied((guess,), 3))
            sequence.token_ids.append(50)
            chances.learn(sequence, (50,), Proposal.copied((guess, 50), 3))
    right, wrong = (chances.cumulative(sequence, 2) for sequence in (lucky, unlucky))
    assert right[0] > 0.85 > FIRST_CHANCES[2] > 0.25 > wrong[0]
    assert right[1] <= right[0]
    assert wrong[1] <= wrong[0]


def test_forced_tokens_share_no_luck_with_other_guesses() -> None:
    """A wrong guess says nothing about what a grammar forces, and a forced token nothing about guesses."""
    chances, sequence = DraftChances(), make_sequence("a", PROMPT, max_tokens=1000)
    mixed = Proposal.forced((50, 50)).with_next(Proposal.copied((50, 51), 3), 2)
    for _ in range(30):
        chances.learn(sequence, (), mixed)
        sequence.token_ids += (50, 50, 52)
        chances.learn(sequence, (50, 50, 52), mixed)
    _, second, third, _ = chances.cumulative(sequence, 4)
    assert second > 0.95
    assert third < 0.25 * second


def test_one_slow_step_does_not_end_all_drafts() -> None:
    costs, sequence_s = RowCosts(), 0.001
    before = costs.row_s(4, sequence_s)
    costs.record(4, 4, extra_s=30.0, sequence_s=sequence_s)
    assert costs.row_s(4, sequence_s) <= 1.25 * before
    for _ in range(60):
        costs.record(4, 4, extra_s=4 * 0.0007, sequence_s=sequence_s)
    assert costs.row_s(4, sequence_s) == pytest.approx(0.0007, rel=0.05)
    assert costs.row_s(64, sequence_s) == 2 * sequence_s, "of steps with many more decodes nothing is known"


@pytest.mark.parametrize(("row_s", "speculates", "wants"), [(0, True, True), (2e-3, True, False), (0, False, False)])
def test_where_a_row_costs_as_much_as_a_step_or_nobody_speculates_the_runner_need_not_propose(
    monkeypatch: pytest.MonkeyPatch, row_s: float, speculates: bool, wants: bool
) -> None:
    driven = Driven()
    driven.scheduler.step_cost, driven.scheduler.speculates = StepCost(0.0, 1e-3, 0.0, 1e-4, 0.0), speculates
    monkeypatch.setattr(RowCosts, "row_s", lambda *_: row_s)
    driven.add("a", PROMPT, max_tokens=20)
    assert driven.begin().wants_proposals == wants


def test_the_sequence_counts_its_own_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Guessing(monkeypatch)
    added: list[Sequence] = [driven.add(name, [ord(name), *PROMPT[1:]], max_tokens=20) for name in "ab"]
    driven.finish_step(driven.begin(), {"a": guesses(6, 3), "b": guesses(6, 3, wrong_at=6)})
    driven.finish_step(driven.begin(), {})
    assert [(s.num_drafts, s.num_right_drafts) for s in added] == [(3, 3), (3, 0)]
