"""The laws of the order of prompts, for random arrivals on one worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from core.scheduling.prompt_order import QUANTUM_S, PromptOrder, _Level

CHUNK_S = 0.2
ROUNDING_S = 1e-6
MANY = 40  # prompts: `check` looks at all of them, so it runs every tenth step

works = st.floats(0.001, 5.0)
gaps = st.one_of(st.just(0.0), st.floats(0.0, 3.0))
arrivals = st.lists(st.tuples(gaps, works), min_size=1, max_size=30)


def turn(order: PromptOrder, some: Collection[str] = ()) -> str:
    """The first of all prompts, or of some."""
    name = order.first_of(some) if some else order.first()
    assert name is not None
    return name


@dataclass
class Worker:
    """Computes chunks of at most CHUNK_S in the order of prompts. Its clock is the work that it has done."""

    order: PromptOrder = field(default_factory=PromptOrder)
    left: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    num_steps: int = 0

    def add(self, name: str, work: float, priority: int = 0, tenant: str = "") -> None:
        self.order.add(name, priority, tenant, work)
        self.left[name] = work

    def step(self) -> tuple[str, float]:
        name = turn(self.order)
        return name, self.compute(name)

    def compute(self, name: str) -> float:
        """A chunk of this prompt. Returns its work."""
        work = min(self.left[name], CHUNK_S)
        self.left[name] -= work
        self.now += work
        self.order.serve(name, work, self.left[name])
        if self.left[name] == 0.0:
            assert self.order.discard(name)
            del self.left[name]
            self.ends[name] = self.now
        self.num_steps += 1
        if len(self.left) < MANY or self.num_steps % 10 == 0:
            self.order.check()
        return work

    def run_until(self, when: float) -> None:
        while self.left and self.now < when:
            self.step()
        self.now = max(self.now, when)

    def run_all(self, arriving: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Each prompt's time from its arrival to its end, and the work that was queued with it at its arrival.

        `arriving`: (seconds after the one before, work).
        """
        arrived: dict[str, tuple[float, float]] = {}
        due = 0.0
        for number, (gap, work) in enumerate(arriving):
            due += gap
            self.run_until(due)
            arrived[f"p{number}"] = self.now, sum(self.left.values()) + work
            self.add(f"p{number}", work)
        self.run_until(float("inf"))
        assert not len(self.order)
        return [(self.ends[name] - at, queued) for name, (at, queued) in arrived.items()]


@settings(max_examples=300)
@given(arrivals)
def test_no_prompt_takes_more_than_twice_as_long_as_first_come_first_served(
    arriving: list[tuple[float, float]],
) -> None:
    for took, queued in Worker().run_all(arriving):
        assert took <= 2.0 * queued + ROUNDING_S


@settings(max_examples=200)
@given(st.lists(works, min_size=1, max_size=30))
def test_prompts_that_arrive_together_take_no_longer_on_average_than_in_order_of_arrival(sizes: list[float]) -> None:
    ends = Worker().run_all([(0.0, work) for work in sizes])
    in_order = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    assert sum(took for took, _ in ends) <= sum(in_order) + ROUNDING_S * len(sizes)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 4), works, st.integers(0, 6)), min_size=1, max_size=60),
    st.lists(works, min_size=40, max_size=40),
)
def test_two_tenants_that_always_have_prompts_get_equal_work(
    others: list[tuple[int, float, int]], sizes: list[float]
) -> None:
    """Whatever the prompts of other tenants are, and when they come."""
    worker = Worker()
    for number, work in enumerate(sizes):
        worker.add(f"{'ab'[number % 2]}{number}", work, tenant="ab"[number % 2])
    served, most = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    for number, (tenant, work, num_steps) in enumerate(others):
        worker.add(f"o{number}", work, tenant=f"other {tenant}")
        for _ in range(num_steps):
            name, done = worker.step()
            if name[0] in served:
                served[name[0]] += done
            if not {"a", "b"} <= {left[0] for left in worker.left}:
                return
            lead = served["a"] - served["b"]
            most["a"], most["b"] = max(most["a"], lead), max(most["b"], -lead)
            assert abs(lead) <= QUANTUM_S + CHUNK_S + ROUNDING_S
            assert most["a"] + most["b"] <= 2.0 * (QUANTUM_S + CHUNK_S) + ROUNDING_S


