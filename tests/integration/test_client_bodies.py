"""What the clients of OpenAI's API send: each body is answered, or refused by the name of the field to blame."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.fleets import Fleets
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.fields import CHAT, COMPLETION, MESSAGE, RESPONSES
from gateway.schemas.responses import ResponsesBody
from tests.support.deployment import deploy, tiny_config
from tests.support.gateway import serving_gateway

CHAT_PATH, TEXT_PATH, RESPONSE_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SMALLEST: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"model": "fake:tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    TEXT_PATH: {"model": "fake:tiny", "prompt": "Hello", "max_tokens": 4},
    RESPONSE_PATH: {"model": "fake:tiny", "input": "Hello", "max_output_tokens": 4},
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "title": "City", "default": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY, "strict": True}}
FUNCTION = {"type": "function", "name": "weather", "description": None, "parameters": CITY, "strict": False}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TEXT = {"type": "text", "text": "hi"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def user(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "hi"} | fields


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "hi"} | fields


def talk(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user(), *messages]}


def items(*given: dict[str, Any]) -> dict[str, Any]:
    return {"input": [user(), *given]}


def of_codex(**fields: Any) -> dict[str, Any]:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "in a sandbox"}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    body = {"instructions": "You are an agent.", "input": [developer, asked], "tools": [FUNCTION], "store": False}
    more = {"stream": True, "include": [], "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "k"}
    return body | more | fields


def nulls_of(schema: Any, rules: Any, path: str) -> dict[str, None]:
    return dict.fromkeys((set(schema.model_fields) | set(rules)) - (set(SMALLEST[path]) - {"model"}))


ECHOED = {  # the fields of a request that our own responses repeat
    "tools": [], "tool_choice": "auto", "temperature": 1.0, "top_p": 1.0, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
    "text": {"format": {"type": "text"}}, "truncation": "disabled", "user": None, "metadata": {}, "instructions": None,
}  # fmt: skip

ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat: null everywhere": (CHAT_PATH, nulls_of(ChatBody, CHAT, CHAT_PATH)),
    "chat: empty everywhere": (
        CHAT_PATH,
        {"logit_bias": {}, "tools": [], "functions": [], "stop": [], "metadata": {}, "user": "", "n": 1, "best_of": 1,
         "response_format": {"type": "text"}, "stream_options": None, "stream": False, "modalities": ["text"],
         "stop_token_ids": [], "chat_template_kwargs": {}, "documents": [], "echo": False},
    ),
    "chat: fields without effect": (
        CHAT_PATH,
        {"store": True, "service_tier": "flex", "metadata": {"a": "b"}, "reasoning_effort": "low", "verbosity": "low",
         "prompt_cache_key": "k", "safety_identifier": "s", "prompt_cache_retention": "24h", "user": "u"},
    ),
    "chat: whole numbers": (CHAT_PATH, {"temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}),
    "chat: both limits": (CHAT_PATH, {"max_tokens": 4, "max_completion_tokens": 4}),
    "chat: auto without tools": (CHAT_PATH, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
    "chat: auto and null tools": (CHAT_PATH, {"tools": None, "tool_choice": "auto"}),
    "chat: none without tools": (CHAT_PATH, {"tool_choice": "none"}),
    "chat: none with tools": (CHAT_PATH, {"tools": [TOOL], "tool_choice": "none"}),
    "chat: a tool": (CHAT_PATH, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    "chat: a tool of a name alone": (
        CHAT_PATH,
        {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]},
    ),
    "chat: a schema": (
        CHAT_PATH,
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": None, "description": None, "strict": True, "schema": SCHEMA}}},
    ),
    "message: what the client got": (
        CHAT_PATH,
        talk(assistant(refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None), user()),
    ),
    "message: null everywhere": (CHAT_PATH, talk(user(tool_calls=None, tool_call_id=None, **dict.fromkeys(MESSAGE)))),
    "message: no content": (CHAT_PATH, talk(assistant(content=None), user())),
    "message: no content and no calls": (CHAT_PATH, talk(assistant(content=None, tool_calls=[]), user())),
    "message: empty content": (CHAT_PATH, talk(assistant(content=""), user(content=[]))),
    "message: a name": (CHAT_PATH, talk(user(name="bob"))),
    "message: parts for every role": (
        CHAT_PATH,
        talk({"role": "system", "content": [TEXT]}, {"role": "developer", "content": [TEXT]}, user(content=[TEXT]),
             assistant(content=[TEXT], tool_calls=[CALL]), RESULT | {"content": [TEXT]}),
    ),
    "message: a cached part": (CHAT_PATH, talk(user(content=[TEXT | {"cache_control": {"type": "ephemeral"}}]))),
    "message: a result": (CHAT_PATH, talk(assistant(content=None, tool_calls=[CALL]), RESULT | {"name": "weather"})),
    "message: an empty result": (CHAT_PATH, talk(assistant(content="", tool_calls=[CALL]), RESULT | {"content": ""})),
    "message: a call without arguments": (
        CHAT_PATH,
        talk(assistant(tool_calls=[CALL | {"type": None, "function": {"name": "weather", "arguments": None}}]), RESULT),
    ),
    "message: a call with empty arguments": (
        CHAT_PATH,
        talk(assistant(tool_calls=[CALL | {"index": 0, "function": {"name": "weather", "arguments": ""}}]), RESULT),
    ),
    "message: reasoning": (CHAT_PATH, talk(assistant(reasoning_content="x", reasoning_details=[], thinking_blocks=[]))),
    "message: of a proxy": (
        CHAT_PATH,
        talk(assistant(provider_specific_fields={}, tool_calls=[CALL | {"provider_specific_fields": None,
                                                                        "extra_content": {"a": 1}}]), RESULT),
    ),
    "message: of a parser": (
        CHAT_PATH,
        talk(assistant(parsed=None, tool_calls=[CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}]),  # type: ignore[operator]
             RESULT),
    ),
    "text: null everywhere": (TEXT_PATH, nulls_of(CompletionBody, COMPLETION, TEXT_PATH)),
    "text: the defaults": (
        TEXT_PATH, {"suffix": "", "echo": False, "best_of": 1, "n": 1, "logit_bias": {}, "stop": [], "seed": -1},
    ),
    "text: of lm-eval": (
        TEXT_PATH, {"prompt": [[72, 101]], "temperature": 0, "max_tokens": 5, "seed": 1234, "stop": ["a", "\n\n"]},
    ),
    "response: null everywhere": (RESPONSE_PATH, nulls_of(ResponsesBody, RESPONSES, RESPONSE_PATH)),
    "response: our own fields": (RESPONSE_PATH, ECHOED),
    "response: auto without tools": (RESPONSE_PATH, {"tool_choice": "auto"}),
    "response: null inside": (
        RESPONSE_PATH,
        {"text": {"format": {"type": None, "name": None}, "verbosity": None}, "reasoning": {},
         "tools": [FUNCTION | {"strict": None, "parameters": None}]},
    ),
    "response: of codex": (RESPONSE_PATH, of_codex()),
    "response: of codex that reasons": (
        RESPONSE_PATH,
        of_codex(reasoning={"effort": "medium", "summary": "auto"}, include=["reasoning.encrypted_content"],
                 text={"verbosity": "low"}, service_tier=None),
    ),
    "response: of the agents SDK": (
        RESPONSE_PATH, items() | {"include": [], "tools": [], "truncation": None, "top_logprobs": None, "store": None},
    ),
    "item: null everywhere": (
        RESPONSE_PATH,
        items(user(**dict.fromkeys(("type", "id", "status", "call_id", "name", "arguments", "output", "phase")))),
    ),
    "item: an earlier answer": (
        RESPONSE_PATH,
        items({"id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
               "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]}, user()),
    ),
    "item: earlier reasoning": (
        RESPONSE_PATH, items({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}, user()),
    ),
    "item: a call and its output": (
        RESPONSE_PATH,
        items({"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}",
               "status": "completed", "parsed_arguments": None},
              {"type": "function_call_output", "call_id": "c1", "output": "5", "id": None, "status": None}),
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {  # the body -> the start of the message
    "chat: a custom tool": (CHAT_PATH, {"tools": [{"type": "custom"}]}, "tools[0].type: only tools of type 'function'"),
    "chat: functions": (CHAT_PATH, {"functions": [{"name": "f"}]}, "functions: is not supported: use tools"),
    "text: log-probabilities of lm-eval": (
        TEXT_PATH,
        {"prompt": [[72, 101]], "temperature": 0, "max_tokens": 0, "logprobs": 1, "seed": 1234, "echo": True},
        "echo: is not supported together with logprobs",
    ),
    "text: no tokens": (TEXT_PATH, {"max_tokens": 0}, "max_tokens: must be at least 1, is 0"),
    "response: log-probabilities": (
        RESPONSE_PATH, {"include": ["message.output_text.logprobs"]}, "include: is not supported",
    ),
    "chat: too long an output": (CHAT_PATH, {"max_tokens": 100_000}, "max_tokens: "),
    "chat: too long an output, under its other name": (
        CHAT_PATH, {"max_tokens": None, "max_completion_tokens": 100_000}, "max_completion_tokens: ",
    ),
    "chat: more log-probabilities than one object may have": (
        CHAT_PATH, {"max_tokens": 8000, "n": 16, "logprobs": True, "top_logprobs": 20}, "top_logprobs: ",
    ),
    "chat: an id that would be two headers": (CHAT_PATH, {"request_id": "a\r\nset-cookie: b"}, "request_id: "),
}  # fmt: skip

PATHS = [("GET", path) for path in ("/v1/models/", "/v1/models/fake:tiny/", "/health/", "/version/")]
PATHS += [("HEAD", path) for path in ("/v1/models", "/health", "/ready")]
PATHS += [("POST", f"{path}/") for path in SMALLEST]


async def test_a_body_of_a_client_is_answered_or_refused_by_name() -> None:
    wrong = []
    async with (
        deploy(tiny_config()) as deployment,
        serving_gateway(Fleets([deployment.router.calls])) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (path, fields) in ANSWERED.items():
            answer = await http.post(path, json=SMALLEST[path] | fields)
            if answer.status_code != 200:
                wrong.append(f"{name}: {answer.text}")
        for name, (path, fields, message) in REFUSED.items():
            answer = await http.post(path, json=SMALLEST[path] | fields)
            error = answer.json().get("error") or {}
            if answer.status_code != 400 or not error["message"].startswith(message) or not error["param"]:
                wrong.append(f"{name}: {answer.status_code} {answer.text}")
        for method, path in PATHS:
            answer = await http.request(method, path, json=SMALLEST.get(path[:-1]))
            if answer.status_code != 200:
                wrong.append(f"{method} {path}: {answer.status_code} {answer.text}")
        answer = await http.request("OPTIONS", CHAT_PATH)
        if (answer.status_code, answer.headers["allow"], answer.json()["error"]["code"]) != (
            405, "POST", "method_not_supported",
        ):  # fmt: skip
            wrong.append(f"OPTIONS: {answer.text}")
    assert not wrong, "\n".join(wrong)
