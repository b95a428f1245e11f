"""Finds calls of tools in the text of a model, while the text arrives.

    TEXT --tag--> OPENING --"[" of a list--> CALL --complete--> AFTER_CALL --separator--> CALL
      ^              |                         |                    |
      +--------------+---- not a call ---------+---- else ----------+

Text before a call is passed on at once; only a possible start of a tag waits. Text that turns out to be no call is
passed on as text. A call is announced when its arguments begin, so the arguments of a call that breaks off later are
incomplete, and what follows them is text. What is passed on up to a place in the text depends on the text up to this
place alone, and not on its division into pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from text.call_object import CallObject
from text.tool_formats import ToolFormat

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The first delta of a call has its id and name. Later ones have a piece of the JSON text of its arguments."""

    index: int
    id: str
    name: str
    arguments: str


Delta = TextDelta | ToolCallDelta


class ToolCallParser:
    """Call `push` for all text in order, then `finish` once."""

    def __init__(self, tool_format: ToolFormat, id_of: Callable[[int], str]) -> None:
        """`id_of`: the id of call 0, 1, ..."""
        self._format = tool_format
        self._separator = tool_format.separator.strip()
        self._id_of = id_of
        self._state: Callable[[str, int], int] = self._at_start if tool_format.bare else self._in_text
        self._held = ""  # text that is neither passed on nor known to belong to a call
        self._call = CallObject(tool_format.needs_arguments)
        self._spaces: str | None = None  # after a call: dropped unless other text follows
        self._is_announced = False  # the call that is read now
        self._deltas: list[Delta] = []
        self.num_calls = self.num_complete_calls = 0

    def push(self, text: str) -> list[Delta]:
        """The part that is new after `text`."""
        position = 0
        while position < len(text):
            position = self._state(text, position)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output. A half-written end of an announced call is no text."""
        held, self._held = self._held, ""
        is_end = self._state == self._after_call or (self._state == self._in_call and self._is_announced)
        if not is_end:
            self._add_text(held)
        return self._take()

    def _take(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return taken

    # ---- the states: each takes some of text[position:] and returns the new position

    def _at_start(self, text: str, position: int) -> int:
        character = text[position]
        if character in _SPACE:
            self._held += character
            return position + 1
        if character == self._format.bare:
            self._open()
        else:
            self._state = self._in_text
            held, self._held = self._held, ""
            self._add_text(held)
        return position

    def _in_text(self, text: str, position: int) -> int:
        tag, rest = self._format.tag, self._held + text[position:]
        found = rest.find(tag)
        if found < 0:
            num_held = _overlap(rest, tag)
            self._held = rest[len(rest) - num_held :]
            self._add_text(rest[: len(rest) - num_held])
            return len(text)
        self._add_text(rest[:found])
        position = len(text) - (len(rest) - found - len(tag))
        self._held = tag
        self._open()
        return position

    def _open(self) -> None:
        """Read a call or a list. `_held` is the text since the start of the tag."""
        self._call, self._is_announced = CallObject(self._format.needs_arguments), False
        self._state = self._opening if self._format.is_list else self._in_call

    def _opening(self, text: str, position: int) -> int:
        character = text[position]
        if character != "[" and character not in _SPACE:
            return self._give_up(position)
        self._held += character
        if character == "[":
            self._state = self._in_call
        return position + 1

    def _in_call(self, text: str, position: int) -> int:
        call, held = self._call, [self._held]
        for place in range(position, len(text)):
            in_arguments = call.in_arguments
            if not call.read(text[place]):
                self._pass_arguments()
                self._held = "".join(held)
                return self._give_up(place)
            if call.announced and not self._is_announced:
                self._announce()
                held = []
            elif not in_arguments:
                held.append(text[place])
            if call.complete:
                self.num_complete_calls += 1
                self._pass_arguments()
                self._held, self._state = "", self._after_call
                return place + 1
        self._pass_arguments()
        self._held = "".join(held)
        return len(text)

    def _after_call(self, text: str, position: int) -> int:
        self._held += text[position]
        begun = self._held.lstrip(_SPACE)
        if begun and begun == self._separator:
            self._call, self._is_announced, self._state = CallObject(self._format.needs_arguments), False, self._in_call
        elif begun and begun == self._format.end:
            self._held, self._state = "", self._in_text
        elif not (self._separator.startswith(begun) or self._format.end.startswith(begun)):
            self._state = self._in_text  # which searches the held text too
            self._held = self._held[:-1]
            return position
        return position + 1

    # ---- what is passed on

    def _give_up(self, position: int) -> int:
        """The text is no call: pass on what is held, and search the rest for a tag."""
        num_held = _overlap(self._held, self._format.tag)
        given_up, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        self._state = self._in_text
        if not self._is_announced or given_up.strip():
            self._add_text(given_up)
        self._is_announced = False
        return position

    def _announce(self) -> None:
        self._is_announced, self._spaces = True, ""
        self._deltas.append(ToolCallDelta(self.num_calls, self._id_of(self.num_calls), self._call.name, ""))
        self.num_calls += 1

    def _pass_arguments(self) -> None:
        arguments = self._call.take_arguments()
        if arguments:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, "", "", arguments))

    def _add_text(self, text: str) -> None:
        if self._spaces is not None:
            self._spaces, text = (self._spaces + text, "") if not text.strip() else (None, self._spaces + text)
        if not text:
            return
        if self._deltas and isinstance(self._deltas[-1], TextDelta):
            text = self._deltas.pop().text + text  # type: ignore[union-attr]
        self._deltas.append(TextDelta(text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a start of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
