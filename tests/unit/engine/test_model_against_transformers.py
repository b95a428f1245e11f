"""Every family has the logits and the greedy tokens of transformers, in float32 with small weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.torch_runner import TorchRunner
from tests.support.transformers_models import FAMILIES, greedy_tokens, random_model, save_reference
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


# ---- A model from a GGUF file has the logits of transformers, for every architecture and every tensor type.
# The gguf package names the tensors in the file, so the tests also check our names. The reference model holds the
# weights that the package reads back from the file.

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
SUPER_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # rows of 256, as K types need
GGUF_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
WRITTEN_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
# Types that the package reads but does not write: random bytes, with these values at the offsets of a block's scales.
READ_TYPES = {"Q4_K": {0: 2e-4, 2: 1.5e-3}, "Q5_K": {0: 1e-4, 2: 1.5e-3}, "Q6_K": {208: 1e-4}}
# Natural log. bfloat16 has 8 bits of precision; the reference is float32.
BF16_LOGPROB_TOLERANCE = 0.2


def reference_model(family: str, sizes: dict[str, int]) -> Any:
    prefix, differences = GGUF_FAMILIES[family]
    return random_model(prefix, SIZES | sizes | differences, seed=5)


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix encoded as a type: the nearest codes, or random bytes if the package cannot write the type."""
    if kind not in READ_TYPES:
        return quantize(values, gguf.GGMLQuantizationType[kind])
    items, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // items, num_bytes), dtype=np.uint8)
    for place, scale in READ_TYPES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def write_gguf(path: Path, family: str, model: Any, kind: str) -> None:
    """Write `model` as a GGUF file with matrices of one type, and set the model's weights to those of the file."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name, values.copy())
            continue
        raw = encoded(values, kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType[kind]).copy()))
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # like llama.cpp's converter
            num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            raw = raw.reshape(num_heads, 2, -1, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(gguf_name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of_both(path: Path, family: str, kind: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of (our runner, transformers) after the same prompt."""
    model = reference_model(family, SUPER_BLOCKS if kind in READ_TYPES else {})
    write_gguf(path, family, model, kind)
    with torch.inference_mode():
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
