"""`Apply` hands every field of the call to the supervisor."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import InvalidRequest
from core.fleet_control import ConfigChange
from router.operations.cluster_servicer import ClusterServicer
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import cluster_pb2


class Control:
    def __init__(self) -> None:
        self.given: tuple[object, ...] = ()

    async def apply(self, *given: object) -> ConfigChange:
        self.given = given
        return ConfigChange(4, ("[router] max_queued 1024 -> 7",))


def servicer_of(control: Control) -> ClusterServicer:
    nothing: Any = None
    supervisor: Any = control
    return ClusterServicer(nothing, nothing, nothing, supervisor, nothing, nothing)


async def test_the_supervisor_gets_the_revision_on_which_the_change_is_based() -> None:
    control, context = Control(), LocalContext.__new__(LocalContext)
    request = cluster_pb2.ApplyRequest(options="{}", expected_revision=3)
    answer = await servicer_of(control).Apply(request, context)  # type: ignore[arg-type]
    assert control.given == ("", "{}", False, 3)
    assert (answer.config_revision, list(answer.changes)) == (4, ["[router] max_queued 1024 -> 7"])


async def test_an_order_to_stop_a_roll_has_no_other_field() -> None:
    context = LocalContext.__new__(LocalContext)
    request = cluster_pb2.ApplyRequest(stop=True, expected_revision=3)
    with pytest.raises(InvalidRequest, match="stop: no other field may be set with it"):
        await servicer_of(Control()).Apply(request, context)  # type: ignore[arg-type]
