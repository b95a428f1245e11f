"""The lines and tables of `tandem status`."""

from __future__ import annotations

import asyncio
import contextlib
import io

import pytest
from rich.console import Console

from cli.commands import status
from cli.commands.status import Sample, fleet_table, holders_table, rates
from cli.screens.path_lines import path_lines
from cli.screens.pool_lines import NO_DECODE, pool_lines, ready_line, traffic_lines
from cli.screens.terminal import Terminal
from core.errors import InvalidRequest
from core.lifecycle import ServiceRole
from tandem_client.stubs import cluster_pb2, worker_pb2


def worker(name: str, tokens: int = 0, age_ms: float = 10.0) -> cluster_pb2.FleetWorker:
    load = worker_pb2.LoadReport(
        num_running=2, num_waiting=1, num_pulls_waiting=4, num_queued_tokens=77, num_prefilled_tokens=tokens,
        num_sampled_tokens=tokens, num_transfers=6,
        ledger=worker_pb2.Ledger(free=50, cached=25, held=20, leased=3, incoming=2),
    )  # fmt: skip
    return cluster_pb2.FleetWorker(
        worker_id=f"{name}.0123456789abcdef", role=worker_pb2.WORKER_ROLE_DECODE, load=load, report_age_ms=age_ms,
        state=worker_pb2.WORKER_STATE_SERVING,
    )  # fmt: skip


def fleet(*workers: cluster_pb2.FleetWorker) -> cluster_pb2.GetFleetResponse:
    return cluster_pb2.GetFleetResponse(
        workers=workers, wanted_prefill=1, wanted_decode=3, num_in_flight=8, num_queued=9
    )


def text_of(response: cluster_pb2.GetFleetResponse, with_ledger: bool = False) -> list[str]:
    out = io.StringIO()
    Terminal(file=out, width=90).print(fleet_table(response, {"decode-0.0123456789abcdef": 12.34}, with_ledger))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_each_of_several_routers_has_a_row_and_only_the_answering_one_has_its_load() -> None:
    found = fleet(worker("decode-0"))
    found.wanted_routers = 3
    found.routers.add(
        router_id="router-0.1a2b3c4d", state=worker_pb2.WORKER_STATE_SERVING, num_in_flight=8, num_queued=9
    )
    found.routers.add(router_id="router-1.5e6f7a8b", state=worker_pb2.WORKER_STATE_DRAINING)
    lines = text_of(found)
    assert lines[0] == "routers 1/3 · prefill 0/1 · decode 1/3"
    assert "router-0.1a2b3c4d serving 8 9" in lines
    assert "router-1.5e6f7a8b draining - -" in lines
    assert "router-1.5e6f7a8b draining" in text_of(found, with_ledger=True)


class Scaled:
    """A router that accepts every size."""

    async def scale(self, *, auto: bool = False, **sizes: int | None) -> cluster_pb2.ScaleResponse:
        self.sizes, self.auto = sizes, auto
        return cluster_pb2.ScaleResponse(wanted_prefill=1, wanted_decode=1, wanted_routers=2)


async def test_scale_without_a_size_names_its_flags() -> None:
    sizes = dict.fromkeys(("prefill", "decode", "routers"))
    with pytest.raises(InvalidRequest, match="give --prefill, --decode, --routers or --auto"):
        await status.scale(contextlib.nullcontext(Scaled()), sizes, False, Console())  # type: ignore[arg-type]


async def test_scale_with_auto_needs_no_size() -> None:
    router, sizes = Scaled(), dict.fromkeys(("prefill", "decode", "routers"))
    await status.scale(contextlib.nullcontext(router), sizes, True, Console(quiet=True))  # type: ignore[arg-type]
    assert router.auto
    assert router.sizes == sizes


def test_the_status_tells_the_attainment_the_moves_and_the_plan() -> None:
    found = fleet(worker("decode-0"))
    assert not traffic_lines(fleet())
    found.num_moved = 3
    found.planner.MergeFrom(
        cluster_pb2.Planner(
            enabled=True, pinned=[cluster_pb2.SERVICE_ROLE_DECODE], plan="1 prefill, 1 decode for 2 requests/s",
            requests_per_s=2.04, num_ended=600, attainment=0.973,
        )
    )  # fmt: skip
    assert traffic_lines(found) == [
        "2.04 requests/s; 97% of 600 within the wanted times in 5 minutes, 3 sequences moved since the start",
        "planner: 1 prefill, 1 decode for 2 requests/s (decode pinned; `tandem scale --auto` releases)",
    ]


def test_one_router_has_no_row_and_a_worker_has_its_use_its_queue_and_its_speed_or_its_blocks() -> None:
    found = fleet(worker("decode-0"), worker("decode-1", age_ms=12_000))
    found.wanted_routers = 1
    found.routers.add(router_id="router-0.1a2b3c4d", state=worker_pb2.WORKER_STATE_SERVING)
    lines = text_of(found)
    assert lines[0] == "prefill 0/1 · decode 2/3 · 8 in flight · 9 queued"
    assert "decode-0.0123 serving 25% 25% 2 5 77 12.3 6" in lines
    assert any("silent 12 s" in line for line in lines), "a worker without recent reports"
    assert not [line for line in lines if "router" in line]
    assert "decode-0.0123 serving 50 25 20 3 2 6" in text_of(found, with_ledger=True)


