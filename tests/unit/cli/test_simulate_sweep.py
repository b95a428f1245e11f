"""What a user of `tandem simulate --sweep` writes, and the sentences that answer."""

from __future__ import annotations

import pytest

from cli.commands.simulate import parse_sweep
from cli.screens.simulate_report import answer
from simulator.replay.sweep import Axis, Point


def point(num_prefill: int, num_decode: int, attainment: float, rate: float = 2.0) -> Point:
    return Point(num_prefill, num_decode, rate, attainment, goodput=attainment * rate)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("prefill=1..4", (1, 2, 3, 4)),
        ("prefill=0..4:2", (0, 2, 4)),
        ("decode=8", (8,)),
        ("decode=8,1,2,2", (1, 2, 8)),
        ("decode=1..2,8", (1, 2, 8)),
        ("rate=0.5..2:0.5", (0.5, 1.0, 1.5, 2.0)),
        ("rate=0.1..0.3:0.1", (0.1, 0.2, 0.3)),
        ("rate=1..2.5", (1.0, 2.0)),
    ],
)
def test_an_axis_has_the_written_values(word: str, values: tuple[float, ...]) -> None:
    assert parse_sweep([word]) == (Axis(word.partition("=")[0], values),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no axis"),
        (["prefill"], "'prefill' is no axis"),
        (["colour=1"], "'colour=1' is no axis"),
        (["prefill=many"], "'prefill=many': write values"),
        (["prefill="], "'prefill=': write values"),
        (["prefill=2:1"], "'prefill=2:1': write values"),
        (["prefill=4..1"], "the last value not below the first"),
        (["prefill=1..4:0"], "the step must be positive"),
        (["prefill=1..2:0.5"], "takes whole numbers"),
        (["prefill=-1"], "at least 0"),
        (["decode=0..2"], "at least 1"),
        (["decode=5000"], "at most 4096"),
        (["rate=0"], "rate must be at least"),
        (["rate=nan"], "must be finite"),
        (["rate=1..inf"], "must be finite"),
        (["rate=1..1e9:0.001"], "more than 4096 values"),
        (["prefill=1..100", "decode=1..100"], "make 10000 simulations"),
        (["prefill=1", "prefill=2"], "prefill has two axes"),
    ],
)
def test_a_bad_sweep_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sweep(words)


def test_the_answer_names_the_fewest_workers() -> None:
    assert answer([point(1, 1, 0.5), point(2, 1, 0.95), point(2, 2, 0.99)]) == [
        "At 2 requests/s the fewest workers that reach attainment 0.9 are 3: 2 prefill and 1 decode, with 0.950."
    ]


def test_the_answer_says_that_no_size_is_enough() -> None:
    (sentence,) = answer([point(1, 1, 0.5), point(2, 1, 0.7)])
    assert sentence.startswith("At 2 requests/s no simulated size of the pools reaches attainment 0.9; 2 prefill")


@pytest.mark.parametrize(
    ("attainments", "sentence"),
    [
        ((1.0, 0.8), "goodput90 is 1.5 requests/s: the highest rate with attainment 0.9."),
        ((1.0, 0.9), "goodput90 is at least 2 requests/s, the highest simulated rate."),
        ((0.8, 0.5), "goodput90 is below 1 requests/s, the lowest simulated rate."),
    ],
)
def test_rates_of_one_shape_give_goodput90(attainments: tuple[float, float], sentence: str) -> None:
    assert answer([point(1, 1, attainments[1], 2.0), point(1, 1, attainments[0], 1.0)]) == [sentence]
