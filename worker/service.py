"""The shell of a prefill or decode worker: one process with an event loop, and threads for steps and transfers.

    gRPC calls --> role's servicer --events--> Driver(machine) --actions--> servicer, step executor, transfer agent
                                                  ^                              |
                                                  +--- StepFinished, MessageReceived, ReadFinished, ... (other threads)

Each role brings its machine and its servicer. This file has the common part: start, reports, drain, stop, and the
switch to the other role: the machine of that role gets the pool, the prefix cache, the runner and the agent of the one
before. The services of both roles are registered from the start; that of the other role refuses its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from core.config import LiveConfig, WorkerConfig, with_live
from core.errors import DeviceLost, TandemError, WorkerDrains, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.scheduling.worker_load import WorkerChanges, WorkerLoad
from core.service import Endpoint
from core.step import StepOutput
from kv_transfer.agent import TransferAgent
from protos import codec, report_codec
from runtime.driver import Driver
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, GrpcServer, cancel_and_wait
from runtime.rpc.security import OPEN, WORKER_RULES, Credentials
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from worker.core import ConfigChanged, DrainRequested, RunStep, StepFailed, StepFinished
from worker.executor import StepExecutor
from worker.grammar_check import GrammarCheck
from worker.reports import ReportFeed
from worker.view import WorkerMachine, WorkerMachineView

STOP_TIMEOUT_S = 5.0  # the end of a thread; beyond: logged, and the process ends
# Failed steps in a row that end the worker. One may be the fault of a request. A worker that fails every step has no
# work, so it would attract every request.
MAX_FAILED_STEPS = 3  # failed steps in a row; beyond: the worker ends

logger = logging.getLogger(__name__)


class Servicer(Protocol):
    """The gRPC service of a role: turns calls into events, and its actions into responses."""

    full_name: str
    default_timeout_s: float  # of a call without a deadline

    def attach(self, driver: Driver[Any, Any], worker_id: str, check_grammar: GrammarCheck) -> None: ...

    def register(self, servicer: Any, server: Any) -> None: ...

    def perform(self, action: Any) -> bool:
        """Returns False if the action is not for this servicer."""
        ...

    def fail_all(self, error: TandemError) -> None:
        """End every open call."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that are slow to build (model, pool). The service builds them in a thread when it starts."""

    worker_id: str
    machine: WorkerMachine  # of the present role
    make_machine: Callable[[ServiceRole], WorkerMachine]  # with the same core and transfers; only once those are idle
    executor: StepExecutor
    agent: TransferAgent  # started
    check_grammar: GrammarCheck


# Takes two functions for use on any thread: post an event to the machine; report the failure of a part.
BuildParts = Callable[[Callable[[Any], None], Callable[[BaseException], None]], WorkerParts]


