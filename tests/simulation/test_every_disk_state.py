"""Something goes wrong in each state of a read from disk, and of a write to it: the worker dies, stops, drains or loses
its streams; a slot is torn or another's, the file is gone, the disk fails, is full or hangs; the request is cancelled,
its deadline passes, or its router dies. Every check of the simulator holds: each request ends once with the right
tokens, the ledger is right after every event, and no block is left. The file itself is in tests/unit/worker/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest

from core.handoff import TransferId
from core.scheduling.sequence import Sequence
from simulator.search.scenario import make_scenario
from simulator.search.simulation import Simulation
from simulator.shells import disk as disks
from simulator.shells.disk import SimulatedDisk
from simulator.shells.worker_shell import WorkerShell
from simulator.virtual.faults import DiskFaults, Fault
from simulator.virtual.world import SimulationError
from tests.simulation.test_every_move_state import BrokenMove, cancel, deadline, router_death
from tests.support.small_worlds import with_small_pools
from worker.tier.disk_tier import DiskTier
from worker.tier.events import (
    BlocksCopied,
    BlocksRead,
    GiveUpRead,
    ReadBlocks,
    SlotErased,
    TierAction,
    TierEvent,
    WriteBlocks,
)

SEED = 3
NUM_REQUESTS = 24
STATE_S = 0.02  # of each state: a cancel of the client comes to the worker within it
HANG_S = 0.4  # so long that a read is given up, and its targets are others' before it ends
STOP_S = 1.3  # more than the limit of any read
LATER_S = (0.001, 0.05)
NUM_BEFORE = 3  # a state is broken when it is reached for this time, so each file has blocks by then
SLOW = DiskFaults(seconds_per_block=0.05, hung=1.0)

READ_STATES = ("is asked", "is half read", "has arrived", "is given up", "is cached")
WRITE_STATES = ("is held", "is copied", "is written", "is in the index")
STATES = READ_STATES + WRITE_STATES
KINDS = ("dies", "vanishes", "stops", "drains", "loses its token stream")


Broken = ReadBlocks | WriteBlocks | GiveUpRead


class BrokenDisk:
    """A small world in which faults happen when a read or a write of any disk is in a state for the third time."""

    def __init__(self, state: str, *what: Callable[[BrokenDisk, WorkerShell, Any], None]) -> None:
        scenario = with_small_pools(make_scenario(SEED))
        faults = DiskFaults(seconds_per_block=0.003, hung=0.5 * (state == "is given up"))
        workers = tuple(replace(spec, disk=faults) for spec in scenario.workers)
        requests = scenario.requests[:NUM_REQUESTS]
        self.simulation = Simulation(replace(scenario, calm=False, num_routers=1, workers=workers, requests=requests))
        self.took_effect = False
        self.was_given_up = False  # the read that was broken
        self._read: tuple[str, TransferId] | None = None  # that was broken
        self.slots: list[int] = []  # of the blocks that are read or written in this state
        self._state, self._what = state, what
        self._num_left = 1 if state == "is given up" else NUM_BEFORE  # after the first, the reads of this disk pause
        self._sequences: dict[tuple[str, TransferId], Sequence] = {}  # of reads, by the name of their worker

    def target_of(self, _: WorkerShell, __: Any) -> None:
        """A read from disk has no other side."""

    def run(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        originals = {name: getattr(SimulatedDisk, name) for name in ("perform", "_fill", "_copy", "__init__")}

        def init(disk: SimulatedDisk, *args: Any) -> None:
            originals["__init__"](disk, *args)
            disk._post = partial(self._post_later, disk, disk._post)  # type: ignore[method-assign]

        def perform(disk: SimulatedDisk, action: TierAction) -> None:
            originals["perform"](disk, action)
            if isinstance(action, ReadBlocks):
                shell = _shell_of(disk)
                self._sequences[shell.name, action.read_id] = shell.machine.prefixes.pulls[action.read_id].sequence
                self._reach(disk, "is asked", action)
            elif isinstance(action, WriteBlocks):
                self._reach(disk, "is held", action)
            elif isinstance(action, GiveUpRead):
                self.was_given_up |= self._read == (_shell_of(disk).name, action.read_id)
                self._reach(disk, "is given up", action)

        def fill(disk: SimulatedDisk, action: ReadBlocks, num_read: int, slots: slice) -> None:
            originals["_fill"](disk, action, num_read, slots)
            if slots.start is None and disk.alive and action.read_id in disk._open_reads:
                self._reach(disk, "is half read", action)

        def copy(disk: SimulatedDisk, action: WriteBlocks) -> None:
            originals["_copy"](disk, action)
            if disk.alive:
                self._reach(disk, "is copied", action)

        monkeypatch.setattr(disks, "COPY_S", STATE_S)
        monkeypatch.setattr(disks, "HANG_S", HANG_S)
        for name, changed in {"__init__": init, "perform": perform, "_fill": fill, "_copy": copy}.items():
            monkeypatch.setattr(SimulatedDisk, name, changed)
        self.simulation.run()
        assert self.took_effect, "no read or write was in this state"
        return self.simulation.world.counts

    def _post_later(self, disk: SimulatedDisk, post: Callable[[TierEvent], None], event: TierEvent) -> None:
        if isinstance(event, BlocksCopied | SlotErased):
            post(event)
            return
        read = _tier_of(disk)._reads[event.read_id] if isinstance(event, BlocksRead) else None
        if isinstance(event, BlocksRead):
            assert read is not None
            action: Broken = ReadBlocks(event.read_id, read.reads, 0.0)
            before, after = "has arrived", "is cached"
        else:
            action = WriteBlocks(_tier_of(disk)._writes)
            before, after = "is written", "is in the index"
        self._reach(disk, before, action)

        def arrive() -> None:
            was_given_up = read is not None and read.is_given_up
            post(event)
            if disk.alive and not was_given_up:
                self._reach(disk, after, action)

        self.simulation.world.after(STATE_S, arrive)

    def _reach(self, disk: SimulatedDisk, state: str, action: Broken) -> None:
        shell = _shell_of(disk)
        sequence = self._sequence(shell, action)
        if state != self._state or self.took_effect or sequence is None:
            return
        if sequence.sequence_id not in shell.calls:
            return  # its call has ended
        self._num_left -= 1
        if self._num_left:
            return
        self.took_effect = True
        if not isinstance(action, WriteBlocks):
            self._read = shell.name, action.read_id
        match action:
            case ReadBlocks(reads=reads):
                self.slots = [read.slot for read in reads]
            case WriteBlocks(writes):
                self.slots = [write.slot for write in writes]
            case GiveUpRead(read_id):
                self.slots = [read.slot for read in _tier_of(disk)._reads[read_id].reads]
        for act in self._what:
            self.simulation.world.after(0.0, partial(act, self, shell, _Ended(sequence)))

    def _sequence(self, shell: WorkerShell, action: Broken) -> Sequence | None:
        """The one that is read for, or one that holds blocks while others are written."""
        if isinstance(action, ReadBlocks | GiveUpRead):
            return self._sequences[shell.name, action.read_id]
        scheduler = shell.machine.core.scheduler
        return next(iter([*scheduler.running, *scheduler.waiting]), None)


class _Ended:
    """As a `Move`, to `cancel` and `deadline`."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence


