"""Every option of Tandem, as frozen dataclasses. Each part of the system gets only its own class.

Names end in their unit. Defaults suit a laptop. `tandem serve --config` reads the same names from TOML, one table for
each class (`[scheduler]`, `[transfer]`, ...); deploy/tandem.toml lists them. `live(...)` marks the options that running
services take; core/config/changes.py says how a fleet takes each of the others.
"""

from core.config.cache import CacheConfig
from core.config.changes import FIXED, Change, LiveConfig, Taken, changes, steps_fit, taken
from core.config.cluster import (
    MIN_TOKEN_CHARS,
    TOKEN_RULE,
    ClusterConfig,
    SecurityConfig,
    TelemetryConfig,
    is_token,
)
from core.config.front import (
    MAX_MIN_INTERVAL_MS,
    MAX_PRIORITY,
    ApiKeyConfig,
    GatewayConfig,
    ModelRuleConfig,
    RouterConfig,
    ServedModelConfig,
)
from core.config.options import live_options, with_live
from core.config.planner import PlannerConfig
from core.config.tables import ARRAYS, TandemConfig, from_mapping
from core.config.text import TOKEN, TOKEN_STAYS, ConfigText
from core.config.transfer import MAX_TRANSFERS, TransferConfig, heartbeat_s
from core.config.vllm import VllmConfig
from core.config.worker import EngineConfig, SchedulerConfig, WorkerConfig

__all__ = [
    "ARRAYS",
    "FIXED",
    "MAX_MIN_INTERVAL_MS",
    "MAX_PRIORITY",
    "MAX_TRANSFERS",
    "MIN_TOKEN_CHARS",
    "TOKEN",
    "TOKEN_RULE",
    "TOKEN_STAYS",
    "ApiKeyConfig",
    "CacheConfig",
    "Change",
    "ClusterConfig",
    "ConfigText",
    "EngineConfig",
    "GatewayConfig",
    "LiveConfig",
    "ModelRuleConfig",
    "PlannerConfig",
    "RouterConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "ServedModelConfig",
    "Taken",
    "TandemConfig",
    "TelemetryConfig",
    "TransferConfig",
    "VllmConfig",
    "WorkerConfig",
    "changes",
    "from_mapping",
    "heartbeat_s",
    "is_token",
    "live_options",
    "steps_fit",
    "taken",
    "with_live",
]  # fmt: skip
