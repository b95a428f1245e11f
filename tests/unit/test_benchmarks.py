"""What the benchmarks conclude from what they measured; measuring itself is theirs to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.engine_figures import OURS, PLAIN, VLLM, Cell, Figures
from benchmarks.engine_page import BEGIN, END, PAGE, section, write_page
from benchmarks.engine_serving import MIN_STEPS, share_around
from benchmarks.report import Line, Report
from model_files.builtin_configs import RANDOM_CONFIGS

ROOT = Path(__file__).parents[2]


def test_less_time_is_faster_and_more_tokens_are_faster() -> None:
    step = Cell("a step", 8.0, "ms", VLLM, theirs=10.0, floor=4.0, least_speed=1.25)
    assert (step.speed, step.share_of_floor, step.holds) == (1.25, 0.5, True)
    prefill = Cell("a prompt", 1000.0, "tokens/s", VLLM, theirs=900.0, floor=2000.0, least_speed=1.25)
    assert prefill.speed == pytest.approx(1.111, abs=1e-3)
    assert prefill.share_of_floor == 0.5
    assert prefill.holds is False


def test_a_peer_that_is_not_there_gives_no_verdict() -> None:
    lines = list(Cell("a step", 8.0, "ms", VLLM, theirs=None, floor=4.0, least_speed=1.25).lines())
    assert [line.holds for line in lines] == [None, None]
    assert lines[0].ratio is None


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"])
    figures.take_floors({"read_bytes_per_s": 1e9, "flop_per_s": 1e12}, {"kv_bytes_per_token": 1000})
    num_weights = sum(figures.num_weights())
    assert figures.decode_floor_ms(512, 8) == pytest.approx(1e3 * (2 * num_weights + 8 * 512 * 1000) / 1e9)
    figures.flop_per_s = 1e6
    assert figures.decode_floor_ms(512, 8) == pytest.approx(1e3 * 16 * num_weights / 1e6)
    figures.take_floors({"read_bytes_per_s": 1.0, "flop_per_s": 1.0}, {"kv_bytes_per_token": 1000})
    assert figures.read_bytes_per_s == 1e9, "a disturbed measurement is no floor"


def test_one_weight_format_has_to_reach_llama_cpp_and_each_has_to_reach_bfloat16() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"])
    for name, milliseconds in ((PLAIN, 20.0), (f"{OURS} int8", 12.0), (f"{OURS} int4", 9.0), ("llama.cpp", 10.0)):
        figures.steps[name, 512, 1, "ms"] = [milliseconds]
    goals = {(cell.measure.split(", ")[1], cell.peer): cell.holds for cell in figures.cells()}
    assert goals == {
        ("int8", "llama.cpp"): None,
        ("int4", "llama.cpp"): True,
        ("int8", PLAIN): True,
        ("int4", PLAIN): True,
    }


def test_attention_is_told_the_bytes_of_sequences_as_long_as_they_had_become() -> None:
    figures = Figures(RANDOM_CONFIGS["llama-tiny"], read_bytes_per_s=1e9, kv_bytes_per_token=1000)
    figures.steps[OURS, 512, 8, "attention_ms"] = [8.0]
    figures.steps[OURS, 512, 8, "length"] = [520.0, 540.0, 560.0]
    (line,) = (line for line in figures.other_lines() if "attention" in line.measure)
    assert line.value == pytest.approx(8 * 540 * 1000 / 8e-3 / 1e9)
    assert (line.ratio, line.holds) == (pytest.approx(0.54), False)


def test_the_time_around_the_model_is_that_between_two_models_of_the_whole_batch() -> None:
    steps = [(8, step * 10.0 + 1.0, step * 10.0 + 10.0) for step in range(MIN_STEPS + 1)]
    assert share_around(steps, 8) == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="only 3 steps"):
        share_around(steps[:4], 8)


def test_a_page_is_written_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    cells = [Cell("a step", 8.0, "ms", VLLM, theirs=10.0, least_speed=2.0)]
    for _ in range(2):
        write_page(section("how", cells, [Line("a share", "", 0.5, "s")]), page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}")
    assert text.endswith(f"{END}after\n")
    assert "old" not in text
    assert text.count("| a step | 8.00 ms | vLLM 10.0 | 1.25 |") == 1
    assert "missed" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no section"):
        write_page("", page)


def test_the_page_of_this_repository_has_its_markers() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert text.index(BEGIN) < text.index(END)


def test_every_line_that_is_printed_is_written_and_a_miss_is_printed_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=200)
    report = Report("trial", console)
    report.add(Line("slow", "under 1 s", 2.0, "s", holds=False))
    report.add(Line("known", "", 3.0, "s", "a peer", 1.5))
    report.write()
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert [set(line) for line in written] == [{"measure", "goal", "value", "unit", "peer", "ratio", "holds"}] * 2
    assert [line["holds"] for line in written] == [False, None]
    printed = console.export_text()
    assert "MISSED" in printed
    assert "1.500 of a peer" in printed
    assert "2 lines in build/bench/trial.json, 1 goals missed" in printed
