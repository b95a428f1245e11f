"""A router with 64 prefill and 64 decode workers: the cost of each decision, and of the reports.

`decision_cost` posts requests with prompts of 8,000 tokens to a `RouterMachine`. A third of the prompts is cached deep
on a few workers, a third shares its first block with every worker, a third is cached nowhere. The cost is the CPU time
of the thread from the arrival of a request until its calls are decided, with packing and hashing of the prompt.

`report_cost` runs the reports of 128 workers in a child process (benchmarks/dataplane/reports.py). A second child
process, the router, follows them with production `WorkerLink`s. The cost is the CPU time of the router.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import NamedTuple

from benchmarks.dataplane.processes import cores
from benchmarks.dataplane.reports import BLOCK_SIZE, LOAD, NUM_WORKERS, ROLES, agent
from benchmarks.processes import ChildProcess
from benchmarks.report import Line, Report
from core.block_hash import sequence_hashes
from core.config import RouterConfig
from core.request import Request, SamplingParams
from router.requests import events
from router.requests.machine import RouterMachine

PROMPT_TOKENS = 8000
NUM_CONVERSATIONS = 96
HOLDERS = 3  # workers of each role that have cached a conversation
SHARED = list(range(BLOCK_SIZE))  # the tokens of the first block of two thirds of the prompts
MOST_MS = {50: 0.5, 99: 1.0}  # percentile -> goal
BUSY_PERCENT = {False: 5.0, True: 30.0}  # of a core, for the reports of idle and of busy workers
REPORTS_S = 5.0

Seconds = dict[str, list[float]]  # CPU time of decisions, by kind of prompt


class ReportCost(NamedTuple):
    share_of_core: float  # of the router's process
    reports_per_s: float


def measure(report: Report, repeats: int) -> None:
    fleet = f"{NUM_WORKERS} + {NUM_WORKERS} workers"
    prompt = f"a prompt of {PROMPT_TOKENS:,} tokens, {fleet}"
    costs = [decision_cost() for _ in range(repeats)]
    every = [sorted(second for of_kind in cost.values() for second in of_kind) for cost in costs]
    for percent, most in MOST_MS.items():
        value = statistics.median(seconds[len(seconds) * percent // 100] for seconds in every)
        report.add(Line(f"a decision for {prompt}, p{percent}", value * 1e3, "ms", most=most))
    for kind in costs[0]:
        kind_s = statistics.median(statistics.median(cost[kind]) for cost in costs)
        report.add(Line(f"a decision for {prompt}, {kind}, p50", kind_s * 1e3, "ms"))
    for is_busy, most in BUSY_PERCENT.items():
        found = [report_cost(is_busy) for _ in range(repeats)]
        per_s = statistics.median(cost.reports_per_s for cost in found)
        words = f"reports of {'busy' if is_busy else 'idle'} {fleet}, {per_s:,.0f} a second"
        share = statistics.median(cost.share_of_core for cost in found)
        report.add(Line(f"{words}: CPU of the router", 100 * share, "% of a core", most=most))


def decision_cost(num_decisions: int = 1500, num_prompts: int = 30) -> Seconds:
    """Each prompt of each kind is priced several times, under other loads. The queue is empty."""
    chance = random.Random(1)
    machine = RouterMachine(RouterConfig(max_in_flight_per_worker=1024), lambda: chance.getrandbits(128))
    prompts = fill(machine, chance, num_prompts)
    seconds: Seconds = {kind: [] for kind in prompts}
    gc.collect()
    for number in range(num_decisions):
        kind = chance.choice(list(prompts))
        token_ids = chance.choice(prompts[kind])
        request = Request(f"r{number}", token_ids, PROMPT_TOKENS, SamplingParams(max_tokens=64))
        arrived = events.RequestArrived(request, 1.0, 100.0)
        started = time.thread_time()
        actions = machine.handle(arrived, 1.0)
        seconds[kind].append(time.thread_time() - started)
        assert actions, "the request found no worker"
        if number % 4:  # some stay, so that the loads differ
            machine.handle(events.ClientCancelled(request.request_id), 1.0)
    return seconds


def fill(machine: RouterMachine, chance: random.Random, num_prompts: int) -> dict[str, list[tuple[int, ...]]]:
    """Join the workers with loads and caches. Returns prompts of each kind."""

    def draw_prompt(shared: bool) -> tuple[int, ...]:
        drawn = [chance.randrange(1000, 128_000) for _ in range(PROMPT_TOKENS)]
        return tuple(SHARED + drawn[BLOCK_SIZE:] if shared else drawn)

    conversations = [draw_prompt(shared=True) for _ in range(NUM_CONVERSATIONS)]
    known = [sequence_hashes(prompt, BLOCK_SIZE) for prompt in conversations]
    for role in ROLES:
        caches: list[set[int]] = [{known[0][0]} for _ in range(NUM_WORKERS)]
        for chain in known:
            for worker in chance.sample(range(NUM_WORKERS), HOLDERS):
                caches[worker].update(chain[: chance.randrange(len(chain) // 2, len(chain) + 1)])
        for number, cached in enumerate(caches):
            load = replace(LOAD, num_queued_tokens=chance.randrange(20_000), num_calls=chance.randrange(64))
            joined = events.WorkerJoined(f"{role.value}-{number}", role, agent(number), tuple(cached), load)
            machine.handle(joined, 1.0)
    return {
        "cached deep": conversations[:num_prompts],
        "first block cached": [draw_prompt(shared=True) for _ in range(num_prompts)],
        "not cached": [draw_prompt(shared=False) for _ in range(num_prompts)],
    }


def report_cost(is_busy: bool, seconds: float = REPORTS_S) -> ReportCost:
    command = [sys.executable, "-m", "benchmarks.dataplane.reports"]
    measured, other = cores()
    fleet, router = ChildProcess("fleet", command, core=other), ChildProcess("router", command, core=measured)
    try:
        addresses = fleet.call("start", is_busy=is_busy)
        return ReportCost(*router.call("follow", addresses=addresses, seconds=seconds))
    finally:
        router.stop()
        fleet.stop()
