"""Goodput of a shape: the highest rate at which nine of ten requests keep the limits of TTFT and TPOT."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise

from simulator.advice.pools import Fleet, Job, Served
from simulator.advice.shapes import CostModel, Scenario, Shape, highest_rate
from simulator.replay.replay_result import WANTED_ATTAINMENT, goodput90
from simulator.replay.trace import cached_tokens
from simulator.replay.workloads import Workload

BLOCK_SIZE = 16  # of the prefix caches
COUNTED = 0.4, 0.85  # shares of a run: before, the fleet fills up; after, it runs empty
MIN_RUN, MAX_RUN = 1000, 10_000  # requests of a run
RUN_LIVES = 6.0  # a run lasts this many times as long as a request at its limits
CLOSE_ENOUGH = 0.08  # of the rate, between the two rates that goodput90 interpolates
NO_TIME_S = 1e-9
KEEPS_UP = 0.9  # of the requests that came in the counted time, those that ended in it; else the fleet falls behind
MAX_TRIALS = 16  # of one goodput
RUN_CHUNKS = 200_000  # of the prompts of a run: runs of long prompts are shorter
MAX_WORK = 50_000_000  # passes of workers in an answer of `tandem advise`, about 1 us each; beyond: `AdviceRefused`
REQUEST_WORK = 8  # passes that take as long as one request outside of them
STEP, LONG_STEP = 1.12, 1.3  # from a rate to the next one: near an expected goodput, and else


class AdviceRefused(ValueError):
    """The question has no honest answer: too few requests, too much work, or a number of GPUs that has no shape."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in their order. Any rate scales the gaps, so that the bursts of the log stay."""

    name: str
    jobs: Sequence[Job]
    gaps: Sequence[float]  # seconds before each job; empty: a Poisson process
    rate: float | None  # requests/s of the log

    @property
    def mean(self) -> Job:
        count = len(self.jobs)
        prompt = sum(job.num_prompt_tokens for job in self.jobs) // count
        cached = min(prompt - 1, sum(job.num_cached_tokens for job in self.jobs) // count)
        return Job(prompt, max(0, cached), max(1, sum(job.num_output_tokens for job in self.jobs) // count))

    def with_hits(self, share: float) -> Load:
        if share == 1.0:
            return self
        jobs = [replace(job, num_cached_tokens=int(job.num_cached_tokens * share)) for job in self.jobs]
        return replace(self, jobs=jobs)

    def run(self, fleet: Fleet, rate: float, num_requests: int, seed: int) -> list[Served]:
        """A stretch of the log that the seed chooses, from its end on to its beginning if needed."""
        chance = random.Random(f"stretch of {seed}")
        first = chance.randrange(len(self.jobs))
        jobs = islice(cycle(self.jobs), first, first + num_requests)
        if self.gaps:
            gaps = list(islice(cycle(self.gaps), first, first + num_requests))
            scale = num_requests / (rate * max(sum(gaps), NO_TIME_S))
        else:
            gaps, scale = [chance.expovariate(1.0) for _ in range(num_requests)], 1.0 / rate
        return fleet.run(jobs, accumulate(gap * scale for gap in gaps))


def load_of(workload: Workload, *, is_random: bool) -> Load:
    """`is_random`: the times of the workload mean nothing, and arrivals are a Poisson process."""
    requests, chance = workload.requests, random.Random("times within an interval of the log")
    cached = cached_tokens(requests, BLOCK_SIZE)
    jobs = [Job(r.num_tokens, hits, r.num_output_tokens) for r, hits in zip(requests, cached, strict=True)]
    times = sorted(r.arrives_at + chance.uniform(0.0, workload.granularity_s) for r in requests)
    lasts_s = times[-1] - times[0]
    rate = (len(requests) - 1) / lasts_s if lasts_s > 0.0 else None
    if is_random or rate is None:
        return Load(workload.name, jobs, (), rate)
    return Load(workload.name, jobs, [1.0 / rate, *(then - now for now, then in pairwise(times))], rate)


@dataclass(frozen=True, slots=True)
class Trial:
    """A shape at one rate."""

    rate: float
    attainment: float
    late_share: float  # of requests: the first token came too late
    slow_share: float  # ... the tokens after it came too slowly
    busy: tuple[float, float]  # share of the time, of the first pool and of the decode pool
    prompt_share: float  # of the busy time of the first pool
    pool_used: float  # most KV that was reserved on a worker, as a share


@dataclass(frozen=True, slots=True)
class Goodput:
    rate: float  # requests/s; 0 if the limits hold at no load
    beyond: Trial  # at the lowest tried rate that misses
    tried: tuple[tuple[float, float], ...]  # rate and attainment, by rising rate


class Search:
    """One number of trials for all: a run of requests costs some ten milliseconds."""

    def __init__(self, load: Load, model: CostModel, slo: Slo) -> None:
        self.load, self.model, self.slo = load, model, slo
        self.mean = load.mean
        self.num_trials = self.work = 0

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise AdviceRefused(
                f"the answer needs more than {MAX_WORK:,} passes of simulated workers: ask for fewer GPUs, shorter "
                "limits, or shorter prompts"
            )

    def trial(self, shape: Shape, scenario: Scenario, rate: float) -> Trial:
        self.num_trials += 1
        fleet = self.model.fleet(shape, scenario)
        life_s = self.slo.ttft_s + self.mean.num_output_tokens * self.slo.tpot_s
        new_tokens = self.mean.num_prompt_tokens - self.mean.num_cached_tokens
        if MIN_RUN * new_tokens > MAX_WORK * shape.max_step_tokens:  # a single run would be too long
            self._spend(MAX_WORK + 1)
        most = RUN_CHUNKS * shape.max_step_tokens / new_tokens
        num_requests = int(max(MIN_RUN, min(MAX_RUN, most, RUN_LIVES * rate * life_s)))
        served = self.load.with_hits(scenario.hits).run(fleet, rate, num_requests, scenario.seed)
        self._spend(REQUEST_WORK * num_requests + sum(worker.num_passes for worker in (*fleet.first, *fleet.decode)))
        counted = served[int(COUNTED[0] * len(served)) : int(COUNTED[1] * len(served))]
        late = sum(one.ttft_s > self.slo.ttft_s for one in counted)
        slow = sum(one.tpot_s is not None and one.tpot_s > self.slo.tpot_s for one in counted)
        kept_share = sum(one.within(self.slo.ttft_s, self.slo.tpot_s) for one in counted) / len(counted)
        first_at, last_at = counted[0].arrived_at, counted[-1].arrived_at
        ended_share = sum(first_at <= one.ended_at <= last_at for one in served) / len(counted)
        if ended_share < KEEPS_UP:  # limits that are long beside the run hide a queue that grows without end
            kept_share = min(kept_share, ended_share)
        lasts_s = max(one.ended_at for one in served)
        first_busy = sum(worker.busy_s for worker in fleet.first)
        decode_busy = sum(worker.busy_s for worker in fleet.decode)
        count = len(counted)
        return Trial(
            rate, kept_share, late / count, slow / count,
            (first_busy / len(fleet.first) / lasts_s, decode_busy / max(1, len(fleet.decode)) / lasts_s),
            sum(worker.prompt_s for worker in fleet.first) / max(first_busy, NO_TIME_S),
            max(worker.most_reserved / worker.kind.pool_tokens for worker in (*fleet.first, *fleet.decode)),
        )  # fmt: skip

    def goodput(self, shape: Shape, scenario: Scenario, near: float | None = None) -> Goodput:
        """`near`: about what is expected, to begin with."""
        rate, step = (near, STEP) if near else (highest_rate(shape, self.model, self.mean, self.slo.tpot_s), LONG_STEP)
        low, high, least = 0.0, math.inf, rate / 200.0
        trials: list[Trial] = []
        while len(trials) < MAX_TRIALS and (high == math.inf or (high > least and high - low > CLOSE_ENOUGH * high)):
            trials.append(self.trial(shape, scenario, rate))
            if trials[-1].attainment >= WANTED_ATTAINMENT:
                low = max(low, rate)
            else:
                high = min(high, rate)
            step *= STEP
            rate = low * step if high == math.inf else (low + high) / 2.0 if low else high / step
        missed = [trial for trial in trials if trial.attainment < WANTED_ATTAINMENT]
        beyond = min(missed, key=lambda trial: trial.rate) if missed else trials[-1]
        tried = tuple(sorted((trial.rate, trial.attainment) for trial in trials))
        return Goodput(goodput90(tried), beyond, tried)
