"""`step_of` makes an `EngineStep` of vLLM's statistics of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from core.cost.step_cost_fit import StepCostFit
from core.kv_layout import KVLayout
from vllm_worker.engine import EngineInfo, EngineStep
from vllm_worker.engine_reports import step_of
from vllm_worker.kv.parameters import READ_BYTES, READ_SECONDS
from vllm_worker.load import EngineLoad
from worker.open_calls import OpenCalls

INFO = EngineInfo(100, KVLayout("m", "float32", 1, 1, 16, 2), frozenset(), 1000, 4096, 2048)
NIXL = {"bytes_transferred": [4096, 2048], "transfer_duration": [0.25, 0.5], "num_failed_transfers": [1]}
EACH_STEP = {
    "vLLM's connector": (NIXL, 6144, 0.75),
    "the same, verified": ({"counts": {"verified": 2}, "inner": NIXL, "options": {}}, 6144, 0.75),
    "the same, with nothing read": ({"counts": {"verified": 2}, "inner": None, "options": {}}, 0, 0.0),
    "Tandem's connector": ({READ_BYTES: 512, READ_SECONDS: 0.125}, 512, 0.125),
    "no connector": (None, 0, 0.0),
}


@pytest.mark.parametrize(("transfers", "num_bytes", "seconds"), EACH_STEP.values(), ids=EACH_STEP)
def test_the_load_sums_the_bytes_that_the_connector_has_read(
    transfers: dict[str, Any] | None, num_bytes: int, seconds: float
) -> None:
    stats = SimpleNamespace(
        iteration_details=None, kv_connector_stats=transfers, num_running_reqs=0, num_waiting_reqs=0, kv_cache_usage=0.0
    )
    load = EngineLoad(INFO)
    for at in (1.0, 2.0):
        load.record(step_of(stats), at)
    told = load.worker_load(OpenCalls(), draining=False)
    assert (told.transferred_bytes, told.transfer_seconds) == (2 * num_bytes, 2 * seconds)


def test_the_tokens_of_a_step_are_those_of_the_oldest_prompts_and_attend_to_the_tokens_before_them() -> None:
    costs = Mock(wraps=StepCostFit())
    load = EngineLoad(INFO, costs=costs)
    for name in ("a", "b"):
        load.add_prompt(name, 10, 1.0)
    for at, prompt_tokens in ((2.0, 6), (3.0, 8)):
        load.record(EngineStep(1, 1, 0.0, 0, prompt_tokens), at)
    pairs = [call.args[0].attended_pairs for call in costs.record.call_args_list]
    assert pairs == [6 * 3, 4 * (6 + 2) + 4 * 2]
