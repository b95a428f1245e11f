"""The speed of a path, from the reads that run over it."""

from kv_transfer.path_speed import WINDOW_BYTES, PathSpeed


def test_a_full_window_tells_the_speed_and_opens_the_next() -> None:
    path = PathSpeed()
    path.begin(10.0)
    assert path.end(WINDOW_BYTES // 2, 11.0) is None
    path.begin(50.0)  # the time between reads does not count
    assert path.end(WINDOW_BYTES // 2, 53.0) == WINDOW_BYTES / 4.0
    path.begin(60.0)
    assert path.end(WINDOW_BYTES, 62.0) == WINDOW_BYTES / 2.0


def test_reads_side_by_side_share_their_time() -> None:
    path = PathSpeed()
    path.begin(0.0)
    path.begin(1.0)
    assert path.end(WINDOW_BYTES // 2, 2.0) is None
    assert path.end(WINDOW_BYTES // 2, 3.0) == WINDOW_BYTES / 3.0


def test_time_lost_in_broken_reads_counts() -> None:
    path = PathSpeed()
    path.begin(0.0)
    assert path.end(0, 9.0) is None
    path.begin(9.0)
    assert path.end(WINDOW_BYTES, 10.0) == WINDOW_BYTES / 10.0
