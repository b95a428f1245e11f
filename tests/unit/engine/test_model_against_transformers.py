"""Every family has the logits and the greedy tokens of transformers, in float32 with small weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.torch_runner import TorchRunner
from tests.support.transformers_models import FAMILIES, greedy_tokens, save_reference
from tests.unit.engine.driving import Engine, request

PROMPT = [(11 * index + 5) % 128 + 3 for index in range(100)]


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TorchRunner]:
    """A random transformers model, and our runner on the model's saved directory."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = save_reference(request.param, directory)
    return reference, load_runner(directory)


def load_runner(directory: Path) -> TorchRunner:
    return TorchRunner(EngineConfig(model=str(directory), dtype="float32", kv_memory_mb=4, num_threads=1))


def our_logits(runner: TorchRunner, token_ids: list[int]) -> np.ndarray:
    """Logits after the last token of a prompt that is prefilled in two uneven chunks."""
    blocks = list(range(runner.layout.num_blocks_for(len(token_ids))))
    sampling = SamplingParams(max_tokens=1)
    logits = None
    for start, end in ((0, 37), (37, len(token_ids))):
        view = SequenceView("a", token_ids, len(token_ids), blocks, sampling)
        logits = runner.logits([ScheduledChunk(view, start, end - start, end == len(token_ids), False)])
    assert logits is not None
    return logits[0].numpy()


def test_the_logits_differ_by_less_than_a_ten_thousandth(pair: tuple[Any, TorchRunner]) -> None:
    reference, runner = pair
    for length in (38, 64, 100):
        with torch.inference_mode():
            expected = reference(torch.tensor([PROMPT[:length]])).logits[0, -1].numpy()
        assert expected.std() > 0.5, "flat logits would agree with anything"
        np.testing.assert_allclose(our_logits(runner, PROMPT[:length]), expected, atol=1e-4, rtol=0)


def test_twenty_greedy_tokens_are_the_same(pair: tuple[Any, TorchRunner]) -> None:
    reference, runner = pair
    prompts = {length: PROMPT[:length] for length in (1, 16, 90)}
    expected = {str(length): greedy_tokens(reference, prompt, 20) for length, prompt in prompts.items()}
    ours = Engine(runner, budget=40).generate(
        *(request(str(length), prompt, max_tokens=20) for length, prompt in prompts.items())
    )
    assert ours == expected


def test_sharded_safetensors_load_as_one(tmp_path: Path) -> None:
    reference = save_reference("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1].numpy()
    np.testing.assert_allclose(our_logits(load_runner(tmp_path), PROMPT), expected, atol=1e-4, rtol=0)
