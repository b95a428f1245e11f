"""The checks of `make soak` notice a container, memory or a descriptor that grows by the request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.live_objects import Footprint, count_live, growth
from tests.tools.soak import check_flat

FLAT = Footprint(Counter(), num_descriptors=10, resident_mb=100.0)


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


@pytest.mark.parametrize(
    ("grown", "message"),
    [
        (replace(FLAT, live=Counter({"router.shell.RouterShell._streams": 101})), "_streams"),
        (replace(FLAT, num_descriptors=30), "20 descriptors"),
        (replace(FLAT, resident_mb=200.0), "100 MB of memory"),
    ],
)
def test_a_soak_that_grows_fails_by_what_has_grown(grown: Footprint, message: str) -> None:
    check_flat(FLAT, FLAT, 10_000)
    with pytest.raises(AssertionError, match=message):
        check_flat(FLAT, grown, 10_000)


def test_containers_that_a_pool_bounds_may_grow() -> None:
    grown = replace(FLAT, live=Counter({"router.routing.prefix_index.PrefixIndex._holders": 5000}))
    check_flat(FLAT, grown, 10_000)
