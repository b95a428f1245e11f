"""A router in this process, and real vLLM workers in processes of their own.

with started_workers(tmp_path, ("prefill", 0), ("decode", 0)) as workers:
    async with routed(workers) as client:
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig, from_mapping
from router.service import RouterService
from tandem_client import AsyncClient
from tests.support.deployment import running_router
from tests.support.service_process import Role, ServiceProcess, Tables, config_with

DRAIN_S = 120.0
BLOCK_SIZE = 32
LEASE_S = 5.0
# Without compilation a start takes 35 s on a core of its own, not minutes.
CONFIG: Tables = {
    "engine": {"name": "vllm", "model": str(default_model_dir()), "dtype": "float32", "kv_memory_mb": 1024},
    "vllm": {"args": ["--enforce-eager", "--block-size", str(BLOCK_SIZE)], "lease_s": LEASE_S},
    "router": {"port": 0, "worker_wait_s": 60.0},
    "gateway": {"port": 0},
}


def require_vllm() -> None:
    """Skip the test where vLLM is not installed."""
    if not python_of(VllmConfig()).exists() or not default_model_dir().is_dir():
        pytest.skip("vLLM is not installed (make vllm)")


def prompt_of(number: int, num_tokens: int) -> list[int]:
    draws = random.Random(number)
    return [draws.randint(1000, 40_000) for _ in range(num_tokens)]


class VllmProcess(ServiceProcess):
    """The process of one worker, the leader of its group. `log`: the file of its standard error."""

    def __init__(self, role: Role, log: Path) -> None:
        python = python_of(VllmConfig())
        super().__init__(role, python=python, environment=variables(python), log=log.open("w+"))
        self.log = log

    def num_handshakes(self) -> int:
        """Those that its engine has begun as a reader, and whose owner answered."""
        return self.log.read_text().count("NIXL compatibility check passed")

    async def drain(self) -> None:
        """Ends when the worker has nothing left."""
        await asyncio.to_thread(self.call, "drain", timeout_s=DRAIN_S)

    def engine(self) -> psutil.Process:
        """The process that schedules, whose child computes. vLLM fails to set its title where the user exports
        TORCHINDUCTOR_CACHE_DIR."""
        children = psutil.Process(self.pid).children()
        return next(child for child in children if re.search("EngineCore|spawn_main", " ".join(child.cmdline())))

    def group(self) -> list[psutil.Process]:
        """The processes that are left of the group."""
        return [one for one in psutil.process_iter() if _group_of(one) == self.pid]


def _group_of(process: psutil.Process) -> int:
    try:
        return -1 if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return -1


@contextlib.contextmanager
def started_workers(
    log_dir: Path,
    *places: tuple[str, int],
    engines_alone: bool = False,
    changes: Tables = {},  # noqa: B006 - nobody changes it
) -> Iterator[dict[str, VllmProcess]]:
    """Start workers of (role, ordinal) beside each other, each on one core in turn. Each writes a log of its own.

    `engines_alone`: their engines without workers, each on a Unix socket. `changes`: as in `config_with`.
    """
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        processes: dict[str, VllmProcess] = {}
        config = config_with(CONFIG, **changes)
        builder = "tests.support.engine_relay:EngineServer" if engines_alone else ""
        for number, (name, ordinal) in enumerate(places):
            core = cores[number % len(cores)]
            role = Role(name, ordinal=ordinal, config=config, cores=(core,), builder=builder, step_s=None)
            process = processes[f"{name}-{ordinal}"] = VllmProcess(role, log_dir / f"{name}-{ordinal}.log")
            stack.callback(process.stop)
        for process in processes.values():
            process.wait_until_ready()
        yield processes


@contextlib.asynccontextmanager
async def routed(
    workers: Sequence[VllmProcess], engine: Tables = CONFIG["engine"], **router: Any
) -> AsyncIterator[tuple[AsyncClient, RouterService]]:
    """A client of a new router for these workers."""
    config = from_mapping(config_with(CONFIG, engine=engine, router=router))
    async with running_router(config, [worker.endpoint for worker in workers]) as (service, address):
        async with AsyncClient(address) as client:
            yield client, service
