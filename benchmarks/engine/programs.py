"""Starts the measured programs, Tandem's engine and the peers, each in a process of its own with the same commands.

    {"do": "fill", "batch": b, "context": c}   b sequences in decode, c tokens each
    {"do": "keep", "batch": b}                 end all but the first b
    {"do": "steps", "count": n}                {"ms": [...]}  n decode steps of the whole batch
    {"do": "prefill", "tokens": t}             {"ms": x}      one prompt, from its arrival to its first token

Commands and answers are JSON objects, one a line. The first answer, `{}`, says that the program is ready.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.child_process import ChildProcess
from benchmarks.engine.install_peers import MODEL, is_installed, llama_dir, tcmalloc, vllm_dir, vllm_weights
from core.config import EngineConfig
from engine.backend import choose_dtype
from model_files.model_source import resolve_model

HERE = Path(__file__).parent
VLLM_KV_GB = 3
SHORT_PROMPT = 16
FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model


@dataclass(frozen=True, slots=True)
class Launch:
    command: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path | None = None


class Program(ChildProcess):
    """One program, started at once, on one core or where the scheduler puts it. Ends with `stop`."""

    def __init__(self, name: str, launch: Launch, core: int | None = None) -> None:
        self._started_at = time.perf_counter()
        pinned: list[str | Path] = [] if core is None else ["taskset", "--cpu-list", str(core)]
        super().__init__(name, [*pinned, *launch.command], launch.environment, launch.directory)
        self._is_ready = False

    def first_token_s(self) -> float:
        """Seconds from the start of the process to the answer to a short prompt. Raises `ChildEnded`."""
        self.call("prefill", tokens=SHORT_PROMPT)
        return time.perf_counter() - self._started_at

    def call(self, do: str, **arguments: Any) -> Any:
        """Raises `ChildEnded` where the program ends instead of answering."""
        if not self._is_ready:
            self.answer()
            self._is_ready = True
        return self.ask({"do": do} | arguments)


def launch_tandem(config: EngineConfig, serve_on_core: int | None = None) -> Launch:
    """The bare engine, or a decode worker whose compute thread runs on `serve_on_core`."""
    command = [sys.executable, "-m", "benchmarks.engine.tandem_worker", json.dumps(asdict(config))]
    return Launch(command if serve_on_core is None else [*command, str(serve_on_core)])


def launch_vllm(core: int) -> Launch | None:
    """vLLM on one core, a step at a time; None where it is not installed."""
    return _launch_vllm("vllm_worker.py", str(core), num_threads=1)


def launch_vllm_replay(cores: str) -> Launch | None:
    """vLLM on these cores ("0-1"), serving requests at their times of arrival; None where it is not installed."""
    first, _, last = cores.partition("-")
    dtype = choose_dtype("auto", torch.device("cpu"))  # as Tandem's engine chooses it
    return _launch_vllm("vllm_replay.py", cores, int(last or first) - int(first) + 1, dtype)


def _launch_vllm(program: str, cores: str, num_threads: int, *arguments: str) -> Launch | None:
    """With the settings that its documentation recommends for a CPU."""
    directory = vllm_dir()
    if not (is_installed(directory) and is_installed(vllm_weights())):
        return None
    preload = [tcmalloc(directory), directory / "lib" / "libiomp5.so"]
    environment = {
        "LD_PRELOAD": ":".join(str(library) for library in preload if library is not None and library.exists()),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Launch([directory / "bin" / "python", HERE / program, vllm_weights(), *arguments], environment)


def launch_llama() -> Launch | None:
    """llama.cpp with the GGUF file itself; None where it is not installed."""
    directory, source = llama_dir(), resolve_model(MODEL)
    if not is_installed(directory) or source.path is None:
        return None
    return Launch(["node", HERE / "llama_worker.mjs", source.path], {}, directory)
