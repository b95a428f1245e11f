"""Reads the answers of OpenAI's API, whole or streamed, chat or completion, into one form. Pure.

Nothing is believed: each field may be missing, or of another type. What breaks the form is noted in `faults`. The text
of an answer is bounded by its bytes, everything else by a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

MAX_TOKENS_READ = 4096  # tokens of one answer of a checked stack; beyond: they are left out
MAX_NOTED = 8  # faults, ids, usages or ends of one such answer; beyond: they are left out
MAX_COUNT = 1 << 31  # a count of tokens in a usage of a checked stack; beyond: it is no count

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Token:
    """One output token. `margin` is the log-probability of the best token minus that of the second, if both came."""

    text: str
    logprob: float
    margin: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int
    total: int
    cached: int | None  # of the prompt; None: not said


@dataclass(slots=True)
class Answer:
    """One choice, and what came around it."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)  # empty without log-probabilities
    finish_reasons: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # each once
    num_roles: int = 0
    num_done: int = 0
    usages: list[Usage] = field(default_factory=list)
    error: str | None = None  # the type and the message of a typed error
    faults: list[str] = field(default_factory=list)

    @property
    def usage(self) -> Usage | None:
        return self.usages[-1] if self.usages else None

    @property
    def is_empty(self) -> bool:
        """No token came: no text, no log-probability, and none is counted."""
        counted = self.usage.completion if self.usage else 0
        return not (self.text or self.tokens or counted)


def load(data: bytes | str) -> object:
    """JSON as the standard has it. Raises `ValueError`, for deep nesting and for a name twice in an object too."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice in an object: readers differ in which they take")
        return found

    try:
        return json.loads(data, parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_whole(body: bytes) -> Answer:
    """The answer of a call without `stream`."""
    answer, texts = Answer(), list[str]()
    _take(answer, texts, body)
    answer.text = "".join(texts)
    return answer


def read_stream(body: bytes) -> Answer:
    """The answer of a call with `stream`, as far as it came."""
    answer, texts = Answer(), list[str]()
    for data in events_of(body):
        if answer.num_done and data != "[DONE]":
            _note(answer.faults, "an event after [DONE]")
        if data == "[DONE]":
            answer.num_done += 1
        else:
            _take(answer, texts, data)
    answer.text = "".join(texts)
    return answer


def events_of(body: bytes) -> Iterator[str]:
    """The data of each server-sent event. An event without its empty line was cut off, and is left out."""
    lines: list[str] = []
    text = body.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    for line in text.split("\n"):
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []


def _take(answer: Answer, texts: list[str], data: bytes | str) -> None:
    """`texts` collects the text: a long one in tiny events would be copied for each event."""
    try:
        message = load(data)
    except ValueError:
        _note(answer.faults, "a message is no JSON, or has a name twice")
        return
    fields = dict_of(message)
    if "error" in fields:
        answer.error = error_of(message)
        if answer.error is None:
            _note(answer.faults, "an error without type and message")
        return
    if isinstance(fields.get("id"), str):
        _note(answer.ids, str(fields["id"]))
    for choice in map(dict_of, list_of(fields.get("choices"))):
        _take_choice(answer, texts, choice)
    usage = dict_of(fields.get("usage"))
    if usage:
        _take_usage(answer, usage)


def _take_choice(answer: Answer, texts: list[str], choice: dict[str, object]) -> None:
    message = dict_of(choice.get("delta")) or dict_of(choice.get("message"))
    answer.num_roles += message.get("role") is not None
    texts += text_of(choice.get("text")), text_of(message.get("content"))
    if choice.get("finish_reason") is not None:
        _add(answer.finish_reasons, text_of(choice["finish_reason"]))
    logprobs = dict_of(choice.get("logprobs"))
    if "content" in logprobs:
        for entry in map(dict_of, list_of(logprobs["content"])):
            tops = [number_of(dict_of(top).get("logprob")) for top in list_of(entry.get("top_logprobs"))]
            _take_token(answer, entry.get("token"), entry.get("logprob"), tops)
    elif "tokens" in logprobs:
        values, tops_of_all = list_of(logprobs.get("token_logprobs")), list_of(logprobs.get("top_logprobs"))
        for place, text in enumerate(list_of(logprobs["tokens"])):
            tops = [number_of(top) for top in dict_of(_at(tops_of_all, place)).values()]
            _take_token(answer, text, _at(values, place), tops)


def _take_token(answer: Answer, text: object, value: object, tops: list[float | None]) -> None:
    logprob = number_of(value)
    if not isinstance(text, str) or logprob is None:
        _note(answer.faults, "a log-probability without token or number")
        return
    best = sorted((top for top in tops if top is not None), reverse=True)
    _add(answer.tokens, Token(text, logprob, best[0] - best[1] if len(best) > 1 else None), MAX_TOKENS_READ)


def _take_usage(answer: Answer, usage: dict[str, object]) -> None:
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    prompt, completion, total = (count_of(count, -1) for count in counts)
    cached = dict_of(usage.get("prompt_tokens_details")).get("cached_tokens")
    _add(answer.usages, Usage(prompt, completion, total, None if cached is None else count_of(cached, -1)))


def _add(kept: list[T], value: T, limit: int = MAX_NOTED) -> None:
    if len(kept) < limit:
        kept.append(value)


def _note(kept: list[str], value: str) -> None:
    if value not in kept:
        _add(kept, value)


def error_of(message: object) -> str | None:
    """`type: message` of an error in OpenAI's form; None if it has another form."""
    error = dict_of(dict_of(message).get("error"))
    kind, text = error.get("type"), error.get("message")
    if not isinstance(kind, str) or not isinstance(text, str) or not kind or not text:
        return None
    return f"{kind}: {text}"


def dict_of(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def count_of(value: object, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else otherwise


def number_of(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _at(values: list[object], place: int) -> object:
    return values[place] if place < len(values) else None
