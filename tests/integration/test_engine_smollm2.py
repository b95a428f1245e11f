"""The embedded default model, whole: from the catalogue's file to the answer."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from core.config import EngineConfig
from engine.factory import build_runner
from engine.runner import Runner
from model_files.catalogue import fetch
from model_files.gguf_file import GGUFFile
from model_files.model_source import load_model_info, resolve_model
from tests.unit.engine.driving import Engine, request
from text.tokenizer import ModelTokenizer, load_tokenizer
from text.tokenizer_files import byte_level_bytes, from_gguf
from tools.sampled_streams import count_different, make_requests

MODEL = "smollm2-135m"
PARIS = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    fetch(MODEL)
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def runner(tokenizer: ModelTokenizer) -> Iterator[Runner]:
    del tokenizer  # the model is here once it is
    built = build_runner(EngineConfig(model=MODEL, dtype="float32", kv_memory_mb=64))
    yield built
    built.close()


@pytest.fixture(scope="module")
def merges(tokenizer: ModelTokenizer) -> tuple[dict[bytes, int], dict[tuple[bytes, bytes], int]]:
    """The vocabulary and merge ranks as they stand in the file, in bytes."""
    del tokenizer
    metadata = GGUFFile(fetch(MODEL)).metadata
    vocabulary = {byte_level_bytes(text): index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {}
    for rank, merge in enumerate(metadata["tokenizer.ggml.merges"]):
        left, right = merge.split(" ", 1)
        ranks[byte_level_bytes(left), byte_level_bytes(right)] = rank
    return vocabulary, ranks


def plain_bpe(text: str, vocabulary: dict[bytes, int], ranks: dict[tuple[bytes, bytes], int]) -> list[int]:
    """Byte-pair encoding as it is told: digits alone, words by GPT-2's pattern, lowest rank merged first."""
    token_ids = []
    for piece in regex.split(r"(\p{N})", text):
        for word in GPT2_WORDS.findall(piece):
            parts = [bytes([byte]) for byte in word.encode()]
            while len(parts) > 1:
                pairs = list(itertools.pairwise(parts))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                merged: list[bytes] = []
                for part in parts:
                    if merged and (merged[-1], part) == best:
                        merged[-1] += part
                    else:
                        merged.append(part)
                parts = merged
            token_ids += [vocabulary[part] for part in parts]
    return token_ids


def test_it_knows_the_capital_of_france(runner: Runner, tokenizer: ModelTokenizer) -> None:
    prompt = tokenizer.encode(PARIS, add_special=False)
    answer = Engine(runner).generate(request("a", prompt, max_tokens=20, ignore_eos=False))["a"]
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in tokenizer.eos_token_ids


def test_the_chat_template_asks_as_the_model_was_taught(tokenizer: ModelTokenizer) -> None:
    rendered = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert rendered.endswith(PARIS)
    assert rendered.startswith("<|im_start|>system\n")


def test_runner_and_tokenizer_agree_on_the_model(runner: Runner, tokenizer: ModelTokenizer) -> None:
    assert runner.info == tokenizer.info == load_model_info(MODEL)
    assert (runner.info.vocab_size, runner.info.context_length, runner.info.eos_token_ids) == (49_152, 8192, {2})
    assert runner.layout.token_bytes == 2 * 23_040  # float32; facts are stated for bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        "  leading and  double   spaces ",
        "\n\n\tTabs\r\nand lines \n",
        "In 1984, 12345.678 and ½ of ⅷ or ٣",
        "naïve café — “quotes” and it's, we'll, I'D",
        "日本語と한국어와 русский",
        "😀👨‍👩‍👧 🇫🇷",
        "def f(x):\n    return x**2  # comment",
        "",
    ],
)
def test_tricky_text_is_cut_as_its_merges_say_and_comes_back_whole(
    tokenizer: ModelTokenizer, merges: tuple[dict[bytes, int], dict[tuple[bytes, bytes], int]], text: str
) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == plain_bpe(text, *merges)
    assert tokenizer.decode(token_ids) == text


def test_special_tokens_are_recognised_in_text_and_silent_in_answers(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode("<|im_start|>a<|im_end|>", add_special=True) == [1, 81, 2]
    assert tokenizer.decode([1, 81, 2]) == "a"
    assert tokenizer.special_tokens["<|im_end|>"] == 2


@functools.cache
def tokenizer_and_library() -> tuple[ModelTokenizer, Tokenizer]:
    fetch(MODEL)
    return load_tokenizer(MODEL), from_gguf(resolve_model(MODEL)).tokenizer


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49_151), max_size=40))
def test_any_tokens_stream_as_the_text_their_library_decodes(token_ids: list[int]) -> None:
    tokenizer, library = tokenizer_and_library()
    detokenizer = tokenizer.detokenizer()
    pieces = [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]
    text = library.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces) == tokenizer.decode(token_ids) == text


def test_the_cached_turns_of_a_chat_have_the_tokens_of_its_whole_text() -> None:
    tokenizer, library = tokenizer_and_library()
    words = re.split(
        r"(?<=[.\n])", (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8").replace("<|", "<")
    )
    turns = ["".join(words[start : start + 12]) for start in range(0, 240, 12)]
    messages = [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    for num_turns in range(1, len(messages) + 1):
        rendered = tokenizer.render_chat(messages[:num_turns])
        assert tokenizer.encode_chat(messages[:num_turns]) == library.encode(rendered, add_special_tokens=False).ids


def test_the_path_of_a_request_changes_no_sampled_token_in_float32() -> None:
    """`python -m tools.sampled_streams` compares 300 streams, in bfloat16 too."""
    paths = ("resumed", "batches of 32", "chunks of 16 tokens", "preempted", "split")
    assert dict(count_different("float32", make_requests(4), num_blocks=13)) == dict.fromkeys(paths, 0)