def _shell_of(disk: SimulatedDisk) -> WorkerShell:
    post = cast(Any, disk._post)
    return (post.args[1] if isinstance(post, partial) else post).__self__  # type: ignore[no-any-return]


def _tier_of(disk: SimulatedDisk) -> DiskTier:
    tier = _shell_of(disk).machine.core.tier
    assert tier is not None
    return tier  # type: ignore[no-any-return]


# ---- what goes wrong


Act = Callable[[BrokenDisk, WorkerShell, Any], None]


def worker_fault(kind: str, delay_s: float = 0.0) -> Act:
    def act(broken: BrokenDisk, shell: WorkerShell, _: Any) -> None:
        fault = Fault(kind, shell.spec.worker_id, broken.simulation.world.now + delay_s, STOP_S)
        broken.simulation.world.after(delay_s, partial(broken.simulation._inject, fault))

    return act


def ends(how: Callable[[BrokenMove, WorkerShell, Any], None]) -> Act:
    return lambda broken, shell, move: how(cast(BrokenMove, broken), shell, move)


def torn(broken: BrokenDisk, shell: WorkerShell, _: Any) -> None:
    """The digests of these slots do not match any more."""
    for slot in broken.slots:
        _disk(shell)._slots.pop(slot, None)


def foreign(broken: BrokenDisk, shell: WorkerShell, _: Any) -> None:
    """Another program has written its own blocks into these slots."""
    slots = _disk(shell)._slots
    for slot in broken.slots:
        if slot in slots:
            header, content = slots[slot]
            slots[slot] = replace(header, name=b"x" * 32, parent=b"y" * 32), content[::-1]


