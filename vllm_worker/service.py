"""The shell of a vLLM worker: the gRPC services of its role, its machine, and its engine.

gRPC calls --> role's servicer --events--> Driver(VllmMachine) --Submit, Abort, MoveOut, ...--> Engine
                                              ^                                                 |
                                              +----- outputs, steps, block events, handshakes --+
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from core.config import LiveConfig, WorkerConfig
from core.errors import TandemError
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole
from core.service import Endpoint
from decode_worker.servicer import DecodeServicer
from prefill_worker.servicer import PrefillServicer
from runtime.driver import Driver
from runtime.rpc.security import OPEN, Credentials
from vllm_worker.engine import BlocksChanged, Engine, EngineReport
from vllm_worker.events import Abort, Fail, GivePrefix, Submit, VllmAction, VllmEvent
from vllm_worker.handshakes import ShakeHands
from vllm_worker.machine import Limits, VllmMachine
from vllm_worker.moves import MoveOut, Stay
from vllm_worker.view import VllmView
from worker.core import ConfigChanged
from worker.request_check import RequestCheck, accept_grammars
from worker.serving_worker import Servicer, ServingWorker

SERVICERS: dict[ServiceRole, Callable[[float], Servicer]] = {
    ServiceRole.PREFILL: PrefillServicer,
    ServiceRole.DECODE: DecodeServicer,
}


class VllmService(ServingWorker):
    """Number `ordinal` of its role. It never switches its role."""

    _machine: VllmMachine  # from `start` on

    def __init__(
        self,
        role: ServiceRole,
        ordinal: int,
        config: WorkerConfig,
        engine: Engine,
        limits: Limits,
        credentials: Credentials = OPEN,
    ) -> None:
        super().__init__(role, config, {role: SERVICERS[role](config.default_timeout_s)}, credentials)
        self._ordinal, self._engine, self._limits = ordinal, engine, limits
        self._view: VllmView = VllmView(lambda: self._machine)

    async def start(self) -> Endpoint:
        self._begin()
        info = await self._engine.start(self._on_report)
        incarnation = secrets.randbits(63) | 1
        worker_id = f"{self._role.value}-{self._ordinal}.{incarnation:016x}" if info.agent is None else info.agent.name
        address = info.agent or AgentAddress(
            name=worker_id,
            incarnation=incarnation,
            metadata=info.address,
            pool_base=0,
            num_blocks=info.num_blocks,
            layout=info.layout,
            lease_s=1.0,
        )
        self._machine = VllmMachine(info, self._limits)
        self._driver = Driver[VllmEvent, VllmAction](self._machine, self._perform, self._on_fatal, self._after_event)
        check = RequestCheck(info.vocab_size, info.context_length, accept_grammars)
        self._servicers[self._role].attach(self._driver, worker_id, check)
        return await self._serve(worker_id, address)

    def set_config(self, live: LiveConfig) -> None:
        super().set_config(live)
        self._driver.post(ConfigChanged(live.scheduler, self._config))

    async def stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._is_serving:
            await self._stop_serving()
        await self._engine.close()

    # ---- the machine and its engine

    def _on_report(self, report: EngineReport) -> None:
        if isinstance(report, BlocksChanged):
            self._view.note(report)
        self._post(report)

    def _perform(self, action: VllmAction) -> None:
        match action:
            case Submit(prompt):
                self._engine.submit(prompt)
            case Abort(request_id):
                self._engine.abort(request_id)
            case MoveOut(request_id, transfer, num_known_tokens):
                self._engine.move(request_id, transfer, num_known_tokens)
            case Stay(request_id, transfer_id):
                self._engine.stay(request_id, transfer_id)
            case GivePrefix(transfer, token_ids, cache_salt):
                self._engine.give_prefix(transfer, token_ids, cache_salt)
            case ShakeHands(peer, address):
                self._engine.shake_hands(peer, address)
            case Fail(detail):
                self._loop.call_soon(self._on_fatal, TandemError(detail))
            case _:
                assert self._servicers[self._role].perform(action), f"no part performs {action}"
