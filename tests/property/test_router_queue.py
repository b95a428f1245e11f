"""The router's queue, hashes computed on demand and the prefix index, each against a plain model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import HashChain, pack_token_ids, root_hash, sequence_hashes, unpack_token_ids
from core.lifecycle import Stage, Timeline
from router.requests.request_queue import RequestQueue
from router.requests.routed_request import RoutedRequest
from router.routing.prefix_index import PrefixIndex
from tests.unit.router.driving_router import request

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "retry", "remove", "first", "aside", "time")),
        st.integers(0, 30),  # which request
        st.integers(-2, 2),  # its priority
        st.floats(0.0, 3.0),  # its pause, or the time that passes
    ),
    max_size=120,
)


@given(OPERATIONS)
def test_the_queue_gives_what_a_sorted_list_would_give(operations: list[tuple[str, int, int, float]]) -> None:
    queue, model, now = RequestQueue(), list[RoutedRequest](), 0.0
    everyone, aside = list[RoutedRequest](), list[RoutedRequest]()
    for operation, which, priority, seconds in operations:
        chosen = everyone[which % len(everyone)] if everyone else None
        if operation == "add":
            routed = RoutedRequest(
                request(str(len(everyone)), priority=priority), len(everyone), now, 1e9, Timeline(Stage.QUEUE, now)
            )
            everyone.append(routed)
            model.append(routed)
            queue.add(routed, now)
        elif operation == "retry" and chosen is not None and chosen not in model:
            chosen.not_before = now + seconds
            model.append(chosen)
            queue.add(chosen, now)
        elif operation == "remove" and chosen is not None:
            queue.remove(chosen)
            model = [routed for routed in model if routed is not chosen]
            aside = [routed for routed in aside if routed is not chosen]
        elif operation in ("first", "aside"):
            ready = [routed for routed in model if routed.not_before <= now and routed not in aside]
            first = min(ready, key=lambda routed: routed.rank, default=None)
            assert queue.first(now) is first
            if first is not None and operation == "aside":
                queue.step_aside(now)
                aside.append(first)
            assert queue.first_aside() is min(aside, key=lambda routed: routed.rank, default=None)
        elif operation == "time":
            now += seconds
        queue.check()
        assert len(queue) == len(model)
    assert Counter(map(id, queue)) == Counter(map(id, model))


ARRIVALS = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 50), st.integers(0, 3)), max_size=60)


@given(ARRIVALS, st.integers(1, 50))
def test_tenants_that_wait_all_the_time_are_served_alike(arrivals: list[tuple[str, int, int]], longest: int) -> None:
    """Two tenants always have a hundred requests. Others come, are served, leave and return, with prompts up to 50."""
    queue, everyone = RequestQueue(), list[RoutedRequest]()

    def add(tenant: str, length: int) -> None:
        asked = replace(request(str(len(everyone)), range(length)), tenant=tenant)
        everyone.append(RoutedRequest(asked, len(everyone), 0.0, 1e9, Timeline(Stage.QUEUE, 0.0)))
        queue.add(everyone[-1], 0.0)

    for number in range(200):
        add("ab"[number >= 150], 1 + number % longest)  # the 50 of "b" are behind all of "a"
    served: Counter[str] = Counter()
    taken: list[int] = []
    for tenant, length, num_taken in arrivals:
        add(tenant, length)
        for _ in range(num_taken):
            routed = queue.first(0.0)
            assert routed is not None
            queue.take_first(0.0)
            queue.check()
            served[routed.request.tenant] += routed.request.num_prompt_tokens
            taken.append(routed.arrival)
            if {"a", "b"} <= {waiting.request.tenant for waiting in queue}:
                assert abs(served["a"] - served["b"]) <= longest
                assert all(served[other] <= served["a"] + 50 + longest for other in "xyz")
    of_tenant = {tenant: [n for n in taken if everyone[n].request.tenant == tenant] for tenant in "abxyz"}
    assert all(numbers == sorted(numbers) for numbers in of_tenant.values())


TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(TOKEN_IDS, st.integers(1, 9), st.text(max_size=3), st.lists(st.integers(0, 80), max_size=4))
def test_hashes_computed_on_demand_equal_those_computed_at_once(
    token_ids: list[int], block_size: int, salt: str, stops: list[int]
) -> None:
    root = root_hash(salt)
    whole = sequence_hashes(token_ids, block_size, root)
    chain = HashChain(pack_token_ids(token_ids), block_size, root)
    assert len(chain) == len(whole)
    for stop in stops:  # readers that stop early, one after the other
        read = [sequence_hash for sequence_hash, _ in zip(chain, range(stop), strict=False)]
        assert read == whole[:stop]
        assert chain.num_computed <= max([0, *(min(s + 1, len(whole)) for s in stops)])
    assert list(chain) == whole


@given(TOKEN_IDS)
def test_packed_token_ids_are_unpacked_unchanged(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == tuple(token_ids)


HASHES = st.integers(0, 12)  # stand in for sequence hashes
WORKERS = st.sampled_from([f"w{number}" for number in range(6)])
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "remove", "replace", "forget")), WORKERS, st.lists(HASHES, max_size=9)
    ),
    max_size=40,
)


@given(CHANGES, st.lists(st.lists(HASHES, max_size=8, unique=True), max_size=4))
def test_the_index_matches_what_sets_of_hashes_would_match(
    changes: list[tuple[str, str, list[int]]], prompts: list[list[int]]
) -> None:
    index, model = PrefixIndex(), dict[str, set[int]]()
    for change, worker, hashes in changes:
        if change == "forget":
            index.forget(worker)
            model.pop(worker, None)
        else:
            getattr(index, change)(worker, hashes)
            held = model.get(worker, set())
            changed = {"store": held | {*hashes}, "remove": held - {*hashes}, "replace": {*hashes}}[change]
            if worker in model or change != "remove":
                model[worker] = changed
        index.check()
    for worker in model:
        assert index.held(worker) == model[worker]
    for prompt in prompts:
        reached = {
            worker: next((depth for depth, each in enumerate(prompt) if each not in held), len(prompt))
            for worker, held in model.items()
        }
        assert index.match(prompt) == {worker: depth for worker, depth in reached.items() if depth}
