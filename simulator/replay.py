"""Replays a trace: routers and workers, as their production machines, in virtual time with a cost model.

The rate of the trace is scaled so that the prefill workers would be busy for the share `load` of the time if nothing
were cached. Each request goes to a random router, or, with `sticky`, each conversation does. A seed decides arrivals,
routers and network delays.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from core.block_pool import Column
from core.config import RouterConfig, SchedulerConfig, TransferConfig, WorkerConfig
from core.lifecycle import ServiceRole, Stage
from core.request import Request, SamplingParams
from core.step_cost import StepCost
from simulator.agent import ReadFaults, SimulatedAgent
from simulator.cost_model import H100_8B, RDMA_400G, LinkCost, layout_8b
from simulator.network import Network, NetworkFaults
from simulator.replay_router import ReplayRouter, Served
from simulator.replay_worker import ReplayWorker, ReplayWorkerSpec
from simulator.trace import TraceRequest, at_rate, infinite_cache_tokens
from simulator.world import SimulationError, World

START_S = 1.0  # the workers join and connect before the first request
GRANULARITY_S = 3.0  # of the times in the traces of Mooncake
MAX_EVENTS = 100_000_000
SETTLE_S = 2.0  # after the last request, so that every lease is released


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    num_routers: int = 1
    num_prefill: int = 4
    num_decode: int = 4
    prefill_pool_tokens: int = 1_000_000  # of each worker
    decode_pool_tokens: int = 400_000  # 52 GB of 128 KiB each
    block_size: int = 64
    load: float = 0.8
    sticky: bool = False
    seed: int = 0
    check_every_s: float = 20.0  # virtual seconds between two checks of every machine
    step_cost: StepCost = H100_8B
    link: LinkCost = RDMA_400G
    message_delay_s: float = 0.0005  # of a message between router and worker; 0.5 to 2.5 times as long
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=partial(RouterConfig, max_in_flight_per_worker=1024))
    scheduler: SchedulerConfig = field(
        default_factory=partial(SchedulerConfig, max_batched_tokens=8192, max_running=256, max_waiting=4096)
    )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Times in seconds; percentiles over the requests that finished."""

    num_requests: int
    num_failed: int
    num_retried: int
    duration_s: float  # virtual, from the first arrival to the last token
    hit_ratio: float  # cached prompt tokens / prompt tokens
    infinite_hit_ratio: float  # the same for one cache without a limit
    ttft_s: tuple[float, ...]  # rising, one for each request
    tpot_s: tuple[float, ...]  # likewise, for requests with at least two tokens
    prefill_queue_s: tuple[float, ...]  # likewise, in the queue of a prefill worker
    router_queue_s: tuple[float, ...]
    transfer_exposed_s: tuple[float, ...]
    prefill_busy: tuple[float, ...]  # share of the duration, by worker
    decode_busy: tuple[float, ...]
    requests_by_router: tuple[int, ...]
    num_events: int

    @property
    def hit_share(self) -> float:
        return self.hit_ratio / self.infinite_hit_ratio if self.infinite_hit_ratio else 0.0


