"""`tandem serve` with its workers on one GPU: real Ray, real gRPC, blocks that move from GPU memory to GPU memory.

Each worker has a share of the GPU. A second decode worker takes the streams of the first one when that is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from cli.credentials import client_of, find_credentials
from cli.screens.path_lines import paths_of
from core.config import EngineConfig
from core.paths import Lane
from core.request import Request, SamplingParams
from tandem_client import AsyncClient, Completion
from tests.support.command import Served, serving
from tests.support.faults import prompt_of
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

MODEL = "random:llama3-tiny"
SHARES = "[cluster]\nprefill_gpus = 0.3\ndecode_gpus = 0.3\nmax_workers = 4\n"
TIMEOUT_S = 60.0
LENGTHS = [1, 15, 16, 17, 80, 700]
NUM_STREAMS, NUM_OUTPUT = 8, 1500


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    config = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    config.write_text(SHARES, encoding="ascii")
    options = ("--model", MODEL, "--device", "cuda", "--dtype", "float32", "--kv-memory-mb", "256", "--decode", "2")
    async with serving(*options, "--local-prefill", "never", "--config", str(config)) as fleet:
        yield fleet
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ended() == (0, [])


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    async with client_of(served.address, find_credentials(None, served.address)) as opened:
        yield opened


@pytest.mark.parametrize("length", LENGTHS)
async def test_the_tokens_of_two_pools_are_those_of_an_engine_on_the_cpu(client: AsyncClient, length: int) -> None:
    prompt, num_output = prompt_of(length, length), 20
    found = await client.complete(prompt, TIMEOUT_S, max_tokens=num_output, temperature=0.0, ignore_eos=True)
    engine = CoLocatedEngine(EngineConfig(model=MODEL, dtype="float32", kv_memory_mb=16, device="cpu", num_threads=1))
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    assert list(found.token_ids) == engine.generate(Request("reference", prompt, len(prompt), params))
    assert found.path == "disaggregated"
    engine.close()


async def test_blocks_move_from_gpu_to_gpu(client: AsyncClient) -> None:
    paths = [path for _, path in paths_of(await client.fleet())]
    assert paths
    assert {path.lane for path in paths} == {Lane.CUDA_IPC}, paths


async def test_streams_of_a_killed_decode_worker_go_on_with_the_same_tokens(client: AsyncClient) -> None:
    prompts = [prompt_of(1000 + number, 100) for number in range(NUM_STREAMS)]
    num_read = [0] * NUM_STREAMS

    async def read(number: int) -> Completion:
        options = {"max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True}
        async with client.stream(prompts[number], TIMEOUT_S, **options) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                num_read[number] += 1
        return stream.result

    undisturbed = await asyncio.gather(*map(read, range(NUM_STREAMS)))
    num_read = [0] * NUM_STREAMS
    tasks = [asyncio.create_task(read(number)) for number in range(NUM_STREAMS)]
    await until(lambda: min(num_read) >= 20, "every stream has tokens")
    workers = [worker for worker in (await client.fleet()).workers if worker.worker_id.startswith("decode-")]
    victim = max(
        workers, key=lambda worker: worker.load.num_running
    )  # the router may choose one worker for all streams
    os.kill(listener(victim.address), signal.SIGKILL)
    found = await asyncio.gather(*tasks)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in undisturbed]
    assert max(answer.num_attempts for answer in found) > 1, "no stream was on the worker that was killed"
    assert victim.worker_id not in {answer.decode_worker for answer in found}


def listener(address: str) -> int:
    """The process that listens at `host:port`."""
    port = int(address.rpartition(":")[2])
    pids = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    }
    (pid,) = pids
    return pid
