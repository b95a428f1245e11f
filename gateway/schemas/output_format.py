"""The form of the output that a request asks for: `response_format` of OpenAI, and vLLM's names for the same.

The router checks schemas, expressions and grammars.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from core.errors import quoted
from gateway.errors import ApiError, refused
from gateway.schemas.base import Schema, items
from gateway.schemas.fields import FORMAT, check_extra
from tandem_client.stubs.inference_pb2 import Choices, OutputFormat

MAX_CHOICE_TEXTS = 1024
Choice = Annotated[list[str], items(MAX_CHOICE_TEXTS)]


class JsonSchema(Schema):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Schema):
    """vLLM's `structured_outputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None


class FormatFields(Schema):
    """The fields of completions and chat completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None


def output_format_of(body: FormatFields) -> tuple[OutputFormat | None, list[str]]:
    """The format, and warnings. Raises `ApiError` for more than one format."""
    found: dict[str, OutputFormat] = {}
    warnings: list[str] = []
    if body.response_format is not None:
        given = body.response_format
        warnings += check_extra(given.model_extra, {}, "response_format.")
        schema = given.json_schema
        if schema is not None:
            warnings += check_extra(schema.model_extra, {}, "response_format.json_schema.")
        value = None if schema is None else schema.schema_
        wanted = response_format(given.type, value, "response_format", "response_format.json_schema.schema")
        if wanted is not None:
            found["response_format"] = wanted
    structured = body.structured_outputs
    if structured is not None:
        warnings += check_extra(structured.model_extra, FORMAT, "structured_outputs.")
        if structured.json_object:
            found["structured_outputs.json_object"] = OutputFormat(json_object=True)
        found |= _vllm_formats("structured_outputs.", structured.json_, structured.regex, structured.choice,
                               structured.grammar)  # fmt: skip
    found |= _vllm_formats("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if len(found) > 1:
        raise refused(list(found)[1], f"cannot be combined with {next(iter(found))}: an output has one form")
    return next(iter(found.values()), None), warnings


def format_field(body: FormatFields) -> str:
    """The field that asks for the form of the output. A tool has one, too."""
    response, structured = body.response_format, body.structured_outputs
    given = {
        "response_format": response is not None and response.type != "text",
        "structured_outputs": structured is not None,
        "guided_json": body.guided_json is not None,
        "guided_regex": body.guided_regex is not None,
        "guided_choice": body.guided_choice is not None,
        "guided_grammar": body.guided_grammar is not None,
    }
    return next((name for name, is_given in given.items() if is_given), "tools")


def response_format(
    kind: str, schema: dict[str, Any] | bool | None, path: str, schema_path: str
) -> OutputFormat | None:
    """None for text. The paths name the fields in errors."""
    match kind:
        case "text":
            return None
        case "json_object":
            return OutputFormat(json_object=True)
        case "json_schema":
            if schema is None:
                raise refused(schema_path, "is required", "missing_required_parameter")
            return OutputFormat(json_schema=_json(schema))
        case _:
            raise refused(f"{path}.type", f"must be text, json_object or json_schema, is {quoted(kind)}")


def _vllm_formats(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, OutputFormat]:
    found = {}
    if schema is not None:
        found[f"{prefix}json"] = OutputFormat(json_schema=schema if isinstance(schema, str) else _json(schema))
    if regex is not None:
        found[f"{prefix}regex"] = OutputFormat(regex=regex)
    if choice is not None:
        found[f"{prefix}choice"] = OutputFormat(choices=Choices(texts=choice))
    if grammar is not None:
        found[f"{prefix}grammar"] = OutputFormat(lark=grammar)
    return found


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except ValueError as error:  # a schema that is nested too deeply, or has NaN
        raise ApiError(400, f"the JSON schema cannot be written: {error}", code="invalid_value") from error
