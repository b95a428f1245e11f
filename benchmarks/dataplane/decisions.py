"""What a decision of the router costs: the CPU time from the arrival of a prompt of 8,000 tokens until its calls are
decided, with packing and hashing, among 64 prefill and 64 decode workers, which may read prefixes from each other.
Measured in this process.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import replace

from benchmarks.report import Line, Report, percentile
from core.block_hash import sequence_hashes
from core.config import RouterConfig
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole, WorkerState
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerLoad
from router.requests import events
from router.requests.machine import RouterMachine

BLOCK_SIZE = 16

NUM_WORKERS = 64  # of each role
PROMPT_TOKENS = 8000
NUM_BLOCKS = 8192  # of a worker
NUM_DECISIONS, NUM_PROMPTS, NUM_CONVERSATIONS = 1500, 30, 96
HOLDERS = 3  # workers of each role that have cached a conversation
SHARED = list(range(BLOCK_SIZE))  # the tokens of the first block of two thirds of the prompts
DECISION_MOST_MS = {50: 0.5, 99: 1.0}  # percentile -> goal
LAYOUT = KVLayout(model="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, block_size=BLOCK_SIZE, head_dim=128)
LOAD = WorkerLoad(WorkerState.SERVING, ledger=dict.fromkeys(Column, NUM_BLOCKS // 5), gives_prefixes=True)

Seconds = dict[str, list[float]]  # of decisions, by kind of prompt


def decisions(report: Report, repeats: int) -> None:
    prompt = f"a prompt of {PROMPT_TOKENS:,} tokens, {NUM_WORKERS} + {NUM_WORKERS} workers"
    costs = [decision_cost() for _ in range(repeats)]
    every = [[second for of_kind in cost.values() for second in of_kind] for cost in costs]
    for percent, most in DECISION_MOST_MS.items():
        value = statistics.median(percentile(seconds, percent / 100) for seconds in every)
        report.add(Line(f"a decision for {prompt}, p{percent}", value * 1e3, "ms", most=most))
    for kind in costs[0]:
        kind_s = statistics.median(statistics.median(cost[kind]) for cost in costs)
        report.add(Line(f"a decision for {prompt}, {kind}, p50", kind_s * 1e3, "ms"))


def decision_cost() -> Seconds:
    """Each prompt of each kind is priced several times, under other loads. The queue is empty."""
    chance = random.Random(1)
    machine = RouterMachine(
        RouterConfig(max_in_flight_per_worker=1024, peer_prefixes="auto"), lambda: chance.getrandbits(128)
    )
    prompts = fill(machine, chance)
    seconds: Seconds = {kind: [] for kind in prompts}
    gc.collect()
    for number in range(NUM_DECISIONS):
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


def fill(machine: RouterMachine, chance: random.Random) -> dict[str, list[tuple[int, ...]]]:
    """Join the workers with loads and caches. Returns prompts of each kind."""

    def draw_prompt(shared: bool) -> tuple[int, ...]:
        drawn = [chance.randrange(1000, 128_000) for _ in range(PROMPT_TOKENS)]
        return tuple(SHARED + drawn[BLOCK_SIZE:] if shared else drawn)

    conversations = [draw_prompt(shared=True) for _ in range(NUM_CONVERSATIONS)]
    known = [sequence_hashes(prompt, BLOCK_SIZE) for prompt in conversations]
    for role in (ServiceRole.PREFILL, ServiceRole.DECODE):
        caches: list[set[int]] = [{known[0][0]} for _ in range(NUM_WORKERS)]
        for chain in known:
            for worker in chance.sample(range(NUM_WORKERS), HOLDERS):
                caches[worker].update(chain[: chance.randrange(len(chain) // 2, len(chain) + 1)])
        for number, cached in enumerate(caches):
            load = replace(LOAD, num_queued_tokens=chance.randrange(20_000), num_calls=chance.randrange(64))
            agent = AgentAddress(f"worker-{number}", number + 1, b"", 0, NUM_BLOCKS, LAYOUT, 10.0)
            joined = events.WorkerJoined(f"{role.value}-{number}", role, agent, tuple(cached), load)
            machine.handle(joined, 1.0)
    return {
        "cached deep": conversations[:NUM_PROMPTS],
        "first block cached": [draw_prompt(shared=True) for _ in range(NUM_PROMPTS)],
        "not cached": [draw_prompt(shared=False) for _ in range(NUM_PROMPTS)],
    }
