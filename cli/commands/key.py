"""`tandem key`: prints a fresh API key and the lines of the config that admit the key."""

from __future__ import annotations

import json

from rich.console import Console

from cli.screens.terminal import print_line
from core.config import ApiKeyConfig
from runtime.rpc.api_keys import hash_of, new_key


def print_new_key(name: str, tenant: str, console: Console) -> None:
    """The key goes to its user, the lines into the config. Raises `ConfigError` for a name that no key can have."""
    fresh = new_key()
    config = ApiKeyConfig(name=name, sha256=hash_of(fresh), tenant=tenant)
    lines = [
        f"# API key, shown only now: {fresh}",
        "[[api_keys]]",
        f"name = {_quoted(config.name)}",
        f'sha256 = "{config.sha256}"',
        *([f"tenant = {_quoted(tenant)}"] if tenant else []),
    ]
    print_line(console, "\n".join(lines))


def _quoted(text: str) -> str:
    """A basic string of TOML: for printable text, the same as a string of JSON."""
    return json.dumps(text, ensure_ascii=False)
