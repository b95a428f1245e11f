"""A simulated worker with vLLM inside: VllmMachine, and a fake engine whose steps take virtual time.

The engine is a process of its own, so it computes while its worker is stopped. It may die or hang; then the worker
ends, as in production. A load of KV may fail, and kept KV is gone after its lease or with its owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from core.cost.step_cost import StepWork
from core.handoff import AgentAddress
from simulator.shells.worker_shell import WorkerShell
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.memory import EOS_TOKEN_IDS, VOCAB_SIZE, token_behind
from simulator.virtual.world import World
from vllm_worker.engine import BlocksChanged, EngineDied, EngineInfo, EngineOutput, HandshakeEnded, Prompt
from vllm_worker.events import Abort, Fail, Submit
from vllm_worker.fake_engine import FakeCluster, FakeCore
from vllm_worker.handshakes import ShakeHands
from vllm_worker.machine import Limits, VllmMachine
from vllm_worker.view import VllmView

HANDSHAKE_S = 0.1


class VllmShell(WorkerShell):
    """`on_failed` is called after the worker has ended because of its engine."""

    def __init__(
        self,
        world: World,
        spec: WorkerSpec,
        cluster: FakeCluster,
        on_failed: Callable[[WorkerShell], None],
        incarnation: int = 1,
        clock_offset_s: float = 0.0,
    ) -> None:
        self._cluster, self._on_failed = cluster, on_failed
        self._is_stepping = False  # for ever, once the engine hangs
        super().__init__(world, spec, incarnation, clock_offset_s)

    def _build(self, incarnation: int) -> None:
        spec, steps = self.spec, self.spec.scheduler
        num_tokens = spec.num_blocks * spec.layout.block_size
        info = EngineInfo(spec.num_blocks, spec.layout, EOS_TOKEN_IDS, VOCAB_SIZE, num_tokens, steps.max_batched_tokens)
        self.engine = FakeCore(self._cluster, self.name, info, token_behind)
        metadata = self.engine.info.address
        self.address = AgentAddress(self.name, incarnation, metadata, 0, spec.num_blocks, spec.layout, lease_s=1.0)
        limits = Limits(spec.worker.step_timeout_s, steps.max_waiting, steps.max_running)
        self.machine = VllmMachine(info, limits)
        self.view = VllmView(lambda: self.machine)

    def join(self, *_: Any) -> None:
        """The engines have no network."""

    def _perform(self, action: Any) -> None:
        match action:
            case Submit(prompt):
                self._submit(prompt)
            case Abort(request_id):
                self.engine.abort(request_id)
            case ShakeHands(peer, address):
                self._world.after(HANDSHAKE_S, partial(self._shake_hands, peer, address))
            case Fail():
                self._world.after(0.0, self._fail)
            case _:
                super()._perform(action)

    def _submit(self, prompt: Prompt) -> None:
        world = self._world
        fails = bool(prompt.handoff) and world.chance(self.spec.engine.lost_load)
        is_gone = fails and world.chance(0.5)  # its owner has ended the lease early
        if fails:
            world.counts["kept KV is gone" if is_gone else "load fails"] += 1
            world.trouble(self.spec.worker_id)
        if is_gone:
            self._cluster.kept.pop(prompt.handoff, None)
        self.engine.loses_loads = fails and not is_gone
        self.engine.submit(prompt)
        self._plan_step()

    def _shake_hands(self, peer: str, address: bytes) -> None:
        if self.alive:
            self.engine.meet(address.decode())
            self.post(HandshakeEnded(peer))

    # ---- steps

    def _plan_step(self) -> None:
        world, spec = self._world, self.spec
        if self._is_stepping or not self.engine.num_open:
            return
        self._is_stepping = True
        step = self.engine.next_step()
        duration_s = spec.step_cost.seconds(StepWork(step.num_decodes, 0, step.prompt_tokens, 0.0))
        if world.chance(spec.engine.hang):
            self._begin_trouble("engine hangs")
        elif world.chance(spec.engine.death):
            self._begin_trouble("engine dies")
            world.after(duration_s, self._die_in_engine)
        else:
            world.after(duration_s, self._step)

    def _begin_trouble(self, what: str) -> None:
        """Until the next worker has joined."""
        self._world.counts[what] += 1
        self._world.note(f"{self.name}: its {what}")
        self._world.trouble(self.spec.worker_id, until=float("inf"))

    def _step(self) -> None:
        self._is_stepping = False
        if not self.alive:
            return
        for report in self.engine.step():
            if isinstance(report, BlocksChanged):
                self.view.note(report)
            elif isinstance(report, EngineOutput) and report.handoff:
                self._world.after(self.spec.transfer.lease_s, partial(self._expire, report.handoff))
            self.post(report)
        self._plan_step()

    def _expire(self, handoff: bytes) -> None:
        self._world.counts["expired lease"] += self._cluster.end_lease(handoff)

    # ---- ends

    def _die_in_engine(self) -> None:
        self.engine.clear()
        self.post(EngineDied("killed"))

    def _fail(self) -> None:
        if self.alive:
            self.die(silent=False, killed=False)
            self._on_failed(self)

    def _end_parts(self) -> None:
        self.engine.clear()

    # ---- what is left

    @property
    def is_idle(self) -> bool:
        return self.alive and not self.stopped and self.machine.idle

    @property
    def cached_blocks(self) -> set[int]:
        return self.engine.cached_blocks

    @property
    def kept_blocks(self) -> dict[str, int]:
        kept = sum(owner == self.name for owner, _ in self._cluster.kept.values())
        return {"requests in the engine": self.engine.num_open, "prompts kept for others": kept}

    def count(self, counts: Counter[str]) -> None:
        counts["aborted in the engine"] += self.engine.num_aborted
