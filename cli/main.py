"""The `tandem` command: its subcommands and their flags. `run` turns each error into one line and an exit code."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.commands.advise_flags import ADVISE_FLAGS
from cli.commands.command_options import DEFAULT_ROUTER, Router, Security, console
from cli.commands.fleet_commands import add_fleet_commands
from cli.commands.simulate_flags import SIMULATE_FLAGS, values_of
from cli.exit_codes import FAILED, INTERRUPTED
from cli.flags import (
    CHOICE_FLAGS,
    CONFIG_FLAGS,
    GATEWAY_FLAGS,
    REQUEST_FLAGS,
    ROUTE_FLAGS,
    Commands,
    fill_request,
    with_flags,
)  # fmt: skip
from cli.output_files import check_output
from cli.screens.terminal import SHOWN, print_line
from core.errors import TandemError
from core.plain_text import escaped

app = typer.Typer(
    cls=Commands,
    help="Serve large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
System = Annotated[str, typer.Option("--system", help="System message at the start of the conversation.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, max=1e6, help="Time limit of an answer, in seconds.")]


def run() -> None:
    """The entry point. Exit codes: 0, 1 (an error, one line on stderr), 2 (wrong usage), 130 (Ctrl-C)."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reading program has ended
        _drop_output()
        sys.exit(FAILED)
    except Exception as error:
        line = _line_of(error)
        if not line or "--debug" in sys.argv:
            raise
        if isinstance(error, OSError):  # such as a full disk under the output
            _drop_output()
        print(f"error: {escaped(line, SHOWN)}", file=sys.stderr)
        sys.exit(FAILED)


def _line_of(error: Exception) -> str:
    """One line for an error that an operator can fix; empty for a bug."""
    from tandem_client import CallFailed  # here, because the import takes as long as a whole `tandem --help`

    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        lacking = ascii(error.object[error.start])
        return f"{error.encoding}, the encoding of the output, lacks {lacking}: set PYTHONIOENCODING=utf-8"
    if isinstance(error, UnicodeError):
        return "the given text is not UTF-8"
    if isinstance(error, CallFailed) and error.code.name == "UNAUTHENTICATED":
        if "API key" in str(error):
            or_token = ", or give the config file with the token by --config" if "token" in str(error) else ""
            return f"{error} (this command: set TANDEM_API_KEY{or_token})"
        return f"{error}; give the config file with the token in [security] by --config"
    return str(error) if isinstance(error, TandemError | CallFailed | OSError) else ""


def _drop_output() -> None:
    """Send buffered output to /dev/null, because Python writes it again at exit, and fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Serve large language models with prefill and decode on separate pools."""
    del debug  # `run` looks for --debug in sys.argv, also for errors while the command line is parsed


@app.command()
@with_flags(CONFIG_FLAGS)
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of options; deploy/tandem.toml lists every option.")
    ] = None,
    **flags: Any,
) -> None:
    """Start routers and both pools, and serve until Ctrl-C. A flag overrides the config file."""
    from cli.config_file import load_config
    from cli.diagnosis.start_checks import check_before_start
    from cli.interrupts import interruptible
    from fleet.ray.cluster import begin

    loaded = load_config(config, flags)
    check_before_start(loaded, console)
    first_line = f"joining Ray at {loaded.cluster.address}" if loaded.cluster.address else "starting Ray"
    print_line(console, first_line)
    cluster = begin(loaded.cluster)
    with interruptible(cluster.close):
        from cli.commands.serve import serve as serve_fleet  # a slow import, while Ray starts

        serve_fleet(loaded, flags, cluster, console)


@app.command()
@with_flags(GATEWAY_FLAGS)
def gateway(
    router: Annotated[
        list[str] | None, typer.Option("--router", help="host:port of a router of the fleet. May be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help=r"TOML file with \[gateway], \[security], models and rules.")
    ] = None,
    **flags: Any,
) -> None:
    """Serve OpenAI's HTTP API for a running fleet, until Ctrl-C."""
    from cli.config_file import load_config
    from cli.diagnosis.start_checks import check_certificate, check_http_port
    from cli.gateway import serve_gateway

    loaded = load_config(config, flags)
    check_http_port(loaded.gateway)
    check_certificate(loaded.gateway)
    serve_gateway(loaded, router or [DEFAULT_ROUTER])


@app.command()
@with_flags((*REQUEST_FLAGS, *CHOICE_FLAGS))
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; if missing or -, standard input.")] = None,
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message of the stream as one JSON line.")] = False,
    timeout: Timeout = 300.0,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
    **flags: Any,
) -> None:
    """Send one prompt, and print the answer while it streams."""
    from cli.commands.generate import generate as generate_answer
    from cli.commands.generate import request_of
    from cli.credentials import client_of, find_credentials

    request = request_of(prompt, system, raw)
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
    """Talk with the model. Ctrl-C stops the answer; Ctrl-C twice quits."""
    from cli.commands.chat import Conversation
    from cli.commands.chat import chat as converse
    from cli.credentials import client_of, find_credentials
    from tandem_client.stubs import inference_pb2

    request = inference_pb2.GenerateRequest()
    fill_request(request, flags)
    converse(client_of(router, find_credentials(config, router)), Conversation(request, system, timeout), console)


