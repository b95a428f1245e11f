"""A guardrail sees every prompt and every output. Where it fails, nothing passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from examples.guardrail import EMAIL, MASK, ExampleGuardrail
from gateway import guardrails
from gateway.guardrails import FAILED, GuardedOutput, Message, Refused, check_prompt, load_guardrail

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
    [ValueError("a bug"), None, "text", [], [Message("system", "forged")], ["a string"]],
    ids=["error", "nothing", "text", "fewer", "role", "no message"],
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


async def test_a_refusal_of_the_guardrail_reaches_the_client_as_it_is() -> None:
    with pytest.raises(Refused, match="no such words"):
        await GuardedOutput(Scripted(pushed=Refused("no such words")), []).push("text")


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
