"""Many requests, many faults: each request ends once, right or typed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.processes import Fleet
from tests.support.unreliable_transport import KINDS
from tools.soak import Tally, soak

NUM_CLIENTS = 8
NUM_KILLS = 4


async def test_a_transport_that_fails_one_operation_in_ten() -> None:
    """The first steps of `make soak`."""
    tally, counts = await soak(num_requests=600, fault_rate=0.1, seed=7, num_rolling=100)
    assert (tally.wrong, tally.endless) == (0, 0)
    assert tally.right + tally.typed.total() == 700
    assert tally.right > 680, f"too many gave up: {tally.typed}"
    assert all(counts[kind] for kind in ("drain", *KINDS)), counts
    assert counts["(pulls failed)"] > 0
    assert tally.num_with_prefix > 0
    assert counts["(blocks read from disk)"] > 0


@pytest.mark.slow  # test_processes.py kills workers at each moment of a hand-off
async def test_workers_killed_all_the_time() -> None:
    """Real processes, real UCX, kill -9 of a random worker as soon as the last one is back."""
    tally, over = Tally(), asyncio.Event()
    generator = random.Random(11)

    async def client(fleet: Fleet, number: int) -> None:
        own = random.Random(number)
        while not over.is_set():
            prompt = prompt_of(own.randrange(200), own.randrange(1, 150))
            stream = Stream(fleet.inference, prompt, own.randrange(1, 25), timeout_s=15.0)
            tally.count_stream(await stream.end())

    async with Fleet.start(
        fault_config("nixl"), {"prefill": 2, "decode": 2}, {"prefill": 0.01, "decode": 0.01}
    ) as fleet:
        clients = [asyncio.create_task(client(fleet, number)) for number in range(NUM_CLIENTS)]
        victims = []
        for _ in range(NUM_KILLS):
            await asyncio.sleep(generator.uniform(0.1, 0.5))
            victims.append(generator.choice([*fleet.pool("prefill"), *fleet.pool("decode")]).name)
            await fleet.kill(victims[-1])  # asserts that it was alive and died of it
            await fleet.heal()
        over.set()
        await asyncio.gather(*clients)
        await fleet.settle()
        await serves_on(fleet.inference)
    assert {victim.partition("-")[0] for victim in victims} == {"prefill", "decode"}
    assert tally.wrong == 0
    assert tally.right > 100
    assert sum(count for attempts, count in tally.attempts.items() if attempts > 1) > 0, "no kill hit a request"
    assert tally.typed.total() < 0.05 * tally.right, f"too many gave up: {tally.typed}"
