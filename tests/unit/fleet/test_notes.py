"""The ring of notes about the fleet."""

from __future__ import annotations

from core.fleet_control import FleetNote
from fleet.law.events import FleetMessage
from fleet.supervisor.notes import MAX_NOTES, NoteRing


def test_the_newest_notes_are_listed_oldest_first_above_a_number_and_up_to_a_limit() -> None:
    ring = NoteRing()
    assert ring.newest(10, 0) == []
    for number in range(1, 6):
        ring.add(FleetMessage(f"decode-{number}", "drains", "why"), float(number))
    assert ring.newest(2, 0) == [FleetNote(n, float(n), f"decode-{n}", "drains", "why") for n in (4, 5)]
    assert [note.number for note in ring.newest(10, 3)] == [4, 5]
    assert ring.newest(10, 5) == []
    assert ring.newest(10, 99) == []


def test_the_oldest_note_goes_when_the_ring_is_full() -> None:
    ring = NoteRing()
    for _ in range(MAX_NOTES + 3):
        ring.add(FleetMessage("fleet", "is scaled"), 0.0)
    notes = ring.newest(2 * MAX_NOTES, 0)
    assert (len(notes), notes[0].number, notes[-1].number) == (MAX_NOTES, 4, MAX_NOTES + 3)
