"""The prefix index against a model that walks every prefix: reachable prefix = score <= held prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.prefix_index import PrefixIndex

WORKERS = st.sampled_from(("a", "b", "c"))
BLOCKS = st.lists(st.integers(1, 12), max_size=6)
CHANGES = st.lists(st.tuples(st.sampled_from(("store", "remove", "replace", "forget")), WORKERS, BLOCKS), max_size=30)


def reachable(held: set[int], prefix: list[int]) -> int:
    missing = [place for place, block in enumerate(prefix) if block not in held]
    return missing[0] if missing else len(prefix)


@given(changes=CHANGES, prefix=BLOCKS)
def test_a_score_is_the_reachable_prefix_of_the_blocks_that_a_worker_holds(
    changes: list[tuple[str, str, list[int]]], prefix: list[int]
) -> None:
    index, held = PrefixIndex(), {worker: set[int]() for worker in ("a", "b", "c")}
    for change, worker, blocks in changes:
        if change == "store":
            index.store(worker, blocks)
            held[worker].update(blocks)
        elif change == "remove":
            index.remove(worker, blocks)
            held[worker].difference_update(blocks)
        elif change == "replace":
            index.replace(worker, blocks)
            held[worker] = set(blocks)
        else:
            index.forget(worker)
            held[worker].clear()
        index.check()
    scores = {worker: reachable(blocks, prefix) for worker, blocks in held.items()}
    assert index.match(prefix) == {worker: score for worker, score in scores.items() if score}
    assert all(index.held(worker) == blocks for worker, blocks in held.items())
