"""`tandem calibrate`: writes costs for `tandem advise` and `simulate`, from a live fleet or from public points."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from cli.commands.calibration_load import BATCH_OUTPUT_TOKENS, CalibrationLoad, LoadPlan
from cli.commands.fleet_polls import FleetPolls
from cli.screens.terminal import print_line
from core.config import RouterConfig, SchedulerConfig
from core.cost.step_cost import StepCost, StepWork
from core.errors import ConfigError
from simulator.calibration.calibration import (
    MEAN_DELAY,
    NUM_MESSAGES,
    Comparison,
    MeasuredRequest,
    MeasuredWorker,
    compare,
    costs_of,
    simulate_run,
)
from simulator.calibration.costs import Costs, write_costs
from simulator.replay.replay_config import ReplayConfig
from simulator.shells.cost_model import RDMA_400G, LinkCost
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2
from tandem_client.stubs.cluster_pb2 import GetFleetResponse

REFRESH_S = 0.1  # between questions that no router has answered
LIGHT_LOAD = 0.3  # of the busier pool, while requests are measured
DEFAULT_STEP_TOKENS = 8192  # of a GPU that is known from public points only


@dataclass(frozen=True, slots=True)
class Calibration:
    costs: Costs
    comparison: Comparison
    workers: tuple[MeasuredWorker, ...]
    num_checked: int
    assumed: tuple[str, ...]  # sentences, of what the fleet did not show


async def calibrate(
    connection: AsyncClient, plan: LoadPlan, local_prefill: str, kv_token_bytes: int = 0
) -> Calibration:
    """Load the fleet, and compare what it does with a simulation from the costs that its workers have fitted.

    `kv_token_bytes`: 0 = those that the answers show. Raises `CallFailed`, and `ConfigError` for a fleet that cannot be
    calibrated.
    """
    base = ReplayConfig().router
    router = RouterConfig(max_in_flight_per_worker=base.max_in_flight_per_worker, local_prefill=local_prefill)
    async with connection as client:
        model = await client.model()
        if plan.longest_prompt + max(plan.output_tokens, BATCH_OUTPUT_TOKENS) > model.context_length:
            raise ConfigError(f"the context of {model.name} is too short for these prompts: {model.context_length}")
        load = CalibrationLoad(client, plan, model.vocab_size)
        before = await _workers(client)
        num_prefill = sum(worker.is_prefill for worker in before)
        num_decode = len(before) - num_prefill
        if not num_decode:
            raise ConfigError("no decode worker serves")
        fitted_on = await load.fit(num_prefill, num_decode)
        fitted = _costs(model.name, await _workers(client), fitted_on)
        rate = _light_rate(fitted, plan, num_prefill, num_decode)
        checked = await load.check(rate)
        workers = await _workers(client)
        costs = _costs(model.name, workers, fitted_on)
    assumed = []
    if not any(worker.paths for worker in workers):
        assumed.append(f"No path was measured: a link is taken to move {costs.link.bytes_per_s / 1e9:.3g} GB/s.")
    if kv_token_bytes:
        costs = replace(costs, token_bytes=kv_token_bytes)
    elif not any(request.transferred_bytes for request in fitted_on):
        assumed.append(
            f"No answer names bytes that moved: a token is taken to have {costs.token_bytes:,} bytes of KV, as in "
            "Llama-3.1-8B. Give those of your model by --kv-token-bytes."
        )
    comparison = _compare(checked, costs, num_prefill, num_decode, router)
    with_errors = replace(costs, median_error=comparison.median_error, largest_error=comparison.largest_error)
    return Calibration(with_errors, comparison, tuple(workers), len(checked), tuple(assumed))


async def _workers(client: AsyncClient) -> list[MeasuredWorker]:
    polls = FleetPolls("it was calibrated")
    while True:
        fleet = await polls.fleet(client)
        if fleet is not None:
            return workers_of(fleet)
        await asyncio.sleep(REFRESH_S)


def _costs(model: str, workers: Sequence[MeasuredWorker], requests: Sequence[MeasuredRequest]) -> Costs:
    try:
        return costs_of(f"{model}, measured in a live fleet", workers, requests)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _light_rate(costs: Costs, plan: LoadPlan, num_prefill: int, num_decode: int) -> float:
    """Requests/s that keep the busier pool at LIGHT_LOAD. The way outside the workers counts as load."""
    mean_prompt, outside_s = plan.longest_prompt // 2, NUM_MESSAGES * MEAN_DELAY * costs.message_delay_s
    prompt_s = outside_s + costs.prefill.step_s + costs.prefill.prompt_seconds(mean_prompt)
    decode_s = outside_s + plan.output_tokens * costs.decode.seconds(StepWork(1, mean_prompt, 0, 0.0))
    if not num_prefill:
        return LIGHT_LOAD * num_decode / (prompt_s + decode_s)
    return LIGHT_LOAD * min(num_prefill / prompt_s, num_decode / decode_s)


def _compare(
    checked: Sequence[MeasuredRequest], costs: Costs, num_prefill: int, num_decode: int, router: RouterConfig
) -> Comparison:
    base = ReplayConfig()
    config = replace(
        base,
        num_prefill=num_prefill,
        num_decode=num_decode,
        router=router,
        scheduler=SchedulerConfig(
            max_batched_tokens=costs.max_step_tokens,
            max_running=min(base.scheduler.max_running, costs.max_step_tokens),
            max_waiting=base.scheduler.max_waiting,
        ),
    )
    return compare(checked, simulate_run(checked, costs, config))


def workers_of(fleet: GetFleetResponse) -> list[MeasuredWorker]:
    """The serving workers, with their fits and their measured paths."""
    return [
        MeasuredWorker(
            worker_id=worker.worker_id,
            is_prefill=worker.role == worker_pb2.WORKER_ROLE_PREFILL,
            cost=_step_cost(worker.load.step_cost),
            max_step_tokens=worker.load.max_step_tokens,
            paths=_paths(worker.load),
        )
        for worker in fleet.workers
        if worker.state == worker_pb2.WORKER_STATE_SERVING
    ]


def _paths(load: worker_pb2.LoadReport) -> tuple[LinkCost, ...]:
    """A worker with vLLM inside measures none of them, and counts what it has read."""
    found = [LinkCost(path.bytes_per_s, path.latency_ms / 1e3) for path in load.paths if path.bytes_per_s > 0]
    if not found and load.transferred_bytes and load.transfer_seconds:
        found.append(LinkCost(load.transferred_bytes / load.transfer_seconds, RDMA_400G.latency_s))
    return tuple(found)


def _step_cost(wire: worker_pb2.StepCost) -> StepCost:
    return StepCost(wire.step_s, wire.sequence_s, wire.context_s, wire.token_s, wire.pair_s)


def report(found: Calibration, output: Path, console: Console) -> None:
    """Print the fits and the errors, and write the file. Raises `OSError`."""
    console.print(_costs_table([(worker.worker_id, worker.cost) for worker in found.workers]))
    console.print(comparison_table(found.comparison))
    console.print(
        f"{found.num_checked} requests at a light load: the median error of a TTFT or TPOT is "
        f"{found.comparison.median_error:.1%}, the largest {found.comparison.largest_error:.1%}. "
        f"Paths move {found.costs.link.bytes_per_s / 1e9:.3g} GB/s.",
        highlight=False,
    )  # fmt: skip
    for sentence in found.assumed:
        print_line(console, sentence)
    _write(output, found.costs, console)


def comparison_table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("measured", "simulated", "error"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        table.add_row(
            row.name, f"{row.measured_s * 1e3:.1f} ms", f"{row.simulated_s * 1e3:.1f} ms", f"{row.error:+.1%}"
        )
    return table


def _costs_table(costs: Sequence[tuple[str, StepCost]]) -> Table:
    """Milliseconds of what a reader can imagine."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    works = {
        "1 decode": StepWork(1, 512, 0, 0.0),
        "16 decodes": StepWork(16, 16 * 512, 0, 0.0),
        "256 tokens": StepWork(0, 0, 256, 256 * 128.0),
        "1024 tokens": StepWork(0, 0, 1024, 1024 * 512.0),
    }
    for name in works:
        table.add_column(name, justify="right")
    for name, cost in costs:
        table.add_row(name, *(f"{cost.seconds(work) * 1e3:.4g} ms" for work in works.values()))
    table.caption = "predicted time of a step; decodes attend to 512 tokens each"
    return table


