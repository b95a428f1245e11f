"""The config of a roll: on its way from `tandem roll`, and read again by the supervisor.

The flags of `tandem serve` win over the file, as they did when the fleet started. The sizes of the pools stay as they
are: `tandem scale` changes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from cli.config_file import Flags, config_of
from core.config import Change, TandemConfig, changes
from core.errors import ConfigError, InvalidRequest

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
KEPT = ("cluster_token", "cluster_token_file")  # of [security]: the token does not travel


def as_json(config: TandemConfig) -> str:
    """The config without the token of the cluster."""
    tables = dataclasses.asdict(config)
    for name in KEPT:
        del tables["security"][name]
    return json.dumps(tables)


def kinship_of(config: TandemConfig) -> str:
    """As `FleetSpec.kinship`: two fleets have the same if their services could be of one fleet; else empty."""
    if not (config.cluster.address and config.cluster.adoption_timeout_s):
        return ""
    tables = dataclasses.asdict(config)
    common = {name: [tables[name][option] for option in FIXED[name] or tables[name]] for name in FIXED}
    return hashlib.sha256(json.dumps(common).encode()).hexdigest()


def read_again(started: TandemConfig, flags: Flags, text: str) -> TandemConfig:
    """As `config_from`, for a roll: options of `FIXED` must be those of the start."""
    config = config_from(started, flags, text)
    for change in changes(started, config):
        if is_fixed(change):
            raise InvalidRequest(
                "config", f"{change.name} must stay as it is in a roll; to change it, start `tandem serve` again"
            )
    return config


def is_fixed(change: Change) -> bool:
    return change.table in FIXED and change.option in (FIXED[change.table] or (change.option,))


def config_from(started: TandemConfig, flags: Flags, text: str) -> TandemConfig:
    """The config of `as_json` with the flags and the token of the start. Raises `InvalidRequest` naming the option."""
    try:
        tables = json.loads(text)
        if not isinstance(tables, dict) or not isinstance(tables.setdefault("security", {}), dict):
            raise InvalidRequest("config", "must be an object of tables")
        tables["security"] |= {name: getattr(started.security, name) for name in KEPT}
        return config_of(tables, flags)
    except json.JSONDecodeError as error:
        raise InvalidRequest("config", f"is not JSON: {error}") from error
    except ConfigError as error:
        raise InvalidRequest("config", str(error)) from error
