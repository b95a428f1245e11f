"""Replays a workload: routers and workers, as their production machines, in virtual time with a cost model.

Arrivals keep the times of the workload, or are scaled to a rate, or to the share of the time in which the prefill
workers would be busy if nothing were cached. A turn of a session arrives at its time, or when the turn before it has
ended, whatever is later: its prompt has the answer to that one. Each request goes to a random router, or, with
`sticky`, each conversation does. A seed decides arrivals, routers, network delays and the noise of step times.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from core.config import TransferConfig
from core.lifecycle import ServiceRole, Stage
from core.request import Request, SamplingParams
from simulator.replay.replay_config import ReplayConfig
from simulator.replay.replay_result import PERCENTS, GapHistogram, ReplayResult, RequestRecord, rising, worst_tenth_mean
from simulator.replay.served import Served, ServedRequests
from simulator.replay.trace import TraceRequest, at_rate, first_turns, infinite_cache_tokens, poisson_arrivals
from simulator.replay.workloads import Workload
from simulator.shells.agent import SimulatedAgent
from simulator.shells.links import StreamLinks
from simulator.shells.router_shell import RouterShell
from simulator.shells.worker_shell import WorkerShell
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.faults import NetworkFaults, ReadFaults
from simulator.virtual.network import Network
from simulator.virtual.world import SimulationError, World

START_S = 1.0  # the workers join and connect before the first request
MAX_EVENTS = 1_000_000_000
SETTLE_S = 30.0  # after the last request, so that every lease is released, or has passed
SAMPLE_S = 1.0  # virtual time between two looks at the use of the pools
PROGRESS_S = 1.0  # ... and between two reports of progress


class Replay:
    def __init__(self, workload: Workload, config: ReplayConfig) -> None:
        self.config = config
        self.world = World(config.seed, max_events=MAX_EVENTS, is_checked=False)
        self.network = Network(self.world, NetworkFaults(delay_s=config.message_delay_s))
        self.workers: dict[str, WorkerShell] = {}
        self._agents: dict[str, SimulatedAgent] = {}
        for role, count in self._first_workers():
            for number in range(count):
                self._add_worker(f"{role.value}-{number}", role)
        self.clients = self._new_clients()
        self.routers = [self._router(f"router-{number}") for number in range(config.num_routers)]
        self.trace = self._arrivals(workload)

    def _router(self, name: str) -> RouterShell:
        router = RouterShell(name, self.world, self.config.router, self.clients, self.config.new_policy)
        router.links = StreamLinks(self.world, router, self.workers, self.config.message_delay_s)
        return router

    def _new_clients(self) -> ServedRequests:
        return ServedRequests(self.world)

    def _first_workers(self) -> list[tuple[ServiceRole, int]]:
        """(role, number) of the workers that serve before the first request."""
        return [(ServiceRole.PREFILL, self.config.num_prefill), (ServiceRole.DECODE, self.config.num_decode)]

    def _add_worker(self, worker_id: str, role: ServiceRole) -> WorkerShell:
        config, is_prefill = self.config, role is ServiceRole.PREFILL
        num_tokens = config.prefill_pool_tokens if is_prefill else config.decode_pool_tokens
        step_cost = config.prefill_cost if is_prefill else config.decode_cost
        spec = WorkerSpec(
            worker_id=worker_id,
            role=role,
            num_blocks=num_tokens // config.layout.block_size,
            layout=config.layout,
            scheduler=config.scheduler,
            transfer=TransferConfig(verify_digests=False, min_bytes_per_s=config.link.bytes_per_s / 1000),
            worker=config.worker,
            step_cost=step_cost,
            known_cost=step_cost,  # as after the warm-up of an engine
            step_noise=config.step_noise,
            link=config.link,
        )
        worker = self.workers[worker_id] = WorkerShell(self.world, spec)
        worker.join(self.network, self._agents, ReadFaults())
        return worker

    def _arrivals(self, workload: Workload) -> list[TraceRequest]:
        """Runs with other numbers of routers and workers have the same arrivals, scaled."""
        config, requests = self.config, workload.requests
        chance = random.Random(f"arrivals of {config.seed}")
        starts = [request.arrives_at for request in first_turns(requests)]
        duration_s = max(starts) - min(starts)
        if config.rate is not None:
            duration_s = len(requests) / config.rate
        elif config.load is not None:
            prefill_s = sum(config.prefill_cost.prompt_seconds(request.num_tokens) for request in requests)
            duration_s = prefill_s / max(1, config.num_prefill) / config.load
        if config.poisson:
            return poisson_arrivals(requests, duration_s, chance)
        return at_rate(requests, duration_s, workload.granularity_s, chance)

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> ReplayResult:
        """`on_progress` gets the number of ended requests now and then, and at the end.

        Raises `SimulationError` if a request has no end, or a worker keeps blocks after the last one; `AssertionError`
        if the check of a machine fails.
        """
        collects_garbage = gc.isenabled()
        gc.disable()  # a replay makes few cycles, and each collection would look at every cached block
        try:
            return self._run(on_progress)
        finally:
            if collects_garbage:
                gc.enable()

    def _run(self, on_progress: Callable[[int], None]) -> ReplayResult:
        chance = random.Random(f"routers of {self.config.seed}")
        of_conversation: dict[int, int] = {}
        latest: dict[int, str] = {}  # session -> its turn before this one
        for number, request in enumerate(self.trace):
            choice = chance.randrange(len(self.routers))
            if self.config.sticky:
                choice = of_conversation.setdefault(request.conversation, choice)
            arrive = partial(self._arrive, number, choice)
            if request.session is not None:
                if request.session in latest:
                    arrive = partial(self.clients.after, latest[request.session], arrive)
                latest[request.session] = f"r{number}"
            self.world.at(START_S + request.arrives_at, arrive)
        self.world.after(PROGRESS_S, partial(self._report_progress, on_progress))
        self.world.after(SAMPLE_S, self._sample_pools)
        if self.config.check_every_s:
            self.world.after(self.config.check_every_s, self._check_again)
        num_turns = max(Counter(r.session for r in self.trace if r.session is not None).values(), default=1)
        longest_s = self.trace[-1].arrives_at + num_turns * self.config.router.default_timeout_s
        self.world.run_until(START_S + longest_s + SETTLE_S, done=self._is_done)
        if not self._is_done():
            num_open = len(self.trace) - self.clients.num_ended
            raise SimulationError(f"seed {self.config.seed}: {num_open} requests have no end")
        self.world.run_until(self.world.now + SETTLE_S)
        self.check()
        self._check_left_clean()
        on_progress(self.clients.num_ended)
        return self._result()

    def _is_done(self) -> bool:
        return self.clients.num_ended == len(self.trace)

    def _arrive(self, number: int, choice: int) -> None:
        traced = self.trace[number]
        request = Request(
            request_id=f"r{number}",
            token_ids=traced.token_ids(),
            num_prompt_tokens=traced.num_tokens,
            sampling=SamplingParams(max_tokens=traced.num_output_tokens, ignore_eos=True),
        )
        router = self.routers[choice]
        self.clients.expect(request, router.name)
        router.arrive(request, self.config.router.default_timeout_s)

    # ---- the laws

    def _check_again(self) -> None:
        self.check()
        self.world.after(self.config.check_every_s, self._check_again)

    def check(self) -> None:
        """Every machine checks itself."""
        for router in self.routers:
            router.machine.check()
        for worker in self._live_workers():
            worker.machine.check()

    def _live_workers(self) -> list[WorkerShell]:
        return [worker for worker in self.workers.values() if worker.alive]

    def _check_left_clean(self) -> None:
        for worker in self._live_workers():
            kept = worker.kept_blocks
            if any(kept.values()) or not worker.machine.idle:
                name = worker.spec.worker_id
                raise SimulationError(f"seed {self.config.seed}: {name} keeps {kept} after the last request")

    # ---- the result

    def _report_progress(self, on_progress: Callable[[int], None]) -> None:
        on_progress(self.clients.num_ended)
        self.world.after(PROGRESS_S, partial(self._report_progress, on_progress))

    def _sample_pools(self) -> None:
        for worker in self._live_workers():
            worker.sample_pool()
        self.world.after(SAMPLE_S, self._sample_pools)

    def _result(self) -> ReplayResult:
        config, served = self.config, self.clients.all
        outcomes = [one.outcome for one in served if one.outcome is not None]
        gaps = GapHistogram()
        for one in served:
            gaps.add_all(one.gaps_s)
        last_token_at = max((one.last_token_at for one in served), default=0.0)
        duration_s = max(last_token_at, served[-1].arrived_at) - START_S
        num_tokens = sum(request.num_tokens for request in self.trace)
        return ReplayResult(
            requests=tuple(_record(one) for one in served),
            slo_ttft_s=config.slo_ttft_s,
            slo_tpot_s=config.slo_tpot_s,
            arrivals_s=served[-1].arrived_at - START_S,
            duration_s=duration_s,
            infinite_hit_ratio=infinite_cache_tokens(self.trace, config.layout.block_size) / num_tokens,
            itl_s={percent: gaps.percentile(percent) for percent in PERCENTS},
            prefill_queue_s=rising(o.prefill.queue_s for o in outcomes if o.prefill is not None),
            router_queue_s=rising(o.timeline.seconds_in(Stage.QUEUE) for o in outcomes),
            transfer_exposed_s=rising(o.decode.transfer_exposed_s for o in outcomes if o.decode is not None),
            prefill_busy=self._of_pool(ServiceRole.PREFILL, lambda worker: worker.executor.busy_s / duration_s),
            decode_busy=self._of_pool(ServiceRole.DECODE, lambda worker: worker.executor.busy_s / duration_s),
            prefill_used=self._of_pool(ServiceRole.PREFILL, lambda worker: worker.mean_used),
            decode_used=self._of_pool(ServiceRole.DECODE, lambda worker: worker.mean_used),
            requests_by_router=tuple(sum(one.router == router.name for one in served) for router in self.routers),
            num_events=self.world.num_events,
        )

    def _of_pool(self, role: ServiceRole, figure: Callable[[WorkerShell], float]) -> tuple[float, ...]:
        return tuple(figure(worker) for worker in self.workers.values() if worker.spec.role is role)


def _record(served: Served) -> RequestRecord:
    outcome, gaps = served.outcome, served.gaps_s
    has_token = served.num_tokens > 0
    record = RequestRecord(
        request_id=served.request_id,
        arrived_at=served.arrived_at - START_S,
        num_prompt_tokens=served.num_prompt_tokens,
        num_output_tokens=served.num_tokens,
        ttft_s=served.first_token_at - served.arrived_at if has_token else None,
        tpot_s=served.tpot_s if gaps else None,
        tbt10_s=worst_tenth_mean(gaps) if gaps else None,
    )
    if outcome is None:
        return replace(record, error="unfinished" if served.end is None else type(served.end).__name__)
    candidate = outcome.candidate
    return replace(
        record,
        cached_tokens=outcome.cached_tokens,
        path=outcome.path.value,
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        predicted_ttft_s=outcome.predicted_first_token_s,
        attempts=outcome.attempts,
    )
