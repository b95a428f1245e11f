"""Each rule of sampling agrees with a naive implementation that handles one token at a time."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TandemError
from core.output_grammar import Masks
from core.request import SamplingParams
from core.step import SampledToken, ScheduledChunk, SequenceView
from engine.histories import Histories
from engine.quick_draw import QuickDraw
from engine.sampling import Sampler, adjust, choose_at, draw_token, filtered_distribution

LOGITS = np.random.default_rng(5).normal(0.0, 2.0, 50).astype(np.float32)


def params(**options: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 5} | options))  # type: ignore[arg-type]


def chunk(sampling: SamplingParams, token_ids: list[int] | None = None, num_prompt_tokens: int = 1) -> ScheduledChunk:
    tokens = token_ids or [1]
    return ScheduledChunk(SequenceView("a", tokens, num_prompt_tokens, [0], sampling), 0, len(tokens), True, False)


def sampled(
    wanted: ScheduledChunk, *allowed: int, eos: frozenset[int] = frozenset(), logits: np.ndarray = LOGITS
) -> SampledToken:
    """`allowed`: by a grammar; none: the chunk has no grammar."""
    masks = Masks({"a": mask_of(*allowed)} if allowed else {})
    return Sampler([wanted], eos).sample(logits[None], masks=masks)["a"][0]


def mask_of(*token_ids: int) -> tuple[bytes, ...]:
    bits = np.zeros(len(LOGITS), np.uint8)
    bits[list(token_ids)] = 1
    return (np.packbits(bits, bitorder="little").tobytes(),)


def choose(logits: np.ndarray, wanted: ScheduledChunk) -> int:
    return sampled(wanted, logits=logits).token_id


def naive_distribution(logits: list[float], sampling: SamplingParams) -> dict[int, float]:
    """Applies temperature, top_k, top_p and min_p in turn, each to the renormalized rest."""

    def renormalized(weights: dict[int, float]) -> dict[int, float]:
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    highest = max(logits)
    rest = {token: math.exp((logit - highest) / sampling.temperature) for token, logit in enumerate(logits)}
    ranked = sorted(rest, key=lambda token: (-rest[token], token))
    rest = renormalized({token: rest[token] for token in ranked[: sampling.top_k or len(ranked)]})
    kept: dict[int, float] = {}
    for token, probability in rest.items():
        if sum(kept.values()) < sampling.top_p or not kept:
            kept[token] = probability
    rest = renormalized(kept)
    most = max(rest.values())
    return renormalized({token: weight for token, weight in rest.items() if weight >= sampling.min_p * most})


FILTERS = [
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 500},
    {"top_p": 0.1},
    {"top_p": 0.83},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_each_filter_keeps_the_tokens_of_the_naive_implementation(options: dict[str, float]) -> None:
    sampling = params(**options)
    token_ids, weights = filtered_distribution(LOGITS.astype(np.float64), sampling)
    expected = naive_distribution(LOGITS.astype(np.float64).tolist(), sampling)
    assert set(token_ids.tolist()) == set(expected)
    np.testing.assert_allclose(weights / weights.sum(), [expected[token] for token in token_ids], rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(0, 14),
)
def test_ties_are_kept_lowest_id_first(logits: list[float], temperature: float, top_k: int) -> None:
    sampling = params(temperature=temperature, top_k=top_k)
    token_ids, _ = filtered_distribution(np.array(logits), sampling)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert sorted(token_ids) == sorted(ranked[: top_k or len(ranked)])


@pytest.mark.parametrize("options", [{}, *FILTERS], ids=str)
def test_draws_follow_the_filtered_distribution(options: dict[str, float]) -> None:
    logits, num_draws = LOGITS[:20], 4000
    token_ids, weights = filtered_distribution(logits, params(**options))
    counts = np.zeros(20)
    for seed in range(num_draws):
        counts[choose(logits, chunk(params(seed=seed, **options)))] += 1
    assert counts.sum() == counts[token_ids].sum()
    expected = num_draws * weights / weights.sum()
    rare = expected < 5  # counted as one kind
    found = np.append(counts[token_ids][~rare], counts[token_ids][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum()) + 1e-9
    # Above mean + 4 standard deviations of chi-square less than once in a thousand; the seeds never change.
    assert ((found - expected) ** 2 / expected).sum() < len(found) + 4 * math.sqrt(2 * len(found))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_draw_without_a_sort_takes_the_token_of_the_law(seed: int) -> None:
    rng, draw = np.random.default_rng(seed), QuickDraw()
    for size in rng.choice([1, 2, 3, 15, 60, 300, 5000], 4):
        logits = rng.normal(0.0, rng.choice([0.0, 0.1, 1.0, 4.0, 20.0]), size)
        match rng.integers(4):
            case 0:
                logits = logits.round()  # ties
            case 1:
                logits[rng.random(size) < 0.5] = -np.inf
                logits[rng.integers(size)] = 1.0
            case 2:
                logits = (4.0 * logits).round() / 4.0 + rng.choice([1000.0, -5000.0])
        row = logits.astype(np.float32)
        flags = rng.random(size) < 0.7
        flags[row.argmax()] = True
        allowed = None if rng.random() < 0.7 else np.packbits(flags, bitorder="little").tobytes()
        sampling = params(
            temperature=rng.choice([1e-5, 0.01, 0.3, 1.0, 2.5, 100.0]),
            top_k=int(rng.choice([0, 0, 0, 1, 2, 7, size // 2, size - 1, size, 2**33])),
            top_p=rng.choice([1.0, 1.0, 1e-6, 0.2, 0.5, 0.9, 0.95, 0.999, 0.9999999]),
            min_p=rng.choice([0.0, 0.0, 1e-300, 1e-6, 0.05, 0.5, 1.0]),
        )
        for key in rng.integers(2**63, size=5).tolist():
            assert draw(row, sampling, key, allowed) == draw_token(row, sampling, key, allowed)


@pytest.mark.parametrize(
    "options",
    [{}, *FILTERS, {"top_k": 50_000}, {"temperature": 2.0, "top_p": 0.999}, {"top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_whole_vocabulary_needs_no_sort(options: dict[str, float], spread: float) -> None:
    row = np.random.default_rng(8).normal(0.0, spread, 150_000).astype(np.float32)
    draw, keys = QuickDraw(), range(3)
    with patch("engine.quick_draw.draw_token", side_effect=AssertionError("the law sorts all tokens")):
        drawn = [draw(row, params(**options), key) for key in keys]
    assert drawn == [draw_token(row, params(**options), key) for key in keys]


def test_the_positions_of_a_seed_draw_independently() -> None:
    flat = np.zeros(4, np.float32)
    drawn = [choose(flat, chunk(params(seed=3), [1] * position)) for position in range(1, 2001)]
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert (((pairs - 2000 / 16) ** 2) / (2000 / 16)).sum() < 15 + 4 * math.sqrt(30)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_logits_that_differ_by_rounding_draw_the_same_token(spread: float) -> None:
    """The inverse CDF over sorted tokens changed 8 % of the draws from flat logits (spread 1)."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0.0, spread, 49_152).astype(np.float32)
    beside = (logits + rng.normal(0.0, 1e-5, len(logits))).astype(np.float32)
    for options in ({"temperature": 0.9}, {"top_p": 0.95}, {"top_k": 50}):
        for seed in range(20):
            sampling = params(seed=seed, **options)
            assert choose(logits, chunk(sampling)) == choose(beside, chunk(sampling))


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    assert {choose(logits, chunk(params(seed=seed))) for seed in range(200)} == {1, 3}


