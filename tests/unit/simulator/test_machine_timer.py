"""The timer of a machine in virtual time, and a line of messages."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from core.machine import Tick
from simulator.virtual.line import independent_line
from simulator.virtual.machine_timer import MachineTimer
from simulator.virtual.world import World


class Alarm:
    """A machine with one deadline at a time."""

    def __init__(self) -> None:
        self.deadline: float | None = None

    def handle(self, _event: object, _now: float) -> list[object]:
        self.deadline = None
        return []

    def next_deadline(self) -> float | None:
        return self.deadline

    def check(self) -> None:
        assert self.deadline is None or self.deadline >= 0


class Clock:
    """An alarm with its timer. Its clock is 100 s ahead of the world's."""

    def __init__(self) -> None:
        self.world = World(0)
        self.machine = Alarm()
        self.timer = MachineTimer(self.world, self.machine, self.on_tick, offset_s=100.0)
        self.ticks: list[float] = []

    def set(self, deadline: float) -> None:
        self.machine.deadline = deadline
        self.timer.update()

    def on_tick(self, tick: Tick) -> None:
        self.ticks.append(round(self.world.now + 100.0, 3))
        self.machine.handle(tick, self.world.now + 100.0)
        self.timer.update()


def test_a_tick_comes_at_the_deadline_on_the_clock_of_the_machine_also_after_moves_both_ways() -> None:
    clock = Clock()
    clock.set(105.0)
    clock.set(103.0)
    clock.world.run_until(4.0)
    assert clock.ticks == [103.0]
    clock.set(106.0)
    clock.set(108.0)
    clock.world.run_until(20.0)
    assert clock.ticks == [103.0, 108.0]


def test_a_stopped_timer_is_silent_until_the_next_update() -> None:
    clock = Clock()
    clock.set(105.0)
    clock.timer.stop()
    clock.world.run_until(6.0)
    assert clock.ticks == []
    clock.timer.update()
    clock.world.run_until(7.0)
    assert clock.ticks == [106.0]  # late: the deadline has passed


def test_the_messages_of_a_line_arrive_in_order_within_2_and_a_half_delays() -> None:
    world = World(3)
    arrived: list[tuple[int, float]] = []

    def arrive(number: int) -> None:
        arrived.append((number, world.now))

    line = independent_line(world, "a", "b", 0.01)
    for number in range(50):
        line.send(partial(arrive, number))
    world.run_until(1.0)
    assert [number for number, _ in arrived] == list(range(50))
    assert all(0.005 <= at <= 0.025 for _, at in arrived)
    assert all(earlier <= later for (_, earlier), (_, later) in pairwise(arrived))


def test_the_delays_of_a_line_depend_on_its_ends_and_the_seed_alone() -> None:
    def delays(seed: int, target: str, draws: int) -> list[float]:
        world = World(seed)
        for _ in range(draws):
            world.random.random()
        arrived: list[float] = []
        line = independent_line(world, "a", target, 0.01)
        for number in range(3):
            world.at(float(number), partial(line.send, lambda: arrived.append(world.now)))
        world.run_until(4.0)
        return arrived

    assert delays(0, "b", 0) == delays(0, "b", 5)
    assert delays(0, "b", 0) != delays(1, "b", 0)
    assert delays(0, "b", 0) != delays(0, "c", 0)