@settings(max_examples=100)
@given(st.data())
def test_tenants_get_equal_work_even_while_only_some_prompts_can_be_computed(data: st.DataObject) -> None:
    """As while a hand-off waits, or no further sequence can run: the first prompts of each tenant can be computed."""
    worker, tenants = Worker(), "abc"
    served = dict.fromkeys(tenants, 0.0)
    for number in range(120):
        tenant = tenants[number % 3]
        worker.add(f"{tenant}{number}", data.draw(st.sampled_from([0.02, 0.3, 2.0])), tenant=tenant)
    for _ in range(150):
        names = [name for tenant in tenants for name in sorted(n for n in worker.left if n[0] == tenant)[:2]]
        if {name[0] for name in names} != set(tenants):
            break
        name = turn(worker.order, names if data.draw(st.integers(0, 4)) else ())
        served[name[0]] += worker.compute(name)
        assert max(served.values()) - min(served.values()) <= 2.0 * (QUANTUM_S + CHUNK_S) + ROUNDING_S


def test_tenants_that_leave_and_return_take_no_more_than_one_that_stays() -> None:
    """Four tenants send one prompt of three quanta after the other; the fifth has a prompt of many such chunks."""
    order, chunk_s, served = PromptOrder(), 3 * QUANTUM_S, dict.fromkeys("abcde", 0.0)
    order.add("e", 0, "e", 1000.0)
    for tenant in "abcd":
        order.add(tenant, 0, tenant, chunk_s)
    for _ in range(200):
        name = turn(order)
        served[name] += chunk_s
        order.serve(name, chunk_s, 1000.0 - served["e"] if name == "e" else 0.0)
        if name != "e":
            order.discard(name)
            order.add(name, 0, name, chunk_s)
        order.check()
    assert abs(served["e"] / sum(served.values()) - 0.2) < 0.02


def test_rounds_that_begin_for_some_prompts_make_up_for_the_excess_of_a_tenant_that_left() -> None:
    """As while a hand-off waits for long. The excess of `guest` is two rounds; three have begun when it returns."""
    order, chunk_s = PromptOrder(), QUANTUM_S
    for tenant in ("a", "b", "guest"):
        order.add(tenant, 0, tenant, 100.0)
    order.serve("guest", 3 * QUANTUM_S, 0.0)
    order.discard("guest")
    for _ in range(8):
        order.serve(turn(order, "ab"), chunk_s, 100.0)
    order.add("guest", 0, "guest", chunk_s)
    turns = []
    for _ in range(3):
        turns.append(turn(order))
        order.serve(turns[-1], chunk_s, 100.0)
    assert "guest" in turns


class Rounds:
    """The work of some tenants when each round begins that all of them have a part in."""

    def __init__(self, tenants: Iterable[str]) -> None:
        self.served = dict.fromkeys(tenants, 0.0)
        self.begun: list[dict[str, float]] = []

    def watched(self) -> AbstractContextManager[object]:
        begin = _Level.begin_rounds

        def watch(level: _Level, shares: Collection[Any]) -> None:
            if self.served.keys() <= {share.tenant for share in shares}:
                self.begun.append(dict(self.served))
            begin(level, shares)

        return patch.object(_Level, "begin_rounds", watch)

    def check(self) -> None:
        """Each tenant has its share of ten rounds within 2 %."""
        for before, after in zip(self.begun, self.begun[10:], strict=False):
            work = {tenant: after[tenant] - before[tenant] for tenant in self.served}
            assert all(abs(part / sum(work.values()) - 1.0 / len(work)) <= 0.02 + ROUNDING_S for part in work.values())


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.sampled_from([0.01, 0.1, 0.33, 0.6, 1e6]), min_size=2, max_size=4))
def test_each_tenant_gets_its_share_of_ten_rounds_whatever_comes_and_goes_and_waits(
    data: st.DataObject, sizes: list[float]
) -> None:
    """Tenant k always has a prompt of sizes[k]. Other tenants come, are served, and cancel; some steps compute only
    some prompts, as while a hand-off waits."""
    worker, tenants = Worker(), {f"k{number}": size for number, size in enumerate(sizes)}
    rounds, changes = Rounds(tenants), st.sampled_from(["", "", "", "come", "cancel", "wait", "urgent"])
    for tenant, size in tenants.items():
        worker.add(tenant, size, tenant=tenant)
    others: dict[str, str] = {}  # tenants of other prompts
    waits = False  # a hand-off
    with rounds.watched():
        for number in range(5000):
            change = data.draw(changes) if number < 120 else ""
            others = {name: tenant for name, tenant in others.items() if name in worker.left}
            if change in ("come", "urgent"):
                others[f"o{number}"] = f"o{data.draw(st.integers(0, 3))}"
                priority = -1 if change == "urgent" else 0
                worker.add(f"o{number}", data.draw(works), priority, others[f"o{number}"])
            elif change == "cancel" and others:
                name = data.draw(st.sampled_from(sorted(others)))
                worker.order.discard(name)
                del worker.left[name]
                continue
            waits ^= change == "wait"
            name = turn(worker.order, [*tenants, *sorted(others)[:1]] if waits else ())
            work = worker.compute(name)
            if name in tenants:
                rounds.served[name] += work
                if name not in worker.left:
                    worker.add(name, tenants[name], tenant=name)
            if len(rounds.begun) > 22:
                break
    assert len(rounds.begun) > 22
    rounds.check()


