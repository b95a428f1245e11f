"""Chooses the runner for a model spec. The fake runner starts fast because only the real runner imports torch."""

from __future__ import annotations

from pathlib import Path

from core.config import EngineConfig
from core.output_grammar import Grammars
from engine.drafting import Lookup
from engine.fake_runner import FakeRunner
from engine.runner import Runner, StepLimits
from model_files.model_source import SourceKind, resolve_model


def build_runner(
    config: EngineConfig,
    cache_dir: Path | None = None,
    limits: StepLimits | None = None,
    gpu_share: float = 1.0,
    grammars: Grammars | None = None,
) -> Runner:
    """The runner for `config.model`, loaded and ready. Raises `ConfigError` or `ModelNotFound`.

    A runner on a GPU prepares for steps of `limits`, and uses `gpu_share` of the memory of the GPU. It proposes drafts
    only with speculation = lookup.
    """
    drafter = None if config.speculation == "off" else Lookup()
    if resolve_model(config.model, cache_dir).kind is SourceKind.FAKE:
        return FakeRunner.from_config(config, grammars, drafter)
    from engine.backend import choose_device

    if choose_device(config.device).type == "cuda" and config.kernels == "auto":
        from engine.gpu.runner import GpuRunner

        on_gpu = drafter if config.speculation == "lookup" else None
        return GpuRunner(config, cache_dir, limits=limits, share=gpu_share, grammars=grammars, drafter=on_gpu)
    from engine.torch_runner import TorchRunner

    return TorchRunner(config, cache_dir, grammars=grammars, drafter=drafter)
