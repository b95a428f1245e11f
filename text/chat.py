"""A chat as a chat template gets it, in the form that the templates of Hugging Face models expect.

message    {"role": ..., "content": ...}
           assistant: also "tool_calls", if there are any: [{"type": "function", "id": ..., "function": {"name": ...,
           "arguments": {...}}}]
           tool: also "tool_call_id" and "name"
tool       {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
_FIXED = frozenset({"role", "type", "name"})  # words of the format, and names, which have letters and digits only


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template

    @property
    def uses_tools(self) -> bool:
        """True if the chat has tools, calls or results."""
        return bool(self.tools) or any("tool_calls" in m or m.get("role") == "tool" for m in self.messages)

    def texts(self) -> Iterator[tuple[str, str]]:
        """(field, text) of every text that the client wrote."""
        for index, message in enumerate(self.messages):
            for key in message.keys() - {"role", "name"}:
                yield from ((f"messages[{index}].{key}", text) for text in _texts(message[key]))
        for index, tool in enumerate(self.tools):
            yield from ((f"tools[{index}]", text) for text in _texts(tool))
        yield from (("template_options_json", text) for text in _texts(self.options))

    def changed(self, change: Callable[[str], str]) -> Chat:
        """With every text of the client replaced by `change` of the text."""
        return Chat(
            [
                {
                    key: value if key in _FIXED else _changed(value, change, is_call=True)
                    for key, value in message.items()
                }
                for message in self.messages
            ],
            [_changed(tool, change, is_call=True) for tool in self.tools],
            _changed(self.options, change),
        )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: Any, change: Callable[[str], str], is_call: bool = False) -> Any:
    """`is_call`: the keys are words of the format, down to "arguments" and "parameters"."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        if not is_call:
            return {change(str(key)): _changed(item, change) for key, item in value.items()}
        return {
            key: item if key in _FIXED else _changed(item, change, key not in ("arguments", "parameters"))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, change, is_call) for item in value]
    return value
