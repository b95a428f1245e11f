"""A choice tells the same text and calls however messages divide it, and wherever another router resumes it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from core.lifecycle import FinishReason
from core.request import Request, SamplingParams
from router.requests.events import Deliver
from router.serving.choice_calls import ChoiceCalls, open_output
from router.serving.choice_stream import ChoiceStream, Chunk
from router.serving.output_formats import RequestGrammars
from runtime.tracing.trace_context import TraceContext
from tandem_client.stubs.inference_pb2 import ChatPrompt, GenerateRequest, Tool, ToolChoice
from tests.support.tool_templates import FAMILIES
from text.chat_template import ChatTemplate
from text.detokenizer import IncrementalDetokenizer
from text.stop_strings import StopStrings
from text.text_stream import TextStream
from text.tokenizer import ByteCodec, ModelTokenizer, load_tokenizer
from text.tool_formats import FORMATS

TOKENS = [bytes([value]) for value in range(256)]  # a token is a byte
ARGUMENTS = '{"city": "Köln \\"}", "days": [1, {"a": null}]}'
FIRST, SECOND = f'{{"name": "weather", "arguments": {ARGUMENTS}}}', '{"name": "now", "arguments": {}}'
CALLS = [("weather", ARGUMENTS), ("now", "{}")]
OUTPUTS = {  # format -> output, its text
    "hermes": (
        f"Ich sehe ☃ nach. <tool\n<tool_call>\n{FIRST}\n</tool_call> und <tool_call>{SECOND}</tool_call>\n<",
        "Ich sehe ☃ nach. <tool\n und \n<",
    ),
    "llama3_json": (f"\n{FIRST}; {SECOND}".replace("arguments", "parameters") + " ☃", " ☃"),
    "mistral": (f"So ☃: [TOOL [TOOL_CALLS] [{FIRST}, {SECOND}] [", "So ☃: [TOOL  ["),
}

formats = pytest.mark.parametrize("tool_format", OUTPUTS)


@dataclass
class Received:
    """What a client makes of the chunks of one choice."""

    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    order: str = ""  # text and calls, as they come

    def take(self, chunk: Chunk | None) -> Received:
        if chunk is None:
            return self
        position = 0
        for delta in chunk.tool_calls:
            assert position <= delta.text_offset <= len(chunk.text)
            self.order += chunk.text[position : delta.text_offset] + delta.name + delta.arguments_json
            position = delta.text_offset
            if delta.id:
                assert (delta.index, delta.arguments_json) == (len(self.calls), "")
                self.calls.append((delta.id, delta.name, ""))
            else:
                assert (delta.index, delta.name) == (len(self.calls) - 1, "")
                found = self.calls[-1]
                self.calls[-1] = (*found[:2], found[2] + delta.arguments_json)
        self.order += chunk.text[position:]
        self.text += chunk.text
        return self


def request_of(seed: int = 7, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request("unique", prompt, len(prompt), SamplingParams(max_tokens=1000, seed=seed))


def choice(tool_format: str, *stop_strings: str) -> ChoiceStream:
    request, text = request_of(), TextStream(IncrementalDetokenizer(TOKENS.__getitem__), StopStrings(stop_strings))
    return ChoiceStream(
        0, "model", "chat", request, "mine", 0.0, text, TraceContext(1, 2), asyncio.Event().set, TOKENS.__getitem__,
        ChoiceCalls(FORMATS[tool_format], request, "mine"),
    )  # fmt: skip


def chunks(stream: ChoiceStream, output: bytes) -> Chunk:
    stream.deliver(Deliver("unique", len(stream.token_ids), tuple(output), ()))
    return stream.take_chunk()


def whole(tool_format: str) -> Received:
    stream = choice(tool_format)
    return Received().take(chunks(stream, OUTPUTS[tool_format][0].encode())).take(stream.last_chunk())


@formats
def test_however_the_output_is_divided_it_tells_the_same_text_and_calls_in_their_order(tool_format: str) -> None:
    found, output = whole(tool_format), OUTPUTS[tool_format][0].encode()
    assert (found.text, [call[1:] for call in found.calls]) == (OUTPUTS[tool_format][1], CALLS)
    if tool_format == "hermes":
        assert found.order == f"Ich sehe ☃ nach. <tool\nweather{ARGUMENTS} und now{{}}\n<"
    in_two = [(output[:index], output[index:]) for index in range(1, len(output))]
    for parts in (*in_two, [bytes([token_id]) for token_id in output]):
        stream, received = choice(tool_format), Received()
        for part in parts:
            received.take(chunks(stream, part))
        assert received.take(stream.last_chunk()) == found, parts


@formats
def test_resumed_at_any_index_a_choice_tells_what_the_client_lacks(tool_format: str) -> None:
    output = OUTPUTS[tool_format][0].encode()
    for index in range(1, len(output) + 1):
        stream = choice(tool_format)
        found = Received().take(chunks(stream, output[:index]))
        resumed = choice(tool_format)
        assert resumed.calls is not None
        resumed.calls.push(resumed.text.push(tuple(output[:index]))[0])
        resumed.resume(tuple(output[:index]), None)
        if index < len(output):
            found.take(chunks(resumed, output[index:]))
        assert found.take(resumed.last_chunk()) == whole(tool_format), index
        assert resumed.ended_before(FinishReason.LENGTH).num_tool_calls == 2


def test_a_stop_string_ends_the_text_and_the_arguments() -> None:
    stream, found = choice("hermes", "days", "never"), Received()
    for token_id in OUTPUTS["hermes"][0].encode():
        stream.deliver(Deliver("unique", len(stream.token_ids), (token_id,), ()))
        if stream.has_chunk:
            found.take(stream.take_chunk())
    found.take(stream.last_chunk())
    assert stream.text.stop_match == "days"
    assert (found.text, found.calls[0][2]) == ("Ich sehe ☃ nach. <tool\n", '{"city": "Köln \\"}", "')
    assert stream.ended_before(FinishReason.STOP).num_tool_calls == 0, "half a call is none"


def test_ids_are_those_of_the_request_and_differ_between_choices_calls_and_prompts() -> None:
    def ids(request: Request, name: str = "mine", tool_format: str = "hermes") -> list[str]:
        _, deltas = ChoiceCalls(FORMATS[tool_format], request, name).push(OUTPUTS[tool_format][0])
        return [delta.id for delta in deltas if delta.id]

    assert ids(request_of()) == ids(request_of())
    found = [*ids(request_of()), *ids(request_of(8)), *ids(request_of(prompt=(1, 3))), *ids(request_of(), "other")]
    assert len(set(found)) == 8
    assert all(each.startswith("call_") and len(each) > 20 for each in found)
    short = [each for seed in range(50) for each in ids(request_of(seed), tool_format="mistral")]
    assert len(set(short)) == 100
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in short)


class TaggedCodec(ByteCodec):
    """Its tags of calls are special tokens, which have no text."""

    tags: ClassVar = {"<tool_call>": 259, "</tool_call>": 260, "<|python_tag|>": 261, "[TOOL_CALLS]": 262}

    @property
    def special_tokens(self) -> dict[str, int]:
        return super().special_tokens | self.tags

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.tags.values() else super().token_bytes(token_id)


@formats
@pytest.mark.parametrize("required", [True, False])
def test_a_call_whose_tags_are_special_tokens_is_a_call(tool_format: str, required: bool) -> None:
    info = replace(load_tokenizer("fake:tiny").info, vocab_size=263)
    tokenizer = ModelTokenizer(info, TaggedCodec(), ChatTemplate(FAMILIES[tool_format], {}))
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    choice = ToolChoice(required=True) if required else None
    wire = GenerateRequest(chat=ChatPrompt(tools=[Tool(name="add", parameters_json=schema)], tool_choice=choice))
    form = FORMATS[tool_format]
    call = f'{form.before_name}"add"{form.before_arguments}{{"a": 1}}{form.after}'
    opening, listed = "" if required else "Wait. ", f"[{call}]" if form.is_list else call
    text = call if required and not form.needs_tag else f"{opening}{form.tag}{listed}"
    parts = re.split("(" + "|".join(map(re.escape, TaggedCodec.tags)) + ")", text)
    token_ids = [
        one for part in parts for one in ([TaggedCodec.tags[part]] if part in TaggedCodec.tags else part.encode())
    ]
    grammars = RequestGrammars(tokenizer)
    grammar = grammars.grammar_of(wire)
    assert grammar
    assert grammars.num_accepted(grammar, token_ids) == len(token_ids)
    output, calls = open_output(wire, request_of(), "mine", tokenizer, StopStrings(()))
    assert calls is not None
    told, deltas = calls.finish(output.push(token_ids)[0])
    assert told == opening
    assert "".join(delta.name + delta.arguments_json for delta in deltas) == 'add{"a": 1}'
    assert calls.num_complete_calls == 1
    assert tokenizer.detokenizer().push(list(TaggedCodec.tags.values())) == "", "without tools they have no text"


def test_only_a_chat_with_tools_of_a_known_format_can_have_calls() -> None:
    hermes = load_tokenizer("fake:tiny")
    unknown = ModelTokenizer(hermes.info, ByteCodec(), None)

    def can_call(wire: GenerateRequest, tokenizer: ModelTokenizer) -> bool:
        return open_output(wire, request_of(), "mine", tokenizer, StopStrings(()))[1] is not None

    with_tools = GenerateRequest(chat=ChatPrompt(tools=[Tool(name="f")]))
    assert can_call(with_tools, hermes)
    assert not can_call(with_tools, unknown)
    assert not can_call(GenerateRequest(chat=ChatPrompt()), hermes)
    assert not can_call(GenerateRequest(text="a"), hermes)