@pytest.mark.parametrize("options", [{}, *FILTERS], ids=str)
@pytest.mark.parametrize("row", [[0.0, np.nan, 2.0], [-np.inf] * 3, [0.0, np.inf, 2.0]])
def test_the_logits_of_a_model_that_overflows_draw_a_token(row: list[float], options: dict[str, float]) -> None:
    """An exception would end vLLM, with every request of the step."""
    logits, sampling = np.array(row, dtype=np.float32), params(**options)
    assert {draw(logits, sampling, key) for draw in (draw_token, QuickDraw()) for key in range(5)} == {logits.argmax()}


def test_bias_and_penalties_follow_their_formulas() -> None:
    logits = np.array([2.0, -2.0, 4.0, -4.0, 1.0], dtype=np.float32)
    sampling = params(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 1.0, 4: -3.0}
    )
    # Prompt 0 1, output 1 2 2: the repetition penalty applies to all tokens, the other two only to the output.
    adjusted = adjust(logits, sampling, counts_of([0, 1, 1, 2, 2], num_prompt_tokens=2))
    assert adjusted.tolist() == [3.0 / 2, -2.0 * 2 - 0.75, 4.0 / 2 - 1.0, -4.0, -2.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, -4.0, 1.0]


def counts_of(token_ids: list[int], num_prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    seen = sorted(set(token_ids))
    return np.array(seen, np.int32), np.array([token_ids[num_prompt_tokens:].count(token) for token in seen], np.int32)


# Prompt and output of up to three sequences grow; the sampler also guesses tokens, and may fail and step back.
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.lists(st.integers(0, 9), max_size=3)), max_size=30))
def test_kept_counts_are_those_of_the_whole_sequence(steps: list[tuple[int, int, list[int]]]) -> None:
    tokens = [[number * 7 % 5 for number in range(40)] for _ in range(3)]
    views = [SequenceView("a", token_ids, 4, [0], params()) for token_ids in tokens]
    histories = Histories()
    for which, end, newest in steps:
        end = max(end, 4) if newest else end
        found, counts = histories.counts(views[which], end, newest=newest)
        wanted = counts_of([*tokens[which][:end], *newest], 4)
        assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == dict(zip(*map(list, wanted), strict=True))


class CountedReads(list[int]):
    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("promised", [False, True])