# ---- public points


def calibrate_from_points(
    path: Path, filters: tuple[str, str, str, int], token_bytes: int, output: Path, console: Console
) -> None:
    """`filters`: model, system, backend and tensor parallelism. Raises `ConfigError` and `OSError`."""
    from simulator.calibration.public_points import (  # with numpy, which a live calibration does not need
        Filters,
        fit_file,
    )

    try:
        fit = fit_file(path, Filters(*filters))
        costs = Costs(
            source=f"{fit.group}, {fit.num_points} points of {path.name}",
            prefill=fit.cost, decode=fit.cost, link=RDMA_400G,
            token_bytes=token_bytes, max_step_tokens=DEFAULT_STEP_TOKENS,
            median_error=fit.median_error, largest_error=fit.largest_error,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    console.print(f"{fit.group}: {fit.num_points} points", highlight=False, markup=False)
    console.print(_costs_table([("any", fit.cost)]))
    console.print(
        f"The median error of the gap between tokens is {fit.median_error:.1%}, the largest {fit.largest_error:.1%}.",
        highlight=False,
    )
    _write(output, costs, console)


def _write(output: Path, costs: Costs, console: Console) -> None:
    write_costs(output, costs)
    print_line(console, f"wrote {output}; use it with `tandem advise` or `tandem simulate` and --costs {output}")
