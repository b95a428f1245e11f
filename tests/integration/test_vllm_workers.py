"""vLLM workers behind a real router, with fake engines: tokens, faults, cancellation, reports."""

from __future__ import annotations

import asyncio

import pytest

from core.config import WorkerConfig
from core.errors import TandemError
from core.lifecycle import ServiceRole
from tandem_client import CallFailed
from tandem_client.stubs import inference_pb2
from tests.support.deployment import make_request
from tests.support.vllm_workers import FakeFleet, deploy_fakes, expected
from tests.support.waiting import until

PROMPT = list(range(1, 41))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40])
async def test_two_pools_give_the_tokens_of_one_engine(num_tokens: int, seed: int | None) -> None:
    sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
    async with deploy_fakes() as fleet:
        answer = await fleet.generate(PROMPT[:num_tokens], 12, **sampling)
        assert answer.token_ids == expected(PROMPT[:num_tokens], 12, seed)
        assert (answer.path, answer.num_attempts, answer.finish_reason) == ("disaggregated", 1, "length")
        assert fleet.cluster.num_handoffs == 1
        assert not fleet.cluster.kept  # it was read
        await fleet.settle()


async def test_a_prompt_without_a_prefill_worker_runs_on_the_decode_worker() -> None:
    async with deploy_fakes(num_prefill=0) as fleet:
        answer = await fleet.generate(PROMPT)
        assert answer.token_ids == expected(PROMPT, 8)
        assert answer.path == "local"


async def _answers(fleet: FakeFleet, count: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Half of them sampled."""
    calls = [
        fleet.generate([*PROMPT, place], max_tokens, **({} if place % 2 else {"temperature": 1.0, "seed": place}))
        for place in range(count)
    ]
    return [answer.token_ids for answer in await asyncio.gather(*calls)]


def _expected(count: int, max_tokens: int) -> list[tuple[int, ...]]:
    return [expected([*PROMPT, place], max_tokens, None if place % 2 else place) for place in range(count)]


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_the_death_of_an_engine_costs_no_stream_and_no_token(victim: str) -> None:
    async with deploy_fakes(num_prefill=2, num_decode=2, step_s=0.01) as fleet:
        engine = fleet.engines[victim]
        calls = asyncio.create_task(_answers(fleet, 12, 40))
        await until(lambda: engine.num_open, "the victim has a request")
        engine.die()
        error = await asyncio.wait_for(fleet.services[victim].failed(), 5.0)
        assert "killed by a test" in str(error)
        del fleet.endpoints[victim]
        await fleet.publish()
        assert await calls == _expected(12, 40)


async def test_a_load_that_fails_is_computed_again() -> None:
    async with deploy_fakes() as fleet:
        fleet.engines["decode-0"].loses_loads = True
        call = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: fleet.cluster.num_handoffs, "a hand-off is there")
        fleet.engines["decode-0"].loses_loads = False
        answer = await call
        assert answer.token_ids == expected(PROMPT, 8)


async def test_an_engine_that_hangs_ends_its_worker() -> None:
    worker = WorkerConfig(step_timeout_s=0.3)
    async with deploy_fakes(num_decode=2, worker=worker, step_s=0.01) as fleet:
        calls = asyncio.create_task(_answers(fleet, 8, 40))
        victim = fleet.engines["decode-1"]
        await until(lambda: victim.num_open, "the victim has a request")
        victim.hangs = True
        error = await asyncio.wait_for(fleet.services["decode-1"].failed(), 5.0)
        assert "step_timeout_s" in str(error)
        assert await calls == _expected(8, 40)


async def test_a_cancelled_stream_ends_in_both_engines() -> None:
    async with deploy_fakes(step_s=0.01) as fleet:
        async with fleet.client.stream(PROMPT, max_tokens=400, ignore_eos=True) as stream:
            num_tokens = 0
            async for piece in stream:
                num_tokens += len(piece.token_ids)
                if num_tokens >= 3:  # the decode worker has sent some
                    break
        await fleet.settle()
        assert fleet.engines["decode-0"].num_aborted == 1


async def test_a_deadline_ends_the_request_of_the_engine() -> None:
    async with deploy_fakes(step_s=0.05) as fleet:
        with pytest.raises(CallFailed) as caught:
            await fleet.client.complete(PROMPT, 0.5, max_tokens=400, ignore_eos=True)
        assert caught.value.code.name == "DEADLINE_EXCEEDED"
        await fleet.settle()


async def test_the_router_learns_the_prefix_cache_of_the_engine() -> None:
    async with deploy_fakes() as fleet:
        await fleet.generate(PROMPT)
        request = make_request(token_ids=[*PROMPT, 1, 2])
        assert isinstance(request, inference_pb2.GenerateRequest)

        async def cached_tokens() -> int:
            explained = await fleet.client.explain(request)
            return max(candidate.cached_tokens for candidate in explained.candidates)

        for _ in range(100):
            if found := await cached_tokens():
                break
            await asyncio.sleep(0.05)
        assert found == 32
        again = await fleet.generate([*PROMPT, 1, 2])
        assert again.usage.cached_tokens == 32
        assert again.token_ids == expected([*PROMPT, 1, 2], 8)


async def test_a_drained_worker_finishes_its_streams() -> None:
    async with deploy_fakes(num_decode=2, step_s=0.005) as fleet:
        calls = asyncio.create_task(_answers(fleet, 6, 40))
        await until(lambda: fleet.engines["decode-0"].num_open, "the worker has a request")
        await fleet.services["decode-0"].drain(10.0)
        assert not fleet.engines["decode-0"].num_open
        assert await calls == _expected(6, 40)


async def test_an_engine_that_does_not_start_says_why() -> None:
    async with deploy_fakes(num_decode=1) as fleet:
        engine = type(fleet.engines["decode-0"])(fleet.cluster)
        engine.refuses_start = True
        with pytest.raises(TandemError, match="does not start"):
            await fleet.add(ServiceRole.DECODE, 1, engine, WorkerConfig())
        assert (await fleet.generate(PROMPT)).token_ids == expected(PROMPT, 8)
