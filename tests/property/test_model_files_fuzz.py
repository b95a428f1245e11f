"""Reading any files of a model succeeds, or fails with a `TandemError`."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from core.errors import TandemError
from engine.model_weights import allocate_weights
from engine.weights import CPU, load_weights
from model_files.gguf_file import GGUFFile
from model_files.model_source import load_config, resolve_model
from tests.support.gguf_bytes import TensorBytes, Value, gguf_bytes
from tests.support.tiny_model_files import DIRECTORY, GGUF_METADATA, GGUF_TENSORS, write_directory, write_gguf_header
from text.tokenizer import load_tokenizer

BOUNDED = settings(max_examples=100)
HEADER_BYTES = len(gguf_bytes(GGUF_METADATA, {}))
SMALL_KEYS_BYTES = HEADER_BYTES - len(gguf_bytes({"tokenizer.ggml.tokens": GGUF_METADATA["tokenizer.ggml.tokens"]}, {}))

integers = st.sampled_from([0, 1, 2, 3, 7, 96, 259, 260, 1 << 31, 1 << 62]) | st.integers(-(1 << 63), (1 << 64) - 1)
floats = st.sampled_from([0.0, -1.0, 1e-38, 1e38, float("inf"), float("nan")]) | st.floats(width=32)
texts = st.sampled_from(["", "a n", "an", "qwen2", "none", "linear", "<s>"]) | st.text(max_size=4)
scalars = st.booleans() | integers | floats | texts
small_integers = st.integers(-(1 << 63), (1 << 63) - 1)
metadata_values: st.SearchStrategy[Any] = (
    scalars
    | st.lists(small_integers, max_size=3)
    | st.lists(st.floats(width=32), min_size=1, max_size=3)
    | st.lists(texts, max_size=3)
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fuzz")
    write_directory(found / "valid")
    return found


def read_everything(spec: str) -> None:
    """Read every file that the router and the workers read, except weights."""
    source = resolve_model(spec)
    load_config(source).inverse_frequencies()
    tokenizer = load_tokenizer(spec)
    token_ids = tokenizer.encode("an <s> in")
    tokenizer.decode(token_ids)
    if tokenizer.has_chat_template:
        tokenizer.render_chat([{"role": "user", "content": "an"}])
    if source.path is not None and source.path.is_file():
        file = GGUFFile(source.path)
        for name in file.tensors:
            file.tensor(name)


def read_or_refuse(spec: str) -> None:
    with contextlib.suppress(TandemError):
        read_everything(spec)


@st.composite
def changed(draw: st.DrawFn, content: bytes, within: int) -> bytes:
    """Change, remove or add bytes in the first `within` bytes of `content`, or truncate it there."""
    payload = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(within, len(payload)) - 1))
        how = draw(st.sampled_from(["change", "cut", "add", "end"]))
        if how == "change":
            payload[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del payload[at : at + draw(st.integers(1, 9))]
        elif how == "add":
            payload[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            del payload[at:]
        payload = payload or bytearray(b"G")
    return bytes(payload)


# ---- GGUF


def test_the_valid_files_are_read_without_an_error(place: Path) -> None:
    """Otherwise the tests below would fuzz files that fail in any case."""
    read_everything(write_gguf_header(place / "valid.gguf"))
    read_everything(str(place / "valid"))


@BOUNDED
@given(data=st.data())
def test_metadata_of_any_type_is_accepted_or_refused(place: Path, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(GGUF_METADATA)), min_size=1, max_size=2))
    changes: dict[str, Value] = {key: data.draw(metadata_values, key) for key in keys}
    read_or_refuse(write_gguf_header(place / "metadata.gguf", changes))


@BOUNDED
@given(
    name=st.sampled_from(["token_embd.weight", "rope_freqs.weight", "blk.0.attn_q.weight"]),
    shape=st.lists(st.sampled_from([0, 1, 8, 31, 33, 64, 256, 260, 1 << 40, (1 << 64) - 1]), min_size=1, max_size=4),
    ggml_type=st.integers(0, 45),
    content=st.binary(max_size=20) | st.just(bytes(70_000)),
)
def test_tensors_of_any_shape_and_type_are_accepted_or_refused(
    place: Path, name: str, shape: list[int], ggml_type: int, content: bytes
) -> None:
    tensors = {name: TensorBytes(tuple(shape), ggml_type, content)}
    read_or_refuse(write_gguf_header(place / "tensors.gguf", tensors=tensors))


@BOUNDED
@given(data=st.data())
def test_any_bytes_of_a_header_are_accepted_or_refused(place: Path, data: st.DataObject) -> None:
    within = data.draw(st.sampled_from([SMALL_KEYS_BYTES, HEADER_BYTES + 200]))
    (place / "bytes.gguf").write_bytes(data.draw(changed(gguf_bytes(GGUF_METADATA, GGUF_TENSORS), within)))
    read_or_refuse(str(place / "bytes.gguf"))


# ---- a directory


@st.composite
def with_one_changed(draw: st.DrawFn, content: Any, depth: int = 4) -> Any:
    """`content` with one value replaced or removed, at most `depth` levels down."""
    if not isinstance(content, dict | list) or not content or depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(json_values)
    content = copy.copy(content)
    key = draw(st.sampled_from(sorted(content) if isinstance(content, dict) else range(len(content))))
    if draw(st.integers(0, 7)) == 0:
        del content[key]
    else:
        content[key] = draw(with_one_changed(content[key], depth - 1))
    return content


@settings(max_examples=200)
@given(data=st.data())
def test_json_of_any_shape_and_any_bytes_in_its_place_are_accepted_or_refused(place: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DIRECTORY)))
    shapes = with_one_changed(DIRECTORY[name]).map(lambda content: json.dumps(content).encode())
    content = data.draw(shapes | changed(json.dumps(DIRECTORY[name]).encode(), 2000))
    directory = write_directory(place / "changed")
    (place / "changed" / name).write_bytes(content)
    read_or_refuse(directory)


# ---- the weights of a directory

QUANTIZATIONS = ["none", "int8", "int4", "fp8"]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool,
    torch.complex64,
]  # fmt: skip
CONFIG_64 = {"hidden_size": 64, "intermediate_size": 64}  # and 4 heads of 16: a wrong shape may have the right size


@pytest.fixture(scope="module")
def weights(place: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory that every quantization loads, and its tensors."""
    directory = place / "weights"
    write_directory(directory, config=CONFIG_64)
    slots = allocate_weights(load_config(resolve_model(str(directory))), torch.float32, CPU).slots()
    tensors = {name: torch.ones(slot.shape) for name, slot in slots.items()}
    save_file(tensors, directory / "model.safetensors")
    for quantization in QUANTIZATIONS:
        load(directory, quantization)
    return directory, tensors


