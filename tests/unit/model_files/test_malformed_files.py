"""The error for an invalid value in the files of a model names its key."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError, InvalidRequest
from model_files import gguf_file
from model_files.gguf_file import GGUFFile
from model_files.model_source import load_model_info
from tests.support.gguf_bytes import TensorBytes, Value
from tests.support.tiny_model_files import BOS_ID, CONFIG, EOS_ID, F32, TOKENS, write_directory, write_gguf_header
from text.tokenizer import load_tokenizer

Q4_0, Q4_1, Q8_0, Q6_K = 2, 3, 8, 14


def test_valid_files_are_read(tmp_path: Path) -> None:
    for spec in (write_gguf_header(tmp_path / "a.gguf"), write_directory(tmp_path / "a")):
        info = load_model_info(spec)
        assert (info.vocab_size, info.bos_token_id, info.eos_token_ids) == (len(TOKENS), BOS_ID, {EOS_ID})
        tokenizer = load_tokenizer(spec)
        assert TOKENS.index("an") in tokenizer.encode("an")
        assert tokenizer.render_chat([{"role": "user", "content": "an"}]) == "<s>an"


def test_the_end_of_a_turn_ends_an_output_of_a_gguf_file_too(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {
        "tokenizer.ggml.tokens": [*TOKENS[:-2], "<|im_end|>", "</s>"],
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2,
    }  # fmt: skip
    info = load_model_info(write_gguf_header(tmp_path / "a.gguf", metadata))
    assert info.eos_token_ids == {0, 1, 2, TOKENS.index("<s>")}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count", 0, "is 0, must be a whole number from 1"),
        ("llama.attention.head_count", [4, 4], r"is \[4, 4\], must be a whole number"),
        ("llama.attention.head_count_kv", True, "is True, must be a whole number"),
        ("llama.block_count", 1 << 40, "must be a whole number from 1 to 10000"),
        ("llama.context_length", "128", "is '128', must be a whole number"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "must be a number"),
        ("llama.rope.freq_base", 0.0, "must be a number from 1"),
        ("general.architecture", ["llama"], "must be a string"),
        ("tokenizer.ggml.bos_token_id", len(TOKENS), "is 260, must be a whole number from 0 to 259"),
        ("tokenizer.ggml.eos_token_id", "</s>", "is '</s>', must be a whole number"),
        ("tokenizer.ggml.eot_token_id", -1, "is -1, must be a whole number"),
        ("tokenizer.ggml.add_bos_token", 1, "must be true or false"),
        ("tokenizer.ggml.tokens", [1, 2], "must be a list of strings"),
        ("tokenizer.ggml.token_type", [1, 1], "has 2 items, tokenizer.ggml.tokens has 260"),
        ("tokenizer.ggml.merges", ["an"], "'an', must have two tokens with a space between"),
        ("tokenizer.ggml.merges", ["q q"], "does not fit tokenizer.ggml.tokens"),
        ("tokenizer.ggml.pre", ["smollm"], "must be a string"),
        ("tokenizer.chat_template", 5, "must be a string"),
    ],
)
def test_an_error_names_the_key_of_an_invalid_gguf_value(tmp_path: Path, key: str, value: Value, message: str) -> None:
    spec = write_gguf_header(tmp_path / "a.gguf", {key: value})
    with pytest.raises(ConfigError, match=f"{key}.*{message}"):
        load_tokenizer(spec)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gpt2", "architecture 'gpt2' is not supported; supported: llama"),
        ("llama.expert_count", 8, "mixtures of experts are not supported"),
        ("llama.rope.dimension_count", 8, "partial rotary embeddings are not supported"),
    ],
)
def test_a_gguf_model_that_the_engine_lacks_is_refused(tmp_path: Path, key: str, value: Value, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_info(write_gguf_header(tmp_path / "a.gguf", {key: value}))


def test_a_file_with_too_long_an_array_or_without_the_magic_word_is_no_usable_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write_gguf_header(tmp_path / "a.gguf"))
    longest = max(len(value) for value in GGUFFile(path).metadata.values() if isinstance(value, list))
    monkeypatch.setattr(gguf_file, "_MAX_ARRAY_ITEMS", longest)
    GGUFFile(path)
    monkeypatch.setattr(gguf_file, "_MAX_ARRAY_ITEMS", longest - 1)
    with pytest.raises(ConfigError, match=f"must have at most {longest - 1} items, has {longest}"):
        GGUFFile(path)
    path.write_bytes(b"GGML" + path.read_bytes()[4:])
    with pytest.raises(ConfigError, match="does not start with GGUF"):
        GGUFFile(path)


def test_an_error_names_a_missing_gguf_key(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf_header(path)
    path.write_bytes(path.read_bytes().replace(b"llama.feed_forward_length", b"llama.feed_backward_lengt"))
    with pytest.raises(ConfigError, match=r"a\.gguf lacks llama\.feed_forward_length"):
        load_model_info(str(path))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("token_embd.weight", (64,), "has 1 dimensions, must have 2"),
        ("token_embd.weight", (1 << 40, 64), "the file is too small"),
        ("token_embd.weight", (0, 64), "the file is too small"),
        ("rope_freqs.weight", (4, 3), "rope_freqs must be 8 numbers"),
    ],
)
def test_an_error_names_a_tensor_with_an_invalid_shape(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    tensors = {name: TensorBytes(shape, F32, np.ones(12, np.float32).tobytes())}
    with pytest.raises(ConfigError, match=message):
        load_model_info(write_gguf_header(tmp_path / "a.gguf", tensors=tensors))


@pytest.mark.parametrize(
    ("ggml_type", "num_columns", "group"), [(Q8_0, 48, 32), (Q4_0, 33, 32), (Q4_1, 31, 32), (Q6_K, 320, 256)]
)
def test_rows_of_an_incomplete_group_are_refused(tmp_path: Path, ggml_type: int, num_columns: int, group: int) -> None:
    """The C kernel would read past the last row."""
    tensors = {"blk.0.attn_q.weight": TensorBytes((4, num_columns), ggml_type, bytes(4096))}
    file = GGUFFile(Path(write_gguf_header(tmp_path / "a.gguf", tensors=tensors)))
    message = f"blk.0.attn_q.weight has rows of {num_columns} numbers, must have a multiple of {group} "
    for read in (file.raw_tensor, file.tensor):
        with pytest.raises(ConfigError, match=message):
            read("blk.0.attn_q.weight")


ROPE = CONFIG["rope_scaling"]
PANICS = {"type": "Precompiled", "precompiled_charsmap": ""}  # ends in a panic of the library's Rust code


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config", {"num_attention_heads": 0}, "num_attention_heads is 0, must be a whole number from 1"),
        ("config", {"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\]"),
        ("config", {"hidden_size": 64.0}, "hidden_size is 64.0"),
        ("config", {"head_dim": 1 << 23}, "head_dim must be even and from 2 to 4096, is 8388608"),
        ("config", {"num_attention_heads": 1 << 21}, "num_heads times head_dim must be at most 16777216, are 2097152"),
        ("config", {"vocab_size": 1 << 40}, "vocab_size is 1099511627776, must be a whole number from 1 to 16777216"),
        ("config", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', must be a number"),
        ("config", {"model_type": ["llama"]}, r"model_type is \['llama'\], must be a string"),
        ("config", {"rope_scaling": "llama3"}, "rope_scaling is 'llama3', must be an object"),
        ("config", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling lacks factor"),
        ("config", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be at least 1"),
        ("config", {"rope_scaling": ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),  # would divide by 0
        ("config", {"sliding_window": "all"}, "sliding_window is 'all'"),
        ("config", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
        ("config", {"eos_token_id": [258, 260]}, "eos_token_id is 260, must be a whole number from 0 to 259"),
        ("config", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("generation_config", {"bos_token_id": -1}, "generation_config.json: bos_token_id is -1"),
        ("tokenizer_config", {"bos_token": 5}, "tokenizer_config.json: bos_token is 5, must be a string"),
        ("tokenizer_config", {"bos_token": {"content": 5}}, "bos_token: content is 5, must be a string"),
        ("tokenizer_config", {"chat_template": 5}, "chat_template is 5, must be a string"),
        ("tokenizer_config", {"chat_template": [5]}, "entry is 5, must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"²": {"content": "a"}}}, "'²' must be a token id"),
        ("tokenizer", {"normalizer": PANICS}, "cannot read .*tokenizer.json: .*Cannot parse precompiled_charsmap"),
    ],
)
def test_an_error_names_the_key_of_an_invalid_json_value(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    spec = write_directory(tmp_path / "a", **{name: changes})
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(spec)


UNABLE: dict[str, dict[str, Any]] = {
    "panics": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "panics with its frame": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [258], "tokens": ["<s>"]}},
        }
    },
    "lacks a token": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]], "byte_fallback": False}},
}


@pytest.mark.parametrize("changes", UNABLE.values(), ids=UNABLE.keys())
def test_a_text_that_the_tokenizer_of_the_model_cannot_encode_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path / "a", tokenizer=changes))
    with pytest.raises(InvalidRequest, match="text: the model's tokenizer cannot encode it"):
        tokenizer.encode("an <s> in")


WITHOUT_AN_OBJECT = (b"\xff", b"[" * 100_000, b"3")
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
UNREADABLE = [*itertools.product(JSON_FILES, WITHOUT_AN_OBJECT), ("chat_template.jinja", b"\xff")]


@pytest.mark.parametrize(("name", "content"), UNREADABLE)
def test_an_error_names_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes) -> None:
    spec = write_directory(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        load_tokenizer(spec)


def test_an_error_names_weights_that_cannot_be_read(tmp_path: Path) -> None:
    spec = write_directory(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load_tokenizer(spec)
