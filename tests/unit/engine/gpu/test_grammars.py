"""Grammars and guesses on the runner of a GPU: the tokens of the runner of a CPU, in graphs, ahead and in parts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import InvalidRequest
from core.request import Request, SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu import graphs
from engine.gpu.device_queue import HostQueue
from engine.gpu.runner import GpuRunner
from engine.gpu.step_arrays import GraphSize
from engine.gpu.step_computer import StepComputer
from engine.model import ModelInputs
from engine.runner import StepLimits, run_step
from engine.torch_runner import TorchRunner
from tests.support.drafts import compute_every_guess
from tests.unit.engine.driving import Engine, Scarce, chunk_of, request
from tests.unit.engine.one_ahead import OneAhead
from text.grammars import GrammarReader
from text.output_format import choice_grammar, json_schema_grammar, regex_grammar
from text.tokenizer import load_tokenizer

MODEL = "random:llama3-tiny"
CONFIG = EngineConfig(model=MODEL, dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
LIMITS = StepLimits(max_running=8, max_batched_tokens=64)
READER = GrammarReader(lambda: load_tokenizer(MODEL))
PROMPT = [(7 * index + 3) % 250 for index in range(60)]
SCHEMA = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
WORDS = regex_grammar("[a-z ]{60}")  # longer than any output here
DRAWN = {"temperature": 0.9, "top_p": 0.9, "seed": 4}


def written(name: str, length: int, grammar: str, **sampling: Any) -> Request:
    return request(name, PROMPT[:length], grammar=grammar, ignore_eos=False, **sampling)


ENDLESS = [
    request("plain", PROMPT[:40]),
    written("greedy", 17, WORDS, num_logprobs=2),
    written("drawn", 33, WORDS, **DRAWN),
    written("penalized", 50, WORDS, repetition_penalty=1.5, frequency_penalty=0.4, logit_bias={98: 3.0}, **DRAWN),
    request("plain drawn", PROMPT[:20], num_logprobs=1, **DRAWN),
]
ENDING = [
    written("json", 21, SCHEMA, max_tokens=20),
    written("choice", 9, choice_grammar(["yes", "no"]), min_tokens=8, **DRAWN),
]


def more_than_any_prompt_alone(inputs: ModelInputs) -> bool:
    return len(inputs.token_ids) > 50


def gpu_runner(**options: Any) -> GpuRunner:
    return GpuRunner(CONFIG, limits=LIMITS, **{"grammars": READER, **options})


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    plain = TorchRunner(CONFIG, grammars=READER)
    tokens = Engine(plain, budget=30).generate(*ENDLESS, *ENDING)
    plain.close()
    return tokens


def test_the_expected_outputs_are_of_their_grammars(expected: dict[str, list[int]]) -> None:
    for name in ("greedy", "drawn", "penalized"):
        assert all(chr(token_id) in "abcdefghijklmnopqrstuvwxyz " for token_id in expected[name])
    assert bytes(expected["choice"][:-1]) in (b"yes", b"no"), "a grammar that allows the end alone outdoes min_tokens"
    assert bytes(expected["json"]).startswith(b"{")


@pytest.mark.parametrize("with_graphs", [True, False])
def test_tokens_are_those_of_the_runner_of_a_cpu(with_graphs: bool, expected: dict[str, list[int]]) -> None:
    runner = gpu_runner(with_graphs=with_graphs)
    assert Engine(runner, budget=30).generate(*ENDLESS, *ENDING) == expected
    assert Engine(runner, budget=30).generate(*ENDLESS[1:2]) == {"greedy": expected["greedy"]}


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_steps_ahead_wait_for_their_masks(
    launches_ahead: bool, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random plans; now and then a step finds no memory, and is computed in parts."""
    monkeypatch.setattr(graphs, "MAX_ROWS", 0)  # a graph needs no memory
    runner = gpu_runner(queue=HostQueue(torch.device("cpu"), launches_ahead=launches_ahead))
    scarce = Scarce(monkeypatch, more_than_any_prompt_alone)
    num_promised = 0
    for seed in range(3):
        driver = OneAhead(runner, random.Random(seed))
        found = driver.generate(list(ENDLESS))
        assert found == {wanted.request_id: expected[wanted.request_id] for wanted in ENDLESS}
        num_promised += driver.num_promised
    assert num_promised > 25
    assert scarce.num_refused, "the memory was never scarce"


