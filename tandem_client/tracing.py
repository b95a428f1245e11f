"""W3C trace context: a call becomes part of the trace of the calling program, if that program uses OpenTelemetry.

Needs the package opentelemetry-api, which is optional. Without it, and outside of a span, calls start traces of their
own; a caller can also pass `("traceparent", ...)` in `metadata`.
"""

from __future__ import annotations

from collections.abc import Sequence

try:
    from opentelemetry import propagate
except ImportError:  # the program does not use OpenTelemetry
    propagate = None  # type: ignore[assignment]


def with_trace(metadata: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """`metadata` with the current span of the program as the parent of the call, unless it names a parent already."""
    if propagate is None or any(name == "traceparent" for name, _ in metadata):
        return metadata
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return [*metadata, *headers.items()] if headers else metadata
