"""docs/gpu.md shows figures of benchmarks/gpu.py alone, with the goals that they missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_figures import draw_figures, draw_pools, load_measured, refuse, take
from benchmarks.gpu_sections.harness import FORMAT, SECTIONS, SectionResult
from benchmarks.report import Line

VERSIONS = {"driver": "1", "cuda": "2", "torch": "3", "triton": "4", "python": "5"}


def measured(**changes: Any) -> dict[str, Any]:
    """A run whose section `decode` was killed after two figures."""
    decode = SectionResult("decode", "out of time", 120.0, 120.0, "killed after 120 s", ["batch 128: no time"])
    decode.lines = [
        Line("a step", 5.0, "ms", floor=4.5, least_share=0.8),
        Line("a served step", 9.0, "ms", floor=4.5, least_share=0.7),
    ]
    return {
        "format": FORMAT,
        "device": "cuda",
        "commit": "0123456789ab",
        "started": "2000-01-01 00:00:00 UTC",
        "machine": VERSIONS | {"device": "A Card 80GB"},
        "sections": [SectionResult("rates", "complete").as_json(), decode.as_json()],
    } | changes


def test_without_a_run_every_section_is_not_measured() -> None:
    rows = draw_figures([]).splitlines()[2:]
    assert len(rows) == len(SECTIONS)
    assert all(row.endswith("| not measured |") for row in rows)


def test_figures_stand_beside_their_floor_with_a_verdict() -> None:
    page = draw_figures([measured()])
    assert "### A Card 80GB" in page
    assert "commit 0123456789ab, driver 1, cuda 2" in page
    assert "| a step | 5 ms | floor 4.5 | 0.9 | at least 0.8 of the floor | holds |" in page
    assert "| a served step | 9 ms | floor 4.5 | 0.5 | at least 0.7 of the floor | missed |" in page


def test_a_section_that_was_killed_or_never_ran_says_so() -> None:
    page = draw_figures([measured()])
    assert "out of time; 1 of 2 goals hold" in page
    assert "The section ended early: out of time. killed after 120 s" in page
    assert "- batch 128: no time" in page
    assert f"| {SECTIONS['peers'].title} | {SECTIONS['peers'].goal} | not measured |" in page


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "rehearsal on a CPU"),
        ({"commit": "unknown"}, "--commit"),
        ({"commit": "0123456789ab+"}, "clean tree"),
        ({"format": 0}, "format 0"),
    ],
)
def test_a_run_that_proves_nothing_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    source = tmp_path / "gpu.json"
    source.write_text(json.dumps(measured(**changes)))
    with pytest.raises(ValueError, match=reason):
        take(source, tmp_path / "kept")
    assert not list(tmp_path.glob("kept/*"))


def test_a_run_replaces_older_figures_of_the_same_device(tmp_path: Path) -> None:
    source, kept = tmp_path / "gpu.json", tmp_path / "kept"
    for commit in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        source.write_text(json.dumps(measured(commit=commit)))
        assert take(source, kept) == kept / "a-card-80gb.json"
    assert [found["commit"] for found in load_measured(kept)] == ["bbbbbbbbbbbb"]


def test_the_figures_that_the_page_shows_are_of_gpus_with_known_commits() -> None:
    for found in load_measured():
        refuse(found)


def test_a_batch_that_does_not_fit_has_no_speed() -> None:
    rows = {row.split("]")[0].strip("| ["): row for row in draw_pools().splitlines()[2:]}
    assert "does not fit" in rows["L40S"]
    assert "does not fit" not in rows["H200 SXM"]
