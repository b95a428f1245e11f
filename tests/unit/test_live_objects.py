"""The count of live objects, by which tests and `make soak` look for leaks, notices a container that grows."""

from __future__ import annotations

from tests.support.live_objects import count_live, growth


class KeepsRequests:
    """Counted under a name of this test alone: the process may still be freeing objects of earlier tests."""

    __module__ = "core"

    def __init__(self) -> None:
        self._by_id: dict[int, float] = {}


def test_a_container_that_keeps_its_elements_is_named() -> None:
    keeper = KeepsRequests()
    before = count_live()
    for request_id in range(50):
        keeper._by_id[request_id] = 1.0
    assert growth(before, count_live()) == {"core.KeepsRequests._by_id": 50}
    keeper._by_id.clear()
    assert growth(before, count_live()) == {}
