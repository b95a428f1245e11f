"""The LoRA adapters of a worker: directories in PEFT's format, which vLLM loads when it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes
MOST_IN_A_STEP = 8  # a GPU has room for so many; `[vllm] args` may say otherwise
CONFIG_FILE = "adapter_config.json"


def adapter_arguments(adapters: Mapping[str, str], on_gpu: bool) -> list[str]:
    """vLLM's arguments for the directories of adapters by name: all stay in host memory.

    On a CPU, vLLM 0.32 gives rows without an adapter the last place (vllm#48421), so that one has to stay empty.
    Raises `ConfigError` if a directory holds no adapter.
    """
    if not adapters:
        return []
    in_a_step = min(len(adapters), MOST_IN_A_STEP) if on_gpu else len(adapters) + 1
    rank = max(_rank_of(name, Path(directory) / CONFIG_FILE) for name, directory in adapters.items())
    return [
        "--enable-lora",
        "--max-lora-rank", str(min(allowed for allowed in RANKS if allowed >= rank)),
        "--max-loras", str(in_a_step),
        "--max-cpu-loras", str(max(len(adapters), in_a_step)),
    ]  # fmt: skip


def _rank_of(name: str, file: Path) -> int:
    try:
        rank = int(json.loads(file.read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"[vllm] adapters: {name} needs {file} with its rank r: {error}") from error
    if not 1 <= rank <= RANKS[-1]:
        raise ConfigError(f"[vllm] adapters: the rank of {name} must be in [1, {RANKS[-1]}], is {rank}")
    return rank
