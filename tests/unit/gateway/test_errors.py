"""Every exception becomes an error in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from core.config import TelemetryConfig
from core.errors import DeadlineExceeded, ErrorCode, InvalidRequest, QueueFull, TandemError
from gateway.errors import STATUSES, ApiError, ClientGone, api_error
from gateway.field_names import http_field
from gateway.fleets import ModelUnknown
from gateway.http.tracing import SERVICE, TracedRequest, current
from gateway.schemas.chat import ChatBody
from gateway.schemas.fields import check_extra
from gateway.schemas.responses import ResponsesBody
from runtime.tracing.telemetry import Telemetry

CHAT = '{"messages": [{"role": "user", "content": "a"}], %s}'
MANY_PARTS = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}]})


def error_with(code: ErrorCode) -> TandemError:
    error = TandemError("why")
    error.code = code
    return error


@pytest.mark.parametrize("code", ErrorCode)
def test_a_code_has_a_status_of_http(code: ErrorCode) -> None:
    if code is ErrorCode.INTERNAL:
        error = api_error(error_with(code))
        assert (error.status, error.headers) == (500, {"x-should-retry": "false"})
    elif code is ErrorCode.RESOURCE_EXHAUSTED:  # a refusal without a hint: see below
        assert api_error(QueueFull("full")).status == 429
    else:
        error = api_error(error_with(code))
        assert (error.status, error.kind, error.code) == STATUSES[code]


def test_a_field_of_the_router_has_its_name_in_the_http_api() -> None:
    error = api_error(InvalidRequest("stop_strings", "at most 16"))
    assert (error.param, error.message) == ("stop", "stop: at most 16")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("text", "prompt"),
        ("token_ids", "prompt"),
        ("chat", "messages"),
        ("chat.messages[3].content", "messages[3].content"),
        ("chat.messages[1].tool_calls[0].id", "messages[1].tool_calls[0].id"),
        ("chat.messages[1].tool_calls[0].name", "messages[1].tool_calls[0].function.name"),
        ("chat.messages[1].tool_calls[0].arguments_json", "messages[1].tool_calls[0].function.arguments"),
        ("chat.tools[0].name", "tools[0].function.name"),
        ("chat.tools[12].parameters_json", "tools[12].function.parameters"),
        ("chat.tool_choice.name", "tool_choice"),
        ("chat.template_options_json", "chat_template_kwargs"),
        ("min_tokens", "min_tokens"),
    ],
)
def test_a_field_of_grpc_has_its_name_over_http_and_keeps_it(field: str, name: str) -> None:
    assert http_field(field) == http_field(name) == name


@pytest.mark.parametrize(("hint", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.001, "2"), (30.0, "30")])
def test_the_hint_of_the_router_is_rounded_up_to_seconds(hint: float, header: str) -> None:
    assert api_error(QueueFull("full", hint)).headers == {"retry-after": header, "x-should-retry": "true"}


@pytest.mark.parametrize(
    ("error", "status", "code", "message", "headers"),
    [
        (error_with(ErrorCode.RESOURCE_EXHAUSTED), 413, "request_too_large", "why", {}),  # over the limit of gRPC
        (DeadlineExceeded("late"), 504, "timeout", "x-tandem-timeout-ms", {"x-should-retry": "false"}),
        (InvalidRequest("prompt", "over the context of 8 tokens"), 400, "context_length_exceeded", "prompt: over", {}),
        (ModelUnknown("a", ["b"]), 404, "model_not_found", "served: b", {}),
        (ClientGone("gone"), 499, "cancelled", "closed the connection", {}),
    ],
)
def test_an_error_has_the_code_that_clients_know(
    error: Exception, status: int, code: str, message: str, headers: dict[str, str]
) -> None:
    found = api_error(error)
    assert (found.status, found.code, found.headers) == (status, code, headers)
    assert message in found.message


def test_an_unexpected_error_keeps_its_text_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = api_error(RuntimeError("a secret"))
    error_id = error.message.rsplit(" ", 1)[1]
    assert "secret" not in str(error.body())
    assert error_id in caplog.text
    assert "a secret" in caplog.text


HUGE = "a" * 1_000_000


def refusal_of(call: Callable[..., object], *arguments: object) -> Exception:
    with pytest.raises((ApiError, ValidationError)) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        ModelUnknown(HUGE, ["b"]),
        InvalidRequest(HUGE, HUGE),
        HTTPException(404, HUGE),
        refusal_of(check_extra, {HUGE: 1}, {}),
        refusal_of(ChatBody.model_validate_json, CHAT % f'"logit_bias": {{"{HUGE}": 1}}'),
        refusal_of(ChatBody.model_validate_json, CHAT % f'"n": "{HUGE}"'),
    ],
    ids=["model", "router", "route", "unknown field", "key of a map", "text of a field"],
)
def test_a_text_of_the_client_is_cut_in_the_answer_and_in_the_span(error: Exception) -> None:
    traced = TracedRequest(Telemetry(TelemetryConfig(), SERVICE, "gateway"), {"headers": []})
    token = current.set(traced)
    try:
        answer = api_error(error).response()
    finally:
        current.reset(token)
    assert len(answer.body) < 4096
    assert 0 < len(traced.error) < 4096


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("{", None, "must be JSON"),
        ("[]", "body", "object"),
        ("{}", "messages", "is required"),
        ('{"messages": []}', "messages", "at least 1"),
        ('{"messages": [{"role": "king", "content": "a"}]}', "messages[0].role", "'system'"),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "messages[0].content[0].type", "required"),
        (MANY_PARTS, "messages[0].content", "at most 1024 items"),
        (CHAT % '"n": 17', "n", "16"),
        (CHAT % '"n": "2"', "n", "integer"),
        (CHAT % '"seed": 9223372036854775808', "seed", "9223372036854775807"),
        (CHAT % '"seed": -9223372036854775809', "seed", "-9223372036854775808"),
        (CHAT % '"top_k": -2', "top_k", "-1"),
        (CHAT % '"stop": [1]', "stop[0]", "string"),
        (CHAT % '"stop": 1', "stop", "a valid string or a valid array"),
        (CHAT % '"logit_bias": {"a": 1}', "logit_bias.a", "token ids"),
        (CHAT % '"max_tokens": 0', "max_tokens", "1"),
        (CHAT % '"stop_token_ids": [4294967296]', "stop_token_ids[0]", "4294967295"),
    ],
)
def test_an_invalid_body_names_the_field_and_the_limit(body: str, param: str | None, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(body)
    error = api_error(caught.value)
    assert (error.status, error.param) == (400, param)
    assert message in error.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[]", "list should have at least 1 item after validation, not 0"),
        ('""', "string should have at least 1 character"),
        ("3", "input should be a valid string or a valid array"),
    ],
)
def test_an_error_of_a_union_tells_what_is_allowed(given: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate_json(f'{{"input": {given}}}')
    error = api_error(caught.value)
    assert (error.param, error.message) == ("input", f"input: {message}")
