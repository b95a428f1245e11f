"""`Apply` hands every field of the call to the supervisor."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.errors import InvalidRequest
from core.fleet_control import ConfigChange
from router.operations.cluster_servicer import ClusterServicer
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import cluster_pb2


async def apply(supervisor: Any, **fields: Any) -> cluster_pb2.ApplyResponse:
    nothing: Any = None
    context: Any = LocalContext(())
    servicer = ClusterServicer(nothing, nothing, nothing, supervisor, nothing, nothing)
    return await servicer.Apply(cluster_pb2.ApplyRequest(**fields), context)


async def test_the_supervisor_gets_the_revision_on_which_the_change_is_based() -> None:
    supervisor = AsyncMock()
    supervisor.apply.return_value = ConfigChange(4, ("[router] max_queued 1024 -> 7",))
    answer = await apply(supervisor, options="{}", expected_revision=3)
    supervisor.apply.assert_awaited_once_with("", "{}", False, 3)
    assert (answer.config_revision, list(answer.changes)) == (4, ["[router] max_queued 1024 -> 7"])


async def test_an_order_to_stop_a_roll_has_no_other_field() -> None:
    with pytest.raises(InvalidRequest, match="stop: no other field may be set with it"):
        await apply(AsyncMock(), stop=True, expected_revision=3)
