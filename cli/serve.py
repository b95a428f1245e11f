"""`tandem serve`: bring the fleet up, keep it up, take it down.

Ctrl-C (or SIGTERM) drains and exits; a second one exits at once, and fleet/ray_head.py ends what is left.
`cli/checks.py` has said before what could be known to be wrong; from then on Ray starts, also while this is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from rich.console import Console

from cli import compose
from cli.credentials import client_of, left_for_this_user, with_cluster_token
from cli.exit_codes import INTERRUPTED
from cli.pools import num_serving, ready_line
from cli.pull import pull_if_named
from core.config import ClusterConfig, TandemConfig
from core.errors import TandemError, WorkerUnavailable
from core.service import Endpoint
from fleet.cluster import Cluster
from fleet.events import FleetFailed, FleetReady, FleetStopped, Notice
from fleet.machine import DRAIN_GRACE_S, LAST_DRAIN_S
from fleet.supervisor import FleetSpec
from runtime.security import OPEN, Credentials, load_credentials, read_token
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2

STOP_MARGIN_S = 5.0
ASK_AGAIN_S = 0.05

Tell = Callable[[str], None]  # one line for the operator


def fleet_spec(config: TandemConfig) -> FleetSpec:
    return FleetSpec(
        config.cluster,
        router=functools.partial(compose.build_router, config),
        prefill=functools.partial(compose.build_prefill_worker, config),
        decode=functools.partial(compose.build_decode_worker, config),
        drain_timeout_s=config.worker.drain_timeout_s,
        router_drain_timeout_s=config.router.drain_timeout_s,
    )


async def bring_up(cluster: Cluster, spec: FleetSpec, tell: Tell) -> Endpoint:
    """Start everything and wait until it serves. Raises `TandemError` with the one line that says why it does not."""
    await cluster.start(spec)
    try:
        async with asyncio.timeout(spec.config.start_timeout_s):
            while True:
                for news in await cluster.news():
                    match news:
                        case Notice():
                            tell(news.text)
                        case FleetFailed():
                            raise TandemError(news.reason)
                        case FleetReady():
                            router = await cluster.router()
                            assert router is not None, "a fleet without a router is never ready"
                            return router
    except TimeoutError:
        raise WorkerUnavailable(
            f"not everything serves after {spec.config.start_timeout_s:g} s (cluster.start_timeout_s): "
            + why_it_takes_long(spec.config, cluster.log_dir)
        ) from None


def why_it_takes_long(config: ClusterConfig, log_dir: str) -> str:
    """What to look at. A Ray of our own has room for every worker, and nothing that would answer `ray status`."""
    if not config.address:
        return f"a large model on this machine may need longer; the logs are in {log_dir}"
    resources = " or ".join(repr(name) for name in dict.fromkeys((config.prefill_resource, config.decode_resource)))
    look = f"RAY_AUTH_MODE=token ray status --address {config.address}"
    return f"is there a machine with a free {resources} for each worker? `{look}` tells"


async def take_down(cluster: Cluster, spec: FleetSpec, tell: Tell) -> None:
    """Drain everything, at most for as long as the drains may take."""
    limit_s = spec.router_drain_timeout_s + LAST_DRAIN_S + 2 * DRAIN_GRACE_S + STOP_MARGIN_S
    try:
        async with asyncio.timeout(limit_s):
            await cluster.shutdown()
            while True:
                for news in await cluster.news():
                    if isinstance(news, Notice):
                        tell(news.text)
                    if isinstance(news, FleetStopped):
                        return
    except TimeoutError:
        tell(f"not everything had drained after {limit_s:g} s; ending it")
    except WorkerUnavailable:
        return  # the supervisor is gone, and everything with it


async def wait_until_known(client: AsyncClient, num_prefill: int, num_decode: int, timeout_s: float) -> None:
    """Wait until the router has heard from that many serving workers of each pool. Raises `WorkerUnavailable`.

    It asks repeatedly: the API has no stream of the fleet's state, and a start waits here once.
    """
    wanted = {worker_pb2.WORKER_ROLE_PREFILL: num_prefill, worker_pb2.WORKER_ROLE_DECODE: num_decode}
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                known = await client.fleet()
                if all(num_serving(known, role) >= count for role, count in wanted.items()):
                    return
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise WorkerUnavailable(
            f"the router at {client.address} has not heard from every worker within {timeout_s:g} s"
        ) from None


@contextlib.asynccontextmanager
async def fleet(
    cluster: Cluster, spec: FleetSpec, tell: Tell, credentials: Credentials = OPEN
) -> AsyncIterator[Endpoint]:
    """A fleet that serves and whose router knows every worker; drained at the end, however that comes."""
    sizes = spec.config
    try:
        router = await bring_up(cluster, spec, tell)
        async with client_of(router.address, credentials) as client:
            await wait_until_known(client, sizes.num_prefill, sizes.num_decode, sizes.start_timeout_s)
        yield router
    finally:
        await take_down(cluster, spec, tell)


@contextlib.asynccontextmanager
async def ended_with_ray(cluster: Cluster, tell: Tell) -> AsyncIterator[None]:
    """Raises `WorkerUnavailable` where Ray fails meanwhile; what is within is cancelled, and has time to drain."""
    within, reason = asyncio.current_task(), ""

    async def watch() -> None:
        nonlocal reason
        reason = await cluster.failed()
        tell("Ray cannot go on; draining")
        assert within is not None
        within.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except (asyncio.CancelledError, TandemError):
        if reason:
            raise WorkerUnavailable(reason) from None
        raise
    finally:
        watching.cancel()


async def follow(cluster: Cluster, tell: Tell) -> None:
    """Say what happens to the fleet, for as long as it runs."""
    while True:
        for news in await cluster.news():
            if isinstance(news, Notice):
                tell(news.text)


class Interrupts:
    """The first Ctrl-C or SIGTERM cancels what runs; the second ends the process at once."""

    def __init__(self, task: asyncio.Task[None], tell: Tell) -> None:
        self._task, self._tell = task, tell
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.count += 1
        if self.count == 1:
            self._tell("draining; once more to stop at once")
            self._task.cancel()
            return
        sys.stdout.flush()
        os._exit(INTERRUPTED)


def run_to_end(main: Callable[[], Coroutine[Any, Any, None]], tell: Tell) -> bool:
    """Run `main` under `Interrupts`. Returns whether it was interrupted."""

    async def supervised() -> bool:
        task = asyncio.create_task(main())
        interrupts = Interrupts(task, tell)
        try:
            await task
        except asyncio.CancelledError:
            if interrupts.count == 0:
                raise
        return interrupts.count > 0

    return asyncio.run(supervised())


def serve(config: TandemConfig, cluster: Cluster, console: Console) -> None:
    """Until interrupted. `cluster` has begun to start. Raises `TandemError` where the fleet cannot come up."""
    secured = with_cluster_token(config)
    credentials, spec = load_credentials(secured.security), fleet_spec(secured)
    made_here = "" if read_token(config.security) else credentials.token

    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def main() -> None:
        async with ended_with_ray(cluster, tell), fleet(cluster, spec, tell, credentials) as router:
            with left_for_this_user(router.address, made_here):
                sizes = config.cluster.num_prefill, config.cluster.num_decode
                tell(ready_line(config.engine.model, router.address, *sizes))
                await follow(cluster, tell)

    if not config.cluster.address:
        pull_if_named(config.engine.model, console)  # it is here, and its hash is checked
    cluster.join()
    run_to_end(main, tell)
