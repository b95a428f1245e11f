"""One worker, as the router sees it: its newest report, reconciled with the calls of this router.

A report counts the calls of all routers that had arrived when its load was taken. Calls of this router with a higher
number are on the way; the router adds them. So the view is the report plus what the report cannot have yet, and several
routers see the same truth:

    prompt work = as reported + that of calls on the way x the routers with open calls
    sequences   = as reported - those of this router + the open calls of this router, which it knows exactly

The calls of other routers on the way are unseen. The other routers see the same reports and choose alike, so each call
of this router on the way counts once for every router. Otherwise all routers choose the same worker between two
reports.

A call that never arrives ends at this router, like every other call, and then counts no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.cost.step_cost import PRIOR, StepCost
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole, WorkerState
from core.paths import PathStatus
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import NUM_SIZE_CLASSES, RouterCalls, WorkerLoad, size_class
from router.routing.question import WorkerView
from router.routing.source_trial import SourceTrial

_NO_CALLS = RouterCalls()
RELEASE_HALF_LIFE_S = 30.0


@dataclass(frozen=True, slots=True)
class CallWork:
    """The work that a call adds to its worker."""

    prompt_s: float = 0.0  # of prompt work
    num_blocks: int = 0  # that it takes
    link_until: float = 0.0  # its blocks move over the link of the worker until then


@dataclass(slots=True)
class ReleaseRate:
    """How long sequences hold a block, by Little's law: the blocks held, summed over time, for each block released.

    So a time without requests changes nothing. The newest minute or so counts.
    """

    _held_s: float = 0.0  # blocks held x seconds
    _num_released: float = 0.0
    _last: tuple[float, int, int] | None = None  # time, blocks held, blocks released since the start of the worker

    def take(self, load: WorkerLoad, now: float) -> None:
        num_held, num_released = load.ledger.get(Column.HELD, 0), load.num_released_blocks
        if self._last is not None:
            last_at, last_held, last_released = self._last
            keep = 0.5 ** ((now - last_at) / RELEASE_HALF_LIFE_S)
            self._held_s = self._held_s * keep + last_held * (now - last_at)
            self._num_released = self._num_released * keep + max(0, num_released - last_released)
        self._last = now, num_held, num_released

    @property
    def blocks_per_s(self) -> float:
        """At the number of blocks held now; 0 = unknown."""
        num_held = 0 if self._last is None else self._last[1]
        return num_held * self._num_released / self._held_s if self._held_s > 0.0 else 0.0


@dataclass(slots=True, eq=False)
class WorkerRecord:
    worker_id: str
    role: ServiceRole
    agent: AgentAddress
    load: WorkerLoad
    reported_at: float
    router_id: str  # of this router
    max_in_flight: int  # of all routers together
    most_dispatched: int = 0  # open dispatches when `max_in_flight` was last changed; they go on
    num_routers: int = 1  # with open calls on any worker; this router counts always
    peer_cost: StepCost = PRIOR  # of measured workers; holds until this worker has measured steps of its own
    paths: dict[str, PathStatus] = field(default_factory=dict)  # over which the worker reads, by peer
    suspect: bool = False  # a call failed; the router dispatches nothing to the worker until its next report
    leaves: bool = False  # it will drain
    dispatched: dict[str, int] = field(default_factory=dict)  # open dispatches of this router -> number of the call
    on_the_way: dict[int, CallWork] = field(default_factory=dict)  # calls that no report has yet
    release: ReleaseRate = field(default_factory=ReleaseRate)
    link_until: float = 0.0  # of `WorkerView`
    sources: dict[str, SourceTrial] = field(default_factory=dict)  # from which it has read prefixes, by agent
    load_at: float = 0.0  # time of `load`; the worker has said since then, at most, that it is unchanged
    view: WorkerView = field(init=False)
    has_room: bool = field(init=False)
    pool_tokens: int = field(init=False)  # that the whole pool holds

    def __post_init__(self) -> None:
        self.pool_tokens = self.agent.num_blocks * self.agent.layout.block_size
        self.load_at = self.reported_at
        self.release.take(self.load, self.load_at)
        self.refresh()

    def take_load(self, load: WorkerLoad) -> None:
        """The load of a report. The numbers of `on_the_way` rise, as does the highest call of each report."""
        self.load, self.load_at = load, self.reported_at
        self.release.take(load, self.load_at)
        last_call = load.router_calls.get(self.router_id, _NO_CALLS).last_call
        while self.on_the_way and (first := next(iter(self.on_the_way))) <= last_call:
            del self.on_the_way[first]
        self.refresh()

    def add_call(self, dispatch_id: str, number: int, work: CallWork) -> None:
        """A call that starts now."""
        self.dispatched[dispatch_id] = number
        self.on_the_way[number] = work
        self.use_link(work.link_until)

    def remove_call(self, dispatch_id: str) -> None:
        """Forget a call that has ended. Does nothing if it is not known."""
        number = self.dispatched.pop(dispatch_id, None)
        if number is not None:
            self.on_the_way.pop(number, None)
            self.refresh()

    def use_link(self, until: float) -> None:
        """A prefix or a hand-off that it reads or gives is on its way until then."""
        self.link_until = max(self.link_until, until)
        self.refresh()

    def begin_read(self, source: str, now: float) -> None:
        """A call starts that reads a prefix from this agent."""
        self.sources.setdefault(source, SourceTrial()).begin(now)
        self.refresh()

    def end_read(self, source: str, num_tokens: int | None, began_at: float, now: float) -> None:
        """As `SourceTrial.end`."""
        if source in self.sources:
            self.sources[source].end(num_tokens, began_at, now)
            self.refresh()

    def set_max_in_flight(self, max_in_flight: int) -> None:
        self.max_in_flight, self.most_dispatched = max_in_flight, len(self.dispatched)
        self.refresh()

    @property
    def serves(self) -> bool:
        return self.load.state is WorkerState.SERVING and not self.leaves

    @property
    def num_free(self) -> int:
        """Calls that it could take now."""
        return max(0, self.max_in_flight - self.view.num_sequences)

    def holds(self, num_tokens: int, max_total_tokens: int) -> bool:
        """Whether the whole pool of a prefill worker holds the prompt, that of a decode worker also the output."""
        # The last token is sampled but never computed, so it needs no slot in the pool.
        is_prefill = self.role is ServiceRole.PREFILL
        return (num_tokens if is_prefill else max(num_tokens, max_total_tokens - 1)) <= self.pool_tokens

    @property
    def step_cost(self) -> StepCost:
        return self.load.step_cost if self.has_measured else self.peer_cost

    @property
    def has_measured(self) -> bool:
        return self.load.step_cost != PRIOR

    def refresh(self) -> None:
        """Compute `view` and `has_room` again after a change."""
        load, num_own = self.load, len(self.dispatched)
        num_reported_own = load.router_calls.get(self.router_id, _NO_CALLS).num_open
        num_sequences = max(0, load.num_calls - num_reported_own) + num_own
        self.view = WorkerView(
            worker_id=self.worker_id,
            num_sequences=num_sequences,
            num_dispatched=num_own,
            cost=self.step_cost,
            step_limit_s=load.step_limit_s,
            max_step_tokens=load.max_step_tokens,
            num_decoding=load.num_decoding,
            decode_context=load.decode_context,
            backlog=load.prompt_backlog,
            reported_at=self.load_at,
            arriving=self._arriving() if self.on_the_way else (),
            num_free_blocks=self._num_free_blocks(),
            num_cached_blocks=load.ledger.get(Column.CACHED, 0),
            blocks_released_per_s=self.release.blocks_per_s,
            block_bytes=self.agent.layout.block_bytes,
            block_size=self.agent.layout.block_size,
            agent_name=self.agent.name,
            machine=self.agent.location.machine,
            paths=self.paths,
            num_blocks=self.agent.num_blocks,
            reads_prefixes=load.gives_prefixes,
            link_until=self.link_until,
            disk_bytes_per_s=load.disk_bytes_per_s if load.num_disk_blocks else 0.0,
            avoided_sources={name: trial.avoided_until for name, trial in self.sources.items() if trial.avoided_until},
        )
        self.has_room = self.serves and not self.suspect and num_sequences < self.max_in_flight

    def _arriving(self) -> tuple[float, ...]:
        """Seconds of prompt work of calls on the way, by size class."""
        arriving = [0.0] * NUM_SIZE_CLASSES
        for work in self.on_the_way.values():
            if work.prompt_s > 0.0:
                arriving[size_class(work.prompt_s)] += self.num_routers * work.prompt_s
        return tuple(arriving)

    def _num_free_blocks(self) -> int:
        ledger = self.load.ledger
        free = ledger.get(Column.FREE, 0) + ledger.get(Column.CACHED, 0) - self.load.num_promised_blocks
        return free - self.num_routers * sum(work.num_blocks for work in self.on_the_way.values())

    def check(self) -> None:
        before, had_room = self.view, self.has_room
        self.refresh()
        assert (self.view, self.has_room) == (before, had_room)
        assert len(self.dispatched) <= max(self.max_in_flight, self.most_dispatched)
        assert set(self.on_the_way) <= set(self.dispatched.values())
        assert list(self.on_the_way) == sorted(self.on_the_way)