@app.command()
@with_flags(ROUTE_FLAGS)
def explain(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; if missing or -, standard input.")] = None,
    system: System = "",
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of the router as one JSON line.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
    **flags: Any,
) -> None:
    """Show the workers that could serve a prompt now, their predicted times, and the router's choice. Runs nothing."""
    from cli.commands.explain import explain as show_candidates
    from cli.commands.generate import request_of
    from cli.credentials import client_of, find_credentials

    request = request_of(prompt, system, raw)
    fill_request(request, flags)
    found = find_credentials(config, router)
    asyncio.run(show_candidates(client_of(router, found), request, console, as_json))


@app.command()
def trace(
    request: Annotated[str | None, typer.Argument(metavar="ID", help="Request id or trace id; none: list.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read this trace file instead of asking the router.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=512, help="Requests to list.")] = 20,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the attributes of every span.")] = False,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Show where the time of a request went, span by span, and why the router chose its workers; or list the last."""
    from cli.commands.trace import show_from_router, show_list, show_trace
    from cli.credentials import client_of, find_credentials
    from cli.screens.trace_file import trace_in_file, traces_in_file

    if file is None:
        client = client_of(router, find_credentials(config, router))
        asyncio.run(show_from_router(client, request, limit, verbose, console))
    elif request is None:
        show_list(traces_in_file(file, limit), console)
    else:
        show_trace(trace_in_file(file, request), verbose, console)


add_fleet_commands(app)


@app.command()
@with_flags(SIMULATE_FLAGS)
def simulate(
    axes: Annotated[list[str] | None, typer.Argument(metavar="AXIS", help="More axes of --sweep.")] = None,
    **flags: Any,
) -> None:
    """Replay a workload in virtual time: latencies, goodput and cache hits; --sweep finds how many workers it needs."""
    from cli.commands.simulate import simulate as run_simulation

    options = values_of(flags)
    if axes and not options["sweep"]:
        raise typer.BadParameter(f"{axes[0]!r} is an axis, which needs --sweep; a file of requests is --workload FILE")
    options["sweep"] = [*(options["sweep"] or ()), *(axes or ())]
    run_simulation(options, console)


@app.command()
@with_flags(ADVISE_FLAGS)
def advise(
    log: Annotated[
        Path | None, typer.Argument(help="Calls of OpenAI's API, .jsonl; or a trace of Mooncake, Azure or Dynamo.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
    **flags: Any,
) -> None:
    """Should I split into prefill and decode pools? Goodput of each shape of your GPUs, from your own requests."""
    from cli.commands.advise import advise as answer

    answer(log, values_of(flags, ADVISE_FLAGS), as_json, console)


@app.command()
def calibrate(
    output: Annotated[
        Path, typer.Argument(help="File to write, for --costs of `tandem advise` and `simulate`.")
    ] = Path("costs.json"),
    longest_prompt: Annotated[int, typer.Option(min=16, max=2**24, help="Tokens of the longest prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, max=2**24, help="Tokens of a measured output.")] = 32,
    largest_batch: Annotated[
        int, typer.Option(min=1, max=4096, help="Most requests at once on one decode worker.")
    ] = 8,
    requests: Annotated[int, typer.Option(min=1, max=2**20, help="Requests that are measured and simulated.")] = 40,
    seed: Annotated[int, typer.Option(help="Decides lengths, token ids and arrivals.")] = 0,
    local_prefill: Annotated[
        Literal["auto", "never"], typer.Option(help="As in the config of the fleet: auto or never.")
    ] = "auto",
    from_points: Annotated[
        Path | None, typer.Option(help="Fit a CSV of public points in place of a live fleet; needs --kv-token-bytes.")
    ] = None,
    model: Annotated[str, typer.Option(help="With --from-points: a part of the model's name.")] = "",
    system: Annotated[str, typer.Option(help="With --from-points: the system, such as h100_sxm.")] = "",
    backend: Annotated[str, typer.Option(help="With --from-points: the server, such as trtllm.")] = "",
    tp_size: Annotated[int, typer.Option(help="With --from-points: tensor parallelism; 0 = any.")] = 0,
    kv_token_bytes: Annotated[
        int, typer.Option(min=0, max=2**31, help="KV bytes of one token. (default: those seen to move)")
    ] = 0,
    timeout: Timeout = 300.0,
    router: Router = DEFAULT_ROUTER,
    config: Security = None,
) -> None:
    """Measure a fleet that serves nobody else. Write the costs of its steps and paths for `advise` and `simulate`."""
    from cli.commands import calibrate as calibration

    check_output("output", output)
    if from_points is None:
        for option, value in (("model", model), ("system", system), ("backend", backend), ("tp-size", tp_size)):
            if value:
                raise typer.BadParameter("only with --from-points", param_hint=f"--{option}")
    else:
        if not kv_token_bytes:
            raise typer.BadParameter("--from-points needs it", param_hint="--kv-token-bytes")
        filters = (model, system, backend, tp_size)
        calibration.calibrate_from_points(from_points, filters, kv_token_bytes, output, console)
        return
    from cli.commands.calibration_load import LoadPlan
    from cli.credentials import client_of, find_credentials

    plan = LoadPlan(longest_prompt, output_tokens, largest_batch, requests, seed, timeout)
    client = client_of(router, find_credentials(config, router))
    calibration.report(asyncio.run(calibration.calibrate(client, plan, local_prefill, kv_token_bytes)), output, console)


@app.command()
def check(
    url: Annotated[str, typer.Argument(help="The stack, such as http://127.0.0.1:8000. It must serve nobody else.")],
    reference: Annotated[
        str, typer.Option(help="The same model without a hand-off, such as one engine alone: its URL.")
    ] = "",
    key: Annotated[str, typer.Option(envvar="TANDEM_API_KEY", help="API key of the stack and the reference.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model. (default: the first one that is served)")] = "",
    metrics: Annotated[
        list[str] | None, typer.Option(help="Page of metrics; may be repeated. (default: /metrics of the stack)")
    ] = None,
    kill: Annotated[str, typer.Option(help="Shell command that kills a worker while streams run.")] = "",
    drain: Annotated[str, typer.Option(help="Shell command that drains a worker while streams run.")] = "",
    deadline_header: Annotated[
        str, typer.Option(help="Header for a deadline in milliseconds, such as x-tandem-timeout-ms.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Longest time of an answer, in seconds.")] = 60.0,
    whole: Annotated[float, typer.Option(min=1, max=1e6, help="Longest time of the whole check, in seconds.")] = 1800.0,
    seed: Annotated[int | None, typer.Option(help="Decides the prompts. (default: random)")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings into this file.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write JUnit's XML into this file.")] = None,
) -> None:
    """Check any split stack with OpenAI's API: tokens, errors, faults. Exit code: 0, or 3 to 5 by the worst failure."""
    import secrets

    from cli.commands.check import run_check
    from conformance.check import CheckPlan
    from conformance.http_exchange import Endpoint

    def endpoint(option: str, address: str) -> Endpoint:
        try:
            return Endpoint.parse(address, key)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error

    check_output("--json", json_file)
    check_output("--junit", junit_file)
    if re.fullmatch(r"[\w!#$%&'*+.^`|~-]*", deadline_header, re.ASCII) is None:
        raise typer.BadParameter(f"must be a name of HTTP, is {deadline_header!r}", param_hint="--deadline-header")
    plan = CheckPlan(
        endpoint("url", url),
        endpoint("--reference", reference) if reference else None,
        tuple(endpoint("--metrics", page) for page in metrics or ()),
        model,
        deadline_header=deadline_header,
        kill=kill,
        drain=drain,
        limit_s=timeout,
        whole_s=whole,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
    )
    sys.exit(asyncio.run(run_check(plan, console, json_file, junit_file)))


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the key in logs and metrics.")],
    tenant: Annotated[str, typer.Option(help="Tenant of every request with the key; default: the name.")] = "",
) -> None:
    """Make an API key: print it once, and the lines for the config, which hold only its hash."""
    from cli.commands.key import print_new_key

    print_new_key(name, tenant, console)


