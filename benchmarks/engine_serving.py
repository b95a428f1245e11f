"""What of a step is not the model while a decode worker really serves: its loop, gRPC, reports and the GIL included.

    this process: 32 Decode calls, as a router makes them  <--gRPC-->  a decode worker on cores of its own

The worker tells when its model began and ended in each step (`Probe` of benchmarks/engine_worker.py). Where two steps
in a row have the whole batch, the time between the end of one model and the begin of the next is what is around it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import pickle
import random
import statistics
import sys
from dataclasses import asdict
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from benchmarks.engine_worker import FIRST_WORD_ID, LAST_WORD_ID, Probe
from cli.compose import build_decode_worker
from core.config import EngineConfig, TandemConfig, TelemetryConfig
from core.request import Request, SamplingParams
from fleet.service_host import Placement, ServiceHost, StartFault
from protos import codec, worker_pb2, worker_pb2_grpc
from runtime.grpc_server import open_channel

MIN_STEPS = 24  # of the whole batch
MAX_MESSAGE_BYTES = 4 << 20
TIMEOUT_S = 300.0

Steps = list[tuple[int, float, float]]  # (sequences, begin, end) of the model in each step, in seconds


def measure(engine: EngineConfig, core: int, batch: int, context: int) -> float:
    """The share of a step that is around the model, at the median. Raises `RuntimeError` where the worker ends."""
    command = [sys.executable, "-m", "benchmarks.engine_serving", json.dumps(asdict(engine)), str(core)]
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            address = worker.stdout.readline().strip()
            if not address:
                raise RuntimeError("the decode worker did not start")
            asyncio.run(_ask(address, batch, context))
            print(file=worker.stdin, flush=True)
            steps: Steps = json.loads(worker.stdout.readline())
        finally:
            worker.stdin.close()
    return share_around([step for step in steps if step[0] == batch], batch)


def share_around(steps: Steps, batch: int) -> float:
    pairs = itertools.pairwise(steps)
    shares = [(begin - last_end) / (end - last_end) for (_, _, last_end), (_, begin, end) in pairs]
    if len(shares) < MIN_STEPS:
        raise RuntimeError(f"only {len(shares)} steps had all {batch} sequences")
    return statistics.median(shares)


async def _ask(address: str, batch: int, context: int) -> None:
    """All calls at once, each with a prompt of its own; prompts are computed in turn, while those before decode."""
    numbers = random.Random(0)
    channel = open_channel(address, MAX_MESSAGE_BYTES)
    stub = worker_pb2_grpc.DecodeWorkerStub(channel)  # type: ignore[no-untyped-call]

    async def one(index: int) -> None:
        prompt = tuple(numbers.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(context))
        sampling = SamplingParams(max_tokens=2 * batch + MIN_STEPS, temperature=0.0, ignore_eos=True)
        request = Request(f"r{index}", prompt, context, sampling)
        wire = worker_pb2.DecodeRequest(sequence=codec.encode_sequence(request))
        async for _ in stub.Decode(wire, timeout=TIMEOUT_S):
            pass

    await asyncio.gather(*(one(index) for index in range(batch)))
    await channel.close(None)


# ---- the worker's process


async def _serve(engine: EngineConfig, core: int) -> None:
    config = TandemConfig(engine=engine, telemetry=TelemetryConfig())
    placement = Placement(ordinal=0, host="", address="", num_threads=1, scale=None, cores=(core,))
    host = ServiceHost()
    endpoint = await host.start(pickle.dumps(functools.partial(build_decode_worker, config)), placement)
    if isinstance(endpoint, StartFault):
        sys.exit(endpoint.reason)
    service: Any = host._service
    probe = Probe(service._parts.executor._runner)
    print(endpoint.address, flush=True)
    if await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(probe.steps), flush=True)
    await host.stop()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    sys.stdout = answers
    asyncio.run(_serve(EngineConfig(**json.loads(sys.argv[1])), int(sys.argv[2])))
