"""The report stream and the token stream of a worker, filled by a test."""

from __future__ import annotations

import asyncio
from typing import Any

from core.lifecycle import ServiceRole
from protos import codec
from tandem_client.stubs import worker_pb2
from tests.support.driven_worker import address


class Reports:
    """Stands in for a stream of grpc.aio. Yields the reports of `put`, and never ends."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[worker_pb2.WorkerReport] = asyncio.Queue()

    def put(self, report: worker_pb2.WorkerReport) -> None:
        self._reports.put_nowait(report)

    def __aiter__(self) -> Reports:
        return self

    async def __anext__(self) -> worker_pb2.WorkerReport:
        return await self._reports.get()

    def cancel(self) -> None:
        pass


class Tokens:
    """Stands in for a StreamTokens call of grpc.aio. Opens at once, and yields the messages of `put`."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[worker_pb2.StepTokens | BaseException] = asyncio.Queue()
        self.put(worker_pb2.StepTokens())

    def put(self, message: worker_pb2.StepTokens | BaseException) -> None:
        """The stream raises an exception."""
        self._messages.put_nowait(message)

    async def read(self) -> worker_pb2.StepTokens:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def cancel(self) -> None:
        pass


def load(**changed: Any) -> worker_pb2.LoadReport:
    """The load of a serving worker."""
    costs = worker_pb2.StepCost(step_s=0.004, sequence_s=0.0005)
    fields: dict[str, Any] = {"state": worker_pb2.WORKER_STATE_SERVING, "step_cost": costs}
    return worker_pb2.LoadReport(**(fields | changed))


def snapshot(worker_id: str, role: ServiceRole = ServiceRole.DECODE) -> worker_pb2.WorkerReport:
    """The first report of a serving worker."""
    report = worker_pb2.WorkerReport(load=load())
    report.snapshot.worker_id, report.snapshot.role = worker_id, codec.ROLE_TO_WIRE[role]
    report.snapshot.agent.CopyFrom(codec.encode_agent(address(worker_id)))
    return report
