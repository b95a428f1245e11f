"""One service of a measured fleet: `python -m benchmarks.migrate.side SIDE`, where SIDE is a `Side` as JSON.

Everything is real but the model: a step sleeps for `step_s`, as on a GPU that leaves the cores to others. The pool has
the layout of the default model, and its blocks move over nixl with digests.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import sys
from dataclasses import dataclass, replace
from typing import Any, TextIO

import uvloop

from benchmarks.dataplane.sleeping_runner import SleepingRunner
from benchmarks.processes import obey, take_stdout
from cli.compose import build_decode_worker, build_prefill_worker, build_router
from core.config import EngineConfig, RouterConfig, SchedulerConfig, TandemConfig
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from core.service import Endpoint
from decode_worker import machine as decode_machine
from engine import factory
from fleet.service_host import Placement, ServiceHost, StartFault
from model_files.model_source import describe, resolve_model

BLOCK_SIZE = 16
MAX_STREAMS = 128
CONFIG = TandemConfig(
    engine=EngineConfig(block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_batched_tokens=8192, max_running=MAX_STREAMS, max_waiting=MAX_STREAMS),
    router=RouterConfig(port=0, max_queued=MAX_STREAMS, max_in_flight_per_worker=MAX_STREAMS),
)
BUILDERS = {
    ServiceRole.ROUTER: build_router,
    ServiceRole.PREFILL: build_prefill_worker,
    ServiceRole.DECODE: build_decode_worker,
}


@dataclass(frozen=True, slots=True)
class Side:
    role: str
    ordinal: int = 0
    step_s: float = 0.02
    num_blocks: int = 6144
    moves_for_room: bool = True


def layout_of(model: str) -> KVLayout:
    return KVLayout(model, "bfloat16", num_layers=30, num_kv_heads=3, block_size=BLOCK_SIZE, head_dim=64)


def build_sleeping_runner(side: Side) -> SleepingRunner:
    info = describe(resolve_model(CONFIG.engine.model), CONFIG.engine.max_context)
    return SleepingRunner(info, side.num_blocks, layout_of(info.fingerprint), side.step_s)


class Service:
    """Each public method is a command, called on a thread."""

    def __init__(self, host: ServiceHost, endpoint: Endpoint) -> None:
        self._host, self._endpoint, self._loop = host, endpoint, asyncio.get_running_loop()

    def endpoint(self) -> dict[str, str]:
        return {"id": self._endpoint.service_id, "address": self._endpoint.address, "role": self._endpoint.role.value}

    def follow(self, workers: list[dict[str, Any]]) -> None:
        """The router's fleet."""
        followed = [
            Endpoint(each["id"], each["address"], ServiceRole(each["role"]), draining=each["draining"])
            for each in workers
        ]
        self._wait(self._host.set_fleet(followed, routers=[]))

    def drain(self, timeout_s: float) -> None:
        worker: Any = self._host._service
        self._wait(worker.drain(timeout_s))

    def counters(self) -> dict[str, float]:
        worker: Any = self._host._service
        load = worker._parts.machine.load()
        return {"preemptions": load.num_preemptions, "read_bytes": load.transferred_bytes}

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def serve(side: Side, answers: TextIO) -> None:
    factory.build_runner = lambda *_, **__: build_sleeping_runner(side)
    if not side.moves_for_room:
        decode_machine.num_short = lambda *_: 0  # type: ignore[attr-defined]
    role, host = ServiceRole(side.role), ServiceHost()
    placement = Placement(ordinal=side.ordinal, host="", address="", num_threads=1, control=None)
    endpoint = await host.start(pickle.dumps(functools.partial(BUILDERS[role], CONFIG)), placement)
    if isinstance(endpoint, StartFault):
        raise RuntimeError(endpoint.reason)
    await asyncio.to_thread(obey, Service(host, replace(endpoint, role=role)), answers)
    await host.stop()


if __name__ == "__main__":
    uvloop.run(serve(Side(**json.loads(sys.argv[1])), take_stdout()))
