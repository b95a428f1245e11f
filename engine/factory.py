"""Chooses the runner for a model spec. The fake runner starts fast because only the real runner imports torch."""

from __future__ import annotations

from pathlib import Path

from core.config import EngineConfig
from engine.fake_runner import FakeRunner
from engine.runner import Runner
from model_files.model_source import SourceKind, resolve_model


def build_runner(config: EngineConfig, cache_dir: Path | None = None) -> Runner:
    """The runner for `config.model`, loaded and ready. Raises `ConfigError` or `ModelNotFound`."""
    if resolve_model(config.model, cache_dir).kind is SourceKind.FAKE:
        return FakeRunner.from_config(config)
    from engine.torch_runner import TorchRunner

    return TorchRunner(config, cache_dir)
