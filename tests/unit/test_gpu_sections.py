"""What the sections of benchmarks/gpu.py conclude from what they receive."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_sections.beside_vllm import Limits, is_inside
from benchmarks.gpu_sections.http_client import Received, take_event
from benchmarks.gpu_sections.vllm_inside import Likeness, likeness
from benchmarks.hf_model import write_model
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.model_config import config_from_hf
from text.tokenizer import load_tokenizer

LLAMA_8B = RANDOM_CONFIGS["llama-3.1-8b"]


def test_a_model_without_weights_has_the_architecture_and_names_each_token(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA_8B)
    assert config_from_hf(json.loads((tmp_path / "config.json").read_text())) == LLAMA_8B
    tokenizer = load_tokenizer(str(tmp_path), own_engine=False)
    assert tokenizer.decode([300, 128_255]) == "<300><128255>"
    assert tokenizer.decode(tokenizer.encode("a byte: ö")) == "a byte: ö"


def test_pieces_of_text_have_times_and_the_server_counts_the_tokens() -> None:
    received = Received()
    events: list[dict[str, Any]] = [{"choices": [{"text": text}], "usage": None} for text in ("<1>", "", "<2><3>")]
    for at, event in enumerate([*events, {"choices": [], "usage": {"completion_tokens": 3}}]):
        take_event(event, received, float(at))
    assert (received.times, received.num_tokens, received.gaps, received.mean_gap) == ([0.0, 2.0], 3, [2.0], 1.0)
    with pytest.raises(ValueError, match="overloaded"):
        take_event({"error": "overloaded"}, received, 4.0)


@pytest.mark.parametrize(
    ("times", "error", "expected"),
    [
        ([0.5, 0.52, 0.54], "", (True, True)),
        ([0.6, 0.61, 0.62], "", (False, False)),  # a late first token
        ([0.1, 0.2, 0.2], "", (False, False)),  # 50 ms a token
        ([0.1] * 9 + [0.25], "", (True, False)),  # a pause of 150 ms
        ([], "refused", (False, False)),
    ],
)
def test_a_request_is_inside_by_its_first_token_and_its_mean_gap(
    times: list[float], error: str, expected: tuple[bool, bool]
) -> None:
    answer = Received(times, len(times), error=error)
    assert (is_inside(answer, Limits()), is_inside(answer, Limits(), smooth=True)) == expected


def completion(*places: tuple[int, tuple[int, ...]]) -> Any:
    """`places`: of each token its id, and the ids of the most likely ones."""
    logprobs = [
        SimpleNamespace(token_id=token_id, top=[SimpleNamespace(token_id=other) for other in best])
        for token_id, best in places
    ]
    return SimpleNamespace(logprobs=logprobs)


def test_tokens_may_differ_where_each_pass_has_the_token_of_the_other_among_its_best() -> None:
    first = (7, (7, 8))
    one = completion(first, (1, (1, 2)), (3, (3, 4)))
    assert likeness(one, completion(first, (1, (1, 9)), (3, (3, 5)))) is Likeness.EQUAL
    assert likeness(one, completion(first, (2, (2, 1)), (99, (99, 98)))) is Likeness.ROUNDED
    assert likeness(one, completion(first, (2, (2, 6)), (3, (3, 4)))) is Likeness.WRONG
    assert likeness(one, completion((8, (8, 9)), (1, (1, 2)), (3, (3, 4)))) is Likeness.WRONG
