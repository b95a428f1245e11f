"""Options of the cache below the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.requirements import require, require_finite_floats


@dataclass(frozen=True, slots=True)
class CacheConfig:
    # Limit: KV blocks of each worker on disk, in 10^9 bytes; 0 = no disk; beyond: the least valuable block goes
    disk_gb: float = 0.0
    disk_dir: str = ""  # directory on a local disk; each worker keeps one file in its subdirectory tandem-kv

    def __post_init__(self) -> None:
        require_finite_floats(self)
        require(not self.disk_gb or bool(self.disk_dir.strip()), "disk_gb needs disk_dir, a directory on a local disk")
