"""The forms of answers: chunks and objects made of the same events."""

from __future__ import annotations

import gc
import json
from asyncio import Queue, create_task, sleep
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gateway.formats.chat import ChatChunks
from gateway.formats.chunks import DONE
from gateway.formats.completion import CompletionChunks
from gateway.formats.encoded import EncodedValue, json_pieces
from gateway.formats.outputs import AnswerHead, CompletionLogprobs, chat_logprobs
from gateway.formats.responses import ResponseEvents
from gateway.formats.usage import UsageSum
from gateway.routes.answering import AnswerCollector, ObjectResponse
from tandem_client.stubs.inference_pb2 import (
    Finished,
    FinishReason,
    Logprob,
    TokenChunk,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

HEAD = AnswerHead("id-1", 'a "model"', 123, frozenset({2}), ("END",))
PAIR = replace(HEAD, num_choices=2)
TEXTS = ["Grüße \u2028", '"quoted" \\ \n', "\x00", ""]
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
CALLS = [
    TokenChunk(text="I ask."),
    TokenChunk(
        text=" ",
        tool_calls=[
            ToolCallDelta(index=0, id="c0", name="add", text_offset=1),
            ToolCallDelta(index=0, arguments_json='{"a"', text_offset=1),
        ],
    ),
    TokenChunk(
        text="Now",
        tool_calls=[
            ToolCallDelta(index=0, arguments_json=": 1}"),
            ToolCallDelta(index=1, id="c1", name="f", text_offset=3),
        ],
    ),
    TokenChunk(tool_calls=[ToolCallDelta(index=1, arguments_json="{}")]),
]


@dataclass(frozen=True)
class Filtered:
    choice: int


Event = TokenChunk | Finished | Filtered


def push(form: Any, event: Event) -> Any:
    match event:
        case Filtered():
            return form.filtered(event.choice)
        case Finished():
            return form.finished(event)
        case _:
            return form.chunk(event)


def tokens(text: str, choice: int = 0, logprobs: Any = ()) -> Event:
    return TokenChunk(choice=choice, text=text, logprobs=logprobs)


def end(
    choice: int = 0, reason: FinishReason = FinishReason.FINISH_REASON_STOP, stop_match: str = "2", num_calls: int = 0
) -> Finished:
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    return Finished(choice=choice, finish_reason=reason, usage=usage, stop_match=stop_match, num_tool_calls=num_calls)


def chunks_of(form: Any, events: list[Event]) -> list[dict[str, Any]]:
    """What a client parses from the stream, which must be valid server-sent events."""
    stream = b"".join(push(form, event) for event in events) + form.end()
    assert stream.endswith(DONE)
    return [json.loads(event.removeprefix("data: ")) for event in stream.decode().split("\n\n")[:-2]]


def object_of(form: Any, events: list[Event]) -> dict[str, Any]:
    """What a client parses from an answer in one piece."""
    found: dict[str, Any] = json.loads(b"".join(json_pieces(folded(form, events))))
    return found


def folded(form: Any, events: list[Event]) -> dict[str, Any]:
    for event in events:
        push(AnswerCollector(form), event)
    whole: dict[str, Any] = form.result()
    return whole


@pytest.mark.parametrize("with_usage", [True, False])
def test_the_text_of_a_chat_is_the_same_in_both_forms(with_usage: bool) -> None:
    events = [tokens(text, choice) for text in TEXTS for choice in (0, 1)] + [end(0), end(1)]
    chunks = chunks_of(ChatChunks(replace(PAIR, with_usage=with_usage)), events)
    answer = object_of(ChatChunks(PAIR), events)
    for choice in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == choice]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["finish_reason"] == "stop"
        text = "".join(part["delta"].get("content", "") for part in own)
        assert text == answer["choices"][choice]["message"]["content"] == "".join(TEXTS)
    assert {chunk["model"] for chunk in chunks} == {HEAD.model}
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usages == ([answer["usage"]] if with_usage else [])
    assert all(("usage" in chunk) is with_usage for chunk in chunks)


