"""The costs file: what is written is read, and what is malformed is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.cost.step_cost import StepCost
from simulator.calibration.costs import BUILT_IN, read_costs, write_costs

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


def test_a_file_without_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("cheap")
    with pytest.raises(ValueError, match=r"costs\.json: Expecting value"):
        read_costs(str(tmp_path / "costs.json"))
