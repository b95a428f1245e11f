"""The output of `tandem explain`, and the phases of a request on one time axis."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from rich.console import Console

from cli.commands.explain import MAX_ROWS, explain
from cli.screens.waterfall import BAR, SLIVER, draw, phases
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.cluster_pb2 import Candidate, ExplainResponse

PAIR = Candidate(
    prefill_worker="prefill-0.0123456789abcdef", decode_worker="decode-1.0123456789abcdef", cached_tokens=64,
    uncached_tokens=16, queue_ms=12.34, prefill_ms=20.5, transfer_ms=3.25, room_wait_ms=1500.4, gap_ms=1.5,
    num_streams=4, first_token_ms=34.84, cost_ms=1542.5, chosen=True,
)  # fmt: skip
ALONE = Candidate(decode_worker="decode-1.0123456789abcdef", uncached_tokens=80, prefill_ms=80.5, cost_ms=1600.0)


class Router:
    """Explains every request in the same way."""

    def __init__(self, *candidates: Candidate) -> None:
        self.explained = ExplainResponse(
            prompt_tokens=80, candidates=candidates, reason="the [lowest] predicted cost",
            path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
        )  # fmt: skip

    async def explain(self, _: inference_pb2.GenerateRequest) -> ExplainResponse:
        return self.explained


async def lines_of(router: Router, width: int = 200, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    connection = contextlib.nullcontext(router)
    await explain(connection, inference_pb2.GenerateRequest(), console, as_json=False)  # type: ignore[arg-type]
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "terminal"), [(200, True), (80, True), (40, False)])
async def test_the_table_has_every_term_of_each_candidate_the_cheapest_first_and_then_the_reason(
    width: int, terminal: bool
) -> None:
    """A star marks the chosen candidate, which is not the cheapest in a near tie."""
    cheaper = Candidate(decode_worker="decode-7.0123456789abcdef", cost_ms=1542.0)
    lines = await lines_of(Router(PAIR, ALONE, cheaper), width, terminal)
    assert lines[0] == "80 prompt tokens · disaggregated · times in ms"
    assert "prefill decode cached new queue prefill transfer room gap first cost" in lines
    assert [line for line in lines if "decode-" in line] == [
        "- decode-7 0 0 0.0 0.0 0.0 0.0 0.0 x 0 0.0 1542",
        "* prefill-0 decode-1 64 16 12.3 20.5 3.2 1500 1.5 x 4 34.8 1542",
        "- decode-1 0 80 0.0 80.5 0.0 0.0 0.0 x 0 0.0 1600",
    ]
    assert lines[-1] == "the [lowest] predicted cost"


async def test_evictions_and_reads_have_columns_where_there_are_any() -> None:
    reading = Candidate(decode_worker="decode-2.0", source="prefill-1.0", read_ms=7.5)
    assert "prefill decode cached new queue prefill transfer room gap first cost read" in await lines_of(
        Router(reading)
    )
    reading = Candidate(decode_worker="decode-2.0", evict_ms=4.0, source="prefill-1.0", read_ms=7.5, cost_ms=20.0)
    lines = await lines_of(Router(reading, ALONE))
    assert "prefill decode cached new queue prefill transfer room gap first cost evict read" in lines
    assert [line for line in lines if "decode-" in line] == [
        "- decode-2 0 0 0.0 0.0 0.0 0.0 0.0 x 0 0.0 20.0 4.0 prefill-1 7.5",
        "- decode-1 0 80 0.0 80.5 0.0 0.0 0.0 x 0 0.0 1600 0.0 -",
    ]


async def test_of_many_candidates_the_cheapest_are_shown_and_the_others_counted() -> None:
    many = [Candidate(decode_worker=f"decode-{cost}.0123456789abcdef", cost_ms=cost) for cost in range(MAX_ROWS + 5)]
    lines = await lines_of(Router(*reversed(many)))
    assert "and 5 more, which --json lists" in lines
    assert [line.split()[1] for line in lines if "decode-" in line] == [f"decode-{cost}" for cost in range(MAX_ROWS)]


async def test_json_has_the_whole_message_on_one_line_zeros_too(capsys: pytest.CaptureFixture[str]) -> None:
    connection = contextlib.nullcontext(Router(PAIR, ALONE))
    await explain(connection, inference_pb2.GenerateRequest(), Console(), as_json=True)  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.splitlines()
    explained = json.loads(line)
    assert explained["prompt_tokens"] == 80
    assert explained["path"] == "REQUEST_PATH_DISAGGREGATED"
    assert explained["candidates"][0]["room_wait_ms"] == 1500.4
    assert explained["candidates"][1]["queue_ms"] == 0.0
    assert {field.name for field in Candidate.DESCRIPTOR.fields} == explained["candidates"][1].keys()


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
