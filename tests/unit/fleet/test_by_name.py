"""Values between processes of two versions of Tandem."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import sys
from collections import namedtuple
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cli import compose
from core import config as options
from core.config import GatewayConfig, LiveConfig, TandemConfig, TransferConfig
from core.cost.step_cost import StepCost
from core.errors import ConfigError
from core.fleet_control import ConfigChange, FleetConfig, FleetNote, FleetStatus, PlanStatus, SlotState, SlotStatus
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter
from core.traffic import RequestTotals, RouterTraffic, WorkerTraffic
from fleet.host import by_name
from fleet.host.by_name import ByName, answer_by_name, pack, unpack
from fleet.host.host import Adoption, LocalRank
from fleet.host.service_host import StartFault
from fleet.law.claims import Claim, Claims
from fleet.law.events import MachineId, Member, SlotId
from fleet.ray import hosts, supervisor_control
from fleet.ray.hosts import HostActor, SupervisorActor
from fleet.supervisor.refusal import Refusal

TABLES = [kind for _, kind in inspect.getmembers(options, dataclasses.is_dataclass) if dataclasses.fields(kind)]
CONFIG = TandemConfig(transfer=TransferConfig(lease_s=7.0), gateway=GatewayConfig(port=8123))


def other_version(kind: type[Any], change: Callable[[list[Any]], list[Any]]) -> type[Any]:
    """The class as a version has it that has other fields, which take anything."""
    old = [(one.name, Any, field_like(one)) for one in dataclasses.fields(kind)]
    made = dataclasses.make_dataclass(kind.__name__, change(old), frozen=True, slots=True)
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made


def field_like(one: Any) -> Any:
    return dataclasses.field(default=one.default, default_factory=one.default_factory, kw_only=one.kw_only)


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_an_option_that_one_version_lacks_moves_no_other(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dataclasses.fields(kind)
    marked = object.__new__(kind)
    for number, one in enumerate(fields):
        object.__setattr__(marked, one.name, f"value {number}")
    new = ("new", int, dataclasses.field(default=5, kw_only=True))
    for place in range(len(fields)):
        with monkeypatch.context() as later:
            version = other_version(kind, lambda old, at=place: [*old[:at], new, *old[at + 1 :]])  # type: ignore[misc]
            packed = pack(marked)
            later.setattr(sys.modules[kind.__module__], kind.__name__, version)
            found = unpack(packed)
        kept = {one.name: f"value {number}" for number, one in enumerate(fields) if number != place}
        assert {one.name: getattr(found, one.name) for one in dataclasses.fields(version)} == kept | {"new": 5}


def test_a_sum_that_one_version_lacks_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of a router that counts more: its supervisor could not read the answer, and killed it."""
    names: Any = ["new", *RequestTotals._fields[1:]]
    version: Any = namedtuple("RequestTotals", names)  # type: ignore[misc]
    version.__module__ = RequestTotals.__module__
    with monkeypatch.context() as later:
        later.setattr("core.traffic.RequestTotals", version)
        packed = pack(version._make([7, *range(1, 9)]))
    assert unpack(packed) == RequestTotals(0, *range(1, 9))


def test_what_no_version_can_guess_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["7.1", "7.2", "7.2", "7.2"])
    monkeypatch.setattr(by_name, "software_version", lambda: next(versions))
    packed = pack(Endpoint("decode-0.1", "127.0.0.1:1", "decode"))  # type: ignore[arg-type]
    needs = other_version(Endpoint, lambda old: [("zone", str), *old])
    monkeypatch.setattr("core.service.Endpoint", needs)
    with pytest.raises(ConfigError, match=r"Tandem 7\.2 cannot read what Tandem 7\.1 has sent: .*'zone'"):
        unpack(packed)
    with pytest.raises(ConfigError, match=r"before 7\.2, which sends options by position"):
        unpack(pickle.dumps(CONFIG))


MEMBER = Member(SlotId(ServiceRole.DECODE, 1), ServiceRole.DECODE, 7)
SERVING = Endpoint("decode-1.7", "127.0.0.1:1", ServiceRole.DECODE)
TRAFFIC = WorkerTraffic("decode-1.7", ServiceRole.DECODE, StepCost(0.1, 0.1, 0.1, 0.1, 0.1), 0.1, 9, 9, 9)
STATUS = SlotStatus("decode-1", ServiceRole.DECODE, SlotState.SERVING, 1)
SENT = [
    Adoption(MEMBER, SERVING, MachineId("m", "m.local"), 0),
    MEMBER,
    MEMBER.slot,
    SERVING,
    MachineId("m", "m.local"),
    LocalRank(0, 1),
    FleetRouter("router-0.1", "127.0.0.1:2", draining=False),
    StartFault("no such model", permanent=True),
    RouterTraffic(RequestTotals(), 0, 0, 1, (TRAFFIC,)),
    TRAFFIC,
    FleetStatus({ServiceRole.DECODE: 1}, (STATUS,), planner=PlanStatus(pinned=(ServiceRole.DECODE,))),
    STATUS,
    FleetNote(1, 2.5, "decode-1", "serves"),
    FleetConfig(1, "{}"),
    ConfigChange(2, ("lease_s",)),
    Refusal("decode", "at most 4"),
    Claim("decode", 0.5),
    Claims(CONFIG.cluster),
    LiveConfig.of(CONFIG),
    CONFIG,
    CONFIG.gateway,
]


@pytest.mark.parametrize("value", SENT, ids=lambda value: type(value).__name__)
def test_a_value_of_another_type_than_declared_is_refused_by_its_name(value: Any) -> None:
    """The next supervisor met a rank that was a text, and ended with a traceback."""
    assert unpack(pack(value)) == value
    for one in dataclasses.fields(value):
        for odd in (object, b"1", [3], (object(),), {"a": 1}):
            wrong = copy.copy(value)
            object.__setattr__(wrong, one.name, odd)
            with pytest.raises(ConfigError, match=rf"{type(value).__name__}\.{one.name} is .*, not of "):
                unpack(pack(wrong))


def test_a_factory_and_what_calls_take_arrive_as_they_were() -> None:
    factory = unpack(pack(functools.partial(compose.build_router, CONFIG)))
    assert (factory.func, factory.args) == (compose.build_router, (CONFIG,))
    for value in (Claims(CONFIG.cluster), LiveConfig.of(CONFIG), None, [SERVING]):
        assert pickle.loads(pickle.dumps(ByName(value))) == value


@pytest.mark.parametrize(("actor", "caller"), [(HostActor, hosts), (SupervisorActor, supervisor_control)])
async def test_calls_between_versions_answer_by_name(actor: type[Any], caller: ModuleType) -> None:
    called = set(re.findall(r"""(?:_ask\(|begin_call\(actor, )"(\w+)\"""", inspect.getsource(caller)))
    methods = {name: getattr(actor, name) for name in called if hasattr(actor, name)}
    wanted = {name for name, one in methods.items() if inspect.signature(one).return_annotation not in ("None", "str")}
    code = answer_by_name(HostActor.machine).__code__
    assert {name for name in wanted if methods[name].__code__ is not code} == set()
    assert len(wanted) > 3
