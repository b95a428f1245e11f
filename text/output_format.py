"""From the output format of a client to a grammar, in llguidance's Lark with `%json` for schemas.

The grammar goes to the workers as it is. `text/grammars.py` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

# Between two parts of a JSON text. Without a limit, a model that prefers spaces writes them to the end of its output.
JSON_SPACE = r"[ \t\n]{0,20}"


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """`schema` is a parsed JSON Schema; true = any JSON value."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}  # the second is refused by name
    grammar: str = LLMatcher.grammar_from_json_schema(dict(schema), overrides={"whitespace_pattern": JSON_SPACE})
    return grammar


def json_object_grammar() -> str:
    return json_schema_grammar({"type": "object"})


def regex_grammar(regex: str) -> str:
    grammar: str = LLMatcher.grammar_from_regex(regex)
    return grammar


def choice_grammar(texts: Sequence[str]) -> str:
    """One terminal: as rules, each text would be an item in a row of the parser."""
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