def load(directory: Path, quantization: str) -> None:
    source = resolve_model(str(directory))
    load_weights(source, load_config(source), torch.float32, CPU, quantization)


@BOUNDED
@given(data=st.data(), quantization=st.sampled_from(QUANTIZATIONS))
def test_weights_of_any_shape_dtype_and_scale_are_loaded_or_refused(
    weights: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject, quantization: str
) -> None:
    directory, tensors = weights
    shapes = st.lists(st.sampled_from([0, 1, 2, 16, 32, 64, 4096]), max_size=3)
    shapes = shapes.filter(lambda shape: math.prod(shape) < 1 << 16)
    name, dtype = data.draw(st.sampled_from(sorted(tensors))), data.draw(st.sampled_from(DTYPES))
    replaced = {name: torch.ones(data.draw(st.just(list(tensors[name].shape)) | shapes)).to(dtype)}
    if data.draw(st.booleans()):
        replaced[name + data.draw(st.sampled_from(["_scale", "_scale_inv"]))] = torch.ones(data.draw(shapes))
    save_file(tensors | replaced, directory / "model.safetensors")
    blocks = st.none() | st.lists(st.sampled_from([1, 7, 32, 64, 1 << 40]), min_size=2, max_size=2)
    format_of_codes = {"quant_method": "fp8", "weight_block_size": data.draw(blocks)}
    write_directory(directory, config=CONFIG_64 | {"quantization_config": format_of_codes})
    with contextlib.suppress(TandemError):
        load(directory, quantization)


@BOUNDED
@given(data=st.data(), quantization=st.sampled_from(QUANTIZATIONS))
def test_any_bytes_of_a_safetensors_file_are_loaded_or_refused(
    weights: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject, quantization: str
) -> None:
    directory, tensors = weights
    write_directory(directory, config=CONFIG_64)
    valid = save(tensors)
    header = 8 + int.from_bytes(valid[:8], "little")
    (directory / "model.safetensors").write_bytes(data.draw(changed(valid, header)))
    with contextlib.suppress(TandemError):
        load(directory, quantization)
