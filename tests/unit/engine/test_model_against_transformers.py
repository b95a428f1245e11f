"""Every family has the logits and the greedy tokens of transformers, in float32 with small weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from engine.torch_runner import TorchRunner
from model_files.model_config import config_from_hf
from tests.support.gguf_models import READ_TYPES, WRITTEN_TYPES, write_gguf
from tests.support.transformers_models import FAMILIES, SIZES, greedy_tokens, random_model, save_reference
from tests.unit.engine.driving import Engine, chunk_of, request

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
    first = runner.logits([chunk_of(token_ids, 0, 37, blocks)._replace(samples=False)])
    assert len(first) == 0
    return runner.logits([chunk_of(token_ids, 37, len(token_ids) - 37, blocks)])[0].numpy()


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


# ---- A model from a GGUF file has the logits of transformers, for every architecture and every tensor type.
# The reference model holds the weights that the gguf package reads back from the file.

BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SUPER_BLOCKS = BLOCKS | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # as K types need
GGUF_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
}
# Natural log. bfloat16 has 8 bits of precision; the reference is float32.
BF16_LOGPROB_TOLERANCE = 0.2


def logits_of_both(path: Path, family: str, kind: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of (our runner, transformers) after the same prompt."""
    prefix, differences = GGUF_FAMILIES[family]
    sizes = SIZES | {"initializer_range": 0.2} | (SUPER_BLOCKS if kind in READ_TYPES else BLOCKS)
    model = random_model(prefix, sizes | differences, seed=5)
    parameters = dict(model.named_parameters())
    tensors = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    meant = write_gguf(path, config_from_hf(model.config.to_dict()), tensors, kind, family)
    with torch.inference_mode():
        for name, values in meant.items():
            parameters[name].copy_(torch.from_numpy(values))
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    assert expected.std() > 0.3, "flat logits would agree with anything"
    runner = TorchRunner(EngineConfig(model=str(path), dtype=dtype, kv_memory_mb=4, num_threads=1))
    return torch.from_numpy(our_logits(runner, PROMPT)), expected


@pytest.mark.parametrize("kind", [*WRITTEN_TYPES, *READ_TYPES])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_gives_the_logits_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    ours, expected = logits_of_both(tmp_path / "model.gguf", family, kind, "float32")
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q5_0", "Q6_K"])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_in_bfloat16_gives_close_log_probabilities(tmp_path: Path, family: str, kind: str) -> None:
    ours, expected = logits_of_both(tmp_path / "model.gguf", family, kind, "bfloat16")
    likely = expected.topk(20).indices
    differences = (ours.float().log_softmax(-1) - expected.log_softmax(-1))[likely].abs()
    assert differences.max() < BF16_LOGPROB_TOLERANCE
