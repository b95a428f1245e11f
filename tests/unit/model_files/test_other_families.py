"""A model that only vLLM can compute: the router needs its sizes, and Tandem's own engine refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from model_files.model_source import describe, resolve_model

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": 7,
    "num_experts": 128,
}  # fmt: skip


def model(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    "config",
    [
        MOE,
        {"model_type": "gemma3", "eos_token_id": 7, "text_config": MOE},
        MOE | {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
        MOE | {"model_type": "mistral", "sliding_window": 512, "rope_scaling": {"rope_type": "yarn"}},
    ],
    ids=["text", "text and images", "known family, other format", "known family, other features"],
)
def test_its_sizes_are_read_without_its_architecture(tmp_path: Path, config: dict[str, Any]) -> None:
    source = resolve_model(model(tmp_path, config))
    info = describe(source, own_engine=False)
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (1000, 4096, frozenset({7}))
    assert describe(source, 100, own_engine=False).context_length == 100
    with pytest.raises(ConfigError, match="at most 4096"):
        describe(source, 5000, own_engine=False)


def test_the_own_engine_refuses_it_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3_moe"):
        describe(resolve_model(model(tmp_path, MOE)))