def test_logprobs_are_those_of_the_raw_logits() -> None:
    runner, plain = gpu_runner(), TorchRunner(CONFIG, grammars=READER)
    digits = regex_grammar("[0-9]{60}")
    step = StepPlan(0, (chunk_of(PROMPT, 0, 60, [0, 1, 2, 3], grammar=digits, num_logprobs=4),))
    (found,), (wanted,) = (run_step(each, step).sampled["a"] for each in (runner, plain))
    assert found.token_id == wanted.token_id
    assert found.token_id not in [token_id for token_id, _ in found.top_logprobs], "else the mask would not show"
    assert [token_id for token_id, _ in found.top_logprobs] == [token_id for token_id, _ in wanted.top_logprobs]
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_a_grammar_that_fails_fails_its_sequence_alone() -> None:
    sampling = SamplingParams(max_tokens=9, grammar=choice_grammar(["a"]))
    view = SequenceView("b", [*PROMPT[:5], ord("b")], 5, [1], sampling)  # its output does not follow the grammar
    first, last = chunk_of(PROMPT[:5], 0, 5, [0], "a", grammar=WORDS), chunk_of(PROMPT[:5], 0, 5, [2], "c")
    output = run_step(gpu_runner(), StepPlan(0, (first, ScheduledChunk(view, 0, 6, True, False), last)))
    assert output.sampled.keys() == {"a", "c"}
    assert output.failed.keys() == {"b"}
    assert isinstance(output.failed["b"], InvalidRequest)


def test_a_runner_without_a_reader_takes_no_grammars() -> None:
    assert not GpuRunner(CONFIG, limits=LIMITS, with_graphs=False).takes_grammars
    assert gpu_runner(with_graphs=False).takes_grammars


REQUESTS = [*ENDLESS, *ENDING]


def generate(
    monkeypatch: pytest.MonkeyPatch, with_graphs: bool = True
) -> tuple[dict[str, list[int]], dict[str, list[int]], Engine]:
    """The tokens without and with many right and some wrong guesses."""
    oracle = compute_every_guess(monkeypatch)
    runner = GpuRunner(CONFIG, limits=LIMITS, grammars=READER, drafter=oracle, with_graphs=with_graphs)
    engine = Engine(runner, budget=64)
    engine.scheduler.speculates = False
    expected = engine.generate(*REQUESTS)
    oracle.texts = [[*wanted.token_ids, *expected[wanted.request_id]] for wanted in REQUESTS]
    engine.scheduler.speculates = True
    return expected, engine.generate(*REQUESTS), engine


@pytest.mark.parametrize("with_graphs", [True, False])
def test_guesses_change_no_token(with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, GraphSize | None]] = []
    stage = StepComputer.stage

    def noted(computer: StepComputer, chunks: Any, rows_before: Any) -> Any:
        staged, size = stage(computer, chunks, rows_before)
        if any(chunk.drafts for chunk in chunks) and all(chunk.num_tokens == 1 for chunk in chunks):
            sizes.append((sum(chunk.num_rows for chunk in chunks), size))
        return staged, size

    monkeypatch.setattr(StepComputer, "stage", noted)
    expected, found, engine = generate(monkeypatch, with_graphs)
    assert found == expected
    assert engine.scheduler.num_right_drafts > 20
    assert engine.scheduler.num_drafts > engine.scheduler.num_right_drafts
    if with_graphs:
        assert any(size is not None for _, size in sizes), "no graph computed a draft"
    for num_rows, size in sizes:
        assert size is None or num_rows <= size.rows


def test_a_step_with_drafts_that_finds_no_memory_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = Scarce(monkeypatch, more_than_any_prompt_alone)
    expected, found, _ = generate(monkeypatch, with_graphs=False)
    assert found == expected
    assert scarce.num_refused, "the memory was never scarce"


def test_drafts_beside_a_prompt_sample_more_rows_than_a_graph_of_few_sequences() -> None:
    """A graph has logits for max_running rows; a step may have drafts beyond it."""
    found = []
    for runner in (TorchRunner(CONFIG), GpuRunner(CONFIG, limits=StepLimits(max_running=4, max_batched_tokens=64))):
        tokens = [*PROMPT[:20]]
        first, second = chunk_of(tokens, 0, 20, [0, 1, 2], "first"), chunk_of(PROMPT[20:50], 0, 30, [3, 4], "second")
        tokens.append(run_step(runner, StepPlan(0, (first,))).sampled["first"][0].token_id)
        drafted = first._replace(start=20, num_tokens=1, drafts=(1, 2, 3))
        found.append(run_step(runner, StepPlan(1, (drafted, second))).sampled)
        runner.close()
    assert found[0].keys() == {"first", "second"}
    assert found[0] == found[1]
