"""Draws the fields without effect of gateway/schemas/fields.py into docs/gateway.md: `python -m docs.gateway_fields`.

tests/unit/gateway/test_fields.py compares the document with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from gateway.routes.tokens import TOKENIZE
from gateway.schemas.fields import (
    CALL,
    CHAT,
    COMPLETION,
    FORMAT,
    ITEM,
    MESSAGE,
    PART,
    RESPONSES,
    SHARED,
    TOOL,
    FieldRule,
)

DOCUMENT = Path(__file__).resolve().parent / "gateway.md"

GROUPS: dict[str, Mapping[str, FieldRule]] = {
    "every generating route": SHARED,
    "/v1/chat/completions": {name: rule for name, rule in CHAT.items() if SHARED.get(name) is not rule},
    "/v1/completions": {name: rule for name, rule in COMPLETION.items() if SHARED.get(name) is not rule},
    "/v1/responses": {name: rule for name, rule in RESPONSES.items() if SHARED.get(name) is not rule},
    "/tokenize": TOKENIZE,
    "a chat message": MESSAGE,
    "an item of input": ITEM,
    "a part of a content": PART,
    "structured_outputs": FORMAT,
    "a call of a tool": CALL,
    "a tool": TOOL,
}


def table() -> str:
    lines = ["| field | of | verdict | always accepted | reason |", "|---|---|---|---|---|"]
    for group, rules in GROUPS.items():
        for name, rule in sorted(rules.items(), key=lambda item: (item[1].verdict.value, item[0])):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral if not isinstance(value, float))
            lines.append(f"| `{name}` | {group} | {rule.verdict.value} | {neutral} | {rule.reason} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """`text` with a new table between its markers."""
    between = re.compile(r"(<!-- fields -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
