"""What `tandem simulate` and `tandem calibrate` print and write, and the line and code of each wrong input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cli.commands.calibrate import workers_of
from cli.commands.calibration_load import CalibrationLoad, LoadPlan
from cli.commands.simulate import parse_sweep
from cli.commands.simulate_flags import SIMULATE_FLAGS
from cli.screens import plots
from cli.screens.simulate_report import answer
from simulator.calibration.costs import BUILT_IN, write_costs
from simulator.replay.sweep import Axis, Point
from simulator.shells.cost_model import LinkCost
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2, worker_pb2
from tandem_client.stubs.cluster_pb2 import GetFleetResponse
from tests.unit.cli.conftest import Tandem

SMALL = ["--requests", "12", "--input-tokens", "256", "--output-tokens", "8", "--rate", "8"]
SMALL += ["--prefill", "1", "--decode", "1", "--processes", "1"]


@pytest.fixture
def simulate(tandem: Tandem) -> Callable[..., str]:
    """What a simulation that succeeds prints."""

    def simulated(*arguments: str) -> str:
        ended = tandem("simulate", *arguments)
        assert ended.code in (0, None), ended.err
        return ended.out

    return simulated


def test_a_run_prints_and_writes_its_figures(tmp_path: Path, simulate: Callable[..., str]) -> None:
    path = tmp_path / "result.json"
    shown = simulate(*SMALL, "--json", str(path), "--seeds", "2")
    for name in ("TTFT", "TPOT", "ITL", "TBT10", "attainment", "goodput", "hit ratio", "median of seeds", "lowest"):
        assert name in shown
    written = json.loads(path.read_text())
    assert written["options"]["input_tokens"] == 256
    assert [seed["num_requests"] for seed in written["seeds"]] == [12, 12]
    assert len(written["seeds"][0]["requests"]) == 12
    assert written["seeds"][0]["ttft_s"] != written["seeds"][1]["ttft_s"]


@pytest.mark.parametrize("flag", ["--slo-ttft-ms", "--slo-itl-ms"])
def test_no_request_is_within_a_microsecond(tmp_path: Path, simulate: Callable[..., str], flag: str) -> None:
    path = tmp_path / "result.json"
    simulate(*SMALL, "--json", str(path), flag, "0.001")
    assert json.loads(path.read_text())["seeds"][0]["attainment"] == 0


def test_a_sweep_names_the_fewest_workers_and_draws_the_front(tmp_path: Path, simulate: Callable[..., str]) -> None:
    path, chart = tmp_path / "grid.json", tmp_path / "grid.png"
    shown = simulate(*SMALL, "--json", str(path), "--plot", str(chart), "--sweep", "prefill=1..2", "decode=1,2")
    assert "fewest workers that reach attainment 0.9 are 2: 1 prefill and 1 decode" in " ".join(shown.split())
    written = json.loads(path.read_text())
    shapes = [(point["prefill"], point["decode"]) for point in written["points"]]
    assert shapes == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {seed["num_requests"] for point in written["points"] for seed in point["seeds"]} == {12}
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "sweep",
    [["rate=2,8"], ["rate=2,8", "decode=1,2"], ["decode=1,2"], []],
    ids=["rates", "rates and shapes", "shapes", "no sweep"],
)
def test_each_kind_of_result_has_a_chart_without_an_empty_part(
    tmp_path: Path, simulate: Callable[..., str], sweep: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(figure: Any, path: Path) -> None:
        assert all(axis.has_data() for axis in figure.axes)
        whole(figure, path)

    whole = plots._save
    monkeypatch.setattr(plots, "_save", save)
    chart = tmp_path / "chart.svg"
    simulate(*SMALL, "--plot", str(chart), *(["--sweep"] if sweep else []), *sweep)
    assert b"<svg" in chart.read_bytes()


def test_costs_of_a_file_change_the_times(tmp_path: Path, simulate: Callable[..., str]) -> None:
    write_costs(tmp_path / "costs.json", BUILT_IN["h100-8b"])
    simulate(*SMALL, "--json", str(tmp_path / "same.json"), "--costs", str(tmp_path / "costs.json"))
    simulate(*SMALL, "--json", str(tmp_path / "built_in.json"))
    slow = json.loads((tmp_path / "costs.json").read_text())
    slow["prefill"]["step_s"] = slow["decode"]["step_s"] = 0.04
    (tmp_path / "costs.json").write_text(json.dumps(slow))
    simulate(*SMALL, "--json", str(tmp_path / "slow.json"), "--costs", str(tmp_path / "costs.json"))
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["seeds"] for name in ("same", "built_in", "slow")
    }
    assert found["same"] == found["built_in"]
    assert found["slow"][0]["tpot_s"]["p50"] > 0.04 > found["same"][0]["tpot_s"]["p50"]


def test_a_workload_of_a_file_is_simulated(tmp_path: Path, simulate: Callable[..., str]) -> None:
    path, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}) + "\n")
    simulate("--workload", str(path), "--rate", "1", "--processes", "1", "--json", str(result))
    (request,) = json.loads(result.read_text())["seeds"][0]["requests"]
    assert request["num_prompt_tokens"] == 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "/nowhere.jsonl"], "cannot read /nowhere.jsonl: No such file or directory"),
        (["--costs", "pyproject.toml"], "pyproject.toml: not JSON at line 1"),
        (["--costs", "h100"], "h100: neither a file of costs nor built-in costs, which are h100-8b, "),
        (
            ["--workload", "tests/data/h100_llama_8b_points.csv"],
            "line 1: TIMESTAMP, ContextTokens, GeneratedTokens must",
        ),
        (["--decode-pool-tokens", "9"], "--decode-pool-tokens must be at least one block, 64 tokens, is 9"),
        (["--plot", "chart.gif"], "chart.gif: a chart ends in .png or .svg"),
        (["--rate", "nan"], "--rate must be a finite number"),
        (["--rate", "1", "--load", "1"], "--load and --rate must not be set together"),
        (["--load", "1", "--sweep", "prefill=1..2"], "--load follows the number of prefill workers"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--arrivals", "sometimes"], "--arrivals must be one of"),
        (["--arrivals", "trace"], "--arrivals trace needs a file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, tandem: Tandem) -> None:
    code, _, shown = tandem("simulate", *arguments)
    assert code == 1
    assert shown.startswith("error: ")
    assert message in shown
    assert shown.count("\n") == 1


OF_FILES = ("divisor", "output-divisor", "session-rate")
NUMBERS = [flag.name for flag in SIMULATE_FLAGS if flag.type in (int, float) and flag.name != "seed"]
CALL = {"timestamp": 0, "usage": {"prompt_tokens": 0, "completion_tokens": 1}}
SESSION = {"session": "a", "input_length": 6, "output_length": 4}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_error_for_a_number_out_of_range_names_its_flag(name: str, tmp_path: Path, tandem: Tandem) -> None:
    (tmp_path / "agents.jsonl").write_text(json.dumps(SESSION) + "\n")
    needs = {"burstiness": ["--arrivals", "gamma"], "prefix-tokens": ["--prefix-groups", "2"]}
    needs |= {each: ["--workload", str(tmp_path / "agents.jsonl")] for each in OF_FILES}
    code, _, shown = tandem("simulate", f"--{name}=-1", *needs.get(name, ()))
    assert code == 1
    assert re.match(rf"error: --{name} (and --prefix-tokens )?must ", shown), shown


def test_the_error_for_a_file_names_no_flag(tmp_path: Path, tandem: Tandem) -> None:
    (tmp_path / "calls.jsonl").write_text(json.dumps(CALL) + "\n")
    _, _, shown = tandem("simulate", "--workload", str(tmp_path / "calls.jsonl"))
    assert "calls.jsonl, line 1: prompt_tokens must be at least 1, is 0" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "rate=1..2", "many"], "'many' is no axis"),
        (["a.jsonl"], "'a.jsonl' is an axis, which needs --sweep; a file of requests is --workload FILE"),
    ],
)
def test_a_bad_sweep_is_wrong_usage(arguments: list[str], message: str, tandem: Tandem) -> None:
    code, _, shown = tandem("simulate", *arguments)
    assert code == 2
    assert message in shown


def test_without_matplotlib_a_chart_names_the_extra(monkeypatch: pytest.MonkeyPatch, tandem: Tandem) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, shown = tandem("simulate", *SMALL, "--plot", "chart.png")
    assert code == 1
    assert shown == "error: charts need matplotlib: install the extra, pip install 'tandem-serve[plots]'\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--from-points", "/nowhere.csv", "--kv-token-bytes", "4"], 1, "No such file or directory"),
        (["--from-points", "/nowhere.csv"], 2, "--kv-token-bytes"),
        (["--requests", "0"], 2, "must be int in [1,"),
        (["--longest-prompt", "4"], 2, "must be int in [16,"),
        (["--system", "h100_sxm"], 2, "Invalid value for --system: only with --from-points"),
    ],
)
def test_a_wrong_calibration_is_refused(arguments: list[str], code: int, message: str, tandem: Tandem) -> None:
    found, _, shown = tandem("calibrate", *arguments)
    assert found == code
    assert message in shown


def test_public_points_become_costs(tmp_path: Path, tandem: Tandem, simulate: Callable[..., str]) -> None:
    points = Path(__file__).resolve().parents[2] / "data/h100_llama_8b_points.csv"
    output = tmp_path / "costs.json"
    ended = tandem("calibrate", str(output), "--from-points", str(points), "--kv-token-bytes", "131072")
    assert ended.code in (0, None)
    assert "median error of the gap between tokens is 1.8%, the largest 6.5%" in ended.out
    simulate(*SMALL, "--costs", str(output))


def point(num_prefill: int, num_decode: int, attainment: float, rate: float = 2.0) -> Point:
    return Point(num_prefill, num_decode, rate, attainment, goodput=attainment * rate)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("prefill=1..4", (1, 2, 3, 4)),
        ("prefill=0..4:2", (0, 2, 4)),
        ("decode=8", (8,)),
        ("decode=8,1,2,2", (1, 2, 8)),
        ("decode=1..2,8", (1, 2, 8)),
        ("rate=0.5..2:0.5", (0.5, 1.0, 1.5, 2.0)),
        ("rate=0.1..0.3:0.1", (0.1, 0.2, 0.3)),
        ("rate=1..2.5", (1.0, 2.0)),
    ],
)
def test_an_axis_has_the_written_values(word: str, values: tuple[float, ...]) -> None:
    assert parse_sweep([word]) == (Axis(word.partition("=")[0], values),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no axis"),
        (["prefill"], "'prefill' is no axis"),
        (["colour=1"], "'colour=1' is no axis"),
        (["prefill=many"], "'prefill=many': write values"),
        (["prefill="], "'prefill=': write values"),
        (["prefill=2:1"], "'prefill=2:1': write values"),
        (["prefill=4..1"], "the last value not below the first"),
        (["prefill=1..4:0"], "the step must be positive"),
        (["prefill=1..2:0.5"], "takes whole numbers"),
        (["prefill=-1"], "at least 0"),
        (["decode=0..2"], "at least 1"),
        (["decode=5000"], "at most 4096"),
        (["rate=0"], "rate must be at least"),
        (["rate=nan"], "must be finite"),
        (["rate=1..inf"], "must be finite"),
        (["rate=1..1e9:0.001"], "more than 4096 values"),
        (["prefill=1..100", "decode=1..100"], "make 10000 simulations"),
        (["prefill=1", "prefill=2"], "prefill has two axes"),
    ],
)
def test_a_bad_sweep_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sweep(words)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        (
            [point(1, 1, 0.5), point(2, 1, 0.95), point(2, 2, 0.99)],
            "At 2 requests/s the fewest workers that reach attainment 0.9 are 3: 2 prefill and 1 decode, with 0.950.",
        ),
        (
            [point(1, 1, 0.5), point(2, 1, 0.7)],
            "At 2 requests/s no simulated size of the pools reaches attainment 0.9; 2 prefill",
        ),
        (
            [point(1, 1, 0.8), point(1, 1, 1.0, 1.0)],
            "goodput90 is 1.5 requests/s: the highest rate with attainment 0.9.",
        ),
        (
            [point(1, 1, 0.9), point(1, 1, 1.0, 1.0)],
            "goodput90 is at least 2 requests/s, the highest simulated rate.",
        ),
        (
            [point(1, 1, 0.5), point(1, 1, 0.8, 1.0)],
            "goodput90 is below 1 requests/s, the lowest simulated rate.",
        ),
    ],
)
def test_the_answer_names_the_fewest_workers_or_the_highest_rate(points: list[Point], sentence: str) -> None:
    (found,) = answer(points)
    assert found.startswith(sentence)


# ---- A calibration sends requests without drafts.


class Recorder:
    """Answers each request with all its tokens at once."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def generate(
        self, request: inference_pb2.GenerateRequest, _timeout_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        tokens = inference_pb2.TokenChunk(token_ids=[1] * request.stop.max_tokens)
        yield inference_pb2.GenerateResponse(tokens=tokens)


