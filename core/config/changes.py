"""What differs between two configs, and which of it a running fleet can take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields

from core.config.front import RouterConfig
from core.config.live import live_options
from core.config.tables import ARRAYS, TandemConfig
from core.config.worker import SchedulerConfig, WorkerConfig

STEP_SIZES = ("max_batched_tokens", "max_running")  # of [scheduler]; the engine of a worker is built for them


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The tables with live options of services, each of which takes the live options of its own tables."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @classmethod
    def of(cls, config: TandemConfig) -> LiveConfig:
        return cls(config.scheduler, config.worker, config.router)


@dataclass(frozen=True, slots=True)
class Change:
    """An option with another value."""

    table: str
    option: str  # empty: a whole array of tables
    is_live: bool
    values: str = ""  # old -> new; empty if they are secret

    @property
    def name(self) -> str:
        return f"[{self.table}] {self.option}" if self.option else f"[[{self.table}]]"

    def __str__(self) -> str:
        return f"{self.name} {self.values}".rstrip()


def changes(old: TandemConfig, new: TandemConfig) -> list[Change]:
    """The options that differ, in the order of the config."""
    return [change for table in fields(TandemConfig) for change in _changes_of(table.name, old, new)]


def is_live(config: TandemConfig, table: str, option: str) -> bool:
    """Whether services with this config take another value of the option."""
    takes_sizes = config.engine.name != "vllm"  # else vLLM plans the steps
    return option in live_options(getattr(config, table)) and (takes_sizes or option not in STEP_SIZES)


def _changes_of(table: str, old: TandemConfig, new: TandemConfig) -> Iterator[Change]:
    old_part, new_part = getattr(old, table), getattr(new, table)
    if table in ARRAYS:
        if old_part != new_part:
            yield Change(table, "", is_live=False)
        return
    option: Field[object]
    for option in fields(old_part):
        before, after = getattr(old_part, option.name), getattr(new_part, option.name)
        if before != after:
            values = f"{before} -> {after}" if option.repr else ""
            yield Change(table, option.name, is_live(old, table, option.name), values)


def too_large(built: SchedulerConfig, new: SchedulerConfig, on_gpu: bool) -> str:
    """Why workers that were built with one config cannot take the step sizes of another; empty if they can."""
    most, wanted = built.on_device(on_gpu), new.on_device(on_gpu)
    for name in STEP_SIZES:
        limit, size = getattr(most, name), getattr(wanted, name)
        if size > limit:
            return f"[scheduler] {name} must be at most {limit}, for which the engines were built, is {size}"
    return ""
