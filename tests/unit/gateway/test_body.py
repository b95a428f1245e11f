"""The body of a request: its bytes, seconds and work are bounded, alone and together with all other bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.errors import QueueFull
from gateway.errors import ApiError, ClientGone, api_error
from gateway.http import body
from gateway.http.body import BodyReader, WaitingBodies
from gateway.http.owner import owner_of
from gateway.routes.calls import _read, read_body
from gateway.routes.tokens import DetokenizeBody, TokenizeBody
from gateway.schemas import json_size
from gateway.schemas.base import Schema
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.json_size import MAX_BARE_BYTES, MAX_DIGITS, MAX_WEIGHT, check_size, count_values
from gateway.schemas.responses import ResponsesBody, ResponseTool
from runtime.owner_ledger import Owner
from runtime.validation_threads import MAX_SHORT_BYTES
from tests.unit.gateway.test_calls import request_with


class Upload:
    """A body that arrives part by part; an empty part is the last one."""

    def __init__(self, reader: BodyReader, length: str = "", host: str = "here", key: str = "") -> None:
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        headers = [(b"content-length", length.encode())] if length else []
        scope = {"headers": [*headers, (b"authorization", b"Bearer " + key.encode())], "client": (host, 1)}
        self.reading = asyncio.create_task(reader.read(scope, self._receive))

    async def sends(self, *parts: bytes | None) -> None:
        self.send_soon(*parts)
        for _ in range(5 + len(parts)):
            await asyncio.sleep(0)

    def send_soon(self, *parts: bytes | None) -> None:
        for part in parts:
            self._parts.put_nowait(part)

    async def _receive(self) -> dict[str, Any]:
        part = await self._parts.get()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    async def refusal(self) -> tuple[int, str | None]:
        with pytest.raises(ApiError) as caught:
            await self.reading
        return caught.value.status, caught.value.code


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> BodyReader:
    """All its bodies have room for 100 bytes."""
    monkeypatch.setattr(body, "MAX_READING_BYTES", 100)
    return BodyReader(1000)


@pytest.mark.parametrize(("length", "parts"), [("11", []), ("9" * 5000, []), ("", [b"123456", b"789012"])])
async def test_a_body_over_the_limit_is_refused_by_its_length_or_its_parts(length: str, parts: list[bytes]) -> None:
    upload = Upload(BodyReader(10), length)
    await upload.sends(*parts)
    assert await upload.refusal() == (413, "request_too_large")


async def test_the_last_part_counts_like_the_others() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 11, "more_body": False}

    with pytest.raises(ApiError) as caught:
        await BodyReader(10).read({"headers": []}, receive)
    assert caught.value.status == 413


async def test_a_client_that_leaves_ends_its_body() -> None:
    upload = Upload(BodyReader(10))
    await upload.sends(b"1", None)
    with pytest.raises(ClientGone):
        await upload.reading


async def test_the_time_of_a_body_grows_with_its_bytes_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def note(_: asyncio.Timeout, when: float) -> None:
        times.append(when - start)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", note)
    start = asyncio.get_running_loop().time()
    upload = Upload(BodyReader(10**9))
    second = b"x" * body.LEAST_BYTES_PER_S
    await upload.sends(b"x", second, second, 100 * second, b"")
    await upload.reading
    assert times == pytest.approx([10, 10, 11, 12, 60, 60], abs=0.5)


async def test_a_body_that_is_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "FIRST_BYTES_S", 0.0)
    assert await Upload(BodyReader(10)).refusal() == (408, "timeout")


async def test_the_largest_body_makes_room_for_the_others(reader: BodyReader) -> None:
    small, large, other = Upload(reader), Upload(reader), Upload(reader)
    await small.sends(b"x" * 30)
    await large.sends(b"x" * 60)
    await other.sends(b"x" * 20)
    assert await large.refusal() == (503, "overloaded")
    await small.sends(b"")
    await other.sends(b"x" * 30, b"")
    assert (len(await small.reading), len(await other.reading)) == (30, 50)


async def test_bodies_that_grow_while_one_is_given_up_are_read_on(reader: BodyReader) -> None:
    large, *others = (Upload(reader) for _ in range(6))
    await large.sends(b"x" * 90)
    for other in others:
        await other.sends(b"x")
    for other in others:  # in as many turns of the loop
        other.send_soon(b"x" * 12, b"")
        await asyncio.sleep(0)
    assert await large.refusal() == (503, "overloaded")
    assert [len(await other.reading) for other in others] == [13] * 5


@pytest.mark.parametrize("kind", ["host", "key"])
async def test_many_small_bodies_of_one_client_do_not_cost_the_body_of_another(reader: BodyReader, kind: str) -> None:
    honest = Upload(reader, **{kind: "honest"})
    hostile = [Upload(reader, **{kind: "hostile"}) for _ in range(15)]
    await honest.sends(b"x" * 30)
    for each in hostile:
        await each.sends(b"x" * 6)
    await honest.sends(b"x" * 10, b"")
    assert len(await honest.reading) == 40
    assert [await each.refusal() for each in hostile if each.reading.done()] == [(503, "overloaded")] * 5


OWNERS = st.tuples(st.sampled_from(["here", "there"]), st.sampled_from(["", "key"]))
STEPS = st.sampled_from(["cancel", "leave", "end", "give up"]) | st.integers(1, 60)


@given(
    owners=st.lists(OWNERS, min_size=1, max_size=6), steps=st.lists(st.tuples(st.integers(0, 5), STEPS), max_size=40)
)
async def test_every_byte_of_a_body_is_counted_once_and_given_back_however_the_body_ends(
    owners: list[tuple[str, str]], steps: list[tuple[int, str | int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MAX_READING_BYTES", 100)
        reader = BodyReader(80)
        uploads = [Upload(reader, host=host, key=key) for host, key in owners]
        for number, step in steps:
            upload = uploads[number % len(uploads)]
            match step:
                case "cancel":
                    upload.reading.cancel()
                case "leave":
                    await upload.sends(None)
                case "end":
                    await upload.sends(b"x", b"")
                case "give up":  # by a neighbour that ends in the same turn of the loop
                    upload.send_soon(b"x" * 79)
                    uploads[0].send_soon(b"x" * 30, b"")
                case int():
                    upload.send_soon(b"x" * step)
            await asyncio.sleep(0)
            reader.check()
        for upload in uploads:
            await upload.sends(None)
        await asyncio.gather(*(upload.reading for upload in uploads), return_exceptions=True)
        reader.check()
        assert not reader._reading
        assert reader._ledger.total == 0


@given(st.lists(st.tuples(OWNERS, st.integers(0, 70), st.booleans()), max_size=30))
def test_waiting_bodies_never_exceed_their_room_and_give_it_back(
    steps: list[tuple[tuple[str, str], int, bool]],
) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as every_body:
        patch.setattr(body, "MAX_WAITING_BYTES", 100)
        waiting, held = WaitingBodies(), list[tuple[contextlib.ExitStack, str, str, int]]()
        for (host, key), size, ends_one in steps:
            if ends_one and held:
                held.pop(size % len(held))[0].close()
            stack = every_body.enter_context(contextlib.ExitStack())
            with contextlib.suppress(QueueFull):
                scope = {"client": (host, 1), "headers": [(b"authorization", b"Bearer " + key.encode())]}
                stack.enter_context(waiting.hold(scope, size))
                held.append((stack, host, key, size))
            waiting.check()
            assert waiting._ledger.total == sum(num_bytes for *_, num_bytes in held)
            assert waiting._ledger.of_host((host, "")) == sum(each[3] for each in held if each[1] == host)
            assert len(waiting._ledger._by_owner) == len({each[1:3] for each in held if each[3]})
        every_body.close()
        assert waiting._ledger.total == 0


@pytest.mark.parametrize("spelling", ["Bearer {}", "bearer {}", "BEARER    {}", "Bearer {}  "])
def test_a_key_is_one_owner_however_its_header_is_spelled(spelling: str) -> None:
    def owner(*values: str) -> Owner:
        client = ("2001:db8::7", 1)
        return owner_of({"client": client, "headers": [(b"authorization", value.encode()) for value in values]})

    assert owner(spelling.format("k")) == owner("Bearer k") != owner("Bearer K")
    assert owner() == owner(spelling.format("k"), "Bearer k") == owner("Basic k") == ("2001:db8::/64", "")
    assert len({owner(f"Bearer {'k' * size}")[1] for size in (1, 60_000)}) == 2
    assert len(owner(f"Bearer {'k' * 60_000}")[1]) == 64, "a long key takes no room"


# ---- The work for a body is bounded: one error for each list, a bound of values, and no long body on the loop.

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
        (CompletionBody, filled('{"prompt": "a", "stop": [', '"a"', "]}"), "stop"),
        (ResponsesBody, filled('{"input": [', "1", "]}"), "input[0]"),
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


def test_a_body_with_long_numbers_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ApiError, match="at most 64 digits in a row") as caught:
        _read(filled('{"prompt": "a", "guided_json": {"a": [', "9" * 4299, "", 970), CompletionBody, lambda body: body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "in_thread"),
    [
        (b'{"prompt": "%b"}' % (b"a" * 15_000), False),
        (b'{"prompt": "%b"}' % (b"a" * MAX_SHORT_BYTES), True),
        (filled('{"prompt": [', "1", "]}", 200), False),
        (filled('{"prompt": [', "1", "]}", 300), True),
    ],
)
async def test_a_body_with_much_work_is_read_in_a_thread(body: bytes, in_thread: bool) -> None:
    _, thread = await read_body(request_with(body=body), CompletionBody, lambda _: threading.get_ident())
    assert (thread != threading.get_ident()) == in_thread
