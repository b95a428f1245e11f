"""Options of the cache below the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.options import check_options, require


@dataclass(frozen=True, slots=True)
class CacheConfig:
    # Limit: KV blocks of each worker on disk, in 10^9 bytes; 0 = no disk; beyond: the least valuable block goes
    disk_gb: float = 0.0
    disk_dir: str = ""  # directory on a local disk; each worker keeps one file in its subdirectory tandem-kv
    # Limit: KV blocks of each worker in host memory, in 10^9 bytes; 0 = none; beyond: the least valuable block goes
    host_gb: float = 0.0
    host_dir: str = ""  # directory in memory; empty = /dev/shm/tandem-UID, with the number of the user

    def __post_init__(self) -> None:
        check_options(self)
        require(not (self.disk_gb and self.host_gb), "disk_gb and host_gb: a worker has one tier below its pool")
        require(not self.disk_gb or bool(self.disk_dir.strip()), "disk_gb needs disk_dir, a directory on a local disk")
        for name in ("disk_dir", "host_dir"):  # `tandem serve` has another working directory
            place = getattr(self, name)
            require(not place or place.startswith(("/", "~")), f"{name} must begin with / or ~, is {place!r}")
