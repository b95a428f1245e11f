"""`tandem status`: a table of routers and both pools, and the paths between workers, once or live. `tandem scale`.

One router answers every call of a connection: the load of the other routers is unknown, and shown as -.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.commands.fleet_polls import FleetPolls
from cli.screens.fleet_health import SILENT_MS, Health, health_of, slot_lines, status_json
from cli.screens.path_lines import ID_DIGITS_HIDDEN, path_lines
from cli.screens.pool_lines import num_serving, pool_lines, sizes_text, traffic_lines
from core.errors import InvalidRequest
from core.wire_names import short_name
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2, worker_pb2

REFRESH_S = 1.0

# KV = share of the pool in use; cached = share of the pool with reusable prefixes; todo = tokens not computed yet;
# moves = open transfers. With --ledger, block counts replace shares and load, because both exceed 80 columns.
COLUMNS = ("KV", "cached", "run", "wait", "todo", "tok/s", "moves")
LEDGER_COLUMNS = ("free", "cached", "held", "leased", "incoming", "moves")
# blocks = blocks that the holder has a claim on. Several holders may claim a block; `counted` counts it at one of them.
HOLDER_COLUMNS: dict[str, JustifyMethod] = {
    "worker": "left", "holder": "left", "state": "left", "blocks": "right", "counted": "right", "for": "right",
    "peer": "left",
}  # fmt: skip
MAX_HOLDER_ROWS = 200

STATE_STYLES = {"starting": "yellow", "serving": "green", "draining": "yellow", "lost": "red"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one time."""

    fleet: cluster_pb2.GetFleetResponse
    at: float  # seconds on the clock of the event loop
    ledger: cluster_pb2.GetLedgerResponse | None = None  # with --ledger


def rates(before: Sample | None, after: Sample) -> dict[str, float]:
    """Tokens per second, computed and sampled, of each worker in both samples."""
    if before is None or after.at <= before.at:
        return {}
    seen = {worker.worker_id: _num_tokens(worker.load) for worker in before.fleet.workers}
    return {
        worker.worker_id: (_num_tokens(worker.load) - seen[worker.worker_id]) / (after.at - before.at)
        for worker in after.fleet.workers
        if worker.worker_id in seen
    }


def _num_tokens(load: worker_pb2.LoadReport) -> int:
    return int(load.num_prefilled_tokens + load.num_sampled_tokens)


