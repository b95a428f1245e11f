"""The stop strings of a request as one automaton, made once and shared by its choices (Aho and Corasick, 1975).

    stop strings "ab", "abc", "b":   0 -a-> 1 -b-> 2 -c-> 3     0 -b-> 4

A state is a prefix of a stop string: the longest one that the text so far ends with. A character takes a constant
number of steps on average, whatever the number and the lengths of the strings. A string adds one chain of states, so
the edge to `state + 1` needs no table, and the other edges are at most one for each string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """Text is read from state 0 on. `depths[state]` is the length of the text that may begin a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next = [""]  # the character from a state to state + 1; "" = none
        self._branches: dict[tuple[int, str], int] = {}
        self.depths = array("H", (0,))
        self._matches = array("H", (0,))  # length of the longest stop string that the text ends with
        for string in strings:
            self._add(string)
        self.first_chars = frozenset(string[0] for string in strings)
        self._fallbacks = array("H", bytes(2 * len(self._next)))  # the next shorter state that the text ends with
        self._link()

    def __bool__(self) -> bool:
        return bool(self.first_chars)

    def search(self, state: int, text: str) -> tuple[int, int, int]:
        """Read `text` up to the end of the first stop string.

        Returns the new state, the number of characters read, and the length of the stop string; 0 = there is none.
        """
        chars, branches, fallbacks, matches = self._next, self._branches, self._fallbacks, self._matches
        for place, char in enumerate(text, start=1):
            while char != chars[state]:
                child = branches.get((state, char))
                if child is not None:
                    state = child
                    break
                if not state:
                    break
                state = fallbacks[state]
            else:
                state += 1
            if matches[state]:
                return state, place, matches[state]
        return state, len(text), 0

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, start=1):
            child = state + 1 if self._next[state] == char else self._branches.get((state, char))
            if child is None:
                child = len(self._next)
                if child == state + 1:
                    self._next[state] = char
                else:
                    self._branches[state, char] = child
                self._next.append("")
                self.depths.append(depth)
                self._matches.append(0)
            state = child
        self._matches[state] = len(string)

    def _link(self) -> None:
        """Find the fallbacks. That of a state is shorter, so shorter states come first."""
        depths, fallbacks, matches = self.depths, self._fallbacks, self._matches
        edges = [(depths[state], state, char, state + 1) for state, char in enumerate(self._next) if char]
        edges += [(depths[state], state, char, child) for (state, char), child in self._branches.items()]
        for depth, parent, char, state in sorted(edges):
            if depth:
                fallbacks[state], _, _ = self.search(fallbacks[parent], char)
                matches[state] = matches[state] or matches[fallbacks[state]]
