"""The patterns that one text must match at once are counted by place, and too many are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from text.grammar_limits import MAX_PATTERNS, check_limits
from text.output_format import json_schema_grammar
from text.schema_patterns import MAX_GENERAL, MAX_PLACES
from text.tool_grammar import tool_grammar

MANY = MAX_PATTERNS + 1


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"x{number}"}


def has(name: str, child: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: child}}


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", **pattern(i)} for i in range(MANY)} | {f"d{MANY}": {"type": "string"}}
NAMED = {f"d{i}": {"$id": f"http://e.x/d{i}", "$ref": f"http://e.x/d{i + 1}", "pattern": f"x{i}"} for i in range(MANY)}
PATTERNS = [pattern(number) for number in range(MANY)]
TOO_MANY: dict[str, Any] = {
    "allOf": {"allOf": PATTERNS},
    "allOf in allOf": {"allOf": [{"allOf": PATTERNS[:7]}, {"allOf": PATTERNS[7:]}]},
    "a property": {"allOf": [has("a", has("b", each)) for each in PATTERNS]},
    "any property": {
        "allOf": [*(has("a", each) for each in PATTERNS[:7]), *({"additionalProperties": p} for p in PATTERNS[7:])]
    },
    "items": {"allOf": [*({"prefixItems": [each]} for each in PATTERNS[:7]), *({"items": p} for p in PATTERNS[7:])]},
    "a chain of $ref": {"$defs": CHAIN, "$ref": "#/$defs/d0"},
    "an escaped $ref": {"$defs": {"a/b": {"allOf": PATTERNS}}, "items": {"$ref": "#/%24defs/a~1b"}},
    "names": {"$defs": NAMED, "$ref": "http://e.x/d0"},
    "beside alternatives": {"allOf": PATTERNS[:-1], "anyOf": PATTERNS[-1:]},
    "formats": {"allOf": [*PATTERNS[:-1], {"format": "email"}]},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_patterns_of_one_text_are_refused(name: str) -> None:
    grammar = json_schema_grammar(TOO_MANY[name])
    lark = f"start: %json {json.dumps(TOO_MANY[name])}"
    tools = tool_grammar("hermes", [("call", TOO_MANY[name])], {}, required=False, other=json_schema_grammar(True))
    for each in (grammar, lark, tools):
        with pytest.raises(ValueError, match=f"at most {MAX_PATTERNS} patterns and formats .*here"):
            check_limits(each)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS[:-1]},
        {"anyOf": PATTERNS},
        {"type": "object", "properties": {f"p{i}": each for i, each in enumerate(PATTERNS)}},
        {"anyOf": [has("id", each) for each in PATTERNS]},
        {"properties": {"a": {"allOf": PATTERNS[:7]}, "b": {"allOf": PATTERNS[7:]}}},
        {"properties": {f"p{i}": {"additionalProperties": each} for i, each in enumerate(PATTERNS)}},
        {"$defs": {"node": {"allOf": [*PATTERNS[:5], has("next", {"$ref": "#/$defs/node"})]}, "unused": {
            "allOf": PATTERNS}}, "$ref": "#/$defs/node"},
        {"properties": {"pattern": {"const": "pattern"}, "format": {}}, "enum": ["pattern"] * MANY},
    ],
)  # fmt: skip
def test_patterns_of_different_texts_are_not_counted_together(schema: dict[str, Any]) -> None:
    check_limits(json_schema_grammar(schema))


def test_regular_expressions_that_a_lark_grammar_joins_are_counted() -> None:
    regexes = [f"/.*x{number}.*/" for number in range(MANY)]
    check_limits('start: A "&&&&&&&&&&&&&&&&" /&{20}&&&&&&&&&&&&&/ // &&&&&&&&&&&&&&\nA: ' + " & ".join(regexes[1:]))
    check_limits('start: "' + '\\"' * 99 + "&" * 99)  # a text that is not closed: llguidance refuses it
    with pytest.raises(ValueError, match="regular expressions joined by &, here 13"):
        check_limits('start: A\nA: /\n"/ & ' + " & ".join(regexes[1:]) + ' # "')
    with pytest.raises(ValueError, match="regular expressions joined by &, here 13"):
        check_limits("start: A\nA: B & " + " & ".join(regexes[:7]) + "\nB: " + " & ".join(regexes[7:]))


def test_places_and_depth_have_a_limit_too() -> None:
    """Each level doubles the number of places."""
    defs = {f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}} for i in range(40)}
    wide = {"$defs": {**defs, "d40": {"allOf": PATTERNS}}, "$ref": "#/$defs/d0"}
    with pytest.raises(ValueError, match=f"at most {MAX_PLACES} values"):
        check_limits(json_schema_grammar(wide))
    many = {"items": {"properties": {f"p{i}": pattern(i) for i in range(MAX_GENERAL + 1)}}}
    with pytest.raises(ValueError, match=f"at most {MAX_GENERAL} values inside items"):
        check_limits(json_schema_grammar(many))
    deep = {f"d{i}": has("a", {"$ref": f"#/$defs/d{i + 1}"}) for i in range(2000)}
    with pytest.raises(ValueError, match="deep"):
        check_limits(json_schema_grammar({"$defs": {**deep, "d2000": {"allOf": PATTERNS}}, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize("grammar", ["{", "{}", '{"grammars": 3}', '{"grammars": [3, {}]}', "start: %json {", "", "["])
def test_what_is_no_grammar_is_left_to_llguidance(grammar: str) -> None:
    check_limits(grammar)
