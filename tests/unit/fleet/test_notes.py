"""The ring of notes about the fleet."""

from __future__ import annotations

from core.fleet_control import FleetNote
from fleet.law.events import FleetMessage
from fleet.supervisor.notes import MAX_NOTES, NoteRing


def test_the_newest_notes_are_listed_oldest_first_above_a_number_and_up_to_a_limit_and_the_oldest_go() -> None:
    ring = NoteRing()
    assert ring.newest(10, 0) == []
    last = MAX_NOTES + 3
    for number in range(1, last + 1):
        ring.add(FleetMessage(f"decode-{number}", "drains", "why"), float(number))
    expected = [FleetNote(n, float(n), f"decode-{n}", "drains", "why") for n in range(4, last + 1)]
    assert ring.newest(2 * MAX_NOTES, 0) == expected
    assert ring.newest(2, 0) == expected[-2:]
    assert ring.newest(10, last - 2) == expected[-2:]
    assert ring.newest(10, last) == ring.newest(10, last + 99) == []
