"""The calls of tools in an output are found as they arrive, and no text of the model is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_templates import FAMILIES
from text.call_object import CallObject
from text.tool_calls import TextDelta, ToolCallDelta, ToolCallParser
from text.tool_formats import FORMATS

Call = tuple[str, str]  # name, arguments
WEATHER = '{"name": "weather", "arguments": {"city": "Paris {\\"}", "days": [1, {"a": null}]}}'
WEATHER_ARGUMENTS = WEATHER.split('"arguments": ')[1][:-1]


def new_parser(tool_format: str) -> ToolCallParser:
    return ToolCallParser(FORMATS[tool_format], "call_{}".format)


def read(tool_format: str, pieces: Iterable[str]) -> tuple[str, list[Call]]:
    """The text and the calls of an output that arrives in these pieces."""
    parser, text = new_parser(tool_format), ""
    calls: list[Call] = []
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    for delta in deltas + parser.finish():
        if isinstance(delta, TextDelta):
            assert delta.text
            text += delta.text
        elif delta.id:
            assert (delta.index, delta.id, delta.arguments) == (len(calls), f"call_{len(calls)}", "")
            calls.append((delta.name, ""))
        else:
            assert (delta.index, delta.name) == (len(calls) - 1, "")
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    num_whole = sum(is_json(arguments) for _, arguments in calls)
    assert num_whole - 1 <= parser.num_complete_calls <= num_whole, "the last one may end behind its arguments"
    return text, calls


def is_json(text: str) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(text)
        return True
    return False


HERMES = {
    "no call": ("Paris is a city.", "Paris is a city.", []),
    "a call": (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", WEATHER_ARGUMENTS)]),
    "text before": (f"Yes.\n<tool_call>{WEATHER}</tool_call>", "Yes.\n", [("weather", WEATHER_ARGUMENTS)]),
    "two calls": (
        f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
        "",
        [("weather", WEATHER_ARGUMENTS), ("now", "{}")],
    ),
    "text between and after": (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call> and <tool_call>{"name": "b"}</tool_call>\nDone.',
        " and \nDone.",
        [("a", "{}"), ("b", "{}")],
    ),
    "arguments first": ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    "arguments null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "no end of the call": ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "no end of the first call": (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "half a tag": ("5 <tool_cal", "5 <tool_cal", []),
    "a tag in a tag": ('<tool_<tool_call>{"name": "f"}</tool_call>', "<tool_", [("f", "{}")]),
    "no object": ("<tool_call>weather()</tool_call>", "<tool_call>weather()</tool_call>", []),
    "an unknown key": ('<tool_call>{"nome": "f"}</tool_call>', '<tool_call>{"nome": "f"}</tool_call>', []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "a name that is no text": ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    "a list": ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    "a name without end": (f'<tool_call>{{"name": "{"f" * 300}', f'<tool_call>{{"name": "{"f" * 300}', []),
    "cut before the arguments": ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    "cut behind the arguments": ('<tool_call>{"name": "f", "arguments": {"x": 1}, "i', "", [("f", '{"x": 1}')]),
    "cut in the end": ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [("f", "{}")]),
    "half a character as the name": ('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"x": "y', "", [("f", '{"x": "y')]),
    "wrong brackets": ('<tool_call>{"name": "f", "arguments": {"x": [1}} and on', "}} and on", [("f", '{"x": [1')]),
    "a call after a malformed one": (
        '<tool_call>{"name": }</tool_call><tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": }</tool_call>',
        [("f", "{}")],
    ),
}  # fmt: skip
LLAMA = {
    "no call": ("Paris {is} a city.", "Paris {is} a city.", []),
    "a call": ('{"name": "f", "parameters": {"x": "1"}}', "", [("f", '{"x": "1"}')]),
    "after its tag": ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    "with a type": ('\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    "two calls": ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    "another object": ('{"answer": 42}', '{"answer": 42}', []),
    "an object with a name": ('{"name": "Bob"}', '{"name": "Bob"}', []),
    "an object after text": ('It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
    "text after a call": ('{"name": "f", "parameters": {}} done', " done", [("f", "{}")]),
}
MISTRAL = {
    "no call": ("[1] Paris is a city.", "[1] Paris is a city.", []),
    "a call": ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1, 2]}}]', "", [("f", '{"x": [1, 2]}')]),
    "its tag has no text": ('[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    "two calls": (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"y": 2}}]',
        "",
        [("f", "{}"), ("g", '{"y": 2}')],
    ),
    "text before": ('See: [TOOL_CALLS][{"name": "f", "arguments": {}}]', "See: ", [("f", "{}")]),
    "a list of numbers": ("[1, 2]", "[1, 2]", []),
    "no list": ('[TOOL_CALLS]{"name": "f"}', '[TOOL_CALLS]{"name": "f"}', []),
}
CASES = [
    pytest.param(tool_format, *case, id=f"{tool_format}: {name}")
    for tool_format, cases in (("hermes", HERMES), ("llama3_json", LLAMA), ("mistral", MISTRAL))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("tool_format", "output", "text", "calls"), CASES)
def test_calls_are_found_and_other_text_is_kept(tool_format: str, output: str, text: str, calls: list[Call]) -> None:
    assert read(tool_format, [output]) == (text, calls)
    assert read(tool_format, output) == (text, calls), "character by character"


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "[", "]", "{", "}", ";", ",", "\n", " ",
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": {}}', '{"a": "}\\"{"}', '"name": "g"', WEATHER, '"', "\\", "x",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    tool_format=st.sampled_from(list(FORMATS)),
    output=st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    data=st.data(),
)
def test_the_result_does_not_depend_on_the_pieces(tool_format: str, output: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=10)))
    pieces = [output[start:end] for start, end in itertools.pairwise([0, *cuts, len(output)])]
    whole = read(tool_format, [output])
    assert read(tool_format, pieces) == whole
    if not whole[1]:
        assert whole[0] == output, "without a call, every character is text"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.text("abc_", min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        max_size=3,
    )
)
def test_every_valid_call_is_returned_with_its_arguments(calls: list[tuple[str, dict[str, object]]]) -> None:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    outputs = {
        "hermes": "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in written),
        "llama3_json": "; ".join(written),
        "mistral": f"[TOOL_CALLS] [{', '.join(written)}]" if written else "",
    }
    for tool_format, output in outputs.items():
        text, found = read(tool_format, [output])
        assert (text, [(name, json.loads(arguments)) for name, arguments in found]) == ("", calls)


def test_text_before_a_call_and_arguments_stream_at_once() -> None:
    parser = new_parser("hermes")
    assert parser.push("Let me") == [TextDelta("Let me")]
    assert parser.push(" look<tool_") == [TextDelta(" look")]
    assert parser.push('call>{"name": "f", "argu') == []
    assert parser.push('ments": {"city": "Par') == [
        ToolCallDelta(0, "call_0", "f", ""),
        ToolCallDelta(0, "", "", '{"city": "Par'),
    ]
    assert parser.push('is"}') == [ToolCallDelta(0, "", "", 'is"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_there_is_a_parser_for_every_format_that_a_template_may_show() -> None:
    assert FORMATS.keys() == FAMILIES.keys()


class CountedText(str):
    """Counts the characters of all texts that slices and sums of it make."""

    num_made = 0

    def _made(self, text: str) -> CountedText:
        CountedText.num_made += len(text)
        return CountedText(text)

    def __getitem__(self, place: Any) -> CountedText:
        return self._made(str.__getitem__(self, place))

    def __add__(self, other: str) -> CountedText:
        return self._made(str.__add__(self, other))

    def __radd__(self, other: str) -> CountedText:
        return self._made(str.__add__(other, self))


@pytest.mark.parametrize(
    ("tool_format", "before", "piece"),
    [
        ("llama3_json", "", " "),
        ("mistral", "[TOOL_CALLS]", " "),
        ("hermes", '<tool_call>{"name": "f"}', " "),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', " "),
        ("hermes", "", "<tool_call>?"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_text_that_waits_is_not_copied_again_for_each_token(
    tool_format: str, before: str, piece: str, at_once: bool
) -> None:
    parser, num_pieces = new_parser(tool_format), 2000
    parser.push(before)
    CountedText.num_made = 0
    for text in [piece * num_pieces] if at_once else [piece] * num_pieces:
        parser.push(CountedText(text))
    assert CountedText.num_made < 5 * num_pieces * len(piece)


@pytest.mark.parametrize("long", ['"' + "a" * 10_000 + '"', "1" * 10_000, " " * 10_000 + "1"])
def test_long_arguments_are_not_read_character_by_character(long: str) -> None:
    with patch.object(CallObject, "read", autospec=True, side_effect=CallObject.read) as read:
        deltas = ToolCallParser(FORMATS["hermes"], str).push(
            f'<tool_call>{{"name": "f", "arguments": {{"a": {long}}}}}'
        )
    assert "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)) == f'{{"a": {long}}}'
    assert read.call_count < 100
