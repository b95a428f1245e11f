"""A guardrail: refuses prompts with a listed word, and masks e-mail addresses in the output.

    PYTHONPATH=. tandem serve --http 8000 --config tandem.toml

with these lines in tandem.toml:

    [gateway]
    guardrail = "examples.guardrail:build"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.guardrails import Message, Refused

REFUSED_WORDS = frozenset({"nitroglycerin", "sarin"})
EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]+(\.[\w-]+)+")
MASK = "[e-mail]"
OPEN_END = re.compile(r"[\w.+@-]{1,320}$")  # an end of the text that later text may make an address


class MaskEmails:
    """Holds back the last word of the text so far, because the word may be part of an address."""

    def __init__(self) -> None:
        self._held = ""

    async def push(self, text: str) -> str:
        text = self._held + text
        end = OPEN_END.search(text)
        cut = end.start() if end else len(text)
        self._held = text[cut:]
        return EMAIL.sub(MASK, text[:cut])

    async def finish(self) -> str:
        return EMAIL.sub(MASK, self._held)


class ExampleGuardrail:
    async def check_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        for message in messages:
            for word in re.findall(r"[^\W_]+", message.text.lower()):
                if word in REFUSED_WORDS:
                    raise Refused(f"prompts about {word} are not answered here")
        return messages

    def open_output(self, _: Sequence[Message]) -> MaskEmails:
        return MaskEmails()


def build() -> ExampleGuardrail:
    return ExampleGuardrail()
