"""`Apply` hands every field of the call to the supervisor; no order loses a field of a later version."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.errors import InvalidRequest
from core.fleet_control import ConfigChange
from router.operations.cluster_servicer import ClusterServicer
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import cluster_pb2

NOTHING: Any = None
CONTEXT: Any = LocalContext(())


def servicer_of(supervisor: Any) -> ClusterServicer:
    return ClusterServicer(NOTHING, NOTHING, NOTHING, supervisor, NOTHING, NOTHING)


async def apply(supervisor: Any, **fields: Any) -> cluster_pb2.ApplyResponse:
    return await servicer_of(supervisor).Apply(cluster_pb2.ApplyRequest(**fields), CONTEXT)


async def test_the_supervisor_gets_the_revision_on_which_the_change_is_based() -> None:
    supervisor = AsyncMock()
    supervisor.apply.return_value = ConfigChange(4, ("[router] max_queued 1024 -> 7",))
    answer = await apply(supervisor, options="{}", expected_revision=3)
    supervisor.apply.assert_awaited_once_with("", "{}", False, 3)
    assert (answer.config_revision, list(answer.changes)) == (4, ["[router] max_queued 1024 -> 7"])


async def test_an_order_to_stop_a_roll_has_no_other_field() -> None:
    with pytest.raises(InvalidRequest, match="stop: no other field may be set with it"):
        await apply(AsyncMock(), stop=True, expected_revision=3)


@pytest.mark.parametrize(
    ("order", "request_"),
    [
        ("Apply", cluster_pb2.ApplyRequest(restart=True)),
        ("Scale", cluster_pb2.ScaleRequest(decode=1)),
        ("SwitchRole", cluster_pb2.SwitchRoleRequest(slot="decode-0", role=cluster_pb2.SERVICE_ROLE_PREFILL)),
    ],
)
async def test_an_order_with_a_field_of_a_later_version_does_nothing(order: str, request_: Any) -> None:
    """An older router would do without asking what a later `tandem` only wants to preview, say."""
    supervisor = AsyncMock()
    request_.MergeFromString(b"\xf8\xf0\x04\x01")
    with pytest.raises(InvalidRequest, match=r"request: field 9999 of .*Request is of a later version of Tandem"):
        await getattr(servicer_of(supervisor), order)(request_, CONTEXT)
    assert supervisor.mock_calls == []
