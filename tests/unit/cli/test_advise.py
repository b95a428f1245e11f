"""What `tandem advise` prints, and the line and code of each wrong input."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cli.screens.advise_report import Question, as_json_object, limit_of
from simulator.advice.advice import Advice, Candidate, Contest
from simulator.advice.goodput import Load, Slo, Trial
from simulator.advice.pools import Job
from simulator.advice.shapes import CostModel, Shape
from simulator.calibration.costs import BUILT_IN, built_in_widths, write_costs
from tests.unit.cli.conftest import Tandem

QUICK = ["--gpus", "2", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "100"]


def log_of(directory: Path, num_requests: int) -> Path:
    chance, path, at = random.Random(5), directory / "calls.jsonl", 1e9
    with path.open("w") as file:
        for _ in range(num_requests):
            at += chance.expovariate(2.0)
            usage = {"prompt_tokens": chance.randint(3000, 5000), "completion_tokens": chance.randint(10, 60)}
            file.write(json.dumps({"timestamp": at, "usage": usage}) + "\n")
    return path


def test_a_log_gets_a_verdict_its_grounds_and_the_price_of_being_wrong(tmp_path: Path, tandem: Tandem) -> None:
    code, shown, _ = tandem("advise", str(log_of(tmp_path, 150)), *QUICK)
    assert code in (0, None)
    assert "calls: 150 requests at 1.93/s" in shown
    assert "1P + 1D" in shown
    assert "1 undivided of 2 GPUs" in shown
    for words in ("Do not split: ", "Price of a split if ", "need no split", "Llama-3.1-8B", "Not modelled: "):
        assert words in shown


def test_the_answer_is_also_one_json_object(tmp_path: Path, tandem: Tandem) -> None:
    costs = tmp_path / "costs.json"
    write_costs(costs, BUILT_IN["h100-8b"])
    by_hand = ["--input-tokens", "8000", "--output-tokens", "20", "--rate", "1"]
    answer = json.loads(tandem("advise", *QUICK, *by_hand, "--costs", str(costs), "--json").out)
    assert answer["verdict"] == "do not split"
    assert answer["rate"] == 1.0
    assert answer["scenarios"][0]["scenario"] == "as modelled"
    assert any("Wider workers were not measured" in sentence for sentence in answer["sentences"])


def test_a_chart_is_drawn_after_the_answer(tmp_path: Path, tandem: Tandem) -> None:
    chart = tmp_path / "attainment.svg"
    command = ("advise", *QUICK, "--input-tokens", "8000", "--output-tokens", "20", "--plot", str(chart))
    chart.symlink_to("/dev/full")
    code, shown, error = tandem(*command)
    assert code == 1
    assert "Do not split" in shown, "a chart that cannot be written costs no answer"
    assert error == f"error: --plot: cannot write {chart}: No space left on device\n"
    chart.unlink()
    tandem(*command)
    drawn = chart.read_text()
    assert drawn.startswith("<?xml")
    assert "<!-- 1P + 1D -->" in drawn


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give the number of GPUs"),
        (["--gpus", "0"], 1, r"the number of GPUs must be in [2, 1024], is 0"),
        (["--gpus", "2", "--slo-tpot-ms", "nan"], 1, "--slo-tpot-ms must be positive and finite, is nan"),
        (["--gpus", "2", "--rate", "-1"], 1, "--rate must be positive and finite, is -1"),
        (["--gpus", "2", "--requests", "0"], 1, "--requests must be positive and finite, is 0"),
        (["--gpus", "2", "--model", "70b"], 1, "there are no costs of h100-70b, only of h100-8b"),
        (["--gpus", "2", "--input-tokens", "1000000000"], 1, "--input-tokens must be at most 320,000, is 1,000,"),
        (["--gpus", "2", "--output-tokens", "1000000000"], 1, "output_tokens must be at most 4,000,000"),
        (["--gpus", "2", "--plot", "/nowhere/a.png"], 1, "the directory of /nowhere/a.png does not exist"),
        (["--gpus", "2", "--plot", "a.txt"], 1, "a.txt: a chart ends in .png or .svg"),
        (["--gpus", "2", "--window-s", "inf"], 1, "--window-s must be positive and finite, is inf"),
        (["a.jsonl", "--gpus", "2", "--prometheus", "x"], 1, "of a log or of --prometheus, not of both"),
        (["--gpus", "2", "--spread", "2"], 1, "spread must be in [0, 1], is 2"),
        (["nowhere.jsonl", "--gpus", "2"], 1, "cannot open nowhere.jsonl: No such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_input_gets_one_line(arguments: list[str], code: int, message: str, tandem: Tandem) -> None:
    ended = tandem("advise", *arguments)
    assert ended.code == code
    assert message in ended.err


def test_a_log_that_is_too_short_is_refused(tmp_path: Path, tandem: Tandem) -> None:
    ended = tandem("advise", str(log_of(tmp_path, 99)), *QUICK)
    assert ended.code == 1
    assert ended.err.startswith("error: calls has 99 requests, at least 100 are needed: give a longer log, or let ")


# ---- words


def trial(late: float, slow: float, busy: tuple[float, float] = (0.9, 0.6), pool_used: float = 0.5) -> Trial:
    return Trial(1.0, 0.5, late, slow, busy, 0.4, pool_used)


@pytest.mark.parametrize(
    ("shape", "beyond", "words"),
    [
        (Shape(1, 1, 8192, 1), trial(0.3, 0.1), "prefill pool 90% busy"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3), "decode pool 60% busy"),
        (Shape(1, 1, 8192, 1), trial(0.0, 0.0), "prefill pool 90% busy"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3, busy=(0.3, 0.1)), "KV waits for the link"),
        (Shape(1, 1, 8192, 1), trial(0.1, 0.3, pool_used=0.99), "no more room for KV"),
        (Shape(2, 1, 8192), trial(0.3, 0.1), "first tokens are late: 90% busy, 40% of it with prompts"),
        (Shape(2, 1, 8192), trial(0.1, 0.3), "tokens are slow: 40% of the time of steps is prompts"),
        (Shape(2, 1, 8192), trial(0.1, 0.3, pool_used=1.0), "no more room for KV"),
    ],
)  # fmt: skip
def test_the_limit_of_a_shape_names_the_resource(shape: Shape, beyond: Trial, words: str) -> None:
    assert words in limit_of(Candidate(shape, 1.0, beyond))


def test_a_shape_that_misses_at_any_load_blames_no_busy_pool() -> None:
    assert limit_of(Candidate(Shape(2, 1, 8192), 0.0, trial(1.0, 0.0))) == "at any load, first tokens are late"


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([(10.0, 13.0), (10.0, 11.0)], "Split: 1P + 1D carries 13 requests/s, +30% beside the best undivided fleet, "
         "and +10% in the worst scenario."),
        ([(10.0, 13.0), (10.0, 9.0)], "Undecided: a split changes the goodput by -10% (1) to +30% (0), "
         "which is within what the model may err."),
        ([(10.0, 9.0), (10.0, 8.0)], "Do not split: 2 undivided, 8,192 tokens a step carries 10 requests/s; "
         "a split changes that by -20% to -10%."),
        ([(10.0, 9.0), (0.0, 0.0)], "Undecided: in 1 of 2 scenarios (1) no shape keeps these limits at any load."),
        ([(0.0, 0.0), (0.0, 0.0)], "Neither: no shape of 2 GPUs keeps these limits at any load."),
        ([(0.0, 2.0), (10.0, 13.0)], "Split: 1P + 1D carries 2 requests/s, from nothing to something beside the best "
         "undivided fleet, and +30% in the worst scenario."),
    ],
)  # fmt: skip
def test_a_verdict_is_one_sentence(pairs: list[tuple[float, float]], sentence: str) -> None:
    found = (Candidate(Shape(2, 1, 8192), pairs[0][0], trial(0.1, 0.1)),
             Candidate(Shape(1, 1, 8192, 1), pairs[0][1], trial(0.1, 0.1)))  # fmt: skip
    advice = Advice(found, tuple(Contest(str(n), *pair) for n, pair in enumerate(pairs)), 1, 2)
    question = Question(Load("log", [Job(10, 0, 2)], (), None), CostModel(built_in_widths("h100-8b"), 1000),
                        Slo(1.0, 0.1), 2)  # fmt: skip
    answer = as_json_object(question, advice)
    assert answer["sentences"][0] == sentence  # type: ignore[index]
    json.dumps(answer, allow_nan=False)
