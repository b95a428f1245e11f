"""A guardrail sees every prompt and every output. Where it fails, nothing passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, InvalidRequest, WorkerUnavailable
from core.request import MAX_JSON_CHARS
from examples.guardrail import EMAIL, MASK, ExampleGuardrail
from gateway import guardrails, prompt_guardrail
from gateway.errors import ApiError
from gateway.guardrails import FAILED, GuardedOutput, Message, Refused, check_prompt, load_guardrail
from gateway.prompt_guardrail import check_chat, texts_of
from gateway.routes.guarded_choice import GuardedChoice
from gateway.routes.sinks import GuardedSink
from tandem_client.stubs.inference_pb2 import ChatMessage, ChatPrompt, TokenChunk, Tool, ToolCall, ToolCallDelta

EXAMPLE = "examples.guardrail:build"
QUESTION = Message("user", "Who are you?")


class Scripted:
    """A guardrail whose answers, or errors, are given."""

    def __init__(self, prompt: Any = None, pushed: Any = "", rest: Any = "") -> None:
        self.prompt, self.pushed, self.rest = prompt, pushed, rest

    async def check_prompt(self, _: Sequence[Message]) -> Sequence[Message]:
        return _given(self.prompt)

    def open_output(self, _: Sequence[Message]) -> Scripted:
        return self

    async def push(self, _: str) -> str:
        return _given(self.pushed)

    async def finish(self) -> str:
        return _given(self.rest)


def _given(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


async def masked(chunks: Sequence[str]) -> str:
    output = GuardedOutput(ExampleGuardrail(), [QUESTION])
    return "".join([await output.push(chunk) for chunk in chunks]) + await output.finish()


async def test_without_a_guardrail_everything_passes_unchanged() -> None:
    assert load_guardrail("") is None
    assert await check_prompt(None, [QUESTION]) == (QUESTION,)
    output = GuardedOutput(None, [QUESTION])
    assert await output.push("a") == "a"
    assert await output.finish() == ""


async def test_the_example_masks_an_address_across_chunks_and_holds_back_only_the_last_word() -> None:
    output = GuardedOutput(load_guardrail(EXAMPLE), [QUESTION])
    sent = [await output.push(chunk) for chunk in ("Write to bo", "b@exam", "ple.com or", " call.")]
    assert sent == ["Write to ", "", f"{MASK} ", "or "]
    assert await output.finish() == "call."


@given(st.lists(st.text("ab@. -+", max_size=6), max_size=12))
def test_the_example_masks_the_same_however_the_text_is_cut(chunks: list[str]) -> None:
    assert asyncio.run(masked(chunks)) == EMAIL.sub(MASK, "".join(chunks))


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("a bug"),
        None,
        "text",
        [],
        [Message("system", "forged")],
        ["a string"],
        [Message("user", cast(Any, 5))],
    ],
    ids=["error", "nothing", "text", "fewer", "role", "no message", "no text"],
)
async def test_a_guardrail_that_fails_on_a_prompt_refuses_it(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Refused, match=FAILED):
        await check_prompt(Scripted(answer), [QUESTION])
    assert "the guardrail" in caplog.text


@pytest.mark.parametrize("answer", [KeyError("a bug"), None, b"bytes"], ids=["error", "nothing", "bytes"])
async def test_a_guardrail_that_fails_on_an_output_ends_it(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Refused, match=FAILED):
        await GuardedOutput(Scripted(pushed=answer), []).push("text")
    with pytest.raises(Refused, match=FAILED):
        await GuardedOutput(Scripted(rest=answer), []).finish()
    assert "the guardrail" in caplog.text


async def test_a_guardrail_whose_methods_cannot_be_called_refuses() -> None:
    unfit: Any = SimpleNamespace(check_prompt=lambda: None, open_output=lambda _: SimpleNamespace(push=None))
    with pytest.raises(Refused, match=FAILED):
        await check_prompt(unfit, [QUESTION])
    output = GuardedOutput(unfit, [QUESTION])
    with pytest.raises(Refused, match=FAILED):
        await output.push("a")
    with pytest.raises(Refused, match=FAILED):
        await output.finish()


async def test_a_guardrail_that_never_answers_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Scripted):
        async def push(self, _: str) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(guardrails, "GUARDRAIL_TIMEOUT_S", 0.01)
    with pytest.raises(Refused, match=FAILED):
        await GuardedOutput(Endless(), []).push("text")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:build", "cannot import no.such.module"),
        ("examples.guardrail:absent", "examples.guardrail has no function absent"),
        ("examples.guardrail:MaskEmails", "must return an object with check_prompt and open_output"),
    ],
)
def test_a_name_without_a_guardrail_is_refused_at_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_guardrail(name)


def fields_of(message: Any, path: str = "") -> dict[str, tuple[Any, str]]:
    """Every text field at every depth, with one element in each list: the path, the message and the name."""
    found: dict[str, tuple[Any, str]] = {}
    for field in message.DESCRIPTOR.fields:
        at = f"{path}.{field.name}".removeprefix(".")
        if field.message_type is not None:
            part = getattr(message, field.name)
            found |= fields_of(part.add() if field.is_repeated else part, at)
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            found[at] = message, field.name
    return found


class Recording(ExampleGuardrail):
    def __init__(self, **changes: str) -> None:
        self.seen: list[str] = []
        self.changes = changes

    async def check_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        self.seen = [message.text for message in messages]
        return [Message(message.role, self.changes.get(message.text, message.text)) for message in messages]


async def test_a_guardrail_sees_every_text_of_the_schema_but_what_the_router_allows_no_client_to_choose() -> None:
    chat, guardrail = ChatPrompt(), Recording()
    texts = fields_of(chat)
    for path, (message, name) in texts.items():
        setattr(message, name, path)
    await check_chat(guardrail, texts_of(chat))
    assert texts.keys() - set(guardrail.seen) == {"messages.role", "tool_choice.name"}
    assert guardrail.seen[-1] == "messages.content"


@pytest.mark.parametrize(
    "place", ["tools.name", "messages.tool_calls.name", "messages.tool_calls.id", "messages.tool_call_id"]
)
async def test_a_name_that_a_guardrail_would_change_refuses_the_prompt(place: str) -> None:
    chat = ChatPrompt()
    message, name = fields_of(chat)[place]
    setattr(message, name, "bomb")
    with pytest.raises(ApiError) as refused:
        await check_chat(Recording(bomb="****"), texts_of(chat))
    assert (refused.value.status, refused.value.code) == (400, "content_policy_violation")
    assert name in refused.value.message


async def test_a_guardrail_may_rewrite_every_other_text() -> None:
    chat = ChatPrompt()
    message, name = fields_of(chat)["tools.description"]
    setattr(message, name, "bomb")
    assert await check_chat(Recording(bomb="****"), texts_of(chat)) == (Message("tools", "****"),)
    assert chat.tools[0].description == "****"


def chat_of(arguments: str, num_calls: int = 1) -> ChatPrompt:
    call = ToolCall(id="a", name="f", arguments_json=arguments)
    return ChatPrompt(messages=[ChatMessage(role="assistant", tool_calls=[call] * num_calls)])


@pytest.mark.parametrize("arguments", ['{"what": "s\\u0061rin"}', '{"what": "s\\u0061rin \\ud800"}'])
async def test_an_escaped_word_is_seen_beside_half_a_character_too(arguments: str) -> None:
    with pytest.raises(ApiError, match="prompts about sarin are not answered here"):
        await check_chat(ExampleGuardrail(), texts_of(chat_of(arguments)))


LISTS = f"[{'[],' * 20_000}[]]"


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (chat_of(" " * (MAX_JSON_CHARS + 1)), "chat.messages[0].tool_calls[0].arguments_json"),
        (ChatPrompt(tools=[Tool(), Tool(parameters_json="9" * 10**5)]), "chat.tools[1].parameters_json"),
        (ChatPrompt(template_options_json="9" * 10**5), "chat.template_options_json"),
    ],
)
def test_a_json_text_that_the_router_would_refuse_is_not_parsed(
    chat: ChatPrompt, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_guardrail, "_unescaped", None)
    with pytest.raises(InvalidRequest, match="must have at most 65536 characters") as caught:
        texts_of(chat)
    assert caught.value.field == field


@pytest.mark.parametrize(("text", "num_calls"), [(LISTS, 3), (f"[{'9' * 65}]", 1000)])
def test_the_json_texts_of_a_chat_are_bounded_as_a_body_before_they_are_parsed(
    text: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(texts_of(chat_of(text, 1))) == 3
    monkeypatch.setattr(prompt_guardrail, "_unescaped", None)
    with pytest.raises(ApiError, match="must have at most"):
        texts_of(chat_of(text, num_calls))


# ---- A guardrail sees the text, the names and the arguments of an output, each part as an output of its own.

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


class RecordingOutput(Scripted):
    """A guardrail that changes nothing, and refuses outputs with a given word."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.parts: list[str] = []
        self._refused = refused

    def open_output(self, _: Sequence[Message]) -> RecordingOutput:
        self.parts.append("")
        return self

    async def push(self, text: str) -> str:
        self.parts[-1] += text
        if self._refused and self._refused in self.parts[-1]:
            raise Refused("no such words")
        return text


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
    guardrail = RecordingOutput()
    choice = GuardedChoice(guardrail, [])
    assert [await choice.push(chunk) for chunk in CHUNKS] == CHUNKS, "nothing is changed, so nothing waits"
    assert guardrail.parts == [
        "I write to bob@example.com", "mail@example.com", '{"to": "eve@example.com"}', "Done", "f", "{}"
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["bob", "mail@", "eve", "Done"])
async def test_any_part_may_be_refused(word: str) -> None:
    choice = GuardedChoice(RecordingOutput(word), [])
    with pytest.raises(Refused, match="no such words"):
        [await choice.push(chunk) for chunk in CHUNKS]


async def test_the_calls_end_with_their_last_choice_and_their_error_is_raised() -> None:
    sink, ends = Mock(is_full=False), asyncio.Event()

    async def refused() -> None:
        guarded.chunk(TokenChunk(text="I am bob"))
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()

    async def failed() -> None:
        raise WorkerUnavailable("gone")

    guarded = GuardedSink(sink, RecordingOutput("bob"), [[QUESTION]], 1)
    async with asyncio.timeout(5):
        await guarded.check_all(refused())
    sink.filtered.assert_called_once_with(0)
    assert ends.is_set()
    with pytest.raises(WorkerUnavailable):
        await GuardedSink(sink, RecordingOutput(), [[QUESTION]], 1).check_all(failed())
