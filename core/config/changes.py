"""What differs between two configs, and how a fleet takes each difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from enum import Enum

from core.config.front import RouterConfig
from core.config.options import live_options
from core.config.tables import ARRAYS, TandemConfig
from core.config.worker import SchedulerConfig, WorkerConfig
from core.errors import shortened
from core.plain_text import escaped

STEP_SIZES = ("max_batched_tokens", "max_running")  # of [scheduler]; the engine of a worker is built for them
# Options that two services of one fleet must have in common, by table. Empty: every option of the table.
FIXED = {
    "security": (),
    "cluster": ("address",),
    "router": ("host", "port"),
    "gateway": ("host", "port"),
    "engine": (
        "name", "model", "dtype", "quantization", "kv_dtype", "device", "block_size", "prefill_block_size",
    ),
}  # fmt: skip
MAX_VALUE_CHARS = 200  # of a value in the answer to an order; beyond: it ends with "..."
SIZES = ("num_prefill", "num_decode", "num_routers")  # of [cluster]


class Taken(Enum):
    """How a fleet takes another value of an option."""

    LIVE = "by every service while it serves"
    RESTART = "by every service when it starts again"
    SIZE = "by `tandem scale`"  # the option counts when `tandem serve` starts the fleet
    NEVER = "by another `tandem serve`"


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
    taken: Taken
    values: str = ""  # old -> new; empty if they are secret

    @property
    def name(self) -> str:
        return f"[{self.table}] {self.option}" if self.option else f"[[{self.table}]]"

    def __str__(self) -> str:
        return f"{self.name} {self.values}".rstrip()


def changes(old: TandemConfig, new: TandemConfig) -> list[Change]:
    """The options that differ, in the order of the config."""
    return [change for table in fields(TandemConfig) for change in _changes_of(table.name, old, new)]


def taken(config: TandemConfig, table: str, option: str) -> Taken:
    """How a fleet with this config takes another value. `option` is empty for a whole array of tables."""
    if table in FIXED and option in (FIXED[table] or (option,)):
        return Taken.NEVER
    if table == "cluster" and option in SIZES:
        return Taken.SIZE
    if table in ARRAYS or option not in live_options(getattr(config, table)):
        return Taken.RESTART
    is_built = config.engine.name == "vllm" and option in STEP_SIZES  # vLLM plans the steps
    return Taken.RESTART if is_built else Taken.LIVE


def _changes_of(table: str, old: TandemConfig, new: TandemConfig) -> Iterator[Change]:
    old_part, new_part = getattr(old, table), getattr(new, table)
    if table in ARRAYS:
        if old_part != new_part:
            yield Change(table, "", taken(old, table, ""))
        return
    option: Field[object]
    for option in fields(old_part):
        before, after = getattr(old_part, option.name), getattr(new_part, option.name)
        if before != after:
            values = f"{_shown(before)} -> {_shown(after)}" if option.repr else ""
            yield Change(table, option.name, taken(old, table, option.name), values)


def _shown(value: object) -> str:
    return escaped(shortened(str(value), MAX_VALUE_CHARS))


def steps_fit(built: SchedulerConfig, new: SchedulerConfig, on_gpu: bool) -> bool:
    """Whether engines that were built with one config compute the steps of another."""
    most, wanted = built.on_device(on_gpu), new.on_device(on_gpu)
    return all(getattr(wanted, name) <= getattr(most, name) for name in STEP_SIZES)
