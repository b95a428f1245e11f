"""Options that several commands share, and the console of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.screens.terminal import Terminal

DEFAULT_ROUTER = "127.0.0.1:50051"

console = Terminal()

Router = Annotated[str, typer.Option("--router", help="host:port of the router.")]
Security = Annotated[
    Path | None, typer.Option("--config", help=r"TOML file with the credentials of the cluster in \[security].")
]