class WorkerService:
    """A `core.service.WorkerControl`. `start` calls `build` once, in a thread."""

    def __init__(
        self,
        role: ServiceRole,
        config: WorkerConfig,
        build: BuildParts,
        servicers: Mapping[ServiceRole, Servicer],
        credentials: Credentials = OPEN,
    ) -> None:
        self._role = role
        self._config = config
        self._build = build
        self._servicers = servicers
        self._credentials = credentials
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._parts: WorkerParts | None = None
        self._view: WorkerMachineView
        self._for_agent: list[Any] = []
        self._driver: Driver[Any, Any] | None = None
        self._step_watch: asyncio.TimerHandle | None = None
        self._stopping = False
        self._limits: ConfigChanged | None = None  # the newest, for the machine of another role
        self._num_failed_steps = 0  # in a row, without an error that is sorted; for the executor's thread

    async def start(self) -> Endpoint:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._parts = parts = await asyncio.to_thread(self._build, self._post_threadsafe, self._fail_threadsafe)
        self._attach_machine()
        self._server = GrpcServer(self._config.host, 0, MAX_GRPC_MESSAGE_BYTES, self._credentials, WORKER_RULES)
        self._feed = ReportFeed(self._config, self._snapshot, self._changes, self._holders, self._ask)
        for servicer in self._servicers.values():
            self._server.add(servicer.register, servicer, servicer.full_name)
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._feed, "tandem.v1.Worker")
        reporting = asyncio.create_task(self._feed.run(), name="reports")
        reporting.add_done_callback(self._on_reports_ended)
        self._tasks.append(reporting)
        address = await self._server.start()
        logger.info("%s serves on %s", parts.worker_id, address)
        return Endpoint(parts.worker_id, address, self._role)

    async def failed(self) -> BaseException:
        return await self._failure

    def set_config(self, live: LiveConfig) -> None:
        assert self._driver is not None
        assert self._parts is not None
        self._config = with_live(self._config, live.worker)
        self._feed.set_config(self._config)
        for servicer in self._servicers.values():
            servicer.default_timeout_s = self._config.default_timeout_s
        if self._step_watch is not None:
            self._step_watch.cancel()
            self._watch_step()
        self._limits = ConfigChanged(live.scheduler.on_device(self._parts.agent.address.location.on_gpu), self._config)
        self._driver.post(self._limits)

    async def drain(self, timeout_s: float) -> None:
        assert self._driver is not None
        assert self._parts is not None
        self._driver.post(DrainRequested())
        self._feed.mark_changed()
        await self._server.set_serving(False)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._view.is_idle:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%s still has work after draining for %g s", self._parts.worker_id, timeout_s)

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> None:
        await self.drain(timeout_s)
        assert self._driver is not None
        assert self._parts is not None
        if self._driver.stopped or not self._view.is_idle:
            raise WorkerUnavailable(f"still has work after draining for {timeout_s:g} s")
        self._driver.stop()
        self._servicers[self._role].fail_all(WorkerDrains("this worker changes its role"))
        self._feed.end_streams()  # the next snapshots name the new role
        self._role = role
        self._parts = replace(self._parts, machine=self._parts.make_machine(role))
        self._attach_machine()
        self._driver.post(Tick() if self._limits is None else self._limits)
        await self._server.set_serving(True)
        logger.info("%s serves as %s worker", self._parts.worker_id, role.value)

    async def stop(self) -> None:
        if self._driver is None or self._stopping:
            return
        self._stopping = True  # and stop every part: a failure stops only the driver
        self._driver.stop()
        if self._step_watch is not None:
            self._step_watch.cancel()
        self._end_calls(WorkerUnavailable("this worker is stopping"))
        await cancel_and_wait(self._tasks)
        await self._server.stop(grace_s=0.5)
        await asyncio.to_thread(self._close_parts)

    def _close_parts(self) -> None:
        assert self._parts is not None
        if not self._parts.executor.close(STOP_TIMEOUT_S):
            logger.warning("the step in flight did not end within %g s", STOP_TIMEOUT_S)
        try:
            self._parts.agent.close(STOP_TIMEOUT_S)
        except TandemError as error:
            logger.warning("%s", error)

    def _end_calls(self, error: TandemError) -> None:
        for servicer in self._servicers.values():
            servicer.fail_all(error)
        self._feed.close()

    def _attach_machine(self) -> None:
        """Drive the machine of the present role. The service of the other role gets a driver that refuses its calls."""
        parts = self._parts
        assert parts is not None
        self._view = WorkerMachineView(parts.machine)
        drivers = [
            Driver[Any, Any](parts.machine, self._perform, self._on_fatal, self._after_event) for _ in self._servicers
        ]
        self._driver, refusing = drivers
        refusing.stop(WorkerDrains, f"this worker serves as {self._role.value} worker")
        for role, servicer in self._servicers.items():
            driver = self._driver if role is self._role else refusing
            servicer.attach(driver, parts.worker_id, parts.check_grammar)

    # ---- actions

    def _perform(self, action: Any) -> None:
        assert self._parts is not None
        if isinstance(action, RunStep):
            self._parts.executor.submit(action.plan, action.planned, self._on_step_done)
            if self._step_watch is None:
                self._watch_step()
        elif not self._servicers[self._role].perform(action):
            self._for_agent.append(action)  # an action unknown to the agent, too, fails the agent and so this worker

    def _after_event(self) -> None:
        assert self._parts is not None
        actions, self._for_agent = self._for_agent, []
        self._parts.agent.perform(actions, self._view.transfers_alive)
        if self._view.is_idle:
            self._idle.set()
        self._feed.mark_changed()

    def _on_step_done(self, result: StepOutput | Exception) -> None:
        """On the executor's thread."""
        if isinstance(result, StepOutput):
            self._num_failed_steps = 0
            self._post_threadsafe(StepFinished(result))
            return
        logger.error("a step failed", exc_info=result)
        self._num_failed_steps += not isinstance(result, TandemError)
        if isinstance(result, DeviceLost) or self._num_failed_steps >= MAX_FAILED_STEPS:
            self._fail_threadsafe(result)
        else:
            self._post_threadsafe(StepFailed(_step_error(result)))

    def _watch_step(self) -> None:
        """Check the oldest step when it is overdue. One timer serves all steps: thousands of timers would cost time."""
        started_at = self._view.step_started_at
        if started_at is None:
            self._step_watch = None
        else:
            self._step_watch = self._loop.call_at(started_at + self._config.step_timeout_s, self._check_step)

    def _check_step(self) -> None:
        self._step_watch = None
        started_at = self._view.step_started_at
        if started_at is None or self._loop.time() < started_at + self._config.step_timeout_s:
            self._watch_step()
            return
        limit = f"{self._config.step_timeout_s:g} s (step_timeout_s)"
        self._on_fatal(TandemError(f"a step has run for more than {limit} and is considered to hang"))

    def _post_threadsafe(self, event: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, event)

    def _post(self, event: Any) -> None:
        if self._driver is not None:  # before `start` has created the driver, no peer has our address
            self._driver.post(event)

    def _ask(self, event: Any) -> None:
        assert self._driver is not None
        self._driver.ask(event)

    def _fail_threadsafe(self, error: BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_fatal, error)

    def _on_reports_ended(self, task: asyncio.Task[None]) -> None:
        """A worker without reports looks lost to its routers, but would go on with its calls."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    def _on_fatal(self, error: BaseException) -> None:
        """A part has failed: end every call, so that routers use other workers, and report the failure to the host."""
        if self._driver is not None:
            self._driver.stop()
            lost = f": {error}" if isinstance(error, DeviceLost) else ""
            self._end_calls(WorkerUnavailable(f"this worker failed{lost}"))
        if not self._failure.done():
            self._failure.set_result(error)

    # ---- reports

    def _snapshot(self) -> worker_pb2.WorkerReport:
        parts = self._parts
        assert parts is not None
        report = report_codec.encode_changes(WorkerChanges(self._load(), paths=self._view.paths))
        report.snapshot.worker_id = parts.worker_id
        report.snapshot.role = codec.ROLE_TO_WIRE[self._role]
        report.snapshot.agent.CopyFrom(codec.encode_agent(parts.agent.address))
        report.snapshot.cached_blocks.extend(self._view.cached_blocks)
        return report

    def _changes(self) -> worker_pb2.WorkerReport | None:
        changes = self._view.take_changes(self._load())
        return None if changes is None else report_codec.encode_changes(changes)

    def _load(self) -> WorkerLoad:
        assert self._parts is not None
        return replace(self._view.load, num_malformed_messages=self._parts.agent.num_malformed)

    def _holders(self) -> worker_pb2.DescribeLedgerResponse:
        assert self._parts is not None
        return worker_pb2.DescribeLedgerResponse(
            worker_id=self._parts.worker_id,
            ledger=codec.encode_ledger(self._view.ledger),
            holders=map(codec.encode_holder, self._view.holders(self._loop.time())),
        )


def _step_error(error: Exception) -> TandemError:
    return error if isinstance(error, TandemError) else TandemError(f"a step failed: {type(error).__name__}: {error}")
