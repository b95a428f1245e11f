"""The tokens of one set of requests, by the path that the requests take through an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.config import SchedulerConfig
from core.request import Request
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence as EngineSequence
from engine.runner import Runner, run_step

Streams = dict[str, list[int]]  # output tokens, by request id


def streams(
    runner: Runner, requests: Sequence[Request], budget: int = 512, max_running: int = 32, num_blocks: int = 0
) -> tuple[Streams, int]:
    """The tokens, and the number of preemptions. `num_blocks`: of the pool; 0 = all that the runner has."""
    config = SchedulerConfig(budget, max_running, len(requests), slo_itl_ms=60_000.0)
    scheduler = Scheduler(config, BlockPool(num_blocks or runner.num_blocks), runner.layout.block_size, frozenset())
    tokens: Streams = {}
    for arrival, request in enumerate(requests):
        scheduler.add(EngineSequence(request, arrival))
        tokens[request.request_id] = list(request.token_ids[request.num_prompt_tokens :])
    while (plan := scheduler.schedule()) is not None:
        for event in scheduler.complete_step(run_step(runner, plan)):
            assert event.index == len(tokens[event.sequence_id])
            tokens[event.sequence_id].append(event.token.token_id)
    return tokens, scheduler.num_preemptions


def alone(runner: Runner, requests: Sequence[Request]) -> Streams:
    """Each request in an empty engine that computes no guessed tokens: the reference."""
    found: Streams = {}
    for request in requests:
        undisturbed = replace(request, sampling=replace(request.sampling, speculation=False))
        found |= streams(runner, [undisturbed])[0]
    return found


def preempted(runner: Runner, requests: Sequence[Request], num_blocks: int) -> Streams:
    """The requests in a pool too small for those that run."""
    found, num_preemptions = streams(runner, requests, max_running=16, num_blocks=num_blocks)
    assert num_preemptions, "nothing was preempted"
    return found


def resumed(runner: Runner, requests: Sequence[Request], expected: Mapping[str, list[int]]) -> Streams:
    """Each request begins anew behind the tokens that it has delivered: one, two and so on up to all but one."""
    again = []
    for number, request in enumerate(requests):
        delivered = expected[request.request_id][: 1 + number % (request.sampling.max_tokens - 1)]
        again.append(replace(request, token_ids=(*request.token_ids, *delivered)))
    return streams(runner, again)[0]


def engine_paths(num_blocks: int) -> dict[str, Callable[[Runner, Sequence[Request]], Streams]]:
    """Every way through one engine, apart from `alone` and `resumed`. `num_blocks`: of a pool that is too small."""
    return {
        "batches of 32": lambda runner, requests: streams(runner, requests)[0],
        "batches of 8": lambda runner, requests: streams(runner, requests, max_running=8)[0],
        "chunks of 16 tokens": lambda runner, requests: streams(runner, requests, budget=16, max_running=8)[0],
        "preempted": lambda runner, requests: preempted(runner, requests, num_blocks),
    }