async def test_no_request_of_a_calibration_takes_drafts() -> None:
    """The costs and the simulator have one token a step: with drafts of 3.5 tokens, TPOT was off by 243 %."""
    plan = LoadPlan(longest_prompt=32, output_tokens=4, largest_batch=2, num_checked=3, seed=0, timeout_s=1.0)
    recorder = Recorder()
    load = CalibrationLoad(cast("AsyncClient", recorder), plan, vocab_size=100)
    await load.fit(1, 1)
    await load.check(rate=1e6)
    assert len(recorder.requests) == 2 * (2 + 1 + 2) + 3
    assert all(request.HasField("speculation") and not request.speculation for request in recorder.requests)


def test_a_worker_without_measured_paths_has_the_speed_of_what_it_has_read() -> None:
    fleet = GetFleetResponse()
    for load in (
        worker_pb2.LoadReport(transferred_bytes=6_000, transfer_seconds=2.0),
        worker_pb2.LoadReport(
            transferred_bytes=6_000, transfer_seconds=2.0, paths=[{"bytes_per_s": 7.0, "latency_ms": 2.0}]
        ),
        worker_pb2.LoadReport(),
    ):
        fleet.workers.add(state=worker_pb2.WORKER_STATE_SERVING).load.CopyFrom(load)
    read, measured, unknown = (worker.paths for worker in workers_of(fleet))
    assert [path.bytes_per_s for path in read] == [3_000.0]
    assert measured == (LinkCost(7.0, 0.002),)
    assert not unknown
