"""Tokenizers from every kind of model file, and rendered chats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from core.errors import ConfigError, InvalidRequest
from tests.support.gguf_bytes import Value
from tests.support.tiny_model_files import CONFIG, write_gguf_header
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from text.chat import Chat
from text.chat_template import MAX_MESSAGES
from text.tokenizer import load_tokenizer
from text.tokenizer_files import byte_level_bytes, sentencepiece_bytes

TEXTS = ["", " ", "  two  spaces ", "plain", "naïve 日本語 😀", "tabs\tand\nlines\n\n", "<s> is special", "12345"]


def write_directory(directory: Path, tokenizer: Tokenizer, **options: object) -> str:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 400}))
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = with_bos(byte_level_tokenizer())
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    spaces = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return with_bos(sentencepiece_tokenizer(spaces, None))


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_tokenizer_of_a_directory_agrees_with_its_library(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    reference = make()
    tokenizer = load_tokenizer(write_directory(tmp_path, reference))
    for text in TEXTS:
        for add_special in (False, True):
            token_ids = tokenizer.encode(text, add_special)
            assert token_ids == reference.encode(text, add_special_tokens=add_special).ids
            assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
            named = reference.decode(token_ids, skip_special_tokens=False)
            assert tokenizer.decode(token_ids, with_special=True) == named


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_an_output_continues_its_prompt(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    """The first word of an output keeps its space, as in an echo and in log-probabilities."""
    tokenizer = load_tokenizer(write_directory(tmp_path, make()))
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        for length in range(1, len(token_ids)):
            prompt, output = token_ids[:length], token_ids[length:]
            shown = tokenizer.decode(prompt)
            if "\ufffd" in shown or not any(map(tokenizer.token_bytes, prompt)):
                continue  # the prompt ends within a character, or has no text
            detokenizer = tokenizer.detokenizer()
            pieces = [detokenizer.push((token_id,)) for token_id in output]
            assert shown + "".join(pieces) + detokenizer.flush() == tokenizer.decode(token_ids)


def test_truncation_set_for_training_does_not_cut_a_prompt(tmp_path: Path) -> None:
    reference = byte_level()
    reference.enable_truncation(max_length=4)
    reference.enable_padding(length=8)
    tokenizer = load_tokenizer(write_directory(tmp_path, reference))
    assert len(tokenizer.encode("eeeeeeeeeeee", add_special=False)) == 12
    assert len(tokenizer.encode("e", add_special=False)) == 1


def test_the_chat_template_of_a_directory_is_found_in_each_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "L{{ bos_token }}"}]
    spec = write_directory(tmp_path, byte_level(), chat_template=named, bos_token={"content": "<s>"})
    assert load_tokenizer(spec).render_chat(chat) == "L<s>"
    write_directory(tmp_path, byte_level(), chat_template="S{{ messages[0].content }}", bos_token="<s>")
    assert load_tokenizer(spec).render_chat(chat) == "Shi"
    (tmp_path / "chat_template.jinja").write_text("F{{ messages[0]['role'] }}")
    assert load_tokenizer(spec).render_chat(chat) == "Fuser"


def test_chats_with_tools_have_a_template_of_their_own_where_the_model_has_one(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with_tools = Chat(chat, [{"type": "function", "function": {"name": "weather"}}])
    default = "{{ messages[0].content }}"
    tool_use = "{{ messages[0].content }}<tool_call>{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    gguf_file: dict[str, Value] = {"tokenizer.chat_template": default, "tokenizer.chat_template.tool_use": tool_use}
    made = [
        load_tokenizer(write_directory(tmp_path, byte_level(), chat_template=named)),
        load_tokenizer(write_gguf_header(tmp_path / "a.gguf", gguf_file)),
    ]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    made.append(load_tokenizer(write_directory(tmp_path, byte_level(), chat_template=default)))
    for tokenizer in made:
        assert (tokenizer.knows_tools, tokenizer.tool_format) == (True, "hermes")
        assert tokenizer.render_chat(chat) == "hi"
        assert tokenizer.render_chat(with_tools) == "hi<tool_call>weather"
        assert tokenizer.render_chat([*chat, {"role": "tool", "content": "7"}]) == "hi<tool_call>"


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_tokenizer_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    reference = byte_level()
    reference.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(write_directory(tmp_path, reference))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_byte_models_chat_with_their_special_tokens() -> None:
    tokenizer = load_tokenizer("fake:tiny")
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    token_ids = tokenizer.encode(text, add_special=False)
    assert token_ids[0] == 257
    assert token_ids.count(258) == 1
    assert tokenizer.decode(token_ids) == "user\nhi\nassistant\n"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = load_tokenizer("random:llama-tiny")
    for token_id in (-1, 259):
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            tokenizer.decode([token_id])
    assert load_tokenizer("random:smollm2-135m").decode([300]) == "<300>"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "a"}], r"messages\[1\]\.role"),
        ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "at most"),
    ],
)
def test_an_error_names_the_malformed_message(messages: list[dict[str, str]], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        load_tokenizer("fake:tiny").render_chat(messages)


def test_every_byte_has_one_character() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(character) for character in alphabet) == [bytes([byte]) for byte in range(256)]


def test_importing_what_the_router_and_the_simulator_use_brings_no_torch() -> None:
    modules = "text.tokenizer, model_files.catalogue, engine.fake_runner, engine.factory"
    command = f"import sys, {modules}; print('torch' in sys.modules, 'gguf' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.split() == ["False", "False"]


def test_only_two_hexadecimal_digits_are_a_byte_of_sentencepiece() -> None:
    texts = {"<0x0A>": b"\n", "<0xfF>": b"\xff", "<0xZZ>": b"<0xZZ>", "<0x-1>": b"<0x-1>", "<0x 1>": b"<0x 1>"}
    assert {text: sentencepiece_bytes(text) for text in texts} == texts
