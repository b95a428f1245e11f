"""The status of a path."""

from __future__ import annotations

from core.paths import Lane, PathState, PathStatus


def test_a_path_describes_itself_in_one_line() -> None:
    path = PathStatus("peer", PathState.SLOW, Lane.TCP, 0.0215e9, 1.25e9, 310e-6)
    assert str(path) == "slow: TCP, 0.0215 GB/s of 1.25, 310 us there and back"
    assert str(PathStatus("peer", PathState.REFUSED, detail="KV layouts differ")) == "refused: KV layouts differ"
