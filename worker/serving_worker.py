"""What all workers have in common: gRPC services and reports around a machine, a drain, and an end.

    gRPC calls --> role's servicer --events--> Driver(machine) --actions--> servicer, engine
    routers    <-- ReportFeed <-- view of the machine

`WorkerService` (worker/service.py) has our engine, `VllmService` (vllm_worker/service.py) that of vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from core.config import LiveConfig, WorkerConfig, with_live
from core.errors import TandemError, WorkerUnavailable
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole
from core.paths import PathStatus
from core.scheduling.block_pool import Column
from core.scheduling.ledger import BlockHolder
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.service import Endpoint
from protos import codec, report_codec
from runtime.driver import Driver
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, GrpcServer, cancel_and_wait
from runtime.rpc.security import WORKER_RULES, Credentials
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.core import DrainRequested
from worker.reports import ReportFeed
from worker.request_check import RequestCheck

logger = logging.getLogger(__name__)


class Servicer(Protocol):
    """The gRPC service of a role: turns calls into events, and its actions into responses."""

    full_name: str
    default_timeout_s: float  # of a call without a deadline

    def attach(self, driver: Driver[Any, Any], worker_id: str, check: RequestCheck) -> None: ...

    def register(self, servicer: Any, server: Any) -> None: ...

    def perform(self, action: Any) -> bool:
        """Returns False if the action is not for this servicer."""
        ...

    def fail_all(self, error: TandemError) -> None:
        """End every open call."""
        ...


class ReportedView(Protocol):
    """What a worker reports of its machine (`WorkerMachineView`)."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def cached_blocks(self) -> tuple[int, ...]: ...

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def paths(self) -> tuple[PathStatus, ...]: ...

    @property
    def ledger(self) -> Mapping[Column, int]: ...

    def holders(self, now: float) -> list[BlockHolder]: ...

    def take_changes(self, load: WorkerLoad) -> WorkerChanges | None: ...


class ServingWorker:
    """A `core.service.Service`. `start` of a subclass sets `_view` and `_driver` between `_begin` and `_serve`."""

    # These parts exist from `start` on.
    _loop: asyncio.AbstractEventLoop
    _failure: asyncio.Future[BaseException]
    _driver: Driver[Any, Any]
    _server: GrpcServer
    _feed: ReportFeed
    _reporting: asyncio.Task[None]
    _worker_id: str
    _address: AgentAddress
    _view: ReportedView

    def __init__(
        self,
        role: ServiceRole,
        config: WorkerConfig,
        servicers: Mapping[ServiceRole, Servicer],
        credentials: Credentials,
    ) -> None:
        self._role = role
        self._config = config
        self._servicers = servicers
        self._credentials = credentials
        self._idle = asyncio.Event()
        self._is_serving = False  # the parts above exist
        self._stopping = False

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()

    async def _serve(self, worker_id: str, address: AgentAddress) -> Endpoint:
        self._worker_id, self._address = worker_id, address
        self._server = GrpcServer(self._config.host, 0, MAX_GRPC_MESSAGE_BYTES, self._credentials, WORKER_RULES)
        self._feed = ReportFeed(
            self._config, self._snapshot, self._changes, self._holders, lambda change: self._driver.ask(change)
        )
        for servicer in self._servicers.values():
            self._server.add(servicer.register, servicer, servicer.full_name)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._feed, "tandem.v1.Worker")
        self._reporting = asyncio.create_task(self._feed.run(), name="reports")
        self._reporting.add_done_callback(self._on_reports_ended)
        self._is_serving = True
        bound = await self._server.start()
        logger.info("%s serves on %s", worker_id, bound)
        return Endpoint(worker_id, bound, self._role)

    async def failed(self) -> BaseException:
        return await self._failure

    def set_config(self, live: LiveConfig) -> None:
        self._config = with_live(self._config, live.worker)
        self._feed.set_config(self._config)
        for servicer in self._servicers.values():
            servicer.default_timeout_s = self._config.default_timeout_s

    async def drain(self, timeout_s: float) -> None:
        self._driver.post(DrainRequested())
        self._feed.mark_changed()
        self._server.set_serving(False)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._view.is_idle:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%s still has work after draining for %g s", self._worker_id, timeout_s)

    async def _stop_serving(self) -> None:
        self._driver.stop()
        self._end_calls(WorkerUnavailable("this worker is stopping"))
        await cancel_and_wait([self._reporting])
        await self._server.stop(grace_s=0.5)

    def _end_calls(self, error: TandemError) -> None:
        for servicer in self._servicers.values():
            servicer.fail_all(error)
        self._feed.close()

    def _post(self, event: Any) -> None:
        if self._is_serving:  # before that, no peer has our address
            self._driver.post(event)

    def _after_event(self) -> None:
        if self._view.is_idle:
            self._idle.set()
        self._feed.mark_changed()

    # ---- failures

    def _on_reports_ended(self, task: asyncio.Task[None]) -> None:
        """A worker without reports looks lost to its routers, but would go on with its calls."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    def _on_fatal(self, error: BaseException) -> None:
        """A part has failed: end every call, so that routers use other workers, and report the failure to the host."""
        if self._is_serving:
            self._driver.stop()
            cause = f": {error}" if isinstance(error, TandemError) else ""
            self._end_calls(WorkerUnavailable(f"this worker failed{cause}"))
        if not self._failure.done():
            self._failure.set_result(error)

    # ---- reports

    def _load(self) -> WorkerLoad:
        return self._view.load

    def _snapshot(self) -> worker_pb2.WorkerReport:
        report = report_codec.encode_changes(WorkerChanges(self._load(), paths=self._view.paths))
        report.snapshot.worker_id = self._worker_id
        report.snapshot.role = codec.ROLE_TO_WIRE[self._role]
        report.snapshot.agent.CopyFrom(codec.encode_agent(self._address))
        report.snapshot.cached_blocks.extend(self._view.cached_blocks)
        return report

    def _changes(self) -> worker_pb2.WorkerReport | None:
        changes = self._view.take_changes(self._load())
        return None if changes is None else report_codec.encode_changes(changes)

    def _holders(self) -> worker_pb2.DescribeLedgerResponse:
        return worker_pb2.DescribeLedgerResponse(
            worker_id=self._worker_id,
            ledger=codec.encode_ledger(self._view.ledger),
            holders=map(codec.encode_holder, self._view.holders(self._loop.time())),
        )
