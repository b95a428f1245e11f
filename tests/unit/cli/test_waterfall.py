"""The waterfall places the phases of a request on one time axis."""

from __future__ import annotations

from cli.screens.waterfall import BAR, SLIVER, draw, phases
from tandem_client.stubs import inference_pb2

TIMINGS = inference_pb2.PhaseTimings(
    tokenize_ms=2, router_queue_ms=4, prefill_queue_ms=4, prefill_ms=80, first_token_ms=95, transfer_ms=70,
    transfer_exposed_ms=10, decode_ms=105, total_ms=200,
)  # fmt: skip


def test_bars_share_one_axis_and_every_line_has_the_same_width() -> None:
    lines = dict(zip([phase.name for phase in phases(TIMINGS)], draw(TIMINGS, width=40), strict=True))
    assert len({len(line) for line in lines.values()}) == 1
    assert lines["prefill"].count(BAR) == 16
    assert lines["decode"].count(BAR) == 21
    assert lines["decode"].index(BAR) > lines["prefill"].index(BAR)


def test_a_phase_shorter_than_a_column_has_a_thin_mark_and_an_absent_phase_has_none() -> None:
    timings = inference_pb2.PhaseTimings(tokenize_ms=0.01, prefill_ms=100, total_ms=1000)
    lines = dict(zip([phase.name for phase in phases(timings)], draw(timings), strict=True))
    assert SLIVER in lines["tokenize"]
    assert SLIVER not in lines["transfer"]
    assert BAR not in lines["transfer"]
    assert len(draw(inference_pb2.PhaseTimings())) == 6, "a request of no duration"
