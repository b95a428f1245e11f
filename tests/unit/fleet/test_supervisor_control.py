"""The router asks its supervisor for pool sizes on the loop that carries every stream: nothing may block or hang."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.errors import InvalidRequest, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.service import PoolSizes
from fleet.ray import supervisor_control
from fleet.ray.supervisor_control import SupervisorControl
from fleet.supervisor.refusal import Refusal


class Supervisor:
    """An actor handle: `scale.remote(...)` gives something to wait for."""

    def __init__(self, answer: PoolSizes | Refusal | None) -> None:
        self._answer = answer  # None: never

    @property
    def scale(self) -> Supervisor:
        return self

    async def remote(self, sizes: PoolSizes, auto: bool) -> PoolSizes | Refusal | None:
        del sizes, auto
        return self._answer or await asyncio.Future()


async def test_the_supervisor_is_asked_by_its_handle_and_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(*_: object, **__: object) -> Any:
        raise AssertionError("ray.get_actor blocks the loop")

    monkeypatch.setattr("ray.get_actor", get_actor)
    assert await SupervisorControl(Supervisor({ServiceRole.DECODE: 2})).scale({}) == {ServiceRole.DECODE: 2}


async def test_a_refusal_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="decode: at most 4"):
        await SupervisorControl(Supervisor(Refusal("decode", "at most 4"))).scale({ServiceRole.DECODE: 5})


async def test_a_supervisor_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_control, "CALL_TIMEOUT_S", 0.01)
    with pytest.raises(WorkerUnavailable, match="does not answer within"):
        await SupervisorControl(Supervisor(None)).scale({})
