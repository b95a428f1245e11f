"""The router's index of cached blocks. Small numbers stand for sequence hashes."""

from __future__ import annotations

import pytest

from router.routing.prefix_index import PrefixIndex


def held_and_reachable(index: PrefixIndex, prefix: list[int], worker: str = "w") -> tuple[int, int]:
    """Blocks of the prefix that the worker holds, and those that are reachable from the root."""
    index.check()
    held = len(index.held(worker) & set(prefix))
    reachable = index.match(prefix).get(worker, 0)
    assert reachable <= held, "a worker reaches more blocks than it holds"
    return held, reachable


def store(index: PrefixIndex, *blocks: int, worker: str = "w") -> None:
    index.store(worker, blocks)


def test_a_missing_block_makes_later_blocks_unreachable_until_it_is_stored() -> None:
    index = PrefixIndex()
    store(index, 1, 2, 3, 4)
    assert held_and_reachable(index, [1, 2, 3, 4]) == (4, 4)
    index.remove("w", [2])
    assert held_and_reachable(index, [1, 2, 3, 4]) == (3, 1)
    store(index, 2)
    assert held_and_reachable(index, [1, 2, 3, 4]) == (4, 4)
    store(index, 5)
    assert held_and_reachable(index, [1, 2, 3, 4, 5]) == (5, 5)


def test_two_prefixes_with_a_common_parent_become_unreachable_with_the_parent() -> None:
    index = PrefixIndex()
    store(index, 1, 2, 3, 13)
    index.remove("w", [3])
    assert held_and_reachable(index, [1, 2, 13]) == (3, 3)
    assert held_and_reachable(index, [1, 2, 3]) == (2, 2)
    index.remove("w", [1])
    assert held_and_reachable(index, [1, 2, 13]) == (2, 0)


def test_each_worker_is_scored_by_its_own_blocks() -> None:
    index = PrefixIndex()
    store(index, 1, 2, 3, worker="deep")
    store(index, 1, 2, worker="shallow")
    store(index, 2, 3, worker="rootless")
    assert index.match([1, 2, 3]) == {"deep": 3, "shallow": 2}


def test_a_prefix_that_no_worker_holds_matches_no_worker() -> None:
    index = PrefixIndex()
    store(index, 1)
    assert index.match([2, 1]) == {}
    assert index.match([]) == {}


def test_a_snapshot_replaces_all_earlier_blocks() -> None:
    index = PrefixIndex()
    store(index, 1, 2)
    index.replace("w", [1, 3])
    assert index.held("w") == {1, 3}
    assert held_and_reachable(index, [1, 2]) == (1, 1)


def test_a_forgotten_worker_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    store(index, 1, 2, worker="a")
    store(index, 1, worker="b")
    index.forget("a")
    assert index.match([1, 2]) == {"b": 1}
    assert index.num_held("a") == 0
    index.check()


def test_removing_an_unknown_block_and_storing_a_block_twice_change_nothing() -> None:
    index = PrefixIndex()
    index.remove("w", [9])
    store(index, 1, 1)
    index.remove("w", [1])
    assert held_and_reachable(index, [1]) == (0, 0)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_the_score_never_exceeds_the_prefix(length: int) -> None:
    index = PrefixIndex()
    store(index, *range(10))
    assert index.match(list(range(length))).get("w", 0) == length
