"""The shell of a prefill or decode worker: one process with an event loop, and threads for steps and transfers.

    Driver(machine) --actions--> servicer of the role, step executor, transfer agent, disk
        ^                                  |
        +--- StepFinished, MessageReceived, ReadFinished, BlocksRead, ... (other threads)

Each role brings its machine and its servicer; worker/serving_worker.py has the common part of all workers. At a switch
to the other role, the machine of that role gets the pool, the prefix cache, the runner and the agent of the one before.
The services of both roles are registered from the start; that of the other role refuses its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.config import LiveConfig, WorkerConfig
from core.errors import DeviceLost, TandemError, WorkerDrains, WorkerUnavailable
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.scheduling.worker_load import WorkerLoad
from core.service import Endpoint
from core.step import StepOutput
from kv_transfer.agent import TransferAgent
from runtime.driver import Driver
from runtime.rpc.security import OPEN, Credentials
from worker.core import ConfigChanged, RunStep, StepFailed, StepFinished
from worker.executor import StepExecutor
from worker.request_check import RequestCheck
from worker.serving_worker import Servicer, ServingWorker
from worker.tier.events import TierAction
from worker.tier.threads import TierThreads
from worker.view import WorkerMachine, WorkerMachineView

STOP_TIMEOUT_S = 5.0  # the end of a thread; beyond: logged, and the process ends
# Failed steps in a row that end the worker. One may be the fault of a request. A worker that fails every step has no
# work, so it would attract every request.
MAX_FAILED_STEPS = 3  # failed steps in a row; beyond: the worker ends

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that are slow to build (model, pool). The service builds them in a thread when it starts."""

    worker_id: str
    machine: WorkerMachine  # of the present role
    make_machine: Callable[[ServiceRole], WorkerMachine]  # with the same core and transfers; only once those are idle
    executor: StepExecutor
    agent: TransferAgent  # started
    check: RequestCheck
    disk: TierThreads | None = None  # of the tier below the pool


# Takes two functions for use on any thread: post an event to the machine; report the failure of a part.
BuildParts = Callable[[Callable[[Any], None], Callable[[BaseException], None]], WorkerParts]


class WorkerService(ServingWorker):
    """A `core.service.WorkerControl`. `start` calls `build` once, in a thread."""

    _parts: WorkerParts  # from `start` on
    _view: WorkerMachineView

    def __init__(
        self,
        role: ServiceRole,
        config: WorkerConfig,
        build: BuildParts,
        servicers: Mapping[ServiceRole, Servicer],
        credentials: Credentials = OPEN,
    ) -> None:
        super().__init__(role, config, servicers, credentials)
        self._build = build
        self._for_agent: list[Any] = []
        self._step_watch: asyncio.TimerHandle | None = None
        self._limits: ConfigChanged | None = None  # the newest, for the machine of another role
        self._num_failed_steps = 0  # in a row, without an error that is sorted; for the executor's thread

    async def start(self) -> Endpoint:
        self._begin()
        self._parts = await asyncio.to_thread(self._build, self._post_threadsafe, self._fail_threadsafe)
        self._attach_machine()
        return await self._serve(self._parts.worker_id, self._parts.agent.address)

    def set_config(self, live: LiveConfig) -> None:
        super().set_config(live)
        if self._step_watch is not None:
            self._step_watch.cancel()
            self._watch_step()
        self._limits = ConfigChanged(live.scheduler.on_device(self._address.location.on_gpu), self._config)
        self._driver.post(self._limits)

    async def switch_role(self, role: ServiceRole, timeout_s: float) -> None:
        await self.drain(timeout_s)
        if self._driver.stopped or not self._view.is_idle:
            raise WorkerUnavailable(f"still has work after draining for {timeout_s:g} s")
        self._driver.stop()
        self._servicers[self._role].fail_all(WorkerDrains("this worker changes its role"))
        self._feed.end_streams()  # the next snapshots name the new role
        self._role = role
        self._parts = replace(self._parts, machine=self._parts.make_machine(role))
        self._attach_machine()
        self._driver.post(Tick() if self._limits is None else self._limits)
        self._server.set_serving(True)
        logger.info("%s serves as %s worker", self._worker_id, role.value)

    async def stop(self) -> None:
        if not self._is_serving or self._stopping:
            return
        self._stopping = True  # and stop every part: a failure stops only the driver
        if self._step_watch is not None:
            self._step_watch.cancel()
        await self._stop_serving()
        await asyncio.to_thread(self._close_parts)

    def _close_parts(self) -> None:
        if not self._parts.executor.close(STOP_TIMEOUT_S):
            logger.warning("the step in flight did not end within %g s", STOP_TIMEOUT_S)
        if self._parts.disk is not None and not self._parts.disk.close(
            STOP_TIMEOUT_S, starts_again=self._failure.done()
        ):
            logger.warning("the disk did not answer within %g s", STOP_TIMEOUT_S)
        try:
            self._parts.agent.close(STOP_TIMEOUT_S)
        except TandemError as error:
            logger.warning("%s", error)

    def _attach_machine(self) -> None:
        """Drive the machine of the present role. The service of the other role gets a driver that refuses its calls."""
        parts = self._parts
        self._view = WorkerMachineView(parts.machine)
        drivers = [
            Driver[Any, Any](parts.machine, self._perform, self._on_fatal, self._after_event) for _ in self._servicers
        ]
        self._driver, refusing = drivers
        refusing.stop(WorkerDrains, f"this worker serves as {self._role.value} worker")
        for role, servicer in self._servicers.items():
            driver = self._driver if role is self._role else refusing
            servicer.attach(driver, parts.worker_id, parts.check)

    # ---- actions

    def _perform(self, action: Any) -> None:
        if isinstance(action, RunStep):
            self._parts.executor.submit(action.plan, action.planned, self._on_step_done)
            if self._step_watch is None:
                self._watch_step()
        elif isinstance(action, TierAction):
            assert self._parts.disk is not None, "a machine without a tier uses the disk"
            self._parts.disk.perform(action)
        elif not self._servicers[self._role].perform(action):
            self._for_agent.append(action)  # an action unknown to the agent, too, fails the agent and so this worker

    def _after_event(self) -> None:
        actions, self._for_agent = self._for_agent, []
        self._parts.agent.perform(actions, self._view.transfers_alive)
        super()._after_event()

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

    def _fail_threadsafe(self, error: BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_fatal, error)

    def _load(self) -> WorkerLoad:
        return replace(super()._load(), num_malformed_messages=self._parts.agent.num_malformed)


def _step_error(error: Exception) -> TandemError:
    return error if isinstance(error, TandemError) else TandemError(f"a step failed: {type(error).__name__}: {error}")
