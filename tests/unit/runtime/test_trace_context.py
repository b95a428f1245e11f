"""W3C Trace Context: which headers continue a trace, and which head is sampled."""

from __future__ import annotations

import pytest

from runtime.tracing.trace_context import start_trace

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_traceparent_is_continued_with_its_decision_whatever_the_ratio() -> None:
    for flags, sampled, ratio in (("01", True, 0.0), ("00", False, 1.0), ("03", True, 0.0)):
        trace = start_trace({"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "tracestate": "a=b"}, ratio)
        assert (trace.trace_id_hex, trace.parent_id, trace.sampled) == (TRACE_ID, int(SPAN_ID, 16), sampled)
        parent = f"00-{TRACE_ID}-{trace.span_id:016x}-{'01' if sampled else '00'}"
        assert trace.headers() == [("traceparent", parent), ("tracestate", "a=b")]


def test_a_later_version_may_have_more_fields() -> None:
    assert start_trace({"traceparent": f"01-{TRACE_ID}-{SPAN_ID}-01-more"}, 1.0).trace_id_hex == TRACE_ID


@pytest.mark.parametrize(
    "header",
    [
        "", "nonsense", f"00-{TRACE_ID}-{SPAN_ID}", f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01", f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-01-more",
    ],
)  # fmt: skip
def test_an_invalid_traceparent_starts_a_new_trace(header: str) -> None:
    trace = start_trace({"traceparent": header}, 1.0)
    assert trace.trace_id_hex != TRACE_ID
    assert trace.parent_id == 0
    assert trace.sampled


def test_the_ratio_decides_by_the_trace_id() -> None:
    traces = [start_trace({}, 0.25) for _ in range(2000)]
    assert 400 < sum(trace.sampled for trace in traces) < 600
    assert not any(start_trace({}, 0.0).sampled for _ in range(100))
    for trace in traces:
        assert trace.sampled == (trace.trace_id % 2**64 < 2**62)
