"""The commands of operators who look at a running fleet, or change it."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from cli.commands.command_options import DEFAULT_ROUTER, Router, Security, console
from cli.screens.terminal import SHOWN, print_line
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
    from cli.commands.status import status as show_status
    from cli.commands.status import status_as_json
    from cli.credentials import client_of, find_credentials
    from cli.screens.fleet_health import DOWN_CODES, Health
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
    from cli.commands.events import show_events
    from cli.credentials import client_of, find_credentials

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
    from cli.commands.status import scale as request_sizes
    from cli.credentials import client_of, find_credentials

    sizes = {"prefill": prefill, "decode": decode, "routers": routers}
    asyncio.run(request_sizes(client_of(router, find_credentials(config, router)), sizes, auto, console))


def role(
    slot: Annotated[str, typer.Argument(help="Name of the worker in `tandem status`, such as decode-1.")],
    role: Annotated[WorkerRole, typer.Argument(help="The pool that it joins.")],
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Move a worker to the other pool in its process: it drains, and serves on with its weights and its cache."""
    from cli.commands.role import switch_role
    from cli.credentials import client_of, find_credentials

    asyncio.run(switch_role(client_of(router, find_credentials(config, router)), slot, role.value, console))


def config(router: Router = DEFAULT_ROUTER, config: Security = None) -> None:
    """Print every option of a fleet as TOML. Those that it takes while it serves are marked as live."""
    from cli.commands.fleet_config import show
    from cli.credentials import client_of, find_credentials

    asyncio.run(show(client_of(router, find_credentials(config, router))))


def apply(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | TABLE.OPTION=VALUE...",
            help="A TOML file as of `tandem serve`, whose flags win over it; or options, as router.max_queued=500.",
        ),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the present roll, and restore the options before.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start every service again, also if nothing else does.")
    ] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Give a fleet other options: live ones at once; for others every service starts again, one at a time."""
    from cli.commands.fleet_config import Order, options_as_json, revision_of
    from cli.commands.fleet_config import apply as apply_order
    from cli.config_file import load_config, read_config
    from cli.credentials import check_token_stays, client_of, credentials_of, find_credentials
    from core.config import ConfigText

    given = given or []
    if stop and (given or restart):
        raise typer.BadParameter("cannot be combined with anything else", param_hint="--stop")
    if not (given or stop or restart):
        raise typer.BadParameter("a file, options, --restart or --stop")
    if len(given) == 1 and "=" not in given[0]:
        file = Path(given[0])
        if not file.exists():
            raise typer.BadParameter(f"{given[0]!r} is neither a file nor TABLE.OPTION=VALUE")
        text = read_config(file)
        new = load_config(file, {}, text)
        credentials = find_credentials(config, router) if config else credentials_of(new.security, router)
        if note := check_token_stays(new.security, credentials):
            print_line(console, note)
        tables = json.dumps(ConfigText.of(new).tables)
        order = Order(tables, restart=restart, expected_revision=revision_of(text))
    else:
        credentials = find_credentials(config, router)
        order = Order(options=options_as_json(given) if given else "", restart=restart, stop=stop)
    asyncio.run(apply_order(client_of(router, credentials), order, console))


def add_fleet_commands(app: typer.Typer) -> None:
    for command in (status, events, scale, role, config, apply):
        app.command()(command)
