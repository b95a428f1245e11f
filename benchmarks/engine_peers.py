"""Programs under measurement: ours and the peers, each a process of its own on one core, obeying the same commands.

    {"do": "fill", "batch": b, "context": c}   b sequences in decode, c tokens each
    {"do": "keep", "batch": b}                 end all but the first b
    {"do": "steps", "count": n}                {"ms": [...]}  n decode steps of the whole batch
    {"do": "prefill", "tokens": t}             {"ms": x}      one prompt, from its arrival to its first token

Commands and answers are JSON, one object a line; the first answer, `{}`, says that the program is ready. Only one
program works at a time, so all of them are measured on the same core, in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import hf_directory
from benchmarks.install_peers import is_installed, llama_dir, peers_dir, tcmalloc, vllm_dir
from core.config import EngineConfig
from model_files.model_source import resolve_model

WORKERS = Path(__file__).parent / "peers"
VLLM_KV_GB = 3
SHORT_PROMPT = 16


class PeerFailed(Exception):
    """A program ended or cannot be started; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Launch:
    command: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path | None = None


class Program:
    """One program, started at once; `first_token_s` waits for it. Ends with `stop`."""

    def __init__(self, name: str, launch: Launch, core: int) -> None:
        self.name = name
        self._begun = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *map(str, launch.command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=launch.directory,
            env=os.environ | launch.environment,
        )

    def first_token_s(self) -> float:
        """Seconds from its start until it has answered a short prompt. Raises `PeerFailed`."""
        self._answer()
        self.prefill(SHORT_PROMPT)
        return time.perf_counter() - self._begun

    def call(self, do: str, **arguments: Any) -> Any:
        """Raises `PeerFailed` where the program ends instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer, which does not come, says why
        return self._answer()

    def steps(self, count: int) -> dict[str, list[float]]:
        """Milliseconds of each step; ours also tells those of its parts."""
        times: dict[str, list[float]] = self.call("steps", count=count)
        return times

    def prefill(self, tokens: int) -> float:
        milliseconds: float = self.call("prefill", tokens=tokens)["ms"]
        return milliseconds

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last_words = self._log.read().strip().splitlines()[-5:]
            raise PeerFailed(f"{self.name} ended: " + " | ".join(last_words))
        return json.loads(line)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def launch_tandem(config: EngineConfig) -> Launch:
    return Launch([sys.executable, "-m", "benchmarks.engine_worker", json.dumps(asdict(config))])


def launch_vllm(model: str, core: int) -> Launch | None:
    """vLLM with the settings its documentation recommends for a CPU; None where it is not installed."""
    directory = vllm_dir()
    if not is_installed(directory):
        return None
    preload = [tcmalloc(directory), directory / "lib" / "libiomp5.so"]
    environment = {
        "LD_PRELOAD": ":".join(str(library) for library in preload if library is not None and library.exists()),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GB),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    weights = hf_directory.write(model, peers_dir() / f"{Path(model).stem}-hf")
    return Launch([directory / "bin" / "python", WORKERS / "vllm_worker.py", weights], environment)


def launch_llama(model: str) -> Launch | None:
    """llama.cpp with the GGUF file itself; None where it is not installed."""
    directory, source = llama_dir(), resolve_model(model)
    if not is_installed(directory) or source.path is None:
        return None
    return Launch(["node", WORKERS / "llama_worker.mjs", source.path], {}, directory)
