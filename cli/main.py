"""The `tandem` command: its commands and flags, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.exit_codes import FAILED, INTERRUPTED
from cli.flags import CHOICE_FLAGS, CONFIG_FLAGS, REQUEST_FLAGS, fill_request, with_flags
from core.errors import TandemError

DEFAULT_ROUTER = "127.0.0.1:50051"

app = typer.Typer(
    help="Serve large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Router = Annotated[str, typer.Option("--router", help="host:port of the router.")]
Security = Annotated[
    Path | None, typer.Option("--config", help=r"TOML file; its \[security] table has the cluster's credentials.")
]
# No more than the wire holds; the router knows the narrower limit.
Size = Annotated[int | None, typer.Option(help="Workers wanted in that pool.", min=0, max=2**32 - 1)]
System = Annotated[str, typer.Option("--system", help="A system message before the conversation.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, max=1e6, help="Seconds the whole answer may take.")]


def run() -> None:
    """The entry point. Exit codes: 0, 1 (an error, one line on stderr), 2 (wrong usage), 130 (Ctrl-C)."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left
        _drop_output()
        sys.exit(FAILED)
    except Exception as error:
        line = _explain(error)
        if not line or "--debug" in sys.argv:
            raise
        if isinstance(error, OSError):  # such as a full disk below our output
            _drop_output()
        print(f"error: {line}", file=sys.stderr)
        sys.exit(FAILED)


def _explain(error: Exception) -> str:
    """One line for an error that an operator can mend; empty for a bug."""
    from tandem_client import CallFailed  # here, because the import takes as long as a whole `tandem --help`

    if isinstance(error, UnicodeError):
        return "what was given as text is not UTF-8"
    return str(error) if isinstance(error, TandemError | CallFailed | OSError) else ""


def _drop_output() -> None:
    """What is still buffered cannot be written, and Python would try to at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Serve large language models with prefill and decode on separate pools."""
    del debug  # `run` looks for it: it also sees errors from before the command line was read


@app.command()
@with_flags(CONFIG_FLAGS)
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; deploy/tandem.toml shows all of it.")
    ] = None,
    **flags: Any,
) -> None:
    """Start a router and both pools, and serve until Ctrl-C. A flag wins over the file."""
    from cli.checks import check_before_start
    from cli.config_file import load_config
    from fleet.cluster import begin

    loaded = load_config(config, flags)
    check_before_start(loaded, console)
    doing = f"joining Ray at {loaded.cluster.address}" if loaded.cluster.address else "starting Ray"
    console.print(doing, highlight=False, markup=False, soft_wrap=True)
    cluster = begin(loaded.cluster)
    try:
        from cli.serve import serve as serve_fleet  # it takes a while, and Ray starts meanwhile

        serve_fleet(loaded, cluster, console)
    finally:
        cluster.close()


@app.command()
@with_flags((*REQUEST_FLAGS, *CHOICE_FLAGS))
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; missing or - = standard input.")] = None,
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message of the stream as one JSON line.")] = False,
    timeout: Timeout = 300.0,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
    **flags: Any,
) -> None:
    """Ask once and print the answer as it comes."""
    from cli.credentials import client_of, find_credentials
    from cli.generate import Prompt, read_prompt
    from cli.generate import generate as generate_answer
    from tandem_client.stubs import inference_pb2

    request = inference_pb2.GenerateRequest()
    Prompt(read_prompt(prompt), system, chat=not raw).fill(request)
    fill_request(request, flags)
    found = find_credentials(config, router)
    asyncio.run(generate_answer(client_of(router, found), request, timeout, as_json))


@app.command()
@with_flags(REQUEST_FLAGS)
def chat(
    system: System = "",
    timeout: Timeout = 300.0,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
    **flags: Any,
) -> None:
    """Talk with the model. Ctrl-C stops the answer, twice quits."""
    from cli.chat import Conversation
    from cli.chat import chat as converse
    from cli.credentials import client_of, find_credentials
    from tandem_client.stubs import inference_pb2

    request = inference_pb2.GenerateRequest()
    fill_request(request, flags)
    converse(client_of(router, find_credentials(config, router)), Conversation(request, system, timeout), console)


@app.command()
def status(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show where every KV block is and who holds it.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Show both pools: state, KV use, queue, tokens per second; live at a terminal, else once."""
    from cli.credentials import client_of, find_credentials
    from cli.status import status as show_status

    asyncio.run(show_status(client_of(router, find_credentials(config, router)), console, once, ledger))


@app.command()
def scale(
    prefill: Size = None,
    decode: Size = None,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Grow or shrink the pools while they serve; what shrinks drains first."""
    from cli.credentials import client_of, find_credentials
    from cli.status import scale as ask_for_sizes

    asyncio.run(ask_for_sizes(client_of(router, find_credentials(config, router)), prefill, decode, console))


@app.command()
def pull(model: Annotated[str, typer.Argument(help="A name of the catalogue.")] = "smollm2-135m") -> None:
    """Fetch a model into the cache."""
    from cli.pull import pull as fetch_model

    console.print(str(fetch_model(model, console)), highlight=False, soft_wrap=True)


@app.command()
def demo() -> None:
    """Start everything on this machine, ask three questions, show where the time went, and stop it again."""
    from cli.checks import check_before_start
    from cli.demo_config import demo_config
    from fleet.cluster import begin

    config = demo_config()
    check_before_start(config, console)
    console.print("starting Ray, a router, a prefill worker and a decode worker", style="dim", highlight=False)
    cluster = begin(config.cluster)
    try:
        from cli.demo import demo as show  # it takes a while, and Ray starts meanwhile

        show(config, cluster, console)
    finally:
        cluster.close()
    console.print("everything is stopped", style="dim")


@app.command()
def doctor() -> None:
    """Check this machine: versions, transports, ports, memory, the model cache; and say how to mend what is wrong."""
    from cli.doctor import doctor as examine

    sys.exit(examine(console))


if __name__ == "__main__":
    run()
