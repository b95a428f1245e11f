"""Reads the trace file of `[telemetry] trace_file` into the messages that the router's ring gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from runtime.tracing.span_names import Attribute, SpanName
from tandem_client.stubs import cluster_pb2

ROOT, GATEWAY = SpanName.REQUEST.value, SpanName.GATEWAY.value


def trace_in_file(path: Path, name: str) -> cluster_pb2.Trace:
    """The request with this request id or trace id. Raises `ConfigError`."""
    spans = list(_read(path))
    roots = [
        s for s in spans if s["name"] == ROOT and name in (_trace_id(s), s["attributes"].get(Attribute.RESPONSE_ID))
    ]
    if not roots:
        raise ConfigError(f"{path} has no request {name!r}; without an id, `tandem trace` lists the requests")
    trace_id = _trace_id(roots[-1])
    spans = sorted((s for s in spans if _trace_id(s) == trace_id), key=_start)
    roots = [s for s in spans if s["name"] == ROOT]
    arrived = _start(roots[0])
    return cluster_pb2.Trace(
        requests=[_summary(number, root) for number, root in enumerate(roots, 1)],
        spans=[_span(s, arrived) for s in sorted(spans, key=lambda s: (s["name"] not in (GATEWAY, ROOT), _start(s)))],
    )


def traces_in_file(path: Path, limit: int) -> list[cluster_pb2.RequestSummary]:
    """The last `limit` requests, newest first. Raises `ConfigError`."""
    spans = list(_read(path))
    roots = [span for span in spans if span["name"] == ROOT]
    return [_summary(number, root) for number, root in list(enumerate(roots, 1))[: -limit - 1 : -1]]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Skips the torn line of a full disk."""
    found: set[bool] = set()  # whether a line is a span
    try:
        with path.open() as lines:
            for line in lines:
                try:
                    span = json.loads(line)
                except ValueError:
                    continue
                is_span = isinstance(span, dict) and span.keys() >= {"name", "context", "start_time", "end_time"}
                found.add(is_span)
                if is_span:
                    yield span
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"--file: cannot read {path}: {reason}") from error
    if found == {False}:
        raise ConfigError(f"--file: {path} must have a span in each line, as [telemetry] trace_file writes them")


def _trace_id(span: dict[str, Any]) -> str:
    return str(span["context"]["trace_id"]).removeprefix("0x")


def _start(span: dict[str, Any]) -> float:
    return datetime.fromisoformat(span["start_time"]).timestamp()


def _duration_ms(span: dict[str, Any]) -> float:
    return (datetime.fromisoformat(span["end_time"]).timestamp() - _start(span)) * 1e3


def _error(span: dict[str, Any]) -> str:
    status = span.get("status", {})
    return str(status.get("description") or "error") if status.get("status_code") == "ERROR" else ""


def _summary(number: int, root: dict[str, Any]) -> cluster_pb2.RequestSummary:
    values = root["attributes"]
    summary = cluster_pb2.RequestSummary(
        number=number,
        request_id=values.get(Attribute.RESPONSE_ID, ""),
        choice=values.get(Attribute.CHOICE, 0),
        trace_id=_trace_id(root),
        arrived_at_unix_ms=_start(root) * 1e3,
        total_ms=_duration_ms(root),
        first_token_ms=values.get(Attribute.TTFT, 0.0),
        end=values.get(Attribute.ERROR_TYPE) or next(iter(values.get(Attribute.FINISH_REASONS, ())), "unknown"),
        attempts=values.get(Attribute.ATTEMPTS, 0),
        tenant=values.get(Attribute.TENANT, ""),
        path=f"REQUEST_PATH_{values.get(Attribute.PATH, 'unspecified').upper()}",
        prefill_worker=values.get(Attribute.PREFILL_WORKER, ""),
        decode_worker=values.get(Attribute.DECODE_WORKER, ""),
    )
    summary.usage.prompt_tokens = values.get(Attribute.INPUT_TOKENS, 0)
    summary.usage.completion_tokens = values.get(Attribute.OUTPUT_TOKENS, 0)
    summary.usage.cached_tokens = values.get(Attribute.CACHED_TOKENS, 0)
    return summary


def _span(span: dict[str, Any], arrived: float) -> cluster_pb2.Span:
    values = span["attributes"]
    return cluster_pb2.Span(
        name=span["name"],
        process=span["resource"]["attributes"].get("service.instance.id", ""),
        choice=values.get(Attribute.CHOICE, 0),
        start_ms=(_start(span) - arrived) * 1e3,
        duration_ms=_duration_ms(span),
        attributes={key: _text(value) for key, value in values.items()},
        error=_error(span),
    )


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
