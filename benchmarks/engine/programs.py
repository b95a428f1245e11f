"""Starts the measured programs, Tandem's engine and the peers, each in a process of its own with the same commands.

{"do": "fill", "batch": b, "context": c}   b sequences in decode, c tokens each
{"do": "keep", "batch": b}                 end all but the first b
{"do": "steps", "count": n}                {"ms": [...]}  n decode steps of the whole batch
{"do": "prefill", "tokens": t}             {"ms": x}      one prompt, from its arrival to its first token
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.config import EngineConfig
from engine.backend import choose_dtype
from model_files.model_source import resolve_model
from tests.support.child_processes import ChildProcess
from tools.install_peers import MODEL, is_installed, llama_dir, tcmalloc, vllm_dir, vllm_weights

HERE = Path(__file__).parent
VLLM_KV_GB = 3
VLLM_STEP_TOKENS = 2048  # the longest prompt measured is one step
FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000  # ordinary tokens of the default model

Start = Callable[[int | None], ChildProcess]  # takes the core; None = where the scheduler puts the program


def tandem(name: str, config: EngineConfig) -> Start:
    command = [sys.executable, "-m", "benchmarks.engine.tandem_worker", json.dumps(asdict(config))]
    return partial(ChildProcess, name, command, None, None)


def vllm(core: int) -> Start | None:
    """vLLM on one core, a step at a time; None where it is not installed."""
    options = {"dtype": "bfloat16", "max_num_seqs": 32, "max_num_batched_tokens": VLLM_STEP_TOKENS}
    return _vllm(str(core), 1, options | {"enable_prefix_caching": False})


def serving_vllm(cores: str) -> Start | None:
    """vLLM on these cores ("0-1"), with its defaults; None where it is not installed."""
    first, _, last = cores.partition("-")
    dtype = choose_dtype("auto", torch.device("cpu"))  # as Tandem's engine chooses it
    return _vllm(cores, int(last or first) - int(first) + 1, {"dtype": dtype, "enable_prefix_caching": True})


def _vllm(cores: str, num_threads: int, options: dict[str, Any]) -> Start | None:
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
    command: list[str | Path] = [
        directory / "bin" / "python",
        HERE / "vllm_worker.py",
        vllm_weights(),
        json.dumps(options),
    ]
    return partial(ChildProcess, "vLLM", command, environment, None)


def llama() -> Start | None:
    """llama.cpp with the GGUF file itself; None where it is not installed."""
    directory, source = llama_dir(), resolve_model(MODEL)
    if not is_installed(directory) or source.path is None:
        return None
    return partial(ChildProcess, "llama.cpp", ["node", HERE / "llama_worker.mjs", source.path], None, directory)
