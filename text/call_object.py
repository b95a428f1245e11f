"""Reads one call of a tool, a JSON object that arrives character by character.

    {"name": "weather", "arguments": {"city": "Paris"}}
                                     ^ announced here: name and arguments begin; each later character of the value is
                                       an argument at once

The arguments are passed on as the model writes them. Only their strings and brackets are followed, to find their end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")  # Llama writes the second
IGNORED = ("id", "type")
MAX_NAME_CHARS = 256
_SPACE = " \t\r\n"
_IN_STRING, _OUTSIDE = re.compile(r'[^"\\]+'), re.compile(r'[^"{}\[\]]+')
_CLOSING = {"{": "}", "[": "]"}


class CallObject:
    """`read` takes a character. It returns False if the text cannot be a call; the character is then not part of it."""

    def __init__(self, needs_arguments: bool) -> None:
        self._needs_arguments = needs_arguments
        self._state: Callable[[str], bool] = self._before_object
        self._key = ""
        self._value: list[str] = []  # characters of the value of the key, except for streamed arguments
        self._closers: list[str] = []  # of the open brackets in the value
        self._in_string = self._escaped = False
        self._arguments: list[str] | None = (
            None  # pieces that `take_arguments` has not returned; None = no such key yet
        )
        self._streams = False
        self.name = ""
        self.announced = False
        self.complete = False

    def read(self, character: str) -> bool:
        return self._state(character)

    def read_run(self, text: str, place: int) -> int:
        """Reads the characters of `text` that are arguments, and end neither a text nor the value. Returns the place
        behind them."""
        if not self._streams or self._escaped or self._arguments is None:
            return place
        found = (_IN_STRING if self._in_string else _OUTSIDE).match(text, place)
        if found is None:
            return place
        self._arguments.append(found[0])
        return found.end()

    def take_arguments(self) -> str:
        if not self.announced:
            return ""
        taken, self._arguments = "".join(self._arguments or ()), []
        return taken

    @property
    def in_arguments(self) -> bool:
        """The characters are passed on as arguments now."""
        return self._streams

    # ---- the states: each takes one character

    def _before_object(self, character: str) -> bool:
        if character == "{":
            self._state = self._before_key
        return character == "{" or character in _SPACE

    def _before_key(self, character: str) -> bool:
        if character == '"':
            self._key = ""
            self._state = self._in_key
        return character == '"' or character in _SPACE

    def _in_key(self, character: str) -> bool:
        if character == '"':
            self._state = self._after_key
            return self._key in (*NAMES, *ARGUMENTS, *IGNORED)
        self._key += character
        return len(self._key) <= max(map(len, (*NAMES, *ARGUMENTS, *IGNORED)))

    def _after_key(self, character: str) -> bool:
        if character == ":":
            self._state = self._before_value
        return character == ":" or character in _SPACE

    def _before_value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character in ",}]":
            return False
        self._value, self._closers, self._in_string = [], [], False
        self._state = self._in_value
        if self._key in ARGUMENTS:
            if self._arguments is not None:
                return False
            if character == "{" and self.name:
                self.announced = self._streams = True
                self._arguments = []
        return self._in_value(character)

    def _in_value(self, character: str) -> bool:
        if self._in_string:
            self._keep(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return bool(self._closers) or self._end_value()
            return self._has_room()
        if not self._closers and (character in ",}" or character in _SPACE):  # the end of a number or a word
            return self._end_value() and self._after_value(character)
        if character in "}]" and (not self._closers or self._closers.pop() != character):
            return False
        self._keep(character)
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closers.append(_CLOSING[character])
        elif character in "}]" and not self._closers:
            return self._end_value()
        return self._has_room()

    def _has_room(self) -> bool:
        return self._key in ARGUMENTS or len(self._value) <= MAX_NAME_CHARS

    def _keep(self, character: str) -> None:
        if self._streams and self._arguments is not None:
            self._arguments.append(character)
        else:
            self._value.append(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._state = self._before_key
        elif character == "}":
            return self._end_object()
        return character == "," or character in _SPACE

    # ---- the ends

    def _end_value(self) -> bool:
        self._state = self._after_value
        if self._streams:
            self._streams = False
            return True
        if self._key in IGNORED:
            return True
        try:
            text = "".join(self._value)
            value = json.loads(text)
            if isinstance(value, str):
                value.encode()  # refuses half a surrogate pair, which no message can carry
        except (ValueError, RecursionError):
            return False
        if self._key in NAMES:
            if not isinstance(value, str) or not value or self.name:
                return False
            self.name = value
        elif isinstance(value, dict):
            self._arguments = [text]
        elif isinstance(value, str):  # some models write the arguments as text
            self._arguments = [value]
        elif value is None:
            self._arguments = ["{}"]
        else:
            return False
        self.announced = bool(self.name) and self._arguments is not None
        return True

    def _end_object(self) -> bool:
        if not self.name or (self._arguments is None and self._needs_arguments):
            return False
        if self._arguments is None:
            self._arguments = ["{}"]
        self.announced = self.complete = True
        return True
