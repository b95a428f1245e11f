"""What vLLM is asked for, and what travels to Tandem's draws inside it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from core.request import Request, SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.quick_draw import QuickDraw
from engine.sampling import Sampler
from vllm_worker.drawn_row import DrawnRow
from vllm_worker.sampling import EXTRA_ARG, decode_draw_params, draw_params_of, encode_draw_params, sampling_arguments

EOS = frozenset({2})


def request(delivered: int = 0, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 10, "temperature": 0.0} | sampling)
    return Request("a", tuple(range(5 + delivered)), 5, params)


def test_a_greedy_request_needs_no_draw_and_ends_with_the_tokens_of_its_own_or_of_the_model() -> None:
    arguments = sampling_arguments(request(), EOS)
    assert "extra_args" not in arguments
    assert arguments["temperature"] == 0.0
    assert (arguments["max_tokens"], arguments["stop_token_ids"], arguments["ignore_eos"]) == (10, [2], True)
    asked = request(ignore_eos=True, stop_token_ids=frozenset({9}))
    assert sampling_arguments(asked, EOS)["stop_token_ids"] == [9]


def test_a_resumed_request_asks_for_the_tokens_that_are_left() -> None:
    assert sampling_arguments(request(delivered=4), EOS)["max_tokens"] == 6
    assert sampling_arguments(request(delivered=4), EOS, max_tokens=1)["max_tokens"] == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {4: 2.0}},
        {"min_tokens": 3},
    ],
)
def test_a_draw_survives_the_wire_with_all_that_chooses_a_token(sampling: dict[str, Any]) -> None:
    asked = request(delivered=2, **sampling)
    wire = json.loads(json.dumps(sampling_arguments(asked, EOS)["extra_args"][EXTRA_ARG]))
    draw = decode_draw_params(wire)
    assert encode_draw_params(draw) == encode_draw_params(draw_params_of(asked, EOS))
    for name, value in sampling.items():
        assert getattr(draw.sampling, name) == value
    assert draw.num_prompt_tokens == 5
    assert draw.barred == ((2,) if "min_tokens" in sampling else ())


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "seed": 3, "top_p": 0.9},
        {"logit_bias": {4: 2.0}},
        {"min_tokens": 6},
        {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    ],
)
def test_a_row_of_a_batch_draws_the_tokens_of_the_engine(sampling: dict[str, Any]) -> None:
    """vLLM takes delivered tokens of a resumed request for its prompt; they are output all the same."""
    asked = request(delivered=3, **sampling)
    rng, tokens, output = np.random.default_rng(3), list(asked.token_ids), list[int]()
    row = DrawnRow(draw_params_of(asked, EOS), list(tokens), output)
    for _ in range(7):
        logits = rng.normal(0.0, 3.0, 20).astype(np.float32)
        logits[2] = 5.0  # the end of the output
        chunk = ScheduledChunk(SequenceView("a", tokens, 5, (), asked.sampling), 0, len(tokens), True, False)
        row.update()
        drawn = row.choose(logits, None, QuickDraw())
        assert drawn == Sampler([chunk], EOS).sample(logits[None])["a"][0].token_id
        tokens.append(drawn)
        output.append(drawn)