def fleet_table(fleet: cluster_pb2.GetFleetResponse, tokens_per_s: Mapping[str, float], with_ledger: bool) -> Table:
    """One row per router, unless there is only one, and one row per worker, prefill pool first."""
    several = max(len(fleet.routers), fleet.wanted_routers) > 1
    table = Table(
        title=(f"routers {_num_routers(fleet)}/{fleet.wanted_routers} · " if several else "")
        + f"prefill {num_serving(fleet, worker_pb2.WORKER_ROLE_PREFILL)}/{fleet.wanted_prefill} · "
        f"decode {num_serving(fleet, worker_pb2.WORKER_ROLE_DECODE)}/{fleet.wanted_decode}"
        + ("" if several else f" · {fleet.num_in_flight} in flight · {fleet.num_queued} queued"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in LEDGER_COLUMNS if with_ledger else COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for router in fleet.routers if several else ():
        table.add_row(*_router_row(router, with_ledger))
    for worker in sorted(fleet.workers, key=lambda w: (w.role, w.worker_id)):
        table.add_row(*_row(worker, tokens_per_s.get(worker.worker_id), with_ledger))
    return table


def _num_routers(fleet: cluster_pb2.GetFleetResponse) -> int:
    return sum(router.state == worker_pb2.WORKER_STATE_SERVING for router in fleet.routers)


def _router_row(router: cluster_pb2.FleetRouter, with_ledger: bool) -> list[str | Text]:
    """Columns `run` and `wait`: requests open on workers, requests that wait for a worker."""
    name: list[str | Text] = [router.router_id, _state_text(router.state)]
    if with_ledger:
        return name
    known = router.HasField("num_queued")
    return [*name, "", "", str(router.num_in_flight) if known else "-", str(router.num_queued) if known else "-"]


def _row(worker: cluster_pb2.FleetWorker, tokens_per_s: float | None, with_ledger: bool) -> list[str | Text]:
    load, ledger = worker.load, worker.load.ledger
    blocks = [ledger.free, ledger.cached, ledger.held, ledger.leased, ledger.incoming]
    total = sum(blocks)
    name: list[str | Text] = [worker.worker_id[:-ID_DIGITS_HIDDEN], _state(worker)]
    if with_ledger:
        return [*name, *(str(count) for count in blocks), str(load.num_transfers)]
    shares = [(total - ledger.free - ledger.cached) / total, ledger.cached / total] if total else [0.0, 0.0]
    return [
        *name,
        *(f"{share:.0%}" for share in shares),
        str(load.num_running),
        str(load.num_waiting + load.num_pulls_waiting),
        str(load.num_queued_tokens),
        "-" if tokens_per_s is None else f"{tokens_per_s:.1f}",
        str(load.num_transfers),
    ]


def holders_table(response: cluster_pb2.GetLedgerResponse) -> Table:
    """The holders of the blocks of each worker, oldest first, so that the holder of leaked blocks is on top."""
    table = Table(title="holders of KV blocks", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, justify in HOLDER_COLUMNS.items():
        # In a narrow terminal, only the names wrap.
        table.add_column(name, justify=justify, no_wrap=name != "holder", overflow="fold")
    num_rows = 0
    for worker in response.workers:
        name, num_left_out = worker.worker_id[:-ID_DIGITS_HIDDEN], worker.ledger.num_left_out
        if worker.error:
            table.add_row(name, Text(f"no answer: {worker.error}", style="red"))
        for holder in worker.ledger.holders:
            if num_rows == MAX_HOLDER_ROWS:
                num_left_out += 1
                continue
            table.add_row(name, *_holder_row(holder))
            num_rows += 1
        if num_left_out:
            table.add_row(name, Text(f"and {num_left_out} more", style="dim"))
    return table


def _holder_row(holder: worker_pb2.BlockHolder) -> list[str]:
    return [
        f"{short_name(worker_pb2.HolderKind, holder.kind)} {holder.name}",
        short_name(worker_pb2.HolderState, holder.state),
        str(holder.num_blocks),
        str(holder.num_counted),
        f"{holder.age_ms / 1e3:.1f} s",
        holder.peer[:-ID_DIGITS_HIDDEN],
    ]


def _state(worker: cluster_pb2.FleetWorker) -> Text:
    """The state of the worker, or for how long it has sent no report. A name keeps its first role."""
    if worker.report_age_ms > SILENT_MS:
        return Text(f"silent {worker.report_age_ms / 1e3:.0f} s", style="red")
    role, state = short_name(worker_pb2.WorkerRole, worker.role), _state_text(worker.state)
    return state if worker.worker_id.startswith(f"{role}-") else state.append(f" as {role}")


def _state_text(state: worker_pb2.WorkerState) -> Text:
    name = short_name(worker_pb2.WorkerState, state)
    return Text(name, style=STATE_STYLES.get(name, "white"))


async def status(connection: AsyncClient, console: Console, once: bool, with_ledger: bool) -> Health:
    """Live until Ctrl-C, or once if `once` or without a terminal. A rate needs two samples."""
    async with connection as client:
        before, after = await _sample(client, with_ledger), None
        polls = FleetPolls("the command ended")
        if once or not console.is_terminal:
            while after is None:
                await asyncio.sleep(REFRESH_S)
                after = await polls.ask(_sample(client, with_ledger))
            console.print(_view(before, after))
            return health_of(after.fleet)
        with Live(_view(None, before), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                after = await polls.ask(_sample(client, with_ledger))
                if after is None:
                    live.update(Group(Text("no router answers now", style="red"), _view(None, before)), refresh=True)
                    continue
                polls.hear(after.fleet)
                live.update(_view(before, after), refresh=True)
                before = after


async def status_as_json(connection: AsyncClient) -> Health:
    """Print one line of JSON."""
    async with connection as client:
        fleet = await client.fleet()
    print(status_json(fleet))
    return health_of(fleet)


async def _sample(client: AsyncClient, with_ledger: bool) -> Sample:
    fleet = await client.fleet()
    ledger = await client.ledger() if with_ledger else None
    return Sample(fleet, asyncio.get_running_loop().time(), ledger)


def _view(before: Sample | None, now: Sample) -> RenderableType:
    table = fleet_table(now.fleet, rates(before, now), with_ledger=now.ledger is not None)
    holders = [] if now.ledger is None else [holders_table(now.ledger)]
    empty = [Text(line, style="yellow") for line in (*pool_lines(now.fleet), *slot_lines(now.fleet))]
    traffic = [Text(line, style="dim") for line in traffic_lines(now.fleet)]
    return Group(table, *empty, *traffic, *paths_text(now.fleet), *holders)


def paths_text(fleet: cluster_pb2.GetFleetResponse) -> list[Text]:
    """A dim line that counts the paths, then a yellow line for each broken path."""
    return [Text(line, style="dim" if number == 0 else "yellow") for number, line in enumerate(path_lines(fleet))]


async def scale(connection: AsyncClient, sizes: Mapping[str, int | None], auto: bool, console: Console) -> None:
    """Change the wanted sizes (prefill, decode, routers). Raises `InvalidRequest` if nothing is given."""
    if all(size is None for size in sizes.values()) and not auto:
        raise InvalidRequest("scale", "give --prefill, --decode, --routers or --auto")
    async with connection as client:
        answer = await client.scale(**sizes, auto=auto)
    wanted = sizes_text(answer.wanted_prefill, answer.wanted_decode, answer.wanted_routers)
    console.print(f"wanted: {wanted}; `tandem status` shows the progress")
