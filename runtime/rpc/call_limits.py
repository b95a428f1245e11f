"""The open calls of a gRPC server. A client may open calls and send no message: 20 KB each while its connection lives.

gRPC's own limit, `maximum_concurrent_rpcs`, has no room apart for the probes of an orchestrator.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio

from runtime.rpc.health import HEALTH_SERVICE

MAX_OPEN_CALLS = 65_536  # calls of a gRPC server, without health checks; beyond: RESOURCE_EXHAUSTED
MAX_HEALTH_CHECKS = 4_096  # open calls of grpc.health.v1.Health/Check; beyond: RESOURCE_EXHAUSTED
CHECK = f"/{HEALTH_SERVICE}/Check"


class CallLimits:
    """Counts the open calls of a server."""

    def __init__(self) -> None:
        self._num_open: Counter[bool] = Counter()  # by whether they are health checks

    def admit(self, method: str) -> bool:
        """Whether a new call is within its limit. Runs once a call, in the task of gRPC that ends with it."""
        is_check = method == CHECK
        if self._num_open[is_check] >= (MAX_HEALTH_CHECKS if is_check else MAX_OPEN_CALLS):
            return False
        self._num_open[is_check] += 1
        call = asyncio.current_task()
        assert call is not None
        call.add_done_callback(lambda _: self._num_open.subtract((is_check,)))
        return True


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this server has too many open calls")


# Of any kind of method: it waits for no message.
REFUSING = grpc.stream_stream_rpc_method_handler(_refuse)
