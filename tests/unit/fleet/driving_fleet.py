"""Drives a FleetMachine in a test. Its methods are the words of transcripts (`tests/support/transcripts.py`):

    growing starts workers, and shrinking drains the newest first        the name of a test
      fleet                                                              a router, a prefill and a decode worker serve
      scale prefill=2   -> start prefill-1
      serves prefill-1  -> router-0: prefill-0 decode-0 prefill-1        the workers that the router has been told of
                        -> say prefill-1 serves                          a line for the operator
      scale prefill=1   -> router-0: prefill-0 decode-0 (prefill-1)      prefill-1 gets no new call
                        -> drain prefill-1

What has its usual value is not written: 30 seconds for the drain of a worker, 10 for that of a router, config 1, the
role in the name of a slot. Notes that are not printed are shown by `notes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from core.config import ClusterConfig
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import PoolSizes
from fleet.law import events
from fleet.law.claims import Claims
from fleet.law.events import FleetAction, FleetEvent, FleetRules, MachineId, Member, ServiceStarted, Serving, SlotId
from fleet.law.machine import FleetMachine
from tests.support.transcripts import Replay, transcripts_of

P, D, R = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
SIZES = {"prefill": P, "decode": D, "routers": R}
DRAIN_S = {P: 30.0, D: 30.0, R: 10.0}


def transcripts(text: str, setup: str = "") -> Callable[[str], None]:
    return transcripts_of(DrivenFleet, text, setup)


class DrivenFleet(Replay):
    """A machine and its clock. A service has the name of its slot, an earlier start of it also its number."""

    def __init__(self) -> None:
        self.now = 100.0
        self.config()

    def post(self, event: FleetEvent) -> list[FleetAction]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        self.members |= {each.member.name: each.member for each in actions if isinstance(each, events.StartService)}
        self.unprinted += [note.text for note in actions if isinstance(note, events.FleetMessage) and not note.printed]
        lists = [action for action in actions if isinstance(action, events.PublishFleet)]
        for each in lists:
            assert [other.router for other in lists] == [router.member for router in each.routers], "not every router"
            assert (each.workers, each.routers) == (lists[0].workers, lists[0].routers)
        shown = [action for action in actions if not isinstance(action, events.FleetMessage) or action.printed]
        return [action for action in shown if action not in lists[1:]]

    def check(self) -> None:
        self.machine.check()

    # ---- the fleet

    def config(self, role_option: str = "", **options: Any) -> list[FleetAction]:
        """A machine that has not begun. Sizes are those of the pools; other options are of [cluster]."""
        sizes = {f"num_{name}": options.pop(name) for name in SIZES if name in options}
        config = ClusterConfig(max_workers=4, start_timeout_s=50.0, restart_backoff_s=1.0, **sizes, **options)
        self.rules = FleetRules(Claims(config), DRAIN_S[D], DRAIN_S[R], role_option)
        self.machine = FleetMachine(self.rules)
        self.members: dict[str, Member] = {}  # the newest start of each slot
        self.unprinted: list[str] = []
        return []

    def begin(self, **options: Any) -> list[FleetAction]:
        self.config(**options)
        return self.time(0.0)

    def fleet(self, **options: Any) -> list[FleetAction]:
        """A fleet whose services serve. Names of services as options are their machines, else m-0."""
        machines = {name: options.pop(name) for name in list(options) if "-" in name}
        self.begin(**options)
        for name in list(self.members):
            self.serves(name, machines.get(name, "m-0"))
        self.unprinted.clear()
        return []

    def adopt(self, *services: str, config: int = 1, **options: Any) -> list[FleetAction]:
        """Services of an earlier supervisor, on m-0; `decode-3:prefill` has switched its role. Options are sizes, and
        of a roll: `rolls_from`, the config before; `rolled`, the service that has the new one; `can_stop`."""
        started = []
        for start, service in enumerate(services, 2):
            name, _, role = service.partition(":")
            pool, _, number = name.partition("-")
            self.members[name] = Member(SlotId(ServiceRole(pool), int(number)), ServiceRole(role or pool), start)
            started.append((machine_id("m-0"), self._started(name)))
        roll, rules = None, {}
        if before := options.pop("rolls_from", 0):
            rolled = frozenset({self.members[options.pop("rolled")]})
            roll = events.RollLeft(before, bool(options.pop("can_stop", 1)), rolled)
            rules = {before: self.rules, config: self.rules}
        return self.post(events.FleetAdopted(tuple(started), sizes_of(options), rules, config, roll))

    # ---- orders

    def scale(self, first: str = "", **sizes: int) -> list[FleetAction]:
        return self.post(events.ScaleTo(sizes_of(sizes), tuple(first.split(",")) if first else ()))

    def switch(self, name: str, role: str) -> list[FleetAction]:
        return self.post(events.SwitchRole(name, ServiceRole(role)))

    def roll(self, **options: Any) -> list[FleetAction]:
        return self._new_config(True, **options)

    def change(self, **options: Any) -> list[FleetAction]:
        """A config that differs in live options only."""
        return self._new_config(False, **options)

    def _new_config(self, restarts: bool, drain_s: float = DRAIN_S[D], **options: Any) -> list[FleetAction]:
        claims = Claims(replace(self.rules.config, **options))
        rules = replace(self.rules, claims=claims, drain_timeout_s=drain_s)
        return self.post(events.NewConfig(rules, restarts, "" if restarts else "[router] max_queued"))

    def stop_roll(self) -> list[FleetAction]:
        return self.post(events.StopRoll())

    def shutdown(self) -> list[FleetAction]:
        return self.post(events.Shutdown())

    # ---- what happens

    def time(self, seconds: float) -> list[FleetAction]:
        self.now += seconds
        return self.post(Tick())

    def placed(self, name: str, machine: str = "m-0") -> list[FleetAction]:
        return self.post(events.ServicePlaced(self.members[name], machine_id(machine)))

    def started(self, name: str) -> list[FleetAction]:
        return self.post(self._started(name))

    def serves(self, name: str, machine: str = "m-0") -> list[FleetAction]:
        """It is placed and started."""
        return self.placed(name, machine) + self.started(name)

    def _started(self, name: str) -> ServiceStarted:
        start = self.members[name].start
        return ServiceStarted(self.members[name], f"{name}.{start:x}", f"host:{start}")

    def fails(self, name: str, *reason: str, permanent: int = 1) -> list[FleetAction]:
        """`permanent`: the start cannot succeed."""
        return self.post(events.StartFailed(self.members[name], " ".join(reason), bool(permanent)))

    def died(self, name: str) -> list[FleetAction]:
        return self.post(events.ServiceDied(self.members[name], "killed"))

    def drained(self, name: str) -> list[FleetAction]:
        return self.post(events.Drained(self.members[name]))

    def switched(self, name: str) -> list[FleetAction]:
        return self.post(events.RoleSwitched(self.members[name]))

    def cannot_switch(self, name: str, *reason: str) -> list[FleetAction]:
        return self.post(events.SwitchFailed(self.members[name], " ".join(reason)))

    def configured(self, name: str, revision: int) -> list[FleetAction]:
        return self.post(events.ServiceConfigured(self.members[name], revision))

    def leaves(self, machine: str, in_s: float | None = None) -> list[FleetAction]:
        return self.post(events.MachineLeaving(machine_id(machine), in_s))

    # ---- questions

    def state(self, name: str) -> list[str]:
        (slot,) = [slot for slot in self.machine.status(self.now).slots if slot.name == name]
        return [f"{slot.state.value}: {slot.reason}" if slot.reason else slot.state.value]

    def sizes(self) -> list[str]:
        return [" ".join(f"{self.machine.wanted[role]} {name}" for name, role in SIZES.items())]

    def configs(self) -> list[str]:
        """The config of new starts, whether the fleet rolls to it, and the config of each service."""
        status = self.machine.status(self.now)
        newest = f"{'rolls to' if status.rolling else 'has'} {status.revision}"
        return [newest, *(f"{slot.name} {slot.revision}" for slot in status.slots)]

    def deadline(self) -> list[str]:
        deadline = self.machine.next_deadline()
        return ["none" if deadline is None else f"in {deadline - self.now:g} s"]

    def notes(self) -> list[str]:
        """Those that were not printed, since the last look."""
        notes, self.unprinted = [note.replace("->", "to") for note in self.unprinted], []
        return notes

    # ---- actions

    def seen(self, action: FleetAction) -> str:
        match action:
            case events.StartService(member, revision, replaces):
                config = f" config {revision}" if revision != 1 else ""
                return f"start {self._name(member)}{config}" + (f" for {self._name(replaces)}" if replaces else "")
            case events.ConfigureService(member, revision):
                return f"configure {self._name(member)} {revision}"
            case events.DrainService(member, timeout_s):
                return f"drain {self._name(member)}{_seconds(timeout_s, member.role)}"
            case events.SwitchService(member, timeout_s):
                return f"switch {self._name(member)} to {member.role.value}{_seconds(timeout_s, D)}"
            case events.KillService(member):
                return f"kill {self._name(member)}"
            case events.PublishFleet(_, workers, routers):
                return f"{' '.join(map(self._serving, routers))}: {' '.join(map(self._serving, workers))}"
            case events.FleetMessage():
                return f"say {action.text}"
            case events.FleetReady():
                return "ready"
            case events.FleetFailed(reason):
                return f"failed {reason}"
            case events.FleetStopped():
                return "stopped"
            case _:
                assert_never(action)

    def _name(self, member: Member) -> str:
        return member.name if self.members[member.name] == member else f"{member.name}.{member.start}"

    def _serving(self, serving: Serving) -> str:
        name, role = self._name(serving.member), serving.role.value
        shown = name if serving.role is serving.member.slot.pool else f"{name}:{role}"
        return f"({shown})" if serving.draining else shown


def _seconds(timeout_s: float, role: ServiceRole) -> str:
    return "" if timeout_s == DRAIN_S[role] else f" {timeout_s:g} s"


def machine_id(name: str) -> MachineId:
    return MachineId(name, f"{name}.local")


def sizes_of(sizes: dict[str, int]) -> PoolSizes:
    return {SIZES[name]: size for name, size in sizes.items()}
