"""How long a whole fleet takes from its command to its first token, and what its processes hold in memory.

    tandem serve (Ray, a router, one prefill and one decode worker) --its first line of service--> one question by a
    client that is running already --> the first token

The weights are in the page cache: whoever calls this has read them just before. Memory is the proportional set size: a
page that processes share is counted in parts.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Line
from core.config import EngineConfig
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

MOST_OVERHEAD_MB = 500  # of a worker, beside weights and pool
TIMEOUT_S = 120.0
SETTLE_S = 1.0
MB = 1 << 20
PROMPT = "What is the capital of France?"
ADDRESS = "127.0.0.1:50651"


@dataclass(frozen=True, slots=True)
class FleetStart:
    first_token_s: float
    worker_bytes: tuple[int, ...]  # of the two largest processes: the workers
    other_bytes: int  # Ray's own, the supervisor and the router


def start_fleet(model: str, kv_memory_mb: int) -> FleetStart:
    """Starts one and stops it again. Raises `RuntimeError` with its last line where it does not come up."""
    command: list[str | Path] = [
        Path(sys.executable).with_name("tandem"), "serve", "--model", model, "--kv-memory-mb", str(kv_memory_mb),
        "--port", ADDRESS.rpartition(":")[2],
    ]  # fmt: skip
    begun = time.perf_counter()
    fleet = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert fleet.stdout is not None
        said = ""
        for line in fleet.stdout:
            said = line.strip()
            if said.startswith("serving "):
                break
        else:
            raise RuntimeError(f"tandem serve ended: {said}")
        asyncio.run(ask())
        first_token_s = time.perf_counter() - begun
        sizes = settled_sizes(fleet.pid)
        return FleetStart(first_token_s, tuple(sizes[:2]), sum(sizes[2:]))
    finally:
        fleet.terminate()
        fleet.communicate(timeout=TIMEOUT_S)


def settled_sizes(pid: int) -> list[int]:
    """Bytes of each process, the largest first, once they grow no more: the pools are touched while they serve."""
    before = -MB
    while True:
        sizes = sorted((process.memory_full_info().pss for process in family(pid)), reverse=True)
        if sum(sizes) <= before + MB:
            return sizes
        before = sum(sizes)
        time.sleep(SETTLE_S)


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


async def ask() -> None:
    """Until the first token."""
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role="user", content=PROMPT)
    request.sampling.temperature = 0.0
    request.stop.max_tokens = 8
    async with AsyncClient(ADDRESS) as client:
        async for response in client.generate(request, TIMEOUT_S):
            if response.HasField("tokens"):
                return


def lines(starts: Sequence[FleetStart], config: EngineConfig, weight_bytes: int) -> Iterator[Line]:
    first_token_s = statistics.median(start.first_token_s for start in starts)
    start = max(starts, key=lambda start: max(start.worker_bytes))
    yield Line("tandem serve, Ray and two pools: command to first token", "", first_token_s, "s")
    allowed = weight_bytes + (config.kv_memory_mb + MOST_OVERHEAD_MB) * MB
    largest = max(start.worker_bytes)
    assert largest > weight_bytes, "no worker was measured"
    yield Line("resident memory of a worker",
               f"under weights once ({weight_bytes / MB:.0f} MB) + KV pool ({config.kv_memory_mb} MB) + "
               f"{MOST_OVERHEAD_MB} MB", largest / MB, "MB", holds=largest < allowed)  # fmt: skip
    yield Line("resident memory of the rest: Ray, supervisor, router, driver", "", start.other_bytes / MB, "MB")
