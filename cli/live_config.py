"""A change of live options, applied by the supervisor to the present config of its fleet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cli.config_file import Flags
from cli.roll_config import as_json, config_from, is_fixed
from core.config import Change, TandemConfig, changes
from core.errors import InvalidRequest

SIZES = ("num_prefill", "num_decode", "num_routers")  # of [cluster]


def amended(present: TandemConfig, flags: Flags, config: str, options: str) -> TandemConfig:
    """The config after a change: a whole `config`, over which the flags of the start win, or only the `options` to
    change. Raises `InvalidRequest` naming every option that is not live."""
    if bool(config) == bool(options):
        raise InvalidRequest("config", "either config or options must be set")
    if config:
        new = config_from(present, flags, config)
    else:
        new = config_from(present, {}, json.dumps(_merged(present, options)))
    _refuse_others(changes(present, new))
    return new


def _merged(present: TandemConfig, options: str) -> dict[str, Any]:
    """The tables of the present config with these options."""
    tables: dict[str, Any] = json.loads(as_json(present))
    try:
        given = json.loads(options)
    except json.JSONDecodeError as error:
        raise InvalidRequest("options", f"is not JSON: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(part, dict) for part in given.values()):
        raise InvalidRequest("options", "must be an object of tables")
    for table, part in given.items():
        if not isinstance(tables.setdefault(table, {}), dict):
            raise InvalidRequest("options", f"[[{table}]] has several entries; change it with `tandem roll`")
        tables[table] |= part
    return tables


def _refuse_others(found: Iterable[Change]) -> None:
    names: dict[str, list[str]] = {}
    for change in found:
        if not change.is_live:
            names.setdefault(_way_of(change), []).append(change.name)
    if names:
        told = "; ".join(f"{', '.join(those)}: {way}" for way, those in names.items())
        raise InvalidRequest("config", f"these options are not live: {told}")


def _way_of(change: Change) -> str:
    if is_fixed(change):
        return "start `tandem serve` again"
    return "use `tandem scale`" if change.option in SIZES else "use `tandem roll --config FILE`"