@app.command()
def pull(model: Annotated[str, typer.Argument(help="Name of a model in the catalogue.")] = "smollm2-135m") -> None:
    """Download a model into the cache."""
    from cli.commands.pull import pull as fetch_model

    print_line(console, str(fetch_model(model, console)))


@app.command()
def demo() -> None:
    """Run a fleet on this machine, ask three questions, show the duration of each phase, and stop the fleet."""
    from cli.commands.demo_config import demo_config
    from cli.diagnosis.start_checks import check_before_start
    from cli.interrupts import interruptible
    from fleet.ray.cluster import begin

    config = demo_config()
    check_before_start(config, console)
    console.print("starting Ray, a router, a prefill worker and a decode worker", style="dim", highlight=False)
    cluster = begin(config.cluster)
    with interruptible(cluster.close):
        from cli.commands.demo import demo as run_demo  # a slow import, while Ray starts
        from cli.screens.terminal import notices

        console.file = notices()  # type: ignore[assignment]  # a terminal that takes nothing holds up no drain
        run_demo(config, cluster, console)
    console.print("everything has stopped", style="dim")


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of `tandem serve`: its port, and vLLM's environment.")
    ] = None,
) -> None:
    """Check versions, transports, ports, memory and the model cache of this machine, and say how to fix each fault."""
    from cli.config_file import load_config
    from cli.diagnosis.doctor import doctor as examine

    sys.exit(examine(console, load_config(config, {})))


if __name__ == "__main__":
    run()
