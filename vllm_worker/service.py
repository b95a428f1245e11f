"""The shell of a vLLM worker: the gRPC services of its role, its machine, and its engine.

gRPC calls --> role's servicer --events--> Driver(VllmMachine) --Submit, Abort, ShakeHands--> Engine
                                              ^                                                 |
                                              +----- outputs, steps, block events, handshakes --+
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from core.config import LiveConfig, WorkerConfig, with_live
from core.errors import TandemError, WorkerUnavailable
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole
from core.scheduling.worker_load import WorkerChanges
from core.service import Endpoint
from decode_worker.servicer import DecodeServicer
from prefill_worker.servicer import PrefillServicer
from protos import codec, report_codec
from runtime.driver import Driver
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, GrpcServer, cancel_and_wait
from runtime.rpc.security import OPEN, WORKER_RULES, Credentials
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from vllm_worker.engine import BlocksChanged, Engine, EngineReport
from vllm_worker.handshakes import ShakeHands
from vllm_worker.machine import Abort, Fail, Limits, Submit, VllmAction, VllmEvent, VllmMachine
from vllm_worker.view import VllmView
from worker.core import ConfigChanged, DrainRequested
from worker.grammar_check import accept_grammars
from worker.reports import ReportFeed
from worker.service import Servicer

SERVICERS: dict[ServiceRole, Callable[[float], Servicer]] = {
    ServiceRole.PREFILL: PrefillServicer,
    ServiceRole.DECODE: DecodeServicer,
}

logger = logging.getLogger(__name__)


class VllmService:
    """A `core.service.Service`, number `ordinal` of its role."""

    def __init__(
        self,
        role: ServiceRole,
        ordinal: int,
        config: WorkerConfig,
        engine: Engine,
        limits: Limits,
        credentials: Credentials = OPEN,
    ) -> None:
        self._role, self._ordinal, self._config, self._engine = role, ordinal, config, engine
        self._limits, self._credentials = limits, credentials
        self._servicer = SERVICERS[role](config.default_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._view = VllmView(lambda: self._machine.worker_load())
        self._driver: Driver[VllmEvent, VllmAction] | None = None
        self._stopping = False

    async def start(self) -> Endpoint:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        info = await self._engine.start(self._on_report)
        incarnation = secrets.randbits(63) | 1
        self._worker_id = f"{self._role.value}-{self._ordinal}.{incarnation:016x}"
        self._address = AgentAddress(
            name=self._worker_id,
            incarnation=incarnation,
            metadata=info.address,
            pool_base=0,
            num_blocks=info.num_blocks,
            layout=info.layout,
            lease_s=1.0,
        )
        self._machine = VllmMachine(info, self._limits)
        self._driver = Driver(self._machine, self._perform, self._on_fatal, self._after_event)
        self._servicer.attach(self._driver, self._worker_id, accept_grammars)
        self._server = GrpcServer(self._config.host, 0, MAX_GRPC_MESSAGE_BYTES, self._credentials, WORKER_RULES)
        self._feed = ReportFeed(self._config, self._snapshot, self._changes, self._holders, self._driver.ask)
        self._server.add(self._servicer.register, self._servicer, self._servicer.full_name)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._feed, "tandem.v1.Worker")
        reporting = asyncio.create_task(self._feed.run(), name="reports")
        reporting.add_done_callback(self._on_reports_ended)
        self._tasks.append(reporting)
        address = await self._server.start()
        logger.info("%s serves on %s", self._worker_id, address)
        return Endpoint(self._worker_id, address, self._role)

    async def failed(self) -> BaseException:
        return await self._failure

    def set_config(self, live: LiveConfig) -> None:
        assert self._driver is not None
        self._config = with_live(self._config, live.worker)
        self._feed.set_config(self._config)
        self._servicer.default_timeout_s = self._config.default_timeout_s
        self._driver.post(ConfigChanged(live.scheduler, self._config))

    async def drain(self, timeout_s: float) -> None:
        assert self._driver is not None
        self._driver.post(DrainRequested())
        await self._server.set_serving(False)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._machine.idle:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%s still has work after draining for %g s", self._worker_id, timeout_s)

    async def stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._driver is not None:
            self._driver.stop()
            self._end_calls(WorkerUnavailable("this worker is stopping"))
            await cancel_and_wait(self._tasks)
            await self._server.stop(grace_s=0.5)
        await self._engine.close()

    def _end_calls(self, error: TandemError) -> None:
        self._servicer.fail_all(error)
        self._feed.close()

    # ---- the machine and its engine

    def _on_report(self, report: EngineReport) -> None:
        if isinstance(report, BlocksChanged):
            self._view.note(report)
        if self._driver is not None:
            self._driver.post(report)

    def _perform(self, action: VllmAction) -> None:
        match action:
            case Submit(prompt):
                self._engine.submit(prompt)
            case Abort(request_id):
                self._engine.abort(request_id)
            case ShakeHands(peer, address):
                self._engine.shake_hands(peer, address)
            case Fail(detail):
                self._loop.call_soon(self._on_fatal, TandemError(detail))
            case _:
                assert self._servicer.perform(action), f"no part performs {action}"

    def _after_event(self) -> None:
        if self._machine.idle:
            self._idle.set()
        self._feed.mark_changed()

    def _on_reports_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    def _on_fatal(self, error: BaseException) -> None:
        """End every call, so that routers use other workers, and report the failure to the host."""
        if self._driver is not None:
            self._driver.stop()
            self._end_calls(WorkerUnavailable(f"this worker failed: {error}"))
        if not self._failure.done():
            self._failure.set_result(error)

    # ---- reports

    def _snapshot(self) -> worker_pb2.WorkerReport:
        report = report_codec.encode_changes(WorkerChanges(self._view.load))
        report.snapshot.worker_id = self._worker_id
        report.snapshot.role = codec.ROLE_TO_WIRE[self._role]
        report.snapshot.agent.CopyFrom(codec.encode_agent(self._address))
        report.snapshot.cached_blocks.extend(self._view.cached_blocks)
        return report

    def _changes(self) -> worker_pb2.WorkerReport | None:
        changes = self._view.take_changes(self._view.load)
        return None if changes is None else report_codec.encode_changes(changes)

    def _holders(self) -> worker_pb2.DescribeLedgerResponse:
        ledger = self._view.load.ledger
        return worker_pb2.DescribeLedgerResponse(worker_id=self._worker_id, ledger=codec.encode_ledger(ledger))
