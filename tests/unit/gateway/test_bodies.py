"""The work for a body is bounded: one error for each list, a bound of values, and no long body on the loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from core.config import GatewayConfig
from gateway.errors import ApiError, api_error
from gateway.http.body import WaitingBodies
from gateway.routes.calls import _read, read_body
from gateway.routes.tokens import DetokenizeBody, TokenizeBody
from gateway.schemas import json_size
from gateway.schemas.base import Schema
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.json_size import MAX_BARE_BYTES, MAX_DIGITS, MAX_WEIGHT, check_size, count_values
from gateway.schemas.responses import ResponsesBody, ResponseTool
from runtime.validation_threads import MAX_SHORT_BYTES, ValidationThreads

BODIES = (ChatBody, CompletionBody, ResponsesBody, ResponseTool, TokenizeBody, DetokenizeBody)


def parts_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a core schema, with the names that lead to it."""
    if isinstance(schema, dict):
        yield path, schema
        for name, part in schema.items():
            yield from parts_of(part, f"{path}.{name}")
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from parts_of(part, path)


@pytest.mark.parametrize("body", BODIES)
def test_each_list_of_a_schema_is_bounded_and_ends_at_its_first_wrong_item(body: type[Schema]) -> None:
    for path, part in parts_of(body.__pydantic_core_schema__):
        is_list = part.get("type") in ("list", "set", "tuple")
        is_map = part.get("type") == "dict" and part["values_schema"]["type"] != "any"  # no value of those is wrong
        if is_list or is_map:
            assert part.get("fail_fast"), path
            assert part.get("max_length"), path


def filled(opening: str, item: str, closing: str, num: int = 10_000) -> bytes:
    return f"{opening}{','.join([item] * num)}{closing}".encode()


