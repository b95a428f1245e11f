"""Grammars for outputs that call tools, in the format that the chat template of the model shows (text/tool_formats.py).

Where calls are required, the output is calls from its first token. Else it is any text, and what follows the opening
tag of a call is a call; a call without a tag (llama3_json) is left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from text.output_format import JSON_SPACE
from text.tool_formats import FORMATS, ToolFormat

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = r"/(.|\n)*/"
_NOTES = ("description", "title", "default", "examples", "$comment")
_CHILDREN = ("properties", "patternProperties", "$defs", "definitions")  # schemas by names that are no keywords


def tool_grammar(
    tool_format: str,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    special_tokens: Mapping[str, int],
    *,
    required: bool,
    single: bool = False,
    other: str = "",
) -> str:
    """`tools`: names and JSON Schemas of arguments. `other`: the grammar of an output without calls; "" = any text.

    Returns "" where nothing can be forced.
    """
    form = FORMATS[tool_format]
    is_special = form.tag in special_tokens
    tag = f"<[{special_tokens[form.tag]}]>" if is_special else _quoted(form.tag)
    after = _quoted(form.after)
    if form.end in special_tokens:
        after = f"{_quoted(form.after.removesuffix(form.end))} <[{special_tokens[form.end]}]>"
    lines = [f"call_{index}: {_call(form, index, name)} {after}" for index, (name, _) in enumerate(tools)]
    lines += [f"arguments_{index}: %json {_schema(schema)}" for index, (_, schema) in enumerate(tools)]
    lines.append("body: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    opening = f"{tag} " if form.needs_tag else ""
    if form.is_list:
        more = "" if single else f" ({_quoted(form.separator)} body)*"
        lines.append(f'calls: {opening}"[" body{more} "]"')
    else:
        more = "" if single else f" ({_quoted(form.separator)} {opening}body)*"
        lines.append(f"calls: {opening}body{more}")
    if required:
        return "\n".join(["start: calls", *lines])
    if other:
        grammars = [{"name": "start", "lark_grammar": "\n".join(["start: calls | @other", *lines])}]
        return json.dumps({"grammars": [*grammars, *_named(other)]})
    if not form.needs_tag and not is_special:
        return ""
    lines.append(f"TEXT: {_ANY_TEXT}")
    rest = '"[" body' + ("" if single else f" ({_quoted(form.separator)} body)*") + ' "]"' if form.is_list else "body"
    if is_special:
        first = [f"start: TEXT | TEXT {tag} {rest}" if single or form.is_list else f"start: TEXT ({tag} {rest} TEXT)*"]
    else:
        repeat = "?" if single else "*"
        first = [f"start: tagged{repeat} TEXT", f"tagged: opening {rest}", f"opening[lazy]: TEXT {tag}"]
    return "\n".join([*first, *lines])


def _call(form: ToolFormat, index: int, name: str) -> str:
    before = f"{form.before_name}{json.dumps(name)}{form.before_arguments}"
    return f"{_quoted(before)} arguments_{index}"


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**_without_notes(schema), "x-guidance": {"whitespace_pattern": JSON_SPACE}}, ensure_ascii=False)


def _without_notes(schema: Any) -> Any:
    """Descriptions are for the model, and are often most of a schema."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_notes_of(key, value) for key, value in schema.items() if key not in _NOTES}


def _without_notes_of(key: str, value: Any) -> Any:
    if key in ("const", "enum"):
        return value
    if key in _CHILDREN and isinstance(value, dict):
        return {name: _without_notes(child) for name, child in value.items()}
    return _without_notes(value)


def _named(grammar: str) -> list[dict[str, Any]]:
    """A grammar of `text.output_format` under the name that the start rule uses."""
    if grammar.startswith("{"):
        (only,) = json.loads(grammar)["grammars"]
        return [{**only, "name": "other"}]
    return [{"name": "other", "lark_grammar": grammar}]


def _quoted(text: str) -> str:
    return json.dumps(text)
