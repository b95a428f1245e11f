"""`tandem role` waits until the worker serves in its new role, and says why it does not."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from cli.commands import role as role_command
from core.errors import WorkerUnavailable
from core.fleet_control import SlotState, SlotStatus
from core.lifecycle import ServiceRole
from protos.fleet_codec import encode_slot
from tandem_client.stubs import cluster_pb2

P = ServiceRole.PREFILL


class Switching:
    """A router whose fleet shows the next state of decode-1 at each call; None = without the slot."""

    def __init__(self, *states: SlotStatus | None) -> None:
        self._states = list(states)

    async def switch_role(self, slot: str, role: cluster_pb2.ServiceRole) -> cluster_pb2.SwitchRoleResponse:
        assert (slot, role) == ("decode-1", cluster_pb2.SERVICE_ROLE_PREFILL)
        return cluster_pb2.SwitchRoleResponse(wanted_prefill=2, wanted_decode=1)

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        state = self._states.pop(0)
        return cluster_pb2.GetFleetResponse(slots=[] if state is None else [encode_slot(state)])


async def switch(monkeypatch: pytest.MonkeyPatch, *states: SlotStatus | None) -> str:
    monkeypatch.setattr(role_command, "REFRESH_S", 0.0)
    out = io.StringIO()
    connection = contextlib.nullcontext(Switching(*states))
    await role_command.switch_role(connection, "decode-1", "prefill", Console(file=out))  # type: ignore[arg-type]
    return out.getvalue()


def decode_1(state: SlotState, role: ServiceRole = P, reason: str = "") -> SlotStatus:
    return SlotStatus("decode-1", role, state, 0.1, reason)


async def test_the_command_ends_when_the_worker_serves_in_its_new_role(monkeypatch: pytest.MonkeyPatch) -> None:
    switching = decode_1(SlotState.SWITCHING)
    said = await switch(monkeypatch, switching, switching, decode_1(SlotState.SERVING))
    assert said == "decode-1 serves as prefill worker; wanted: 2 prefill, 1 decode\n"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            decode_1(SlotState.WAITING, reason="did not switch: still has work"),
            "waiting: did not switch: still has work",
        ),
        (decode_1(SlotState.DRAINING, ServiceRole.DECODE, "its machine leaves"), "draining: its machine leaves"),
        (None, "gone"),
    ],
)
async def test_the_command_fails_with_the_state_of_a_worker_that_does_not(
    monkeypatch: pytest.MonkeyPatch, after: SlotStatus | None, said: str
) -> None:
    with pytest.raises(WorkerUnavailable) as failed:
        await switch(monkeypatch, decode_1(SlotState.SWITCHING), after)
    assert str(failed.value) == f"decode-1 does not serve as prefill worker, it is {said}"
