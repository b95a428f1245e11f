"""`tandem config`: the options of a running fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.command_options import DEFAULT_ROUTER, Router, Security, console

config_app = typer.Typer(
    help="Show the options of a fleet, and change live ones while it serves.", no_args_is_help=True
)


@config_app.command()
def show(router: Router = DEFAULT_ROUTER, config: Security = None) -> None:
    """Print every option as TOML. Those that the fleet can change while it serves are marked as live."""
    from cli.credentials import client_of, find_credentials
    from cli.fleet_config import show as show_options

    asyncio.run(show_options(client_of(router, find_credentials(config, router))))


@config_app.command("set")
def set_options(
    options: Annotated[list[str], typer.Argument(metavar="TABLE.OPTION=VALUE...", help="router.max_queued=500")],
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Change live options of every service now, and of later starts."""
    from cli.credentials import client_of, find_credentials
    from cli.fleet_config import change, options_as_json

    client = client_of(router, find_credentials(config, router))
    asyncio.run(change(client, console, options=options_as_json(options)))


@config_app.command()
def apply(
    file: Annotated[Path, typer.Argument(help="TOML file, as of `tandem serve`; flags of `tandem serve` win.")],
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Give every service the options of a file, if only live options differ; else name the others."""
    from cli.config_file import load_config
    from cli.credentials import client_of, find_credentials
    from cli.fleet_config import change
    from cli.roll_config import as_json

    client = client_of(router, find_credentials(file, router))
    asyncio.run(change(client, console, config=as_json(load_config(file, {}))))
