"""The record that a supervisor leaves to the next one, for services that outlive it (docs/adr/0056).

The services are the state of a fleet; the record adds what they do not know: the wanted sizes, the pins of the planner,
the config that operators have changed, and a roll under way. It counts only if a service is there to be adopted.

The next `tandem serve` may have another config than the earlier one had at its start. Then the new config wins over
changes by `tandem apply`, and a roll under way goes on to the new config.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.config import ConfigText, TandemConfig
from core.errors import InvalidRequest, TandemError, WorkerUnavailable
from core.fleet_control import FleetStatus
from core.lifecycle import ServiceRole
from fleet.law.events import FleetAdopted, FleetMessage, MachineId, RollLeft, ServiceStarted
from fleet.supervisor.spec import FleetSpec

ROLES = frozenset(role.value for role in ServiceRole)
# A record of another version
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
MAX_REVISION = 2**31  # in a record; GetFleet sends 32 bits
KEEP_INTERVAL_S = 1.0  # between two looks whether the record is still true


class HandoverStore(Protocol):
    """Keeps one record for as long as services can outlive their supervisor. Both raise `WorkerUnavailable`."""

    async def read(self) -> str:
        """Empty without a record."""

    async def write(self, record: str) -> None: ...


@dataclass(frozen=True, slots=True)
class KeptRoll:
    leaves: int  # revision of the services that have not rolled
    can_stop: bool  # a failure would restore `leaves`
    rolled: tuple[str, ...]  # service ids


@dataclass(frozen=True, slots=True)
class Handover:
    started: str  # the config with which `tandem serve` has started, as `ConfigText.as_json` writes it
    sizes: Mapping[str, int]  # by role
    pinned: tuple[str, ...]  # roles
    revision: int = 0  # of new starts; 0 = another version has written the configs otherwise
    texts: Mapping[int, str] = field(default_factory=dict)  # by revision, that of new starts and that of `roll.leaves`
    roll: KeptRoll | None = None

    @classmethod
    def of(
        cls,
        started: FleetSpec,
        specs: Mapping[int, FleetSpec],
        status: FleetStatus,
        pinned: Sequence[ServiceRole],
        can_stop_roll: bool,
    ) -> Handover:
        """The record of a fleet. `specs`: by revision."""
        roll, revisions = None, {status.revision}
        if status.rolling:
            live = [slot for slot in status.slots if slot.service_id]
            leaves = max((slot.revision for slot in live if slot.revision != status.revision), default=status.revision)
            rolled = tuple(slot.service_id for slot in live if slot.revision == status.revision)
            roll = KeptRoll(leaves, can_stop_roll, rolled)
            revisions.add(leaves)
        sizes = {role.value: size for role, size in status.wanted.items()}
        texts = {revision: specs[revision].text.as_json() for revision in revisions}
        roles = tuple(role.value for role in pinned)
        return cls(started.text.as_json(), sizes, roles, status.revision, texts, roll)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, record: str) -> Handover | None:
        """None without a record. Roles, fields and configs that this version does not know are left out."""
        try:
            fields = json.loads(record)
            sizes = {role: size for role, size in fields["sizes"].items() if role in ROLES and type(size) is int}
            pinned = tuple(role for role in fields["pinned"] if role in ROLES)
        except UNREADABLE:
            return None
        try:
            texts = {int(revision): str(text) for revision, text in fields["texts"].items()}
            roll, revision = fields["roll"], fields["revision"]
            if roll is not None:
                roll = KeptRoll(int(roll["leaves"]), bool(roll["can_stop"]), tuple(roll["rolled"]))
            known = {number for number in texts if 0 < number < MAX_REVISION}
            if not {revision, revision if roll is None else roll.leaves} <= known == texts.keys():
                raise KeyError("a revision without a text, or out of range")
            return cls(str(fields["started"]), sizes, pinned, int(revision), texts, roll)
        except UNREADABLE:
            return cls("", sizes, pinned)


class HandoverKeeper:
    """Keeps the record of this supervisor in the store."""

    def __init__(self, store: HandoverStore, present: Callable[[], Handover]) -> None:
        self._store, self._present = store, present
        self._written: Handover | None = None
        self._writing = asyncio.Lock()

    async def read(self) -> str:
        """The record of the earlier supervisor; empty if Ray does not answer."""
        with contextlib.suppress(WorkerUnavailable):
            return await self._store.read()
        return ""

    async def keep(self) -> None:
        """Write the record, if it has changed."""
        async with self._writing:
            handover = self._present()
            if handover != self._written:
                with contextlib.suppress(WorkerUnavailable):  # Ray is away for a moment; `keep_always` tries again
                    await self._store.write(handover.as_json())
                    self._written = handover

    async def keep_always(self) -> None:
        while True:
            await self.keep()
            await asyncio.sleep(KEEP_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class Takeover:
    adopted: FleetAdopted
    specs: dict[int, FleetSpec]  # by revision
    pinned: tuple[ServiceRole, ...] = ()
    notes: tuple[FleetMessage, ...] = ()


def take_over(record: str, started: FleetSpec, services: Sequence[tuple[MachineId, ServiceStarted]]) -> Takeover:
    """The fleet as the record and the adopted services describe it, for a `tandem serve` that has `started`."""
    handover = Handover.from_json(record)
    if handover is None:
        note = FleetMessage("fleet", "has no record of its earlier supervisor", "it forgets sizes, pins and changes")
        return Takeover(FleetAdopted(tuple(services)), {1: started}, notes=(note,))
    roll, notes = handover.roll, list[FleetMessage]()
    kept = handover.texts.get(handover.revision, "")
    has_same_config = any(_config_of(text) == started.text.config for text in (handover.started, kept))
    newest = max(handover.texts, default=0)
    revision = handover.revision if has_same_config else newest + 1
    try:
        if not newest:
            raise InvalidRequest("config", "another version of Tandem has written it")
        specs = {revision: _spec_of(kept, started) if has_same_config else started}
        if roll is not None:
            specs[roll.leaves] = _spec_of(handover.texts[roll.leaves], started)
    except TandemError as fault:
        revision, roll = newest + 1, None
        specs = {revision: started}
        told = f"{fault}; `tandem apply --restart` gives every service the present one"
        notes.append(FleetMessage("fleet", "cannot keep the config of its earlier supervisor", told))
    if specs[revision].text.config != started.text.config:
        told = f"config {revision} differs from that of `tandem serve`"
        notes.append(FleetMessage("fleet", "keeps what `tandem apply` has changed", told))
    elif newest and kept != handover.started and _config_of(kept) != started.text.config:
        told = "`tandem serve` has another config now"
        notes.append(FleetMessage("fleet", "forgets what `tandem apply` had changed", told))
    limit, sizes = started.rules.config.max_workers, {}
    for role in ServiceRole:
        least = 1 if role is ServiceRole.ROUTER else 0
        if least <= handover.sizes.get(role.value, -1) <= limit:
            sizes[role] = handover.sizes[role.value]
    left = None
    if roll is not None:
        rolled = [one.member for _, one in services if has_same_config and one.service_id in roll.rolled]
        left = RollLeft(roll.leaves, roll.can_stop, frozenset(rolled))
    rules = {number: spec.rules for number, spec in specs.items()}
    adopted = FleetAdopted(tuple(services), sizes, rules, revision, left)
    return Takeover(adopted, specs, tuple(map(ServiceRole, handover.pinned)), tuple(notes))


def _config_of(text: str) -> TandemConfig | None:
    """None for one of another version that this version cannot read."""
    try:
        return ConfigText.read(text).config
    except TandemError:
        return None


def _spec_of(text: str, started: FleetSpec) -> FleetSpec:
    """The spec of a kept config under the flags of the present `tandem serve`. Raises `TandemError`."""
    kept = dataclasses.replace(ConfigText.read(text), flags=started.text.flags)
    return started if kept == started.text else started.of(kept)
