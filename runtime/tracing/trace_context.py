"""The place of a request in a trace: W3C Trace Context in and out, and the decision of head sampling."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import NamedTuple

# version-trace id-span id-flags. A later version may append fields.
_TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE_CHARS = 512
_SAMPLED = 1
# Ids need no secrecy. `secrets` releases the interpreter lock for each id, and a busy thread then holds up the loop.
_RANDOM = random.Random()


class TraceContext(NamedTuple):
    """The root span of a process for one request, and its parent in the calling process."""

    trace_id: int
    span_id: int
    parent_id: int = 0  # 0 = none
    sampled: bool = True
    state: str = ""  # tracestate of the caller

    @property
    def trace_id_hex(self) -> str:
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"

    def headers(self) -> list[tuple[str, str]]:
        """The headers that make the spans of the called process children of this one."""
        headers = [("traceparent", self.traceparent)]
        return [*headers, ("tracestate", self.state)] if self.state else headers


def start_trace(headers: Mapping[str, str], sample_ratio: float) -> TraceContext:
    """Continue the trace of the caller, with the caller's sampling decision, or start a new one.

    A traceparent that breaks the rules of W3C is ignored, as the standard asks for. The decision follows from the trace
    id, so every process with the same ratio decides the same.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    span_id = new_span_id()
    if found is not None:
        version, trace_id, parent_id, flags, rest = found.groups()
        valid = version != "ff" and int(trace_id, 16) and int(parent_id, 16) and not (version == "00" and rest)
        if valid:
            state = headers.get("tracestate", "")[:MAX_TRACESTATE_CHARS]
            return TraceContext(int(trace_id, 16), span_id, int(parent_id, 16), bool(int(flags, 16) & _SAMPLED), state)
    new_id = _RANDOM.getrandbits(128) or 1
    return TraceContext(new_id, span_id, sampled=(new_id & (2**64 - 1)) < sample_ratio * 2**64)


def new_span_id() -> int:
    return _RANDOM.getrandbits(64) or 1
