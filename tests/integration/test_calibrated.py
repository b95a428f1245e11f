"""The simulator is calibrated: it predicts the median TTFT and TPOT of a live run from what the workers of the run fit.

The only test that compares times, so `make soak` runs it, and `make test` does not. A slow machine slows the fit as
much as the requests. A machine that other programs slow for a while does not: then equal requests take unequal times,
and the run says nothing. So a run may be repeated, and a wrong prediction fails in a quiet run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cli.commands.calibrate import Calibration, calibrate, comparison_table
from cli.commands.calibration_load import LoadPlan
from core.config import SchedulerConfig
from model_files.builtin_configs import RANDOM_CONFIGS
from tandem_client import AsyncClient
from tests.support.deployment import deploy, tiny_config

WITHIN = 0.2
NUM_RUNS = 3
QUIET = 1.5  # TPOT at the 90th percentile beside the median, at a light load; about 1.1 if nothing else runs
# Steps take some milliseconds on a core, far more than the messages between client, router and workers.
SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 64,
}
PLAN = LoadPlan(longest_prompt=256, output_tokens=16, largest_batch=4, num_checked=40, seed=0, timeout_s=60.0)


async def calibrated(seed: int) -> Calibration:
    base = tiny_config("random:calibrated")
    config = replace(
        base,
        engine=replace(base.engine, kv_memory_mb=256),
        scheduler=SchedulerConfig(max_batched_tokens=256, max_running=32),
    )
    async with deploy(config) as deployment:
        return await calibrate(AsyncClient(deployment.router_address), replace(PLAN, seed=seed), "never")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_simulation_predicts_the_medians_of_a_live_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM_CONFIGS, "calibrated", replace(RANDOM_CONFIGS["qwen2-tiny"], **SIZES))
    console = Console(width=80)
    missed = []
    for seed in range(NUM_RUNS):
        found = (await calibrated(seed)).comparison
        console.print(comparison_table(found))
        errors = [found.row(name).error for name in ("TTFT p50", "TPOT p50")]
        if all(abs(error) <= WITHIN for error in errors):
            return
        if found.row("TPOT p90").measured_s <= QUIET * found.row("TPOT p50").measured_s:
            missed.append(errors)
    if not missed:
        pytest.skip("other programs slow this machine: equal requests take unequal times")
    pytest.fail(f"medians of TTFT and TPOT are off by {missed}")
