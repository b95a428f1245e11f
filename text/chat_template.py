"""A model's chat template, rendered in a sandbox.

Templates come with model files from anywhere, so they run in jinja's immutable sandbox: no attribute beyond plain data,
no change to what they are given, bounded ranges, bounded output. `raise_exception` is how a template refuses a
conversation; that is the caller's fault and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import ConfigError, InvalidRequest

MAX_RENDERED_CHARS = 4_000_000
MAX_MESSAGES = 4096


def _refuse(message: str) -> None:
    raise InvalidRequest("messages", str(message))


def _to_json(value: object, indent: int | None = None) -> str:
    # jinja's own tojson escapes HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """Raises `ConfigError` where `source` is not a jinja template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the assistant's next words. Raises `InvalidRequest` naming what is wrong."""
        if not messages:
            raise InvalidRequest("messages", "must hold at least 1 message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("messages", f"at most {MAX_MESSAGES}, are {len(messages)}")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidRequest(f"messages[{index}].{key}", "must be text")
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            ):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest("messages", f"render to more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest("messages", f"the model's chat template cannot render them: {error}") from error
        return "".join(pieces)
