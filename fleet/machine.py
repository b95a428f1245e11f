"""The law of the fleet: how many services run, which of them restart, and in which order they stop.

A slot is one place in the fleet (`router-0`, `decode-1`); a member is one start of a slot. The machine drops every
event of a member that is not the newest start of its slot.

    WAITING --StartService--> STARTING --ServiceStarted--> SERVING --no longer wanted--> DRAINING --> gone
       ^                          |                           |
       +--- StartFailed, too slow +------- ServiceDied -------+     (after a pause that doubles, up to 30 s)

Rule 1: the number of slots of a pool that do not drain equals the wanted size.
Rule 2: every router learns of a change in the step in which the machine learns of it.
Rule 3: removed slots drain, newest first. A drain past its time limit is killed.
Rule 4: at shutdown all routers drain before any worker, so that dispatched requests can finish.
Rule 5: at least one router is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from core.config import ClusterConfig
from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import SIZE_FIELDS, PoolSizes
from fleet.claims import Claims, GpuUse
from fleet.events import (
    Drained,
    DrainService,
    FleetAction,
    FleetEvent,
    FleetFailed,
    FleetMessage,
    FleetReady,
    FleetStopped,
    KillService,
    Member,
    PublishFleet,
    ScaleTo,
    ServiceDied,
    ServiceStarted,
    Serving,
    Shutdown,
    StartFailed,
    StartService,
)

BACKOFF_MAX_S = 30.0
STABLE_S = 60.0  # after this long in service, the failures of a slot count from zero again
DRAIN_GRACE_S = 2.0  # after the time limit of a drain; then the process is killed
LAST_DRAIN_S = 2.0  # of workers at shutdown, when no router sends requests
FIRST_START_ATTEMPTS = 3  # of one slot before the fleet has served at all


class _State(Enum):
    WAITING = "waiting"  # starts at `deadline`
    STARTING = "starting"  # fails at `deadline`
    SERVING = "serving"
    DRAINING = "draining"  # killed at `deadline`


@dataclass(slots=True)
class _Slot:
    member: Member
    state: _State
    since: float
    deadline: float | None
    failures: int = 0  # since the slot was last stable
    service_id: str = ""
    address: str = ""


class FleetMachine:
    """A `core.machine.Machine` over `FleetEvent` and `FleetAction`. The first `Tick` starts everything."""

    def __init__(
        self,
        config: ClusterConfig,
        drain_timeout_s: float,
        router_drain_timeout_s: float,
        gpu_use: GpuUse = GpuUse.NEVER,
    ) -> None:
        self._config = config
        self._claims = Claims(config, gpu_use)
        self._drain_timeout_s = {
            ServiceRole.PREFILL: drain_timeout_s,
            ServiceRole.DECODE: drain_timeout_s,
            ServiceRole.ROUTER: router_drain_timeout_s,
        }
        self._wanted: dict[ServiceRole, int] = {
            ServiceRole.PREFILL: config.num_prefill,
            ServiceRole.DECODE: config.num_decode,
            ServiceRole.ROUTER: config.num_routers,
        }
        self._slots: dict[tuple[ServiceRole, int], _Slot] = {}
        self._num_starts = 0
        self._published: dict[Member, PublishFleet] = {}  # the newest of each live router
        self._was_ready = self._has_failed = self._ending = self._stopped = False
        self._actions: list[FleetAction] = []

    @property
    def wanted(self) -> PoolSizes:
        """The wanted number of services of every role."""
        return dict(self._wanted)

    def handle(self, event: FleetEvent, now: float) -> list[FleetAction]:
        """Raises `InvalidRequest` for a `ScaleTo` with a size out of range, and then changes nothing."""
        match event:
            case ScaleTo():
                self._scale(event)
            case Shutdown():
                self._ending = True
            case Tick():
                pass
            case _:
                slot = self._slots.get((event.member.role, event.member.ordinal))
                if slot is not None and slot.member == event.member:
                    self._record(slot, event, now)
        self._expire(now)
        self._balance(now)
        self._announce()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        return min((slot.deadline for slot in self._slots.values() if slot.deadline is not None), default=None)

    def check(self) -> None:
        for key, slot in self._slots.items():
            assert key == (slot.member.role, slot.member.ordinal), f"{slot.member.name} is in slot {key}"
            assert (slot.deadline is None) == (slot.state is _State.SERVING), f"{slot.member.name}: wrong deadline"
            if slot.state in (_State.SERVING, _State.DRAINING):
                assert slot.service_id, f"{slot.member.name} serves without a name"
                assert slot.address, f"{slot.member.name} serves without an address"
        for role, wanted in self._wanted.items():
            staying = self._staying(role)
            if not self._ending:
                assert len(staying) == wanted, f"{len(staying)} slots of {role} for {wanted} wanted"
        assert self._wanted[ServiceRole.ROUTER] >= 1, "no router is wanted"
        starts = [slot.member.start for slot in self._slots.values()]
        assert len(set(starts)) == len(starts), "two members share a start"
        publication = {publication.router: publication for publication in self._publications()}
        assert self._published == publication, "a router has not been told of a change"
        assert not (self._stopped and self._slots), "a slot is left after FleetStopped"

    def _scale(self, event: ScaleTo) -> None:
        limit = self._config.max_workers
        for role, size in event.sizes.items():
            least = 1 if role is ServiceRole.ROUTER else 0
            if not least <= size <= limit:
                message = f"must be in [{least}, {limit}] (cluster.max_workers), is {size}"
                raise InvalidRequest(SIZE_FIELDS[role], message)
        self._wanted |= event.sizes

    def _record(self, slot: _Slot, event: ServiceStarted | StartFailed | ServiceDied | Drained, now: float) -> None:
        match event:
            case ServiceStarted() if slot.state is _State.STARTING:
                slot.state, slot.since, slot.deadline = _State.SERVING, now, None
                slot.service_id, slot.address = event.service_id, event.address
                if self._was_ready and not self._ending:
                    self._actions.append(FleetMessage(f"{slot.member.name} serves"))
            case StartFailed() if slot.state is _State.STARTING:
                self._fail(slot, "did not start", event.reason, now, permanent=event.permanent)
            case ServiceDied() if slot.state in (_State.STARTING, _State.SERVING):
                self._fail(slot, "died", event.reason, now)
            case Drained() | ServiceDied() if slot.state is _State.DRAINING:
                if not self._ending:
                    self._actions.append(FleetMessage(f"{slot.member.name} has drained"))
                self._forget(slot)

    def _expire(self, now: float) -> None:
        """Act on every slot whose deadline has come."""
        for slot in list(self._slots.values()):
            if slot.deadline is None or now < slot.deadline:
                continue
            if slot.state is _State.WAITING and not self._ending:
                self._start(slot, now)
            elif slot.state is _State.STARTING:
                self._actions.append(KillService(slot.member))
                hint = self._claims.wait_hint(slot.member.role)
                reason = f"no answer within {self._config.start_timeout_s:g} s{hint}"
                self._fail(slot, "did not start", reason, now)
            elif slot.state is _State.DRAINING:
                self._actions.append(KillService(slot.member))
                self._actions.append(FleetMessage(f"{slot.member.name} did not drain in time and was killed"))
                self._forget(slot)

    def _fail(self, slot: _Slot, what: str, reason: str, now: float, permanent: bool = False) -> None:
        if slot.state is _State.SERVING and now - slot.since >= STABLE_S:
            slot.failures = 0
        pause_s = float(min(BACKOFF_MAX_S, self._config.restart_backoff_s * 2 ** min(slot.failures, 16)))
        slot.failures += 1
        hopeless = permanent or slot.failures >= FIRST_START_ATTEMPTS
        if not self._was_ready and hopeless and not self._has_failed and not self._ending:
            self._has_failed = True
            self._actions.append(FleetFailed(f"{slot.member.name}: {reason}"))
        elif not self._ending:
            self._actions.append(
                FleetMessage(f"{slot.member.name} {what}: {reason}; starting it again in {pause_s:g} s")
            )
        slot.state, slot.since, slot.deadline = _State.WAITING, now, now + pause_s

    def _start(self, slot: _Slot, now: float) -> None:
        self._num_starts += 1
        slot.member = Member(slot.member.role, slot.member.ordinal, self._num_starts)
        slot.state, slot.since, slot.deadline = _State.STARTING, now, now + self._config.start_timeout_s
        self._actions.append(StartService(slot.member))

    def _forget(self, slot: _Slot) -> None:
        del self._slots[(slot.member.role, slot.member.ordinal)]

    def _balance(self, now: float) -> None:
        """Rules 1, 3 and 4."""
        if self._ending:
            self._end(now)
            return
        added: list[_Slot] = []
        for role, wanted in self._wanted.items():
            staying = self._staying(role)
            for slot in staying[wanted:]:
                self._leave(slot, self._drain_timeout_s[role], now)
            for _ in range(wanted - len(staying)):
                ordinal = next(n for n in range(len(self._slots) + 1) if (role, n) not in self._slots)
                slot = self._slots[(role, ordinal)] = _Slot(Member(role, ordinal, 0), _State.WAITING, now, now)
                added.append(slot)
        # By ordinal: where workers share GPUs, each GPU then gets a prefill and a decode worker.
        for slot in sorted(added, key=lambda slot: slot.member.ordinal):
            self._start(slot, now)

    def _end(self, now: float) -> None:
        """Rule 4. A slot that does not serve leaves at once."""
        for slot in list(self._slots.values()):
            if slot.member.role is ServiceRole.ROUTER and slot.state is not _State.DRAINING:
                self._leave(slot, self._drain_timeout_s[ServiceRole.ROUTER], now)
            elif slot.state in (_State.WAITING, _State.STARTING):
                self._leave(slot, LAST_DRAIN_S, now)
        if not self._live(ServiceRole.ROUTER):
            for slot in list(self._slots.values()):
                if slot.state is _State.DRAINING:
                    slot.deadline = min(slot.deadline or now, now + LAST_DRAIN_S + DRAIN_GRACE_S)
                else:
                    self._leave(slot, LAST_DRAIN_S, now)

    def _leave(self, slot: _Slot, timeout_s: float, now: float) -> None:
        if slot.state is _State.SERVING:
            slot.state, slot.since, slot.deadline = _State.DRAINING, now, now + timeout_s + DRAIN_GRACE_S
            self._actions.append(DrainService(slot.member, timeout_s))
            return
        if slot.state is _State.STARTING:
            self._actions.append(KillService(slot.member))
        self._forget(slot)

    def _announce(self) -> None:
        """Rule 2, and the message that the supervisor waits for."""
        published, self._published = (
            self._published,
            {publication.router: publication for publication in self._publications()},
        )
        changed = [
            publication for router, publication in self._published.items() if published.get(router) != publication
        ]
        self._actions[:0] = changed
        serving = [slot.state is _State.SERVING for slot in self._slots.values()]
        if not self._was_ready and not self._ending and all(serving):
            self._was_ready = True
            self._actions.append(FleetReady())
        if self._ending and not self._slots and not self._stopped:
            self._stopped = True
            self._actions.append(FleetStopped())

    def _staying(self, role: ServiceRole) -> list[_Slot]:
        """Slots of a role that do not drain: serving ones first, and the oldest first among equals."""
        slots = [s for s in self._slots.values() if s.member.role is role and s.state is not _State.DRAINING]
        order = {_State.SERVING: 0, _State.STARTING: 1, _State.WAITING: 2}
        return sorted(slots, key=lambda s: (order[s.state], s.member.start))

    def _publications(self) -> list[PublishFleet]:
        """The lists that every live router must have."""
        routers, workers = self._live(ServiceRole.ROUTER), self._live(ServiceRole.PREFILL, ServiceRole.DECODE)
        return [PublishFleet(router.member, workers, routers) for router in routers]

    def _live(self, *roles: ServiceRole) -> tuple[Serving, ...]:
        """The serving and the draining members of these roles, by their start."""
        live = [
            Serving(slot.member, slot.service_id, slot.address, _drains_as_router(slot))
            for slot in self._slots.values()
            if slot.member.role in roles and slot.state in (_State.SERVING, _State.DRAINING)
        ]
        return tuple(sorted(live, key=lambda serving: serving.member.start))


def _drains_as_router(slot: _Slot) -> bool:
    return slot.member.role is ServiceRole.ROUTER and slot.state is _State.DRAINING
