"""Finds calls of tools in the text of a model, while the text arrives.

    TEXT --tag--> OPENING --"[" of a list--> CALL --complete--> AFTER_CALL --separator--> CALL
      ^              |                         |                    |
      +--------------+---- not a call ---------+---- else ----------+

Text before a call is passed on at once; only a possible start of a tag waits. Text that turns out to be no call is
passed on as text. A call is announced when its arguments begin, so the arguments of a call that breaks off later are
incomplete, and what follows them is text. What is passed on up to a place in the text depends on the text up to this
place alone, and not on its division into pieces. Text that waits is kept in pieces and joined once: it may wait for
long, such as spaces without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from text.call_object import CallObject
from text.tool_formats import ToolFormat

_SPACES = re.compile(r"[ \t\r\n]+")


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
        self._held: list[str] = []  # text that is neither passed on nor known to belong to a call
        self._begun = ""  # after a call: the held text behind its spaces
        self._call = CallObject(tool_format.needs_arguments)
        self._spaces: list[str] | None = None  # after a call: dropped unless other text follows
        self._is_announced = False  # the call that is read now
        self._deltas: list[Delta] = []
        self._text: list[str] = []  # behind the deltas
        self.num_calls = self.num_complete_calls = 0

    def push(self, text: str) -> list[Delta]:
        """The part that is new after `text`."""
        position = 0
        while position < len(text):
            position = self._state(text, position)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output. A half-written end of an announced call is no text."""
        held = self._take_held()
        is_end = self._state == self._after_call or (self._state == self._in_call and self._is_announced)
        if not is_end:
            self._add_text(held)
        return self._take()

    def _take(self) -> list[Delta]:
        self._end_text()
        taken, self._deltas = self._deltas, []
        return taken

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    # ---- the states: each takes some of text[position:] and returns the new position

    def _at_start(self, text: str, position: int) -> int:
        if spaces := _SPACES.match(text, position):
            self._held.append(spaces[0])
            return spaces.end()
        if text[position] == self._format.bare:
            self._open()
        else:
            self._state = self._in_text
            self._add_text(self._take_held())
        return position

    def _in_text(self, text: str, position: int) -> int:
        tag, held = self._format.tag, self._take_held()
        across = (held + text[position : position + len(tag)]).find(tag) if held else -1
        found = text.find(tag, position) if across < 0 else position + across - len(held)
        if found < 0 and across < 0:
            rest = held + text[position:]
            num_held = _overlap(rest, tag)
            self._held.append(rest[len(rest) - num_held :])
            self._add_text(rest[: len(rest) - num_held])
            return len(text)
        self._add_text(held[:across] if across >= 0 else held + text[position:found])
        self._held.append(tag)
        self._open()
        return found + len(tag)

    def _open(self) -> None:
        """Read a call or a list. `_held` is the text since the start of the tag."""
        self._call, self._is_announced = CallObject(self._format.needs_arguments), False
        self._state = self._opening if self._format.is_list else self._in_call

    def _opening(self, text: str, position: int) -> int:
        if spaces := _SPACES.match(text, position):
            self._held.append(spaces[0])
            return spaces.end()
        if text[position] != "[":
            return self._give_up(position)
        self._held.append("[")
        self._state = self._in_call
        return position + 1

    def _in_call(self, text: str, position: int) -> int:
        call, held, place = self._call, self._held, position
        while (place := call.read_run(text, place)) < len(text):
            in_arguments = call.in_arguments
            if not call.read(text[place]):
                self._pass_arguments()
                return self._give_up(place)
            if call.announced and not self._is_announced:
                self._announce()
                held.clear()
            elif not in_arguments:
                held.append(text[place])
            if call.complete:
                self.num_complete_calls += 1
                self._pass_arguments()
                held.clear()
                self._begun, self._state = "", self._after_call
                return place + 1
            place += 1
        self._pass_arguments()
        return len(text)

    def _after_call(self, text: str, position: int) -> int:
        if not self._begun and (spaces := _SPACES.match(text, position)):
            self._held.append(spaces[0])
            return spaces.end()
        character = text[position]
        self._held.append(character)
        self._begun += character
        if self._begun == self._separator:
            self._call, self._is_announced, self._state = CallObject(self._format.needs_arguments), False, self._in_call
        elif self._begun == self._format.end:
            self._held.clear()
            self._state = self._in_text
        elif not (self._separator.startswith(self._begun) or self._format.end.startswith(self._begun)):
            self._state = self._in_text  # which searches the held text too
            self._held.pop()
            return position
        return position + 1

    # ---- what is passed on

    def _give_up(self, position: int) -> int:
        """The text is no call: pass on what is held, and search the rest for a tag."""
        held = self._take_held()
        num_held = _overlap(held, self._format.tag)
        given_up = held[: len(held) - num_held]
        self._held.append(held[len(held) - num_held :])
        self._state = self._in_text
        if not self._is_announced or given_up.strip():
            self._add_text(given_up)
        self._is_announced = False
        return position

    def _announce(self) -> None:
        self._is_announced, self._spaces = True, []
        self._end_text()
        self._deltas.append(ToolCallDelta(self.num_calls, self._id_of(self.num_calls), self._call.name, ""))
        self.num_calls += 1

    def _pass_arguments(self) -> None:
        arguments = self._call.take_arguments()
        if arguments:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, "", "", arguments))

    def _add_text(self, text: str) -> None:
        if self._spaces is None:
            self._text.append(text)
            return
        self._spaces.append(text)
        if text.strip():
            self._text += self._spaces
            self._spaces = None

    def _end_text(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if text:
            self._deltas.append(TextDelta(text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a start of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