def test_a_step_reads_the_new_tokens_of_a_penalized_sequence_alone(promised: bool) -> None:
    tokens, histories = CountedReads(range(40)), Histories()
    view = SequenceView("a", tokens, 30, [0], params(repetition_penalty=1.3, frequency_penalty=0.5))
    drawn = []
    for end in range(40, 140):
        last = ScheduledChunk(view, end - 1, 1, True, promised)
        found = Sampler([last], histories=histories).sample(LOGITS[None], {"a": tokens[end - 1]})
        drawn.append(found["a"][0].token_id)
        tokens.append(drawn[-1])
    assert tokens.num_read < 2 * 140 + 100
    rows = [ScheduledChunk(view, end - 1, 1, True, False) for end in range(40, 140)]
    assert drawn == [choose(LOGITS, row) for row in rows], "as without kept counts"


def test_greedy_takes_the_highest_logit_after_penalties_and_the_lowest_id_of_ties() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.9], dtype=np.float32)
    assert choose(logits, chunk(params(temperature=0.0))) == 1
    assert choose(logits, chunk(params(temperature=0.0, repetition_penalty=2.0), [1, 2])) == 3
    assert choose(logits, chunk(params(temperature=0.0, logit_bias={0: 50.0}))) == 0


def test_logprobs_are_log_softmax_of_the_raw_logits_where_they_are_asked_for() -> None:
    plain, only_chosen = (sampled(chunk(params(temperature=0.0, num_logprobs=count))) for count in (None, 0))
    assert plain.logprob is None
    assert (only_chosen.logprob is None, only_chosen.top_logprobs) == (False, ())
    sampling = params(temperature=0.0, num_logprobs=3, logit_bias={4: 100.0})
    token = sampled(chunk(sampling))
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert token.token_id == 4
    assert token.logprob == pytest.approx(expected[4], abs=1e-5)
    best = np.argsort(-LOGITS)[:3]
    assert [index for index, _ in token.top_logprobs] == best.tolist()
    np.testing.assert_allclose([logprob for _, logprob in token.top_logprobs], expected[best], atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 2, "logit_bias": {3: 100.0}}]
)
def test_before_min_tokens_no_token_that_ends_the_output_is_drawn(options: dict[str, object]) -> None:
    logits = np.array([0.0, 1.0, 0.5, 9.0, 8.0], dtype=np.float32)
    ends = {3, 4}

    def drawn(num_output: int, **more: object) -> set[int]:
        tokens = [1, 2, *[0] * num_output]
        asked = (params(seed=seed, stop_token_ids=frozenset({3}), **options, **more) for seed in range(50))
        return {sampled(chunk(each, tokens, 2), eos=frozenset({4}), logits=logits).token_id for each in asked}

    for num_output in (0, 1, 2):
        assert drawn(num_output, min_tokens=3).isdisjoint(ends), "also for a request that resumes"
    assert drawn(3, min_tokens=3) == drawn(3)
    assert drawn(3, min_tokens=3) & ends
    assert drawn(0, min_tokens=3, ignore_eos=True) & ends <= {4}, "an end-of-sequence token does not end this output"


def test_log_probabilities_stay_the_model_s_before_min_tokens() -> None:
    sampling = params(temperature=0.0, num_logprobs=1, min_tokens=2)
    best = int(LOGITS.argmax())
    token = sampled(chunk(sampling), eos=frozenset({best}))
    assert token.token_id != best
    assert token.top_logprobs[0][0] == best


# ---- masks of a grammar


@given(allowed=st.sets(st.integers(0, 49), min_size=1), seed=st.integers(0, 9))
def test_a_masked_token_is_that_of_logits_without_the_others(allowed: set[int], seed: int) -> None:
    masked = np.where(np.isin(np.arange(50), list(allowed)), LOGITS, np.float32(-np.inf))
    for options in ({"temperature": 0.0}, {}, {"top_k": 3, "temperature": 0.7}, {"top_p": 0.5}, {"min_p": 0.3}):
        sampling = params(**options, seed=seed, grammar="any", presence_penalty=1.5)
        found = sampled(chunk(sampling, [1, 2, 3]), *allowed).token_id
        adjusted = adjust(masked, sampling, counts_of([1, 2, 3], 1))
        assert found == choose_at(adjusted, sampling, 3)
        assert found in allowed


def test_log_probabilities_are_those_of_the_model_behind_a_mask_too() -> None:
    plain, least = sampled(chunk(params(temperature=0.0, num_logprobs=2))), int(LOGITS.argmin())
    token = sampled(chunk(params(temperature=0.0, num_logprobs=2, grammar="any")), least)
    assert token.token_id == least
    assert token.top_logprobs == plain.top_logprobs


def test_the_least_output_gives_way_to_a_grammar_that_allows_nothing_but_the_end() -> None:
    written = chunk(params(temperature=0.0, grammar="any", min_tokens=5))
    assert sampled(written, 7, eos=frozenset({7})).token_id == 7
    assert sampled(written, 7, 8, eos=frozenset({7})).token_id == 8


def test_a_sequence_whose_grammar_has_failed_gets_no_token() -> None:
    rows = [chunk(params(grammar="any")), ScheduledChunk(SequenceView("b", [1], 1, [0], params()), 0, 1, True, False)]
    masks = Masks({}, {"a": TandemError("too complex")})
    assert list(Sampler(rows).sample(np.stack([LOGITS, LOGITS]), masks=masks)) == ["b"]
