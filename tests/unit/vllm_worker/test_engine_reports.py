"""`step_of` makes an `EngineStep` of vLLM's statistics of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.kv_layout import KVLayout
from vllm_worker.engine import EngineInfo
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
