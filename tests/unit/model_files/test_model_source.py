"""The model specs of operators, and the models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError, ModelNotFound
from model_files.default_sampling import default_sampling
from model_files.model_config import RopeScaling, config_from_hf
from model_files.model_source import describe, fingerprint, load_model_info, resolve_model
from tests.support.tiny_model_files import CONFIG

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def directory(path: Path, weights: bytes = b"w" * 100, **changes: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    (path / "model.safetensors").write_bytes(weights)
    return str(path)


@pytest.mark.parametrize("spec", ["nothing", "no/such/file.gguf", "random:nothing", "fake:nothing", ""])
def test_the_error_for_an_unknown_model_is_one_line_that_lists_the_models(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"llama-tiny|fake:tiny") as failure:
        resolve_model(spec, tmp_path)
    assert "\n" not in str(failure.value)
    with pytest.raises(ModelNotFound, match="run `tandem pull smollm2-135m`"):
        resolve_model("smollm2-135m", tmp_path)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models--org--a-model/snapshots/5fa3", "org/a-model"),
        ("models--gpt2/snapshots/5fa3", "gpt2"),
        ("models--org--a-model/5fa3", "5fa3"),
        ("snapshots/5fa3", "5fa3"),
    ],
)
def test_a_snapshot_in_the_cache_of_hugging_face_has_the_name_of_its_repository(
    folder: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    assert resolve_model(directory(path)).name == name
    (tmp_path / "link").symlink_to(path)
    assert resolve_model(str(tmp_path / "link")).name == name


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(tmp_path: Path) -> None:
    here, copy = directory(tmp_path / "a"), directory(tmp_path / "b")
    other_weights = directory(tmp_path / "c", b"w" * 99 + b"v")
    other_config = directory(tmp_path / "d", rope_theta=5.0)
    first, *others = (fingerprint(resolve_model(spec)) for spec in (here, copy, other_weights, other_config))
    assert others[0] == first
    assert len({first, *others[1:]}) == 3


def test_a_change_anywhere_in_a_small_file_changes_the_fingerprint(tmp_path: Path) -> None:
    found = set()
    for place in range(0, 300_000, 30_000):
        weights = bytearray(300_000)
        weights[place] = 1
        found.add(fingerprint(resolve_model(directory(tmp_path / "a", bytes(weights)))))
    assert len(found) == 10


def tokens(**special: bool) -> dict[str, object]:
    """Added tokens with the ids 90, 91, ... by name without its brackets, and whether each is special."""
    return {
        str(90 + place): {"content": f"<|{name}|>", "special": is_special}
        for place, (name, is_special) in enumerate(special.items())
    }


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"eos_token": "<|done|>", "added_tokens_decoder": tokens(start=True, done=True)}, {91}),
        ({"eos_token": {"content": "<|done|>"}, "added_tokens_decoder": tokens(done=False)}, {90}),
        ({"eos_token": None, "added_tokens_decoder": tokens(done=True)}, set()),
        ({"added_tokens_decoder": tokens(im_start=True, im_end=True, eot_id=True)}, {91, 92}),
        ({"added_tokens_decoder": tokens(im_end=False)}, set()),
        ({"added_tokens_decoder": tokens(start=True, end=True)}, {91}),
        ({"added_tokens_decoder": {**tokens(end=True), "91": {"content": "<|return|>", "special": True}}}, {91}),
        ({"added_tokens_decoder": {"100": {"content": "<|im_end|>", "special": True}}}, set()),
    ],
    ids=["eos_token", "an object", "no eos_token", "by name", "not special", "of a message", "of a turn", "not drawn"],
)  # fmt: skip
def test_an_output_ends_as_any_file_says_or_with_the_end_of_a_turn(
    options: dict[str, object], ends: set[int], tmp_path: Path
) -> None:
    spec = directory(tmp_path, eos_token_id=0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert load_model_info(spec).eos_token_ids == {0, 7} | ends
    listed = options.pop("added_tokens_decoder")
    assert isinstance(listed, dict)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    added = [{"id": int(index), **token} for index, token in listed.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert load_model_info(spec).eos_token_ids == {0, 7} | ends, "newer tokenizers list the tokens in one file only"


SAMPLING = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "max_new_tokens": 99,
    "do_sample": False, "presence_penalty": 1.5, "eos_token_id": [7], "transformers_version": "4.51",
}  # fmt: skip


def test_the_sampling_of_a_model_has_the_values_that_vllm_takes(tmp_path: Path) -> None:
    source = resolve_model(directory(tmp_path))
    assert default_sampling(source) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(SAMPLING))
    assert default_sampling(source) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "max_tokens": 99,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "top_k": -1}')
    assert default_sampling(source) == {"top_k": 0}
    assert default_sampling(resolve_model("random:llama-tiny")) == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature is -1, must be a number from 0"),
        ({"temperature": 101}, r"temperature: must be in \[0, 100\], is 101.* generation_config = none ignores it"),
        ({"top_p": 0}, r"top_p: must be in \(0, 1\], is 0"),
        ({"top_k": 1.5}, "top_k is 1.5, must be a whole number from -1"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1', must be a number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, must be a whole number from 1"),
    ],
)
def test_a_sampling_out_of_range_is_named(wrong: dict[str, object], message: str, tmp_path: Path) -> None:
    spec = directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        default_sampling(resolve_model(spec))


def test_max_context_may_shorten_but_not_extend_the_context(tmp_path: Path) -> None:
    spec = directory(tmp_path / "a")
    assert load_model_info(spec).context_length == 4096
    assert load_model_info(spec, max_context=100).context_length == 100
    with pytest.raises(ConfigError, match="max_context must be at most 4096"):
        load_model_info(spec, max_context=5000)


def test_a_sliding_window_limits_max_context(tmp_path: Path) -> None:
    spec = directory(tmp_path / "a", model_type="mistral", sliding_window=1024)
    with pytest.raises(ConfigError, match="set max_context to 1024 or less"):
        load_model_info(spec)
    assert load_model_info(spec, max_context=1024).context_length == 1024
    assert load_model_info(directory(tmp_path / "b", model_type="mistral", sliding_window=None)).context_length == 4096
    qwen = directory(tmp_path / "c", model_type="qwen2", sliding_window=1024, use_sliding_window=False)
    assert load_model_info(qwen).context_length == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"mlp_bias": True}, "mlp_bias false"),
        ({"quantization_config": {"bits": 4}}, "use a GGUF file"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config of 'awq' is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "float-quantized",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size must be two"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of its num_kv_heads, are 4 and 3"),
        ({"head_dim": 7}, "must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be a whole number from 1"),
    ],
)
def test_a_feature_that_is_not_supported_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(LLAMA | changes)


def test_rope_is_read_as_transformers_4_and_5_write_it() -> None:
    scaling = CONFIG["rope_scaling"]
    older = config_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    newer = config_from_hf(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert older == newer
    assert older.rope_scaling == RopeScaling(8.0, False, 1.0, 4.0, 64)
    assert older.rope_theta == 5e5


# ---- A model that only vLLM can compute: the router needs its sizes, and Tandem's own engine refuses it.

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": 7,
    "num_experts": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        MOE,
        {"model_type": "gemma3", "eos_token_id": 7, "text_config": MOE},
        MOE | {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
        MOE | {"model_type": "mistral", "sliding_window": 512, "rope_scaling": {"rope_type": "yarn"}},
    ],
    ids=["text", "text and images", "known family, other format", "known family, other features"],
)
def test_its_sizes_are_read_without_its_architecture(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_model(str(tmp_path))
    info = describe(source, own_engine=False)
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (1000, 4096, frozenset({7}))
    assert describe(source, 100, own_engine=False).context_length == 100
    with pytest.raises(ConfigError, match="at most 4096"):
        describe(source, 5000, own_engine=False)
