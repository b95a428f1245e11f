"""The names that the fields of the gRPC API have in a request over HTTP.

`http_field` knows those that every route shares. A route adds the names that depend on its request: which field asks
for the form of the output, or which item of `input` became a message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from core.errors import InvalidRequest

# A field of the gRPC API, where its name differs -> the field of the HTTP API.
_RULES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"text|token_ids", "prompt"),
        (r"stop_strings", "stop"),
        (r"output_format\..+", "output_format"),
        (r"chat", "messages"),
        (r"chat\.template_options_json", "chat_template_kwargs"),
        (r"chat\.tool_choice\.name", "tool_choice"),
        (r"chat\.(.*tool_calls\[\d+\]|tools\[\d+\])\.name", r"\1.function.name"),
        (r"chat\.(.*tool_calls\[\d+\])\.arguments_json", r"\1.function.arguments"),
        (r"chat\.(tools\[\d+\])\.parameters_json", r"\1.function.parameters"),
        (r"chat\.(.+)", r"\1"),
    )
)


def http_field(field: str) -> str:
    """ "chat.messages[3].content" is "messages[3].content". A name of the HTTP API stays as it is."""
    for pattern, name in _RULES:
        found = pattern.fullmatch(field)
        if found is not None:
            return found.expand(name)
    return field


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of a router get the name of the field that the client has sent.

    `names`: a field of the HTTP API, or the beginning of its path -> its name in this request. The longest one counts.
    """
    try:
        yield
    except InvalidRequest as error:
        field = http_field(error.field)
        for end in [len(field), *reversed([mark.start() for mark in re.finditer(r"[.\[]", field)])]:
            if field[:end] in names:
                field = names[field[:end]] + field[end:]
                break
        raise InvalidRequest(field, error.message) from None
