"""Draws the phases of a request as bars on one time axis.

tokenize | queue | prefill ......| first token
                     transfer ......... (runs during prefill, except for its exposed end)
                                 | decode ..................
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_client.stubs import inference_pb2

BAR, SLIVER = "█", "▏"
NAME_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    start_ms: float  # since the request arrived
    duration_ms: float


def phases(timings: inference_pb2.PhaseTimings) -> list[Phase]:
    """The phases in the order in which a client notices them.

    Router and workers measure with different clocks, so phases are placed by their order: prefill starts after the
    queues, and the transfer ends `transfer_exposed_ms` after prefill.
    """
    queue_at = timings.tokenize_ms
    prefill_queue_at = queue_at + timings.router_queue_ms
    prefill_at = prefill_queue_at + timings.prefill_queue_ms
    prefill_end = prefill_at + timings.prefill_ms
    transfer_at = max(prefill_queue_at, prefill_end + timings.transfer_exposed_ms - timings.transfer_ms)
    return [
        Phase("tokenize", 0.0, timings.tokenize_ms),
        Phase("queue", queue_at, timings.router_queue_ms + timings.prefill_queue_ms),
        Phase("prefill", prefill_at, timings.prefill_ms),
        Phase("first token", 0.0, timings.first_token_ms),
        Phase("transfer", transfer_at, timings.transfer_ms),
        Phase("decode", timings.first_token_ms, timings.decode_ms),
    ]


def draw(timings: inference_pb2.PhaseTimings, width: int = 48) -> list[str]:
    """One line per phase: name, bar, milliseconds. `width` columns span the request. A short phase has a thin mark."""
    rows = phases(timings)
    span_ms = max([timings.total_ms, *(phase.start_ms + phase.duration_ms for phase in rows)]) or 1.0
    lines = []
    for phase in rows:
        bar = bar_of(phase.start_ms, phase.duration_ms, span_ms, width)
        lines.append(f"{phase.name:<{NAME_WIDTH}} {bar} {phase.duration_ms:9.1f} ms")
    return lines


def bar_of(start_ms: float, duration_ms: float, span_ms: float, width: int) -> str:
    """A line of `width` columns that span `span_ms`, with a mark from `start_ms` for `duration_ms`."""
    start = max(0, min(width - 1, int(start_ms / span_ms * width)))
    length = min(width - start, round(duration_ms / span_ms * width))
    mark = BAR * length if length else (SLIVER if duration_ms > 0 else " ")
    return (" " * start + mark).ljust(width)