def test_calls_of_tools_are_the_same_in_both_forms() -> None:
    events: list[Event] = [*CALLS, end(num_calls=2)]
    chunks = chunks_of(ChatChunks(HEAD), events)
    (choice,) = object_of(ChatChunks(HEAD), events)["choices"]
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"name": part["function"].get("name", ""), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == list(calls.values())
    assert [call["name"] for call in calls.values()] == ["add", "f"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["c0", "c1"]
    assert [call["arguments"] for call in calls.values()] == ['{"a": 1}', "{}"]
    assert choice["message"]["content"] == "I ask. Now"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [next(iter(delta), "") for delta in deltas] == [
        "role", "content", "content", "tool_calls", "tool_calls", "tool_calls", "content", "tool_calls", "tool_calls",
        "",
    ], "text and calls keep their order"  # fmt: skip
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_items_of_a_response_keep_the_order_of_text_and_calls() -> None:
    pushed: list[Event] = [*CALLS, end(num_calls=2)]
    answer = object_of(ResponseEvents(HEAD, {}), pushed)
    items = answer["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message", "function_call"]
    assert [item["content"][0]["text"] for item in items[::2]] == ["I ask. ", "Now"]
    assert [(item["call_id"], item["arguments"]) for item in items[1::2]] == [("c0", '{"a": 1}'), ("c1", "{}")]
    assert answer["status"] == "completed"
    form = ResponseEvents(HEAD, {})
    stream = b"".join(push(form, event) for event in pushed).decode()
    events = [json.loads(event.partition("data: ")[2]) for event in stream.split("\n\n") if event]
    ended = [(event["output_index"], event["item"]["type"]) for event in events if event["type"].endswith("item.done")]
    assert ended == list(enumerate(item["type"] for item in items))


def test_a_response_that_ends_at_once_has_an_empty_message() -> None:
    form = ResponseEvents(HEAD, {})
    kinds = [event.split("\n")[0] for event in (push(form, end()) + form.end()).decode().split("\n\n") if event]
    assert [kind.removeprefix("event: response.") for kind in kinds] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "num_calls", "names_tool", "chat", "status"),
    [
        (STOP, 1, False, "tool_calls", "completed"),
        (STOP, 1, True, "stop", "completed"),  # the client has chosen the tool
        (STOP, 0, False, "stop", "completed"),  # a stop string broke the call off
        (LENGTH, 0, False, "length", "incomplete"),
        (LENGTH, 1, False, "length", "incomplete"),  # a second call may be incomplete
    ],
)
def test_only_a_model_that_has_called_a_tool_ends_with_tool_calls(
    reason: FinishReason, num_calls: int, names_tool: bool, chat: str, status: str
) -> None:
    event = end(reason=reason, num_calls=num_calls)
    head = replace(HEAD, names_tool=names_tool)
    call = TokenChunk(tool_calls=[ToolCallDelta(index=0, id="c0", name="add"), ToolCallDelta(arguments_json="{")])
    chunks = chunks_of(ChatChunks(head), [call, event])
    answer = object_of(ChatChunks(head), [call, event])
    response = object_of(ResponseEvents(head, {}), [call, event])
    assert answer["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == chat
    assert (response["status"], response["output"][0]["status"]) == (status, status)


@pytest.mark.parametrize(("match", "reason"), [("END", "END"), ("2", None), ("77", 77), ("", None)])
def test_the_reason_of_a_stop_is_a_string_an_id_or_null(match: str, reason: Any) -> None:
    assert HEAD.stop_reason(end(stop_match=match)) == reason


def test_a_filtered_choice_ends_in_every_form() -> None:
    events: list[Event] = [tokens("a"), Filtered(0)]
    chat = chunks_of(ChatChunks(HEAD), events)
    text = chunks_of(CompletionChunks(HEAD, [""]), events)
    assert chat[-1]["choices"][0]["finish_reason"] == text[-1]["choices"][0]["finish_reason"] == "content_filter"
    (whole,) = object_of(ChatChunks(HEAD), events)["choices"]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("a", "content_filter")
    assert object_of(ResponseEvents(HEAD, {}), events)["incomplete_details"] == {"reason": "content_filter"}


def test_a_prompt_counts_once_however_many_choices_continue_it_and_whichever_a_guardrail_ends() -> None:
    usage = UsageSum(2, False)
    for choice in (1, 2):
        usage.add(end(choice))
    assert usage.counts() == (10, 4, 8)
    for choice in (0, 3):
        usage.add(end(choice))
    assert usage.counts() == (10, 8, 8)
    assert usage.responses()["total_tokens"] == 18


def test_a_receipt_is_there_if_it_was_asked_for_and_a_choice_has_one() -> None:
    for with_receipt, ends, expected in ((False, [end()], False), (True, [], False), (True, [end()], True)):
        usage = UsageSum(1, with_receipt)
        for each in ends:
            usage.add(each)
        assert ("tandem" in usage.chat()) == expected


def test_offsets_count_the_characters_of_the_text_and_a_part_of_one_is_named_by_its_bytes() -> None:
    entries = [TokenLogprobs(logprob=-1, token=part) for part in ("ß".encode(), b"\xc3", b"\x9f", b"b")]
    columns = CompletionLogprobs(10).take(entries)
    assert columns["text_offset"] == [10, 11, 11, 12]
    assert columns["token_logprobs"] == [-1] * 4
    assert columns["tokens"] == ["ß", "bytes:\\xc3", "bytes:\\x9f", "b"]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_log_probabilities_are_the_same_in_one_object_and_in_chunks(num_tokens: int) -> None:
    entries = [
        TokenLogprobs(logprob=-index, token=token, top=[Logprob(logprob=-0.5, token=b'"\n')])
        for index, token in enumerate((b"a", "ß".encode(), b"\xc3"))
    ]
    events: list[Event] = [tokens("", 1, entries[at : at + num_tokens]) for at in range(0, 3, num_tokens)]
    events += [tokens("", 1), end(0), end(1)]
    first, second = object_of(ChatChunks(PAIR), events)["choices"]
    assert first["logprobs"] is None
    assert second["logprobs"] == {"content": json.loads(json.dumps(chat_logprobs(entries))), "refusal": None}
    first, second = object_of(CompletionChunks(PAIR, ["x"] * 2), events)["choices"]
    assert (first["text"], second["text"], first["logprobs"]) == ("x", "x", None)
    assert second["logprobs"] == json.loads(json.dumps(CompletionLogprobs(1).take(entries)))
    for form in (ChatChunks(HEAD), CompletionChunks(HEAD, [""])):
        chunks = chunks_of(form, [TokenChunk(text="x", token_ids=[3], logprobs=entries)])
        assert "token_ids" not in chunks[-1]["choices"][0]


IDS_HEAD = replace(HEAD, with_token_ids=True)
IDS_PAIR = replace(IDS_HEAD, num_choices=2)
PROMPTS = ((7, 8, 9), (5,))  # two prompts with two choices each


def chunks_with_ids(num_prompts: int) -> list[Event]:
    """The last two tokens of each choice have no text, as a special token has none."""
    events: list[Event] = []
    for index, (text, token_ids) in enumerate((("a", (1,)), ("bc", (2, 3)), ("", (4, 2)))):
        for choice in range(2 * num_prompts):
            prompt = PROMPTS[choice // 2] if index == 0 else ()
            ids = [choice, *token_ids]
            events.append(TokenChunk(choice=choice, text=text, token_ids=ids, prompt_token_ids=prompt))
    return [*events, *(end(choice) for choice in range(2 * num_prompts))]


@pytest.mark.parametrize("echo", ["", "x"])
def test_token_ids_are_in_a_completion_where_vllm_has_them(echo: str) -> None:
    def form() -> CompletionChunks:
        return CompletionChunks(IDS_PAIR, [echo] * 4)

    events = chunks_with_ids(2)
    chunks, answer = chunks_of(form(), events), object_of(form(), events)
    for choice, whole in enumerate(answer["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice]
        assert [part.get("prompt_token_ids") for part in own] == [list(PROMPTS[choice // 2]), None, None, None]
        assert whole["prompt_token_ids"] == own[0]["prompt_token_ids"]
        assert [part["token_ids"] for part in own] == [[choice, 1], [choice, 2, 3], [choice, 4, 2], []]
        assert whole["token_ids"] == [choice, 1, choice, 2, 3, choice, 4, 2]
        assert [part["logprobs"] for part in own] == [None] * 4
        assert whole["text"] == "".join(part["text"] for part in own) == f"{echo}abc"


def test_token_ids_are_in_a_chat_where_vllm_has_them() -> None:
    def form() -> ChatChunks:
        return ChatChunks(IDS_PAIR)

    events = chunks_with_ids(1)
    chunks, answer = chunks_of(form(), events), object_of(form(), events)
    assert answer["prompt_token_ids"] == list(PROMPTS[0])
    for choice, whole in enumerate(answer["choices"]):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [list(PROMPTS[0]), *[None] * 4]
        assert "prompt_token_ids" not in {*whole, *own[0]["choices"][0]}
        parts = [chunk["choices"][0]["token_ids"] for chunk in own]
        assert parts == [[], [choice, 1], [choice, 2, 3], [choice, 4, 2], []]
        assert whole["token_ids"] == [choice, 1, choice, 2, 3, choice, 4, 2]
        assert whole["message"]["content"] == "abc"


def test_each_token_id_comes_once_beside_calls_of_tools() -> None:
    events: list[Event] = []
    for index, chunk in enumerate(CALLS):
        event = TokenChunk(token_ids=[index, 10 + index])
        event.MergeFrom(chunk)
        events.append(event)
    events += [TokenChunk(token_ids=[20]), end(num_calls=2)]
    chunks = chunks_of(ChatChunks(IDS_HEAD), events)
    found = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    (whole,) = object_of(ChatChunks(IDS_HEAD), events)["choices"]
    assert whole["token_ids"] == found == [0, 10, 1, 11, 2, 12, 3, 13, 20]
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == ['{"a": 1}', "{}"]


def test_an_object_keeps_no_log_probability_but_its_json() -> None:
    value = -1.28125  # of this test alone: garbage of others may be there
    entries = [TokenLogprobs(logprob=value, token=b"a", top=[Logprob(logprob=value, token=b"a")] * 20)] * 100
    pieces = json_pieces(folded(ChatChunks(HEAD), [tokens("a", 0, entries)]))
    # Other libraries have dicts of other classes under this name, which no comparison may touch.
    kept = [part for part in gc.get_objects() if type(part) is dict and type(part.get("logprob")) is float]
    assert [part for part in kept if part["logprob"] == value] == []
    assert len(b"".join(pieces)) > 100 * 21 * 40


async def test_a_long_object_is_sent_in_pieces() -> None:
    entries = [TokenLogprobs(logprob=-1, token=b"a", top=[Logprob(token=b"a")] * 20)] * 100
    answer, sent = folded(ChatChunks(HEAD), [tokens("a", 0, entries)] * 10), []
    num_sent_in_turns: list[int] = []
    response = ObjectResponse(json_pieces(answer), {"x-request-id": "1"})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def count() -> None:
        while True:
            num_sent_in_turns.append(len(sent))
            await sleep(0)

    counting = create_task(count())
    await response({}, Queue().get, send)
    counting.cancel()
    assert num_sent_in_turns[-3:] == [len(sent) - 2, len(sent) - 1, len(sent)], "each turn of the loop sends a piece"
    head, *parts = sent
    assert dict(head["headers"])[b"content-length"] == str(sum(len(part["body"]) for part in parts)).encode()
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 5
    assert len(json.loads(b"".join(part["body"] for part in parts))["choices"][0]["logprobs"]["content"]) == 1000


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_an_impossible_token_has_a_number_that_json_knows(logprob: float) -> None:
    entry = TokenLogprobs(logprob=logprob, token=b"a", top=[Logprob(logprob=logprob, token=b"b")])
    (found,), columns = chat_logprobs([entry]), CompletionLogprobs(0).take([entry])
    assert found["logprob"] == found["top_logprobs"][0]["logprob"] == columns["token_logprobs"][0] == -9999.0
    json.dumps([found, columns], allow_nan=False)


def test_a_response_fails_with_an_error_event() -> None:
    form = ResponseEvents(HEAD, {})
    push(form, tokens("a"))
    failed = form.fail(RuntimeError("x")).decode().split("\n\n")
    assert [event.splitlines()[0] for event in failed if event] == ["event: error", "event: response.failed"]


def test_the_events_of_a_response_encode_no_field_of_the_request_again(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ResponseEvents(HEAD, {"instructions": EncodedValue("x" * 100_000)})
    num_chars, dumps = 0, json.dumps

    def counted(*args: Any, **options: Any) -> str:
        nonlocal num_chars
        text = dumps(*args, **options)
        num_chars += len(text)
        return text

    monkeypatch.setattr(json, "dumps", counted)
    texts = form.encode([]), push(form, end()), form.end()
    assert num_chars < 10_000
    events = [json.loads(line[6:]) for line in b"".join(texts).splitlines() if line.startswith(b"data: ")]
    repeated = [event["response"]["instructions"] for event in events if "response" in event]
    assert repeated == ["x" * 100_000] * 3
