"""The config of `tandem demo`. Separate from cli/commands/demo.py, because that module imports slowly."""

from __future__ import annotations

from core.config import ClusterConfig, EngineConfig, RouterConfig, TandemConfig

MODEL = "smollm2-135m"


def demo_config() -> TandemConfig:
    return TandemConfig(
        engine=EngineConfig(model=MODEL, device="cpu", kv_memory_mb=256, max_context=2048),
        router=RouterConfig(port=0, local_prefill="never"),
        cluster=ClusterConfig(max_workers=4),
    )
