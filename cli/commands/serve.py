"""`tandem serve`: starts the fleet, prints its notices, and stops it.

Ctrl-C, SIGTERM or SIGHUP drains the fleet and exits. A second Ctrl-C or SIGTERM exits at once, and fleet/ray/head.py
kills what still runs.
cli/diagnosis/start_checks.py runs before this module. Ray starts while this module is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from rich.console import Console

from cli import compose
from cli.commands.fleet_polls import FleetPolls
from cli.commands.pull import pull_if_listed
from cli.config_file import Flags, config_of, set_by_flags
from cli.credentials import check_token_files, client_of, token_file, with_cluster_token
from cli.diagnosis.start_checks import check_named
from cli.diagnosis.vllm_environment import python_of, torch_version, variables
from cli.http_port import claimed_port, gateway_line
from cli.interrupts import PrintLine, run_interruptible
from cli.screens.pool_lines import num_serving, ready_line
from cli.screens.terminal import print_notice
from core.config import TOKEN, TOKEN_STAYS, ConfigText, EngineConfig, SecurityConfig, TandemConfig
from core.errors import ConfigError, InvalidRequest, TandemError, WorkerUnavailable
from core.service import Service
from fleet.host.kinship import kinship_of
from fleet.law.claims import GpuUse
from fleet.law.events import FleetFailed, FleetMessage, FleetReady, FleetStopped
from fleet.law.machine import LAST_DRAIN_S
from fleet.law.services import DRAIN_GRACE_S
from fleet.ray.cluster import Cluster
from fleet.supervisor.spec import FleetSpec, Interpreter
from runtime.rpc.security import OPEN, Credentials, load_credentials, read_token
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2

STOP_MARGIN_S = 5.0
POLL_INTERVAL_S = 0.05


def fleet_spec(config: TandemConfig, flags: Flags | None = None) -> FleetSpec:
    """`flags` of the command line: they win over a file that is applied later."""
    return _spec_of(config, ConfigText.of(config, set_by_flags(config, flags or {})))


def make_spec(security: SecurityConfig, text: ConfigText) -> FleetSpec:
    """A `fleet.supervisor.spec.MakeSpec` of a fleet with the token in `security`."""
    own = text.tables.get("security", {})
    tables = text.tables
    if isinstance(own, dict):
        for name in TOKEN:  # only an order of an operator has them, no text
            present = getattr(security, name)
            if own.get(name, present) != present:
                raise InvalidRequest("config", f"[security] {name}: {TOKEN_STAYS}")
        tables = tables | {"security": own | {name: getattr(security, name) for name in TOKEN}}
    try:
        config = config_of(tables, {})
        return _spec_of(config, ConfigText.of(config, text.flags, text.steps))
    except ConfigError as error:
        raise InvalidRequest("config", str(error)) from error


def _spec_of(config: TandemConfig, text: ConfigText) -> FleetSpec:
    """Engines are built for the steps of the text, and then take those of the config, which may rise to them again."""
    built = replace(config, scheduler=replace(config.scheduler, **text.steps))
    build_prefill: Callable[..., Service] = compose.build_prefill_worker
    build_decode: Callable[..., Service] = compose.build_decode_worker
    interpreter, torch = None, importlib.metadata.version("torch")
    if config.engine.name == "vllm":
        from cli import vllm

        python = python_of(config.vllm)
        interpreter, torch = Interpreter(str(python), variables(python)), torch_version(python)
        build_prefill, build_decode = vllm.build_prefill_worker, vllm.build_decode_worker
    return FleetSpec(
        config.cluster,
        router=functools.partial(compose.build_router, built),
        prefill=functools.partial(build_prefill, built),
        decode=functools.partial(build_decode, built),
        router_host=functools.partial(compose.router_host, config),
        router_port=config.router.port,
        drain_timeout_s=config.worker.drain_timeout_s,
        router_drain_timeout_s=config.router.drain_timeout_s,
        gpu_use=gpu_use(config.engine, torch, joined=bool(config.cluster.address)),
        gpus_per_worker=config.vllm.tensor_parallel,
        interpreter=interpreter,
        make=functools.partial(make_spec, config.security),
        check=check_named,
        text=text,
        planner=config.planner,
        local_prefill=config.router.local_prefill == "auto",
        role_option=compose.role_option(config.engine),
    )


def gpu_use(config: EngineConfig, torch: str, joined: bool) -> GpuUse:
    """Whether workers ask Ray for GPUs. `torch`: their version of it here, which says nothing for a joined cluster."""
    if config.device == "cpu" or config.is_fake:
        return GpuUse.NEVER
    if config.device == "auto":
        return GpuUse.NEVER if torch.endswith("+cpu") and not joined else GpuUse.IF_PRESENT
    return GpuUse.ALWAYS


async def start_fleet(cluster: Cluster, spec: FleetSpec, print_line: PrintLine) -> list[str]:
    """Start every service and wait until all serve. Returns the addresses of the routers, one for each machine.

    The supervisor bounds each start. A service may wait for a machine without a limit, and a line says so. Raises
    `TandemError` with the reason.
    """
    await cluster.start(spec)
    while True:
        for update in await cluster.updates():
            match update:
                case FleetMessage():
                    print_line(update.text)
                case FleetFailed():
                    if not spec.config.address:
                        print_line(f"the logs are in {cluster.log_dir}")
                    raise TandemError(update.reason)
                case FleetReady():
                    return list(dict.fromkeys(router.address for router in await cluster.routers()))
                case FleetStopped():
                    raise AssertionError("nobody has stopped the fleet yet")


async def stop_fleet(cluster: Cluster, print_line: PrintLine) -> None:
    """Drain every service, and give up when the time limits of all drains are over."""
    loop, limit_s = asyncio.get_running_loop(), LAST_DRAIN_S + 2 * DRAIN_GRACE_S + STOP_MARGIN_S
    try:
        async with asyncio.timeout(limit_s) as patience:
            limit_s += await cluster.shutdown()
            patience.reschedule(loop.time() + limit_s)
            while True:
                for update in await cluster.updates():
                    if isinstance(update, FleetMessage):
                        print_line(update.text)
                    if isinstance(update, FleetStopped):
                        return
    except TimeoutError:
        print_line(f"some services have not drained after {limit_s:g} s; killing them")
        cluster.kill_services()
    except WorkerUnavailable:
        return  # the supervisor has ended. In a joined cluster its services wait for the next one


async def wait_for_workers(client: AsyncClient, timeout_s: float) -> None:
    """Wait until a router lists as many serving workers of each pool as are wanted. Raises `WorkerUnavailable`."""
    polls = FleetPolls("every worker served")
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await polls.fleet(client)
                if found is not None:
                    num_prefill = num_serving(found, worker_pb2.WORKER_ROLE_PREFILL)
                    num_decode = num_serving(found, worker_pb2.WORKER_ROLE_DECODE)
                    if num_prefill >= found.wanted_prefill and num_decode >= found.wanted_decode:
                        return
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        raise WorkerUnavailable(
            f"the router at {client.address} received no report from some workers within {timeout_s:g} s"
        ) from None


@contextlib.asynccontextmanager
async def fleet(
    cluster: Cluster, spec: FleetSpec, print_line: PrintLine, credentials: Credentials = OPEN
) -> AsyncIterator[list[str]]:
    """A fleet in which every service serves, drained on exit, also after an error. Yields the addresses of routers."""
    try:
        addresses = await start_fleet(cluster, spec, print_line)
        for address in addresses:
            async with client_of(address, credentials) as client:
                await wait_for_workers(client, spec.config.start_timeout_s)
        yield addresses
    finally:
        await stop_fleet(cluster, print_line)


@contextlib.asynccontextmanager
async def cancelled_when_ray_fails(cluster: Cluster, print_line: PrintLine) -> AsyncIterator[None]:
    """If Ray fails, cancel the body of this context, let it drain, and raise `WorkerUnavailable`."""
    body, reason = asyncio.current_task(), ""

    async def watch() -> None:
        nonlocal reason
        reason = await cluster.failed()
        print_line("Ray has failed; draining")
        assert body is not None
        body.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except (asyncio.CancelledError, TandemError):
        if reason:
            raise WorkerUnavailable(reason) from None
        raise
    finally:
        watching.cancel()


async def print_notices(cluster: Cluster, print_line: PrintLine) -> None:
    """Print every notice of the fleet, for as long as it runs. Raises `TandemError` if its supervisor fails."""
    while True:
        for update in await cluster.updates():
            match update:
                case FleetMessage():
                    print_line(update.text)
                case FleetFailed():
                    raise TandemError(update.reason)
                case FleetReady() | FleetStopped():
                    pass  # the caller knows


def serve(config: TandemConfig, flags: Flags, cluster: Cluster, console: Console) -> None:
    """Serve until interrupted. `cluster` is starting already. Raises `TandemError` if the start or Ray fails."""
    secured = with_cluster_token(config)
    credentials = load_credentials(secured.security)
    generated_token = "" if read_token(config.security) else credentials.token
    if generated_token:
        check_token_files()

    async def main(spec: FleetSpec) -> None:
        show = print_notice
        async with cancelled_when_ray_fails(cluster, show), fleet(cluster, spec, show, credentials) as addresses:
            with contextlib.ExitStack() as token_files:
                for address in addresses:
                    token_files.enter_context(token_file(address, generated_token))
                for address in addresses if config.gateway.port else ():
                    host = compose.http_host(config, address.rpartition(":")[0] if config.cluster.address else "")
                    show(gateway_line(replace(config.gateway, host=host)))
                wanted = (await cluster.control.status()).wanted  # after an adoption, perhaps more than the config says
                show(ready_line(config.engine.model, addresses, wanted))
                await print_notices(cluster, show)

    if not config.cluster.address:
        pull_if_listed(config.engine.model, console)  # the file is cached; this checks its hash
    cluster.join()
    # A generated token ends with this process, and without it nobody can adopt its services.
    kinship = "" if generated_token else kinship_of(secured)
    spec = replace(fleet_spec(secured, flags), kinship=kinship)
    # In a joined cluster, a router of an earlier fleet may listen there.
    claims_port = config.gateway.port and not config.cluster.address
    with claimed_port(config.gateway) if claims_port else contextlib.nullcontext():
        run_interruptible(functools.partial(main, spec), print_notice, cluster.kill_services)