def percentile(rising: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 without values."""
    return rising[min(len(rising) - 1, int(len(rising) * percent / 100))] if rising else 0.0


def imbalance(busy: Sequence[float]) -> float:
    """The busiest worker beside the mean; 1 is even."""
    return max(busy) / statistics.fmean(busy) if any(busy) else 1.0


class Replay:
    def __init__(self, trace: Sequence[TraceRequest], config: ReplayConfig) -> None:
        """Raises `ValueError` for an empty trace."""
        if not trace:
            raise ValueError("the trace holds no request")
        self.config = config
        self.world = World(config.seed, max_events=MAX_EVENTS)
        self.network = Network(self.world, NetworkFaults(delay_s=config.message_delay_s))
        self.workers = {spec.worker_id: ReplayWorker(self.world, self.network, spec) for spec in self._specs()}
        agents: dict[str, SimulatedAgent] = {}
        for worker in self.workers.values():
            worker.agent.join(self.world, self.network, agents, ReadFaults())
        self.routers = [
            ReplayRouter(f"router-{number}", self.world, self.network, config.router, self.workers, self._count_end)
            for number in range(config.num_routers)
        ]
        chance = random.Random(f"arrivals of {config.seed}")  # separate, so that every number of routers has the same
        self.trace = at_rate(trace, self._duration_s(trace), GRANULARITY_S, chance)
        self.served: list[Served] = []
        self._num_ended = 0

    def _specs(self) -> list[ReplayWorkerSpec]:
        config, layout = self.config, layout_8b(self.config.block_size)
        pools = [(ServiceRole.PREFILL, config.num_prefill, config.prefill_pool_tokens)]
        pools += [(ServiceRole.DECODE, config.num_decode, config.decode_pool_tokens)]
        return [
            ReplayWorkerSpec(
                worker_id=f"{role.value}-{number}",
                role=role,
                num_blocks=num_tokens // config.block_size,
                layout=layout,
                scheduler=config.scheduler,
                transfer=TransferConfig(verify_digests=False, min_bytes_per_s=config.link.bytes_per_s / 1000),
                worker=config.worker,
                step_cost=config.step_cost,
                link=config.link,
            )
            for role, count, num_tokens in pools
            for number in range(count)
        ]

    def _duration_s(self, trace: Sequence[TraceRequest]) -> float:
        prefill_s = sum(self.config.step_cost.prompt_seconds(request.num_tokens) for request in trace)
        return prefill_s / self.config.num_prefill / self.config.load

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> ReplayResult:
        """`on_progress` gets the number of ended requests now and then.

        Raises `SimulationError` if a request has no end, or a worker keeps blocks after the last one; `AssertionError`
        if the check of a machine fails.
        """
        chance = random.Random(f"routers of {self.config.seed}")
        of_conversation: dict[int, int] = {}
        for number, request in enumerate(self.trace):
            choice = chance.randrange(len(self.routers))
            if self.config.sticky:
                choice = of_conversation.setdefault(request.conversation, choice)
            self.world.at(START_S + request.arrives_at, partial(self._arrive, number, choice))
        self.world.after(self.config.check_every_s, partial(self._check_again, on_progress))
        timeout_s = self.config.router.default_timeout_s
        self.world.run_until(START_S + self.trace[-1].arrives_at + timeout_s + SETTLE_S, done=self._is_done)
        if not self._is_done():
            raise SimulationError(f"seed {self.config.seed}: {len(self.trace) - self._num_ended} requests have no end")
        self.world.run_until(self.world.now + SETTLE_S)
        self.check()
        self._check_left_clean()
        return self._result()

    def _is_done(self) -> bool:
        return self._num_ended == len(self.trace)

    def _arrive(self, number: int, choice: int) -> None:
        traced = self.trace[number]
        request = Request(
            request_id=f"r{number}",
            token_ids=traced.token_ids(),
            num_prompt_tokens=traced.num_tokens,
            sampling=SamplingParams(max_tokens=traced.num_output_tokens, ignore_eos=True),
        )
        self.served.append(self.routers[choice].arrive(request))

    def _count_end(self) -> None:
        self._num_ended += 1

    # ---- the laws

    def _check_again(self, on_progress: Callable[[int], None]) -> None:
        self.check()
        on_progress(self._num_ended)
        self.world.after(self.config.check_every_s, partial(self._check_again, on_progress))

    def check(self) -> None:
        """Every machine checks itself."""
        for router in self.routers:
            router.machine.check()
        for worker in self.workers.values():
            worker.machine.check()

    def _check_left_clean(self) -> None:
        for worker in self.workers.values():
            ledger = worker.pool.ledger()
            used = {column.value: ledger[column] for column in (Column.HELD, Column.LEASED, Column.INCOMING)}
            if any(used.values()) or not worker.machine.idle:
                raise SimulationError(
                    f"seed {self.config.seed}: {worker.worker_id} keeps {used} after the last request"
                )

    # ---- the result

    def _result(self) -> ReplayResult:
        finished = [(served, served.outcome) for served in self.served if served.outcome is not None]
        num_tokens = sum(served.request.num_prompt_tokens for served, _ in finished)
        infinite = infinite_cache_tokens(self.trace, self.config.block_size)
        duration_s = max((served.last_token_at for served in self.served), default=START_S) - START_S
        in_prefill = [outcome.prefill for _, outcome in finished if outcome.prefill is not None]
        in_decode = [outcome.decode for _, outcome in finished if outcome.decode is not None]
        return ReplayResult(
            num_requests=len(self.served),
            num_failed=len(self.served) - len(finished),
            num_retried=sum(outcome.attempts > 1 for _, outcome in finished),
            duration_s=duration_s,
            hit_ratio=sum(outcome.cached_tokens for _, outcome in finished) / max(1, num_tokens),
            infinite_hit_ratio=infinite / sum(request.num_tokens for request in self.trace),
            ttft_s=_rising(served.first_token_at - served.arrived_at for served, _ in finished),
            tpot_s=_rising(served.tpot_s for served, _ in finished if served.num_tokens > 1),
            prefill_queue_s=_rising(result.queue_s for result in in_prefill),
            router_queue_s=_rising(outcome.timeline.seconds_in(Stage.QUEUE) for _, outcome in finished),
            transfer_exposed_s=_rising(result.transfer_exposed_s for result in in_decode),
            prefill_busy=self._busy(ServiceRole.PREFILL, duration_s),
            decode_busy=self._busy(ServiceRole.DECODE, duration_s),
            requests_by_router=tuple(sum(s.router == router.name for s in self.served) for router in self.routers),
            num_events=self.world.num_events,
        )

    def _busy(self, role: ServiceRole, duration_s: float) -> tuple[float, ...]:
        return tuple(worker.busy_s / duration_s for worker in self.workers.values() if worker.spec.role is role)


def _rising(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(values))
