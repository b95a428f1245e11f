"""The health service of a gRPC server (grpc.health.v1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH_SERVICE = "grpc.health.v1.Health"
Status: Any = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the stubs lack it
    """Unlike gRPC's servicer, it holds no lock while it writes: a client that reads nothing must not delay a drain."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def set(self, names: Iterable[str], serving: bool) -> None:
        self._statuses |= dict.fromkeys(names, Status.SERVING if serving else Status.NOT_SERVING)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        sent = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(Status(status=status))
            sent = status
            await changed.wait()
