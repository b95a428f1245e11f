"""`tandem explain`: the ways that a prompt could take now, with the predicted seconds that the router compares."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf import json_format
from rich import box
from rich.console import Console
from rich.table import Table

from cli.screens.terminal import print_line
from core.wire_names import short_name
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2, inference_pb2

# new = tokens to compute; room = wait for blocks of the decode worker; gap = what each step of its streams becomes
# longer, times the streams; first = until the first token. All times are in ms.
COLUMNS = ("cached", "new", "queue", "prefill", "transfer", "room", "gap", "first", "cost")
EVICT = "evict"  # where a prompt drives something out of a cache
READ = "read"  # of a prefix that a peer has cached, while the queue goes on: the peer and the time; where one is read
MAX_ROWS = 24
MIN_PIPE_WIDTH = 120  # columns of an output that is no terminal


def candidates_table(explained: cluster_pb2.ExplainResponse) -> Table:
    """One row for each of the `MAX_ROWS` cheapest candidates, cheapest first. A star marks the chosen one."""
    path = short_name(inference_pb2.RequestPath, explained.path)
    table = Table(
        title=f"{explained.prompt_tokens} prompt tokens · {path} · times in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for name in ("", "prefill", "decode"):
        table.add_column(name, overflow="fold")
    extra: list[tuple[str, Callable[[cluster_pb2.Candidate], str]]] = []
    if any(candidate.evict_ms for candidate in explained.candidates):
        extra.append((EVICT, lambda candidate: _ms(candidate.evict_ms)))
    if any(candidate.source for candidate in explained.candidates):
        extra.append((READ, _read))
    for name in (*COLUMNS, *(name for name, _ in extra)):
        table.add_column(name, justify="right", no_wrap=True)  # in a narrow terminal, only the names wrap
    for candidate in sorted(explained.candidates, key=lambda candidate: candidate.cost_ms)[:MAX_ROWS]:
        cells = (*_row(candidate), *(cell_of(candidate) for _, cell_of in extra))
        table.add_row(*cells, style="bold" if candidate.chosen else None)
    return table


def _row(candidate: cluster_pb2.Candidate) -> list[str]:
    c = candidate
    return [
        "*" if c.chosen else "",
        _name(c.prefill_worker) if c.prefill_worker else "-",
        _name(c.decode_worker),
        str(c.cached_tokens),
        str(c.uncached_tokens),
        *(_ms(time) for time in (c.queue_ms, c.prefill_ms, c.transfer_ms, c.room_wait_ms)),
        f"{_ms(c.gap_ms)} x {c.num_streams}",
        _ms(c.first_token_ms),
        _ms(c.cost_ms),
    ]


def _read(candidate: cluster_pb2.Candidate) -> str:
    return f"{_name(candidate.source)} {_ms(candidate.read_ms)}" if candidate.source else "-"


def _name(worker_id: str) -> str:
    """Without the incarnation: prefill-0.0123456789abcdef is prefill-0."""
    return worker_id.partition(".")[0]


def _ms(time_ms: float) -> str:
    return f"{time_ms:.1f}" if time_ms < 1000 else f"{time_ms:.0f}"


async def explain(
    connection: AsyncClient, request: inference_pb2.GenerateRequest, console: Console, as_json: bool
) -> None:
    """Print the candidates for `request`, which does not run: a table, or the whole message as one JSON line."""
    async with connection as client:
        explained = await client.explain(request)
    if as_json:
        print(
            json_format.MessageToJson(
                explained, indent=None, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
        return
    if not console.is_terminal:
        console.width = max(console.width, MIN_PIPE_WIDTH)
    console.print(candidates_table(explained))
    if len(explained.candidates) > MAX_ROWS:
        console.print(f"and {len(explained.candidates) - MAX_ROWS} more, which --json lists", style="dim")
    print_line(console, explained.reason)
