"""Costs from the measurements of a live run, and the same run simulated with them.

The workers of a live fleet fit the time of their steps and measure their paths. The rest of a request's TTFT is the way
between client, router and worker: its median is divided among the messages of a simulated request.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.cost.step_cost import PRIOR, StepCost, StepWork
from simulator.calibration.costs import Costs
from simulator.replay.replay import Replay
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import ReplayResult, percentile, rising
from simulator.replay.trace import TraceRequest
from simulator.replay.workloads import Workload
from simulator.shells.cost_model import RDMA_400G, LinkCost, layout_8b

BLOCK_SIZE = 16
NUM_MESSAGES = 2  # of a simulated request before its first token
MEAN_DELAY = 1.5  # of a simulated message, in `message_delay_s`
TYPICAL = StepWork(num_decodes=4, decode_context=2048, prefill_tokens=256, attended_pairs=256 * 256 / 2)
MIN_TOKEN_BYTES = 4
UNKNOWN_TOKEN_BYTES = layout_8b(1).token_bytes  # of a fleet in which no KV has moved


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """A finished request of a live run, as its client saw it."""

    sent_at: float  # seconds
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    tpot_s: float | None  # None with one output token
    in_worker_s: float  # of the TTFT: in the queue and in the steps of the worker that computed the prompt
    transferred_bytes: int = 0

    @property
    def outside_s(self) -> float:
        return max(0.0, self.ttft_s - self.in_worker_s)


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """The report of a worker in the live run."""

    worker_id: str
    is_prefill: bool
    cost: StepCost
    max_step_tokens: int
    paths: tuple[LinkCost, ...] = ()  # over which the worker reads; only measured ones

    @property
    def is_fitted(self) -> bool:
        return self.cost != PRIOR


def costs_of(source: str, workers: Sequence[MeasuredWorker], requests: Sequence[MeasuredRequest]) -> Costs:
    """Of each role the typical worker, the median path, and the median way outside the workers.

    Raises `ValueError` without a decode worker, without a request, or if no worker of a role has fitted its steps.
    """
    prefill = [worker for worker in workers if worker.is_prefill]
    decode = [worker for worker in workers if not worker.is_prefill]
    if not decode or not requests:
        raise ValueError("a calibration needs a decode worker and finished requests")
    decode_cost = _typical_cost("decode", decode)
    delay_s = statistics.median(request.outside_s for request in requests) / (NUM_MESSAGES * MEAN_DELAY)
    return Costs(
        source=source,
        prefill=_typical_cost("prefill", prefill) if prefill else decode_cost,
        decode=decode_cost,
        link=_median_path([path for worker in workers for path in worker.paths]),
        token_bytes=_token_bytes(requests),
        max_step_tokens=min(worker.max_step_tokens for worker in workers),
        message_delay_s=delay_s,
    )


def _typical_cost(role: str, workers: Sequence[MeasuredWorker]) -> StepCost:
    fitted = sorted((w.cost for w in workers if w.is_fitted), key=lambda cost: cost.seconds(TYPICAL))
    if not fitted:
        raise ValueError(f"no {role} worker has fitted the time of its steps: send it more requests")
    return fitted[(len(fitted) - 1) // 2]


def _median_path(paths: Sequence[LinkCost]) -> LinkCost:
    if not paths:
        return RDMA_400G
    return LinkCost(
        bytes_per_s=statistics.median(path.bytes_per_s for path in paths),
        latency_s=statistics.median(path.latency_s for path in paths),
    )


def _token_bytes(requests: Sequence[MeasuredRequest]) -> int:
    """KV of one token, from the longest prompt that moved whole: the partial last block matters least there."""
    moved = [request for request in requests if request.transferred_bytes]
    if not moved:
        return UNKNOWN_TOKEN_BYTES
    longest = max(moved, key=lambda request: (request.num_prompt_tokens, request.transferred_bytes))
    token_bytes = longest.transferred_bytes / longest.num_prompt_tokens
    return max(MIN_TOKEN_BYTES, round(token_bytes / MIN_TOKEN_BYTES) * MIN_TOKEN_BYTES)


def simulate_run(requests: Sequence[MeasuredRequest], costs: Costs, config: ReplayConfig) -> ReplayResult:
    """The requests at the times when they were sent, with prompts that share nothing.

    The costs replace those of `config`. The records of the result are in the order of `sent_at`.
    """
    own_costs = replace(
        config,
        layout=costs.layout(BLOCK_SIZE),
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        link=costs.link,
        message_delay_s=costs.message_delay_s,
        rate=None,
        load=None,
    )
    return Replay(Workload("calibration", _as_trace(requests)), own_costs).run()


def _as_trace(requests: Sequence[MeasuredRequest]) -> list[TraceRequest]:
    trace: list[TraceRequest] = []
    num_blocks = 0
    ordered = sorted(requests, key=lambda request: request.sent_at)
    for request in ordered:
        last = num_blocks + -(-request.num_prompt_tokens // BLOCK_SIZE)
        at, hash_ids = request.sent_at - ordered[0].sent_at, tuple(range(num_blocks, last))
        trace.append(TraceRequest(at, hash_ids, request.num_prompt_tokens, request.num_output_tokens, BLOCK_SIZE))
        num_blocks = last
    return trace


@dataclass(frozen=True, slots=True)
class Row:
    """A time of the live run and of the simulation, in seconds."""

    name: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """As a share of the measured time; negative if the simulation is too fast."""
        return self.simulated_s / self.measured_s - 1.0 if self.measured_s else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]  # percentiles of TTFT and TPOT
    median_error: float  # of the TTFT and TPOT of single requests
    largest_error: float

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def compare(requests: Sequence[MeasuredRequest], simulated: ReplayResult) -> Comparison:
    """Raises `ValueError` if a simulated request failed."""
    if simulated.num_failed:
        raise ValueError(f"{simulated.num_failed} simulated requests failed")
    ordered = sorted(requests, key=lambda request: request.sent_at)
    pairs: dict[str, list[tuple[float, float]]] = {
        "TTFT": _pairs(ordered, simulated, lambda one: one.ttft_s),
        "TPOT": _pairs(ordered, simulated, lambda one: one.tpot_s),
    }
    errors = rising(abs(guess / true - 1.0) for found in pairs.values() for true, guess in found if true > 0.0)
    rows = tuple(
        Row(f"{name} p{percent}", percentile(rising(t for t, _ in found), percent),
            percentile(rising(s for _, s in found), percent))
        for name, found in pairs.items()
        for percent in (50, 90)
    )  # fmt: skip
    return Comparison(rows, percentile(errors, 50), errors[-1] if errors else 0.0)


def _pairs(
    requests: Sequence[MeasuredRequest], simulated: ReplayResult, time_of: Callable[..., float | None]
) -> list[tuple[float, float]]:
    """(measured, simulated) of each request that has the time in both runs."""
    both = zip(requests, simulated.requests, strict=True)
    times = ((time_of(measured), time_of(record)) for measured, record in both)
    return [(true, guess) for true, guess in times if true is not None and guess is not None]