@settings(max_examples=100)
@given(st.lists(st.floats(0.001, 0.6), min_size=200, max_size=200))
def test_a_stream_of_new_tenants_does_not_starve_a_long_prompt(sizes: list[float]) -> None:
    """A new tenant comes before every step, and each of its prompts is shorter than the long one."""
    worker = Worker()
    worker.add("long", 4.0, tenant="patient")
    turns = [0.0]  # of the long prompt
    num_shares = 1
    for number, work in enumerate(sizes):
        worker.add(f"p{number}", work, tenant=f"t{number}")
        num_shares = max(num_shares, len(worker.left))
        name, _ = worker.step()
        if name == "long":
            turns.append(worker.now)
        if "long" not in worker.left:
            break
    turns.append(worker.now)
    longest = max(after - before for before, after in pairwise(turns))
    assert longest <= 2 * 2 * num_shares * (QUANTUM_S + CHUNK_S), "two rounds at most lie between two turns"


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3), works), min_size=1, max_size=20))
def test_a_prompt_runs_only_if_no_prompt_of_a_lower_priority_value_waits(prompts: list[tuple[int, int, float]]) -> None:
    worker = Worker()
    priorities = {}
    for number, (priority, tenant, work) in enumerate(prompts):
        priorities[f"p{number}"] = priority
        worker.add(f"p{number}", work, priority, f"t{tenant}")
    while worker.left:
        best = min(priorities[name] for name in worker.left)
        name, _ = worker.step()
        assert priorities[name] == best


@settings(max_examples=150)
@given(st.data())
def test_after_any_changes_the_order_is_whole_and_every_prompt_ends(data: st.DataObject) -> None:
    """Work grows after a preemption, shrinks with a cache hit, prompts leave, and some cannot be computed now."""
    worker = Worker()
    for number in range(data.draw(st.integers(1, 25))):
        change = data.draw(st.sampled_from(["add", "add", "step", "resize", "discard", "back", "some"]))
        names = sorted(worker.left)
        if change == "add" or not names:
            worker.add(f"p{number}", data.draw(works), data.draw(st.integers(0, 1)), data.draw(st.sampled_from("ab")))
            continue
        name = data.draw(st.sampled_from(names))
        if change == "step":
            worker.step()
        elif change == "resize":
            worker.left[name] = data.draw(works)
            worker.order.resize(name, worker.left[name])
        elif change == "discard":
            assert worker.order.discard(name)
            assert not worker.order.discard(name)
            del worker.left[name]
        elif change == "back":
            worker.order.discard(name)
            worker.order.add(name, 0, "a", worker.left[name], is_back=True)
        else:
            some = data.draw(st.lists(st.sampled_from(names), unique=True))
            first = worker.order.first_of(some)
            assert (first in some) if some else (first is None)
            assert worker.order.first_of([worker.order.first() or "", *some]) == worker.order.first()
        worker.order.check()
    worker.run_until(float("inf"))
    assert worker.order.first() is None


@settings(max_examples=100)
@given(st.lists(works, min_size=2, max_size=12), st.integers(-10, 10), st.integers(0, 20))
def test_other_prices_change_no_order(sizes: list[float], exponent: int, num_steps: int) -> None:
    """A prompt that came before the first fit of a GPU kept a due point in the seconds of a CPU."""
    first, second, factor = Worker(), Worker(), 2.0**exponent  # exact products
    for number, work in enumerate(sizes):
        for worker in (first, second):
            worker.add(f"p{number}", work)
    for _ in range(num_steps):
        if first.left:
            assert first.step() == second.step()
    if not first.left:
        return
    second.order.reprice({name: left * factor for name, left in second.left.items()})
    second.order.check()
    second.left = {name: left * factor for name, left in second.left.items()}
    while first.left:
        name = turn(first.order)
        assert name == turn(second.order)
        for worker in (first, second):
            worker.order.serve(name, worker.left[name], 0.0)
            worker.order.discard(name)
            del worker.left[name]
