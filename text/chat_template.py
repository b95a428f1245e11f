"""Renders a chat with the chat template of a model.

Templates come with model files from anywhere, so they run in a sandbox (`text/template_sandbox.py`). A template refuses
a conversation with `raise_exception`, which raises `InvalidRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import ConfigError, InvalidRequest
from text.template_sandbox import MAX_VALUE_SIZE, Meter, TemplateSandbox, meter

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = MAX_VALUE_SIZE
MAX_MESSAGES = 4096


def _refuse(message: str) -> None:
    raise InvalidRequest("messages", str(message))


class ChatTemplate:
    """Raises `ConfigError` if `source` is not a jinja template, or uses a feature that the sandbox lacks."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"the model's chat template must have at most {MAX_TEMPLATE_CHARS} characters, has {len(source)}"
            )
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token
        try:
            self._template = environment.from_string(environment.metered(source))
        except Exception as error:  # jinja compiles the template to Python, which may raise any exception
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the next message of the assistant. Raises `InvalidRequest`, which names the field."""
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
            for piece in self._template.generate(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            ):
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
