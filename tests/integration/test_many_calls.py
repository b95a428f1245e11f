"""A thousand calls at once: each ends with its tokens or with a hint when to come back, and nothing stays behind."""

from __future__ import annotations

import asyncio

import grpc

from runtime.rpc.grpc_server import RETRY_AFTER_KEY
from tests.support.deployment import Deployment, deploy
from tests.support.faults import Stream, fault_config, prompt_of
from tests.support.live_objects import count_live, growth
from tests.support.steps import slow_down

NUM_CALLS = 1000
NUM_PROMPTS = 20
NUM_OUTPUT = 3
STEP_S = 0.05  # so slow that calls come faster than they are served
WITHIN_S = 150.0  # a machine with 24 busy processes beside this one took 29 s


def calls(deployment: Deployment, count: int) -> list[Stream]:
    prompts = [prompt_of(seed, 20 + seed) for seed in range(NUM_PROMPTS)]
    return [
        Stream(deployment.inference, prompts[number % NUM_PROMPTS], NUM_OUTPUT, timeout_s=WITHIN_S)
        for number in range(count)
    ]


async def test_of_a_thousand_calls_each_ends_with_tokens_or_a_retry_hint_and_leaves_nothing_behind() -> None:
    # A first read of a prefix from a peer connects two workers, which stay connected.
    config = fault_config(lease_s=1.0, max_queued=40, max_in_flight_per_worker=2, peer_prefixes="never")
    async with deploy(config, num_prefill=2, num_decode=2) as deployment:
        for stream in calls(deployment, NUM_PROMPTS):
            await stream.right()
        await deployment.settle()
        before = count_live()

        for worker in deployment.workers:
            slow_down(worker, STEP_S)
        streams = calls(deployment, NUM_CALLS)
        for stream in streams:
            await stream.end()
        refused = [stream for stream in streams if stream.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
        served = [stream for stream in streams if stream.code is None]
        others = {(stream.code, stream.details) for stream in {*streams} - {*refused, *served}}
        assert not others
        assert len(refused) > 100
        assert len(served) > 40, "no more than the queue holds"
        for stream in served:
            await stream.right()
        for stream in refused:
            assert stream.num_tokens == 0
            assert int(stream.trailers[RETRY_AFTER_KEY]) > 0

        hint_s = max(int(stream.trailers[RETRY_AFTER_KEY]) for stream in refused) / 1000
        await asyncio.sleep(hint_s)
        await calls(deployment, 1)[0].right()
        await deployment.settle()
        del stream, streams, refused, served
        assert not growth(before, count_live())
