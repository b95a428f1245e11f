"""Requests from keyword arguments, and typed results from messages."""

from __future__ import annotations

from typing import Any

import pytest

from tandem_client import (
    Piece,
    Promise,
    Receipt,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from tandem_client.prompts import build_request
from tandem_client.results import Collector
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import TokenChunk
from tandem_client.stubs.inference_pb2 import ToolCallDelta as Delta

LOGPROB = inference_pb2.TokenLogprobs(
    logprob=-0.5, token=b"\xc3", top=[inference_pb2.Logprob(token_id=2, logprob=-0.25, token=b"b")]
)
CHUNKS = [
    inference_pb2.TokenChunk(text="a", token_ids=[1], logprobs=[LOGPROB]),
    inference_pb2.TokenChunk(text="bc", token_ids=[2, 3], logprobs=[LOGPROB, LOGPROB]),
]
FINISHED = inference_pb2.Finished(
    finish_reason=inference_pb2.FINISH_REASON_LENGTH,
    usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
    timings=inference_pb2.PhaseTimings(first_token_ms=12.5, total_ms=20.0),
    path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
    promise=inference_pb2.Promise(ttft_ms=10.0, tpot_ms=2.0, path=inference_pb2.REQUEST_PATH_LOCAL),
    receipt=inference_pb2.Receipt(
        queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, kv_block_seconds=4.0, transferred_bytes=5
    ),
    request_id="r-1",
    attempts=1,
    seed=9,
)


def test_messages_become_pieces_and_at_the_end_a_completion() -> None:
    collector = Collector()
    pieces = [collector.take(inference_pb2.GenerateResponse(tokens=chunk)) for chunk in CHUNKS]
    logprob = TokenLogprob(1, b"\xc3", -0.5, (TopLogprob(2, b"b", -0.25),))
    assert pieces[0] == Piece("a", (1,), (logprob,))
    assert collector.take(inference_pb2.GenerateResponse(finished=FINISHED)) is None
    result = collector.completion
    assert result is not None
    assert (result.text, result.token_ids, len(result.logprobs)) == ("abc", (1, 2, 3), 3)
    assert (result.finish_reason, result.path, result.request_id, result.seed) == ("length", "disaggregated", "r-1", 9)
    assert result.usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    assert result.timings == Timings(0, 0, 0, 0, 12.5, 0, 0, 0, 20.0)
    assert result.promise == Promise(10.0, 2.0, "local")
    assert result.receipt == Receipt(1.0, 2.0, 3.0, 4.0, 5)


def test_keyword_arguments_fill_the_request() -> None:
    request = build_request(
        [{"role": "user", "content": "Hi"}],
        {"max_tokens": 4, "stop": "END", "temperature": 0.5, "logit_bias": {7: 1.0}, "logprobs": 2, "user": "alice"},
    )
    assert request.chat.messages[0] == inference_pb2.ChatMessage(role="user", content="Hi")
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (4, ["END"])
    assert (request.sampling.temperature, dict(request.sampling.logit_bias)) == (0.5, {7: 1.0})
    assert (request.logprobs, request.user) == (2, "alice")
    assert list(build_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert build_request("text", {"stop": ["a", "b"]}).stop.stop_strings == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("text", {"max_token": 4}, "'max_token' is not an option; known: model, max_tokens"),
        ("text", {"max_tokens": "many"}, "many|int"),
        ([{"author": "me"}], {}, "a message has role and content, this one has author"),
        ("text", {"tools": [{"name": "f"}]}, "'tools' needs messages as the prompt"),
        ([{"role": "user"}], {"tools": [{"function": {}}]}, "a tool has name, description and parameters, this one"),
        ([{"role": "user"}], {"tool_choice": {"any": True}}, "a tool choice has required, name and single"),
    ],
)
def test_an_argument_that_no_request_has_is_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        build_request(prompt, options)


def test_deltas_of_calls_become_calls_which_a_message_takes_back() -> None:
    chunks = [
        TokenChunk(text="I ask.", token_ids=[1], tool_calls=[Delta(id="c0", name="f", text_offset=6)]),
        TokenChunk(token_ids=[2], tool_calls=[Delta(arguments_json='{"a"'), Delta(arguments_json=": 1}")]),
        TokenChunk(tool_calls=[Delta(index=1, id="c1", name="g"), Delta(index=1, arguments_json="{")]),
    ]
    collector = Collector()
    pieces = [collector.take(inference_pb2.GenerateResponse(tokens=chunk)) for chunk in chunks]
    assert pieces[0] == Piece("I ask.", (1,), (), (ToolCallDelta(0, "c0", "f", "", 6),))
    collector.take(inference_pb2.GenerateResponse(finished=FINISHED))
    result = collector.completion
    assert result is not None
    assert (result.text, result.finish_reason) == ("I ask.", "length")
    assert result.tool_calls == (ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{"))
    message = {"role": "assistant", "content": result.text, "tool_calls": result.tool_calls[:1]}
    assert build_request([message], {}).chat.messages[0].tool_calls[0] == inference_pb2.ToolCall(
        id="c0", name="f", arguments_json='{"a": 1}'
    )


def test_tools_are_plain_values_or_messages() -> None:
    prompt = [{"role": "user", "content": "Hi"}]
    tools = [{"name": "f", "parameters": {"type": "object"}}, inference_pb2.Tool(name="g")]
    chat = build_request(prompt, {"tools": tools, "tool_choice": {"name": "f", "single": True}}).chat
    assert list(chat.tools) == [
        inference_pb2.Tool(name="f", parameters_json='{"type": "object"}'),
        inference_pb2.Tool(name="g"),
    ]
    assert chat.tool_choice == inference_pb2.ToolChoice(name="f", single=True)
    assert not build_request(prompt, {"tools": tools}).chat.HasField("tool_choice")
