"""`tandem trace`: the spans of one request as bars on one time axis, or a list of the last requests.

The router's ring and a trace file (cli/screens/trace_file.py) both give the messages of the Cluster service.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.commands.explain import candidates_table
from cli.screens.waterfall import bar_of
from core.plain_text import escaped
from core.wire_names import short_name
from tandem_client import AsyncClient
from tandem_client.stubs import cluster_pb2, inference_pb2

ROOTS = ("gateway.request", "tandem.request")
MIN_BAR, MAX_BAR = 16, 60
NAME_WIDTH = 27  # "    decode_worker.transfer" and a space
MS_WIDTH = 13
ATTEMPT = "tandem.attempt"
WORKERS = ("prefill_worker.", "decode_worker.")
COLUMNS = ("request", "arrived", "end", "path", "in", "cached", "out", "first token", "total", "attempts", "trace id")


async def show_from_router(
    connection: AsyncClient, name: str | None, limit: int, verbose: bool, console: Console
) -> None:
    """The request with this request id or trace id, or without a name the last requests, from the router's ring."""
    async with connection as client:
        if name is None:
            show_list((await client.list_requests(limit)).requests, console)
        else:
            show_trace(await client.get_trace(name), verbose, console)


def show_trace(trace: cluster_pb2.Trace, verbose: bool, console: Console) -> None:
    """Print the spans of every choice, and the candidates of the last dispatch."""
    for summary in trace.requests:
        spans = [span for span in trace.spans if span.choice == summary.choice]
        console.print(_title(summary, len(trace.requests)), soft_wrap=True)
        _show_spans(spans, verbose, console)
    if trace.candidates:
        chosen = next((candidate for candidate in trace.candidates if candidate.chosen), None)
        console.print()
        explained = cluster_pb2.ExplainResponse(candidates=trace.candidates)
        if trace.requests:
            explained.prompt_tokens = trace.requests[-1].usage.prompt_tokens
            explained.path = trace.requests[-1].path
        console.print(candidates_table(explained))
        if chosen is not None:
            console.print(
                "Candidates when the request was last dispatched; the star marks the chosen one.", style="dim"
            )


def _title(summary: cluster_pb2.RequestSummary, num_choices: int) -> Text:
    title = Text()
    title.append(escaped(summary.request_id), style="bold")
    if num_choices > 1:
        title.append(f" choice {summary.choice}")
    title.append(f"  {escaped(summary.end)}", style="green" if summary.end in ("stop", "length") else "red")
    title.append(f"  {summary.total_ms:.1f} ms  trace {escaped(summary.trace_id)}")
    return title


def _show_spans(spans: list[cluster_pb2.Span], verbose: bool, console: Console) -> None:
    ordered = _in_tree_order(spans)
    start_ms = min((span.start_ms for span, _ in ordered), default=0.0)
    span_ms = max((span.start_ms + span.duration_ms - start_ms for span, _ in ordered), default=0.0) or 1.0
    width = max(MIN_BAR, min(MAX_BAR, console.width - NAME_WIDTH - MS_WIDTH))
    for span, depth in ordered:
        name = ("  " * depth + escaped(span.name))[:NAME_WIDTH].ljust(NAME_WIDTH)
        bar = bar_of(span.start_ms - start_ms, span.duration_ms, span_ms, width)
        line = Text(name, style="red" if span.error else "")
        line.append(bar, style="red" if span.error else ("cyan" if depth > 1 else "blue"))
        line.append(f"{span.duration_ms:10.1f} ms", style="")
        console.print(line, no_wrap=True, overflow="crop", soft_wrap=True)
        if span.error:
            console.print(Text("  " * depth + "  " + escaped(span.error), style="red"))
        if verbose:
            process = [f"process={span.process}"] if span.process else []
            values = process + [f"{key}={value}" for key, value in sorted(span.attributes.items())]
            console.print(Text("  " * depth + "  " + escaped("  ".join(values)), style="dim"))


def _in_tree_order(spans: list[cluster_pb2.Span]) -> list[tuple[cluster_pb2.Span, int]]:
    """Each span with its depth: roots, stages in the router, and behind each attempt the stages of its workers."""
    above = 0
    ordered: list[tuple[cluster_pb2.Span, int]] = []
    of_workers = [span for span in spans if span.name.startswith(WORKERS)]
    for span in (span for span in spans if not span.name.startswith(WORKERS)):
        if span.name in ROOTS:
            ordered.append((span, above))
            above += 1
            continue
        ordered.append((span, above))
        if span.name == "router.attempt":
            number = span.attributes.get(ATTEMPT)
            ordered += [(stage, above + 1) for stage in of_workers if stage.attributes.get(ATTEMPT) == number]
    return ordered


def show_list(requests: Iterable[cluster_pb2.RequestSummary], console: Console) -> None:
    """One line for each request, newest first."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in COLUMNS:
        number = name in ("in", "cached", "out", "first token", "total", "attempts")
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for r in requests:
        path = short_name(inference_pb2.RequestPath, r.path) if r.path else "-"
        arrived = datetime.fromtimestamp(r.arrived_at_unix_ms / 1e3).strftime("%H:%M:%S")
        first = f"{r.first_token_ms:.0f} ms" if r.first_token_ms else "-"
        counts = [str(r.usage.prompt_tokens), str(r.usage.cached_tokens), str(r.usage.completion_tokens)]
        style = None if r.end in ("stop", "length") else "red"
        row = [r.request_id, arrived, r.end, path, *counts, first, f"{r.total_ms:.0f} ms", str(r.attempts), r.trace_id]
        table.add_row(*map(escaped, row), style=style)
    if not table.row_count:
        console.print("No request has ended yet.")
        return
    if not console.is_terminal:
        console.width = max(console.width, 160)
    console.print(table)
