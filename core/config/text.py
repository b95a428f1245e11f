"""The config of a fleet as one text: what a supervisor keeps, changes and leaves to the next supervisor.

    {"tables": every option, "flags": options that flags of `tandem serve` set, "steps": what the engines are built for}

An operator changes it by a file, over which the flags win, or by some options, which win over the flags. No text has
the token of the cluster.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from core.config.changes import STEP_SIZES
from core.config.tables import TandemConfig, from_mapping
from core.config.worker import SchedulerConfig
from core.errors import InvalidRequest

TOKEN = ("cluster_token", "cluster_token_file")  # of [security]
TOKEN_STAYS = "the token of a running fleet never changes; stop the fleet and start `tandem serve` with the new one"

Tables = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigText:
    tables: Tables = field(default_factory=dict)
    flags: Tables = field(default_factory=dict)  # likewise by table
    steps: dict[str, int] = field(default_factory=dict)  # of [scheduler]; empty: those of `tables`

    @classmethod
    def of(cls, config: TandemConfig, flags: Tables | None = None, steps: dict[str, int] | None = None) -> ConfigText:
        tables = asdict(config)
        for name in TOKEN:
            del tables["security"][name]
        return cls(json.loads(json.dumps(tables)), flags or {}, steps or {})  # arrays as in JSON, not tuples

    @classmethod
    def read(cls, text: str) -> ConfigText:
        """Raises `InvalidRequest` for what is no text. `config` reads the options."""
        content = _object("config", text)
        parts = [content.get(name, {}) for name in ("tables", "flags", "steps")]
        if not all(isinstance(part, dict) for part in parts):
            raise InvalidRequest("config", "must be an object of objects")
        tables, flags, steps = parts
        if steps and not (steps.keys() == set(STEP_SIZES) and all(type(size) is int for size in steps.values())):
            raise InvalidRequest("config", f"steps must be {' and '.join(STEP_SIZES)}")
        return cls(tables, flags, steps)

    def as_json(self) -> str:
        return json.dumps({"tables": self.tables, "flags": self.flags, "steps": self.steps})

    @property
    def config(self) -> TandemConfig:
        """Without the token. Raises `ConfigError` naming the option."""
        return from_mapping(self.tables)

    @property
    def built(self) -> SchedulerConfig:
        """With the steps that the engines are built for."""
        scheduler = self.config.scheduler
        return replace(scheduler, **self.steps)

    def merged(self, config: str, options: str) -> ConfigText:
        """After a file or some options, as JSON by table, with engines built anew. Raises `InvalidRequest`."""
        if config and options:
            raise InvalidRequest("options", "must be empty with config")
        tables = _object("config", config) if config else dict(self.tables)
        for table, part in (self.flags if config else _object("options", options or "{}")).items():
            if not isinstance(part, dict):
                raise InvalidRequest("options", "must be an object of tables")
            present = tables.get(table, {})
            if not isinstance(present, dict):
                raise InvalidRequest("options", f"[[{table}]] has several entries; change it in a file")
            tables[table] = present | part
        return ConfigText(tables, self.flags)


def _object(name: str, text: str) -> Tables:
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(name, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(name, "must be an object of tables")
    return content
