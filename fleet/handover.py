"""The record that a supervisor leaves to the next one, for services that outlive it (docs/adr/0056).

The services are the state of a fleet; the record adds what they do not know: the wanted sizes, the pins of the planner,
the config that operators have changed, and a roll under way. It counts only if a service is there to be adopted.

The next `tandem serve` may have another config than the earlier one had at its start. Then the new config wins over
changes by `tandem config` and `tandem roll`, and a roll under way goes on to the new config.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import TandemError, WorkerUnavailable
from core.lifecycle import ServiceRole
from fleet.events import FleetAdopted, FleetMessage, MachineId, RollLeft, ServiceStarted
from fleet.spec import FleetSpec

ROLES = frozenset(role.value for role in ServiceRole)
KEEP_INTERVAL_S = 1.0  # between two looks whether the record is still true


class HandoverStore(Protocol):
    """Keeps one record for as long as services can outlive their supervisor. Both raise `WorkerUnavailable`."""

    async def read(self) -> str:
        """Empty without a record."""

    async def write(self, record: str) -> None: ...


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """One revision of the config, from which another supervisor can make the spec again."""

    revision: int
    built_text: str  # as in `FleetSpec`
    text: str  # as in `FleetSpec`

    @classmethod
    def of(cls, revision: int, spec: FleetSpec) -> KeptConfig:
        return cls(revision, spec.built_text, spec.text)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> KeptConfig:
        """From a record. Raises one of several exceptions if it is not as `of` makes it."""
        for text in (fields["built_text"], fields["text"]):
            if not isinstance(json.loads(text), dict):
                raise TypeError("a config is an object of tables")
        if type(fields["revision"]) is not int:
            raise TypeError("a revision is a whole number")
        return cls(fields["revision"], fields["built_text"], fields["text"])

    def spec(self, started: FleetSpec) -> FleetSpec:
        """In the fleet of a `tandem serve` that has `started`. Raises `TandemError`."""
        spec = started
        if self.built_text != started.text and started.reread is not None:
            spec = started.reread(self.built_text)
        options = _changed_options(self.built_text, self.text)
        if options and spec.amend is not None:
            spec, _ = spec.amend("", options)  # a whole config would lose to the flags of `tandem serve`
        return started.followed_by(spec)


def _changed_options(built_text: str, text: str) -> str:
    """As in `FleetControl.change_config`; empty if nothing has changed."""
    before, after = json.loads(built_text), json.loads(text)
    changed = {}
    for table, part in after.items():
        was = before.get(table)
        if part != was and isinstance(part, dict) and isinstance(was, dict):
            changed[table] = {name: value for name, value in part.items() if name not in was or value != was[name]}
        elif part != was:
            changed[table] = part  # also a list of tables
    return json.dumps(changed) if changed else ""


@dataclass(frozen=True, slots=True)
class KeptRoll:
    leaves: KeptConfig  # of the services that have not rolled
    can_stop: bool  # a failure would restore `leaves`
    rolled: tuple[str, ...]  # service ids


@dataclass(frozen=True, slots=True)
class Handover:
    started_text: str  # the config with which `tandem serve` has started
    sizes: Mapping[str, int]  # by role
    pinned: tuple[str, ...]  # roles
    config: KeptConfig  # of new starts
    roll: KeptRoll | None = None

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, record: str) -> Handover | None:
        """None without a record, and for one that another version has written otherwise. Roles and fields that this
        version does not know are left out."""
        try:
            fields = json.loads(record)
            sizes = {role: size for role, size in fields["sizes"].items() if role in ROLES and type(size) is int}
            pinned, roll = tuple(role for role in fields["pinned"] if role in ROLES), fields["roll"]
            if roll is not None:
                roll = KeptRoll(KeptConfig.read(roll["leaves"]), bool(roll["can_stop"]), tuple(roll["rolled"]))
            return cls(fields["started_text"], sizes, pinned, KeptConfig.read(fields["config"]), roll)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


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
    config, roll, notes = handover.config, handover.roll, list[FleetMessage]()
    newest = max(config.revision, 0 if roll is None else roll.leaves.revision)
    has_same_config = started.text in (handover.started_text, config.text)
    try:
        revision = config.revision if has_same_config else newest + 1
        specs = {revision: config.spec(started) if has_same_config else started}
        if roll is not None:
            specs[roll.leaves.revision] = roll.leaves.spec(started)
    except TandemError as fault:
        revision, roll = newest + 1, None
        specs = {revision: started}
        told = f"{fault}; `tandem roll` gives every service the present one"
        notes.append(FleetMessage("fleet", "cannot keep the config of its earlier supervisor", told))
    if specs[revision].text != started.text:
        told = f"config {revision} differs from that of `tandem serve`"
        notes.append(FleetMessage("fleet", "keeps what `tandem config` or `tandem roll` has changed", told))
    elif config.text not in (handover.started_text, started.text):
        told = "`tandem serve` has another config now"
        notes.append(FleetMessage("fleet", "forgets what `tandem config` or `tandem roll` had changed", told))
    limit, sizes = started.rules.config.max_workers, {}
    for role in ServiceRole:
        least = 1 if role is ServiceRole.ROUTER else 0
        if least <= handover.sizes.get(role.value, -1) <= limit:
            sizes[role] = handover.sizes[role.value]
    left = None
    if roll is not None:
        rolled = [one.member for _, one in services if has_same_config and one.service_id in roll.rolled]
        left = RollLeft(roll.leaves.revision, roll.can_stop, frozenset(rolled))
    rules = {number: spec.rules for number, spec in specs.items()}
    adopted = FleetAdopted(tuple(services), sizes, rules, revision, left)
    return Takeover(adopted, specs, tuple(map(ServiceRole, handover.pinned)), tuple(notes))
