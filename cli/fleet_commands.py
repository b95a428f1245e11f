"""The commands of operators who look at a running fleet, or change it."""

from __future__ import annotations

import asyncio
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from cli.command_options import DEFAULT_ROUTER, Router, Security, console
from cli.config_commands import config_app
from cli.terminal import SHOWN
from core.plain_text import escaped

# The range of the message field; the supervisor checks a narrower limit.
Size = Annotated[int | None, typer.Option(help="Number of workers wanted in this pool.", min=0, max=2**32 - 1)]
NumRouters = Annotated[int | None, typer.Option(help="Number of routers wanted.", min=0, max=2**32 - 1)]


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


def status(
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Count KV blocks by state, and list their holders.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the pools and slots as one JSON line.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Show routers and both pools: live at a terminal, else once. Exit code: 0 healthy, 1 degraded, 2 down."""
    from cli.credentials import client_of, find_credentials
    from cli.health import DOWN_CODES, Health
    from cli.status import status as show_status
    from cli.status import status_as_json
    from tandem_client import CallFailed

    if as_json and ledger:
        raise typer.BadParameter("cannot be combined with --ledger", param_hint="--json")
    client = client_of(router, find_credentials(config, router))
    try:
        health = asyncio.run(status_as_json(client) if as_json else show_status(client, console, once, ledger))
    except CallFailed as error:
        if error.code.name not in DOWN_CODES:
            raise
        print(f"error: {escaped(str(error), SHOWN)}", file=sys.stderr)
        health = Health.DOWN
    sys.exit(health)


def events(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Events to list.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one JSON line.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """List what happened to the fleet, oldest first, with reasons: starts, deaths, drains, changes of size."""
    from cli.credentials import client_of, find_credentials
    from cli.events import show_events

    asyncio.run(show_events(client_of(router, find_credentials(config, router)), limit, as_json, console))


def scale(
    prefill: Size = None,
    decode: Size = None,
    routers: NumRouters = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let the planner size the pools that are not given.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Grow or shrink the pools while they serve. A removed worker or router drains before it stops."""
    from cli.credentials import client_of, find_credentials
    from cli.status import scale as request_sizes

    sizes = {"prefill": prefill, "decode": decode, "routers": routers}
    asyncio.run(request_sizes(client_of(router, find_credentials(config, router)), sizes, auto, console))


def role(
    slot: Annotated[str, typer.Argument(help="Name of the worker in `tandem status`, such as decode-1.")],
    role: Annotated[WorkerRole, typer.Argument(help="The pool that it joins.")],
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Move a worker to the other pool in its process: it drains, and serves on with its weights and its cache."""
    from cli.credentials import client_of, find_credentials
    from cli.role import switch_role

    asyncio.run(switch_role(client_of(router, find_credentials(config, router)), slot, role.value, console))


def roll(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file of the new options, as of `tandem serve`; none: they stay."),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the present roll, and restore the options before.")
    ] = False,
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Start every service again, one at a time, new before old where there is room; a failure restores the options."""
    from cli.config_file import load_config
    from cli.credentials import client_of, find_credentials
    from cli.roll import roll as start_again
    from cli.roll_config import as_json

    if stop and config is not None:
        raise typer.BadParameter("cannot be combined with --stop", param_hint="--config")
    text = "" if config is None else as_json(load_config(config, {}))
    asyncio.run(start_again(client_of(router, find_credentials(config, router)), text, stop, console))


def add_fleet_commands(app: typer.Typer) -> None:
    for command in (status, events, scale, role, roll):
        app.command()(command)
    app.add_typer(config_app, name="config")
