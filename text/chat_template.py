"""A model's chat template.

Templates come with model files from anywhere, so they run in a sandbox (`text/template_sandbox.py`). A template
refuses a conversation by `raise_exception`: that is the caller's fault and says so.
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
    """Raises `ConfigError` where `source` is not a jinja template, or uses what the sandbox does not have."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the model's chat template has {len(source)} characters, over {MAX_TEMPLATE_CHARS}")
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token
        try:
            self._template = environment.from_string(environment.metered(source))
        except Exception as error:  # any source must end here: jinja compiles it to Python, which has errors of its own
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
        meter.set(Meter())
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            ):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest("messages", f"render to more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise whatever Python does, RecursionError and MemoryError too
            shown = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template cannot render them: {shown}") from error
        return "".join(pieces)