def holders_of(response: cluster_pb2.GetLedgerResponse, width: int = 110) -> list[str]:
    out = io.StringIO()
    Terminal(file=out, width=width).print(holders_table(response))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def holder(name: str, kind: str, state: str, blocks: int, counted: int, age_ms: float = 0) -> worker_pb2.BlockHolder:
    return worker_pb2.BlockHolder(
        kind=f"HOLDER_KIND_{kind}", name=name,
        state=f"HOLDER_STATE_{state}", num_blocks=blocks, num_counted=counted,
        age_ms=age_ms, peer="prefill-0.0123456789abcdef" if kind != "SEQUENCE" else "",
    )  # fmt: skip


def test_the_ledger_shows_the_blocks_and_the_age_of_each_holder() -> None:
    ledger = worker_pb2.DescribeLedgerResponse(
        holders=[
            holder("router-1.7[0]", "SEQUENCE", "RUNNING", 5, 3, age_ms=12_340),
            holder("0a1b2c3d", "PULL", "READING", 4, 4, age_ms=51),
        ],
        num_left_out=9,
    )
    response = cluster_pb2.GetLedgerResponse(
        workers=[
            cluster_pb2.WorkerLedger(worker_id="decode-0.0123456789abcdef", ledger=ledger),
            cluster_pb2.WorkerLedger(worker_id="decode-1.0123456789abcdef", error="timed out"),
        ]
    )
    lines = holders_of(response)
    assert "decode-0.0123 sequence router-1.7[0] running 5 3 12.3 s" in lines
    assert "decode-0.0123 pull 0a1b2c3d reading 4 4 0.1 s prefill-0.0123" in lines
    assert "decode-0.0123 and 9 more" in lines
    assert "decode-1.0123 no answer: timed out" in lines


class OneFleet:
    """A router whose fleet never changes."""

    def __init__(self, found: cluster_pb2.GetFleetResponse | None = None) -> None:
        self.num_calls = 0
        self._found = found or fleet(worker("decode-0"))

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        self.num_calls += 1
        return self._found


async def test_status_without_a_terminal_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)
    client, out = OneFleet(), io.StringIO()
    async with asyncio.timeout(5):
        await status.status(contextlib.nullcontext(client), Console(file=out), once=False, with_ledger=False)  # type: ignore[arg-type]
    assert client.num_calls == 2
    assert out.getvalue().count("decode-0.0123") == 1


def prefill_worker() -> cluster_pb2.FleetWorker:
    found = worker("prefill-0")
    found.role = worker_pb2.WORKER_ROLE_PREFILL
    return found


def test_a_pool_without_a_serving_worker_has_a_line_about_the_consequence() -> None:
    starting = worker("decode-0")
    starting.state = worker_pb2.WORKER_STATE_STARTING
    assert pool_lines(fleet(prefill_worker(), starting)) == ["no decode worker serves yet: requests wait"]
    none_wanted = cluster_pb2.GetFleetResponse(workers=[prefill_worker()], wanted_prefill=1)
    assert pool_lines(none_wanted) == [f"no request is served: {NO_DECODE}"]
    assert pool_lines(fleet(worker("decode-0"))) == ["no prefill worker serves: decode workers compute the prompts"]
    assert pool_lines(fleet(prefill_worker(), worker("decode-0"))) == []


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 1), "serving m at h:1 (2 prefill, 1 decode); Ctrl-C drains and stops"),
        ((0, 1), "serving m at h:1 (0 prefill, 1 decode): decode workers compute the prompts; Ctrl-C drains and stops"),
        ((1, 0), f"no request is served at h:1 (1 prefill, 0 decode): {NO_DECODE}; Ctrl-C drains and stops"),
        ((1, 1, 2), "serving m at h:1, i:1 (1 prefill, 1 decode, 2 routers); Ctrl-C drains and stops"),
    ],
)
def test_the_ready_line_says_whether_requests_are_served(sizes: tuple[int, ...], line: str) -> None:
    roles = ServiceRole.PREFILL, ServiceRole.DECODE, ServiceRole.ROUTER
    wanted = dict(zip(roles, (*sizes, 1)[:3], strict=True))
    assert ready_line("m", ["h:1", "i:1"] if len(sizes) == 3 else ["h:1"], wanted) == line


def test_a_rate_is_the_difference_of_two_samples_and_needs_both() -> None:
    before = Sample(fleet(worker("decode-0", tokens=100)), at=10.0)
    after = Sample(fleet(worker("decode-0", tokens=150), worker("decode-1", tokens=7)), at=12.0)
    assert rates(before, after) == {"decode-0.0123456789abcdef": 50.0}
    assert rates(None, after) == {}


PREFILL = "prefill-0.fedcba9876543210"


def with_paths(*paths: worker_pb2.PathReport) -> cluster_pb2.GetFleetResponse:
    reader, owner = worker("decode-0"), cluster_pb2.FleetWorker(worker_id=PREFILL)
    reader.load.paths.extend(paths)
    return fleet(reader, owner)


def test_each_broken_path_has_its_line() -> None:
    slow = worker_pb2.PathReport(
        peer=PREFILL, state=worker_pb2.PATH_STATE_SLOW, lane=worker_pb2.PATH_LANE_TCP, bytes_per_s=1.1e9,
        expected_bytes_per_s=12.5e9, latency_ms=0.31,
    )  # fmt: skip
    fine = worker_pb2.PathReport(peer=PREFILL, state=worker_pb2.PATH_STATE_FINE)
    assert path_lines(with_paths(slow, fine)) == [
        "paths: 1 fine · 1 slow",
        "prefill-0.fedc -> decode-0.0123: slow: TCP, 1.1 GB/s of 12.5, 310 us there and back",
    ]