def removed(_: BrokenDisk, shell: WorkerShell, __: Any) -> None:
    """The file has been cut to no bytes, or the next process finds neither file nor directory."""
    _disk(shell)._slots.clear()


def failing(_: BrokenDisk, shell: WorkerShell, __: Any) -> None:
    _disk(shell)._faults = DiskFaults(failed=1.0)


def full(_: BrokenDisk, shell: WorkerShell, __: Any) -> None:
    """Writes fail, over other blocks too, and reads do not."""
    disk = _disk(shell)
    disk.is_full = True
    copy = disk._copy

    def without_room(action: WriteBlocks) -> None:
        disk._faults = DiskFaults(failed=1.0)
        copy(action)
        disk._faults = DiskFaults()

    disk._copy = without_room  # type: ignore[method-assign]


def hanging(_: BrokenDisk, shell: WorkerShell, __: Any) -> None:
    _disk(shell)._faults = SLOW


def _disk(shell: WorkerShell) -> SimulatedDisk:
    assert shell.disk is not None
    return shell.disk


FILE_FAULTS: tuple[Act, ...] = (torn, foreign, removed, failing, full, hanging)
ENDS: dict[str, Act] = {how.__name__: ends(how) for how in (cancel, deadline, router_death)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_the_worker_fails_in_each_state(monkeypatch: pytest.MonkeyPatch, state: str, kind: str) -> None:
    assert BrokenDisk(state, worker_fault(kind)).run(monkeypatch)[kind] > 0


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_the_request_ends_in_each_state(monkeypatch: pytest.MonkeyPatch, state: str, how: str) -> None:
    broken = BrokenDisk(state, ENDS[how])
    broken.run(monkeypatch)
    assert broken.was_given_up == (state in ("is asked", "is half read", "has arrived"))


@pytest.mark.parametrize("fault", FILE_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("state", STATES)
def test_the_file_or_its_disk_fails_in_each_state(monkeypatch: pytest.MonkeyPatch, state: str, fault: Act) -> None:
    BrokenDisk(state, fault).run(monkeypatch)


def _second_faults() -> list[Any]:
    """Each pair in each state with one delay, which differs between states; `make soak` tries all delays."""
    firsts = (ENDS["cancel"], failing, hanging)
    pairs = product(STATES, range(len(firsts)), ("dies", "stops", "drains"))
    return [
        pytest.param(state, firsts[first], kind, delay_s, marks=() if (number + turn) % 2 == 0 else pytest.mark.slow)
        for number, (state, first, kind) in enumerate(pairs)
        for turn, delay_s in enumerate(LATER_S)
    ]


@pytest.mark.parametrize(("state", "first", "kind", "delay_s"), _second_faults())
def test_the_worker_fails_too(
    monkeypatch: pytest.MonkeyPatch, state: str, first: Act, kind: str, delay_s: float
) -> None:
    assert BrokenDisk(state, first, worker_fault(kind, delay_s)).run(monkeypatch)[kind] > 0


# ---- machines and disks broken on purpose


def failure(state: str, *what: Act) -> str:
    """The broken rule; empty where none is."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            BrokenDisk(state, *what).run(patch)
        except SimulationError as error:
            return str(error)
    return ""


def test_a_disk_that_writes_into_targets_that_were_given_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the reads hang and end after their targets have become others'."""
    monkeypatch.setattr(DiskTier, "take_given_up", lambda _: [])
    assert "is right" in failure("is given up", ENDS["cancel"])


def test_a_slot_that_has_its_name_before_its_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without digests, whose writer dies halfway."""

    def begun(self: SimulatedDisk, action: WriteBlocks) -> None:
        copy(self, action)
        for write in action.writes:
            self._slots[write.slot] = write.header, [7] * self._memory.block_size

    copy = SimulatedDisk._copy
    monkeypatch.setattr(SimulatedDisk, "_copy", begun)
    assert failure("is copied", worker_fault("dies"))
