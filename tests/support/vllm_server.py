"""`vllm serve` with the default model, a process group of its own on one core. No process of Tandem.

One process schedules and computes: two would wait for each other in loops, and each loop takes a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from tests.support.child_processes import START_TIMEOUT_S, group_killed
from tests.support.ports import free_port
from tests.support.service_process import ROOT

MODEL = "m"
END_S = 20.0


@dataclass
class VllmServer:
    """Each start has the same ports. `transfer`: the JSON of `--kv-transfer-config`; None: no hand-off."""

    log: Path
    core: int
    transfer: Mapping[str, Any] | None = None
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid_file(self) -> Path:
        """Has the id of the newest process and of its group, for commands."""
        return self.log.with_suffix(".pid")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        python = python_of(VllmConfig())
        command = [
            "taskset", "--cpu-list", str(self.core), str(python), "-m", "vllm.entrypoints.cli.main", "serve",
            str(default_model_dir()), "--served-model-name", MODEL, "--port", str(self.port), "--dtype", self.dtype,
            "--block-size", "32", "--max-model-len", "2048", "--enforce-eager",
            "--distributed-executor-backend", "uni", *self.options,
        ]  # fmt: skip
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        environment = os.environ | variables(python) | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else "uni" has no effect on a CPU
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
        } | dict(self.environment)  # fmt: skip
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.pid_file.write_text(str(self.process.pid))

    def wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    self._pin()
                    return
            time.sleep(0.5)
        raise AssertionError(f"{self.url} did not start")

    def _pin(self) -> None:
        """vLLM's NIXL connector has moved the thread that computes to the last core, in every engine of a machine."""
        assert self.process is not None
        server = psutil.Process(self.process.pid)
        for process in (server, *server.children(recursive=True)):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, {self.core})

    def end(self) -> None:
        """Also of what is left of the group."""
        if self.process is None:
            return
        with group_killed(self.process), contextlib.suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(END_S)

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def started(*servers: VllmServer) -> Iterator[None]:
    """All of them serve."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield
