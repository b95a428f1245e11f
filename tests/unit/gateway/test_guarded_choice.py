"""A guardrail sees the text, the names and the arguments of an output, each part as an output of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from examples.guardrail import MASK, ExampleGuardrail
from gateway.guardrails import Message, Refused
from gateway.routes.guarded_choice import GuardedChoice
from tandem_client.stubs.inference_pb2 import TokenChunk, ToolCallDelta

CHUNKS = [
    TokenChunk(text="I write"),
    TokenChunk(text=" to bo"),
    TokenChunk(
        text="b@example.com", tool_calls=[ToolCallDelta(index=0, id="c0", name="mail@example.com", text_offset=13)]
    ),
    TokenChunk(tool_calls=[ToolCallDelta(index=0, arguments_json='{"to": "eve@exam')]),
    TokenChunk(tool_calls=[ToolCallDelta(index=0, arguments_json="ple.com")]),
    TokenChunk(
        text="Done",
        tool_calls=[
            ToolCallDelta(index=0, arguments_json='"}'),
            ToolCallDelta(index=1, id="c1", name="f", text_offset=4),
            ToolCallDelta(index=1, arguments_json="{}", text_offset=4),
        ],
    ),
]


class Recording:
    """A guardrail that changes nothing, and refuses outputs with a given word."""

    def __init__(self, refused: str = "") -> None:
        self.parts: list[str] = []
        self._refused = refused

    async def check_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def open_output(self, _: Sequence[Message]) -> Recording:
        self.parts.append("")
        return self

    async def push(self, text: str) -> str:
        self.parts[-1] += text
        if self._refused and self._refused in self.parts[-1]:
            raise Refused("no such words")
        return text

    async def finish(self) -> str:
        return ""


async def test_text_names_and_arguments_are_masked_and_keep_their_order() -> None:
    choice = GuardedChoice(ExampleGuardrail(), [])
    passed = [await choice.push(chunk) for chunk in CHUNKS] + [await choice.finish(0)]
    written: list[str] = []
    for chunk in passed:
        position = 0
        for delta in chunk.tool_calls:
            written += [chunk.text[position : delta.text_offset], delta.name, delta.arguments_json]
            position = delta.text_offset
        written.append(chunk.text[position:])
    assert "".join(written) == f'I write to {MASK}{MASK}{{"to": "{MASK}"}}Donef{{}}'
    assert [delta.id for chunk in passed for delta in chunk.tool_calls if delta.id] == ["c0", "c1"]


async def test_each_part_is_an_output_of_its_own() -> None:
    guardrail = Recording()
    choice = GuardedChoice(guardrail, [])
    passed = [await choice.push(chunk) for chunk in CHUNKS]
    assert passed == CHUNKS, "nothing is changed, so nothing waits"
    assert guardrail.parts == [
        "I write to bob@example.com", "mail@example.com", '{"to": "eve@example.com"}', "Done", "f", "{}"
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["bob", "mail@", "eve", "Done"])
async def test_any_part_may_be_refused(word: str) -> None:
    choice = GuardedChoice(Recording(word), [])
    with pytest.raises(Refused, match="no such words"):
        [await choice.push(chunk) for chunk in CHUNKS]