CHAT = '{"messages": [{"role": "user", "content": "a"}], '


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (ChatBody, filled('{"messages": [{"role": "user", "content": [', "1", "]}]}"), "messages[0].content[0]"),
        (ChatBody, filled('{"messages": [', "1", "]}"), "messages[0]"),
        (ChatBody, filled(CHAT + '"tools": [', "1", "]}"), "tools[0]"),
        (ChatBody, filled(CHAT + '"stop_token_ids": [', '""', "]}"), "stop_token_ids[0]"),
        (ChatBody, filled(CHAT + '"guided_choice": [', "1", "]}"), "guided_choice[0]"),
        (CompletionBody, filled('{"prompt": "a", "stop": [', "1", "]}"), "stop[0]"),
        (CompletionBody, filled('{"prompt": "a", "stop": [', '"a"', "]}"), "stop"),
        (ResponsesBody, filled('{"input": [', "1", "]}"), "input[0]"),
        (ResponsesBody, filled('{"input": "a", "tools": [', "1", "]}"), "tools[0]"),
        (DetokenizeBody, filled('{"tokens": [', '""', "]}"), "tokens[0]"),
        (
            ChatBody,
            filled(CHAT + '"logit_bias": {', ",".join(f'"a{n}": 1' for n in range(9999)), "}}", 1),
            "logit_bias.a0",
        ),
    ],
)
def test_a_list_of_wrong_items_makes_one_error(schema: type[Schema], body: bytes, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(body)
    assert caught.value.error_count() <= 2  # a union has one for each alternative
    assert api_error(caught.value).param == param


@pytest.mark.parametrize(("name", "num_chars"), [("model", 1024), ("user", 256), ("cache_salt", 256)])
@pytest.mark.parametrize("schema", BODIES)
def test_a_text_that_names_something_is_bounded(schema: type[Schema], name: str, num_chars: int) -> None:
    if name not in schema.model_fields:
        return
    validator = schema.__pydantic_validator__
    validator.validate_assignment(schema.model_construct(), name, "x" * num_chars)
    with pytest.raises(ValidationError, match=f"at most {num_chars} characters") as caught:
        validator.validate_assignment(schema.model_construct(), name, "x" * (num_chars + 1))
    refusal = api_error(caught.value)
    assert (refusal.param, "x" * 9 in refusal.message) == (name, False)


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        (filled('{"tokens": [', "1", "]}", MAX_WEIGHT - 28), True),
        (filled('{"tokens": [', "1", "]}", MAX_WEIGHT - 27), False),
        (filled('{"x": [', "{}", "]}", MAX_WEIGHT // 10), True),
        (filled('{"x": [', "{}", "]}", MAX_WEIGHT // 9), False),
        (filled('{"x": [', "[]", "]}", MAX_WEIGHT // 9), False),
        (filled('{"x": [', '""', "]}", MAX_WEIGHT // 6), True),
        (filled('{"x": [', '""', "]}", MAX_WEIGHT // 5), False),
        (filled("{", '"a":1', "}", MAX_WEIGHT // 14), True),
        (filled("{", '"a":1', "}", MAX_WEIGHT // 12), False),
        (filled('{"a": "%s", "x": [' % ("[" * MAX_WEIGHT), "[]", "]}", MAX_WEIGHT // 9), False),
        (b"[" * (MAX_WEIGHT // 4), False),
        (b'{"prompt": "%b"}' % (rb"\"[{:,\\" * MAX_WEIGHT), True),
        (b'{"prompt": "%b"}' % (rb"\"" * MAX_WEIGHT), True),
        (b'{"prompt": "%b"}' % (b"1" * MAX_BARE_BYTES), True),
        (filled('{"x": [', "1" * MAX_DIGITS, "]}", MAX_BARE_BYTES // (MAX_DIGITS + 1) - 1), True),
        (filled('{"x": [', "1" * MAX_DIGITS, "]}", MAX_BARE_BYTES // (MAX_DIGITS + 1) + 1), False),
        (filled('{"x": [', "1" * (MAX_DIGITS + 1), "]}"), False),
    ],
)
def test_the_values_outside_of_texts_are_bounded(body: bytes, accepted: bool) -> None:
    if accepted:
        check_size(body)
        return
    with pytest.raises(ApiError, match=r"^body: must have at most") as caught:
        check_size(body)
    assert caught.value.status == 400


TEXTS = st.text(alphabet='\\",:[{a', max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Commas, texts with keys, and keys with lists and objects."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    commas, texts, keys = (sum(numbers) for numbers in zip((max(0, len(value) - 1), 0, 1), *inner, strict=True))
    return (commas, texts + len(value), keys + len(value)) if isinstance(value, dict) else (commas, texts, keys)


@given(value=VALUES, part_bytes=st.integers(1, 9))
def test_values_are_counted_however_the_body_is_divided(value: Any, part_bytes: int) -> None:
    with patch.object(json_size, "PART_BYTES", part_bytes):
        size = count_values(json.dumps(value).encode())
    assert (size.num_values - 1, size.num_texts, size.num_keys) == counts(value)


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 65, 1000])
@pytest.mark.parametrize("num_digits", [MAX_DIGITS, MAX_DIGITS + 1])
@pytest.mark.parametrize("form", ["{}", "0.{}", "1e-{}", '"a", {}', "{}, 1"])
def test_a_long_number_is_found_however_the_body_is_divided(form: str, num_digits: int, part_bytes: int) -> None:
    body = f"[{form.format('7' * num_digits)}]".encode()
    with patch.object(json_size, "PART_BYTES", part_bytes):
        assert count_values(body).has_long_number == (num_digits > MAX_DIGITS)


def test_digits_of_different_numbers_and_of_texts_are_no_long_number() -> None:
    body = json.dumps({"1" * 99: ["2" * 99, 3 * 10**63, 4 * 10**63, {"5" * 60: 6}]}).encode()
    assert not count_values(body).has_long_number


@pytest.mark.parametrize(
    ("schema", "opening"),
    [
        (ChatBody, CHAT + '"chat_template_kwargs": {"a": ['),
        (TokenizeBody, CHAT + '"chat_template_kwargs": {"a": ['),
        (ChatBody, CHAT + '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": ['),
        (CompletionBody, '{"prompt": "a", "guided_json": {"a": ['),
        (ResponsesBody, '{"input": "a", "tools": [{"type": "function", "name": "f", "output_schema": {"a": ['),
    ],
)
def test_a_body_with_long_numbers_is_refused_before_it_is_parsed(schema: type[Schema], opening: str) -> None:
    with pytest.raises(ApiError, match="at most 64 digits in a row") as caught:
        _read(filled(opening, "9" * 4299, "", 970), schema, lambda body: body)
    assert caught.value.status == 400


@pytest.fixture
def threads() -> Iterator[ValidationThreads]:
    threads = ValidationThreads(max_pending=1)
    yield threads
    threads.close()


@pytest.mark.parametrize(
    ("body", "in_thread"),
    [
        (b'{"prompt": "%b"}' % (b"a" * 15_000), False),
        (b'{"prompt": "%b"}' % (b"a" * MAX_SHORT_BYTES), True),
        (filled('{"prompt": [', "1", "]}", 200), False),
        (filled('{"prompt": [', "1", "]}", 300), True),
    ],
)
async def test_a_body_with_much_work_is_read_in_a_thread(
    threads: ValidationThreads, body: bytes, in_thread: bool
) -> None:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    config = GatewayConfig(default_timeout_s=5.0)
    app = SimpleNamespace(state=SimpleNamespace(threads=threads, config=config, waiting_bodies=WaitingBodies()))
    request = Request({"type": "http", "method": "POST", "headers": [], "app": app}, receive)
    _, thread = await read_body(request, CompletionBody, lambda _: threading.get_ident())
    assert (thread != threading.get_ident()) == in_thread
