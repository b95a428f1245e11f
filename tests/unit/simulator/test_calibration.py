"""Costs: from a live run, from public points, and in their file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from core.config import RouterConfig
from core.cost.step_cost import PRIOR, StepCost
from simulator.calibration.calibration import MeasuredRequest, MeasuredWorker, compare, costs_of, simulate_run
from simulator.calibration.costs import BUILT_IN, MAX_FILE_BYTES, read_costs, write_costs
from simulator.calibration.public_points import Filters, Group, Point, fit_file, fit_points
from simulator.replay.replay_config import ReplayConfig
from simulator.shells.cost_model import H100_8B, RDMA_400G, LinkCost

FAST = StepCost(1e-3, 1e-4, 1e-7, 1e-5, 1e-9)
MIDDLE = StepCost(2e-3, 1e-4, 1e-7, 1e-5, 1e-9)
SLOW = StepCost(9e-3, 1e-4, 1e-7, 1e-5, 1e-9)
REQUEST = MeasuredRequest(10.0, 100, 8, ttft_s=0.5, tpot_s=0.02, in_worker_s=0.4, transferred_bytes=112 * 400)
CONFIG = ReplayConfig(num_prefill=1, num_decode=1, router=RouterConfig(local_prefill="never"))


def worker(name: str, cost: StepCost, *paths: LinkCost) -> MeasuredWorker:
    return MeasuredWorker(name, name.startswith("p"), cost, max_step_tokens=256, paths=paths)


def test_each_role_has_the_cost_of_its_typical_worker() -> None:
    workers = [worker("p0", SLOW), worker("p1", FAST), worker("p2", MIDDLE), worker("d0", SLOW), worker("d1", PRIOR)]
    costs = costs_of("a test", workers, [REQUEST])
    assert (costs.prefill, costs.decode, costs.max_step_tokens) == (MIDDLE, SLOW, 256)


def test_the_link_is_the_median_path() -> None:
    paths = [LinkCost(speed, 1e-5) for speed in (1e9, 3e9, 9e9)]
    assert costs_of("a test", [worker("d0", FAST, *paths)], [REQUEST]).link == LinkCost(3e9, 1e-5)
    assert costs_of("a test", [worker("d0", FAST)], [REQUEST]).link == RDMA_400G


def test_what_is_outside_the_workers_is_divided_among_the_messages() -> None:
    costs = costs_of("a test", [worker("d0", FAST)], [REQUEST])
    assert costs.message_delay_s * 2 * 1.5 == pytest.approx(0.1)


def test_the_kv_of_a_token_follows_from_the_longest_moved_prompt() -> None:
    whole = replace(REQUEST, num_prompt_tokens=128, transferred_bytes=128 * 400)
    local = replace(REQUEST, num_prompt_tokens=512, transferred_bytes=0)
    assert costs_of("a test", [worker("d0", FAST)], [REQUEST, whole, local]).token_bytes == 400
    assert costs_of("a test", [worker("d0", FAST)], [local]).token_bytes == 128 * 1024


@pytest.mark.parametrize(
    ("workers", "requests", "message"),
    [
        ([worker("p0", FAST)], [REQUEST], "needs a decode worker"),
        ([worker("d0", FAST)], [], "finished requests"),
        ([worker("d0", PRIOR)], [REQUEST], "no decode worker has fitted"),
        ([worker("d0", FAST), worker("p0", PRIOR)], [REQUEST], "no prefill worker has fitted"),
    ],
)
def test_a_run_that_shows_nothing_is_refused(
    workers: list[MeasuredWorker], requests: list[MeasuredRequest], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        costs_of("a test", workers, requests)


def test_a_simulated_request_takes_what_the_costs_say() -> None:
    costs = costs_of("a test", [worker("p0", SLOW), worker("d0", SLOW)], [replace(REQUEST, in_worker_s=0.497)])
    sent = [replace(REQUEST, sent_at=10.0 + number) for number in range(4)]
    simulated = simulate_run(sent, costs, CONFIG)
    prompt_s = SLOW.step_s + SLOW.prompt_seconds(100) + 2 * 1.5 * costs.message_delay_s
    assert [record.num_prompt_tokens for record in simulated.requests] == [100] * 4
    assert [record.arrived_at for record in simulated.requests] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [record.ttft_s for record in simulated.requests] == pytest.approx([prompt_s] * 4, rel=0.2)
    assert [record.tpot_s for record in simulated.requests] == pytest.approx([SLOW.step_s] * 4, rel=0.2)


def test_a_comparison_pairs_requests_by_their_time() -> None:
    costs = costs_of("a test", [worker("p0", SLOW), worker("d0", SLOW)], [replace(REQUEST, in_worker_s=0.497)])
    simulated = simulate_run([REQUEST, replace(REQUEST, sent_at=11.0)], costs, CONFIG)
    first, second = simulated.requests
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    late = replace(REQUEST, sent_at=11.0, ttft_s=second.ttft_s, tpot_s=second.tpot_s)
    early = replace(REQUEST, sent_at=10.0, ttft_s=first.ttft_s * 2, tpot_s=first.tpot_s)
    found = compare([late, early], simulated)
    assert found.largest_error == pytest.approx(0.5)
    assert found.median_error == 0.0
    assert found.row("TTFT p90").error == pytest.approx(-0.5, rel=0.2)
    assert found.row("TPOT p50").error == 0.0


COSTS = replace(BUILT_IN["h100-8b"], source="a test", decode=StepCost(1.0, 2.0, 3.0, 4.0, 5.0), median_error=None)


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", COSTS)
    assert read_costs(str(tmp_path / "costs.json")) == COSTS


def test_a_built_in_name_needs_no_file() -> None:
    assert read_costs("h100-8b").layout(64).token_bytes == 128 * 1024


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            data = data[parent]
        data[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("version", 2), "version must be 1, is 2"),
        (lambda data: data.pop("link"), "the file lacks link"),
        (changed("colour", 1), "unknown entries: colour"),
        (lambda data: data["decode"].pop("pair_s"), "decode lacks pair_s"),
        (changed("decode.token_s", "fast"), "decode: every value must be a number"),
        (changed("decode.token_s", -1.0), "decode: a time is negative"),
        (changed("prefill", [1]), "prefill must hold a JSON object"),
        (changed("link.bytes_per_s", 0), "link: the speed must be positive"),
        (changed("token_bytes", 6), "token_bytes must be a positive multiple of 4"),
        (changed("max_step_tokens", 0), "max_step_tokens must be at least 1"),
        (changed("message_delay_s", -1), "message_delay_s must be in"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        read_costs(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cheap", "not JSON at line 1: Expecting value"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "invalid start byte"),
        (b" " * (MAX_FILE_BYTES + 1), "longer than 1,000,000 bytes"),
    ],
)
def test_a_file_without_json_and_a_hostile_one_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        read_costs(str(path))


def test_a_device_is_no_file_of_costs() -> None:
    with pytest.raises(ValueError, match="/dev/zero: must be a regular file"):
        read_costs("/dev/zero")


MEASURED = Path(__file__).resolve().parents[2] / "data/h100_llama_8b_points.csv"
GROUP = Group("a-model", "h100_sxm", "trtllm", 1)
TRUE = StepCost(step_s=5e-3, sequence_s=0.0, context_s=4e-8, token_s=2e-5, pair_s=6e-10)
HEADER = "model_path,system,backend,tp_size,mode,isl,osl,batch_size,silicon_tpot_ms\n"
H100 = Filters("llama-3.1-8b", "h100_sxm", "trtllm", 1)


def points(cost: StepCost) -> list[Point]:
    found = []
    for batch in (8, 32, 128):
        for prompt in (1024, 2048, 4096):
            for output in (128, 512):
                terms = Point(prompt, output, batch, 1.0).terms
                constants = (cost.step_s, cost.context_s, cost.token_s, cost.pair_s)
                gap_s = sum(term * constant for term, constant in zip(terms, constants, strict=True))
                found.append(Point(prompt, output, batch, gap_s))
    return found


def test_the_fit_finds_the_constants() -> None:
    fit = fit_points(GROUP, points(TRUE))
    assert astuple(fit.cost) == pytest.approx(astuple(TRUE), rel=1e-6)
    assert fit.largest_error < 1e-6


def test_no_constant_is_negative() -> None:
    fit = fit_points(GROUP, points(StepCost(5e-3, 0.0, 4e-8, 2e-5, pair_s=-3e-10)))
    assert min(astuple(fit.cost)) >= 0.0
    assert fit.cost.pair_s == 0.0
    assert 0.0 < fit.median_error <= fit.largest_error < 0.2


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="5 points, 6 are needed"):
        fit_points(GROUP, points(TRUE)[:5])


def written(directory: Path, *rows: str) -> Path:
    path = directory / "points.csv"
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,s,b,1,agg,1024,128,8,fast", "line 3: .*fast"),
        ("m,s,b,one,agg,1024,128,8,7", "line 3: .*one"),
        ("m,s,b,1,agg,1024,0,8,7", "line 3: .*not a measurement"),
        ("m,s,b,1,agg,1024,128,8,-7", "line 3: .*not a measurement"),
        ("m,s,other,1,agg,1024,128,8,7", "leave 2 servers: m on s with b, tp 1 .1 points.; m on s with other"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_file(written(tmp_path, "m,s,b,1,agg,1024,128,8,7.5", row), Filters())


def test_the_built_in_costs_follow_from_the_public_points(tmp_path: Path) -> None:
    marked = tmp_path / "points.csv"
    marked.write_text("\ufeff" + MEASURED.read_text(), encoding="utf-8")  # as Excel writes it
    fit = fit_file(MEASURED, H100)
    assert fit_file(marked, H100) == fit
    assert astuple(fit.cost) == pytest.approx(astuple(H100_8B), rel=5e-3)
    assert (fit.num_points, round(fit.median_error, 3), round(fit.largest_error, 3)) == (42, 0.018, 0.065)
