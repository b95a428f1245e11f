"""Renders a chat with the chat template of a model.

Templates come with model files from anywhere, so they run in a sandbox (`text/template_sandbox.py`). A template refuses
a conversation with `raise_exception`, which raises `InvalidRequest`. `strftime_now` gives a template the date.

The templates of models with images loop over the parts of a content, and would show nothing of a plain text. A template
that shows a probe as a list of parts only gets each content as such a list.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from jinja2 import meta

from core.errors import ConfigError, InvalidRequest
from text.chat import Chat
from text.template_meter import MAX_VALUE_SIZE, Meter, check_content, meter
from text.template_sandbox import TemplateSandbox

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = MAX_VALUE_SIZE
MAX_MESSAGES = 4096
MAX_DATE_FORMAT_CHARS = 64
_PROBE = "probe"

# tool_format -> what a template that shows this format to its model contains, one behind the other
_TOOL_FORMATS = {
    "hermes": (re.compile("<tool_call>"),),
    "mistral": (re.compile(r"\[TOOL_CALLS\]"),),
    "llama3_json": (re.compile(r'\{\\?"name\\?":'), re.compile(r'"parameters\\?"\s*:')),
}


def _shows(source: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    """One expression for all of `patterns` would search the rest of the source from each place of the first."""
    position = 0
    for pattern in patterns:
        found = pattern.search(source, position)
        if found is None:
            return False
        position = found.end()
    return True


def _refuse(message: object) -> None:
    check_content(message)
    raise InvalidRequest("messages", str(message))


def _date(date_format: str) -> str:
    if len(date_format) > MAX_DATE_FORMAT_CHARS or re.search(r"\d{3}", date_format):  # "%999d" is padded
        raise InvalidRequest("messages", "the chat template formats the date with a format that is too long")
    return time.strftime(date_format)


class ChatTemplate:
    """Raises `ConfigError` if `source` is not a jinja template, or uses a feature that the sandbox lacks."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"the model's chat template must have at most {MAX_TEMPLATE_CHARS} characters, has {len(source)}"
            )
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _date
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token
        try:
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(environment.metered(source))
        except Exception as error:  # jinja compiles the template to Python, which may raise any exception
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error
        formats = [name for name, patterns in _TOOL_FORMATS.items() if _shows(source, patterns)]
        self.tool_format = formats[0] if formats and self.knows_tools else ""
        self._knows_developer = "developer" in source
        self.reserved = frozenset({"messages", "tools", "add_generation_prompt", *special_tokens, *environment.globals})
        self._takes_parts = False
        if not self._shows_text():
            self._takes_parts = True
            self._takes_parts = self._shows_text()

    def _shows_text(self) -> bool:
        try:
            return _PROBE in self.render(Chat([{"role": "user", "content": _PROBE}]))
        except InvalidRequest:
            return False

    def render(self, chat: Chat) -> str:
        """The prompt for the next message of the assistant. Raises `InvalidRequest`, which names the field."""
        messages = chat.messages
        if not messages:
            raise InvalidRequest("messages", "must have at least 1 message, has 0")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("messages", f"must have at most {MAX_MESSAGES} messages, has {len(messages)}")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidRequest(
                        f"messages[{index}].{key}", f"must be text, is {type(message.get(key)).__name__}"
                    )
        pieces: list[str] = []
        num_chars = 0
        meter.set(Meter())
        try:
            for piece in self._template.generate(self._variables(chat)):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest("messages", f"must render to at most {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise any exception, also RecursionError and MemoryError
            shown = str(error) or type(error).__name__
            raise InvalidRequest(
                "messages", f"the model's chat template cannot render the messages: {shown}"
            ) from error
        return "".join(pieces)

    def _variables(self, chat: Chat) -> dict[str, object]:
        messages = [dict(message) for message in chat.messages]
        if not self._knows_developer:
            for message in messages:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if self._takes_parts:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return {
            "documents": None,
            **chat.options,
            **self._special_tokens,
            "messages": messages,
            "tools": list(chat.tools) or None,
            "add_generation_prompt": True,
        }
