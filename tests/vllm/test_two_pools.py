"""Real vLLM in two pools: the tokens are those of one vLLM, and no fault of a process costs a stream or a token.

`make test-vllm` runs these tests (after `make vllm`). The tests share their workers and run in order: the last ones
kill them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import jsonschema
import psutil
import pytest

from core.lifecycle import ServiceRole
from core.scheduling.block_pool import Column
from router.routing.worker_record import WorkerRecord
from tandem_client import AsyncClient, Completion
from tests.support.vllm_fleet import BLOCK_SIZE, LEASE_S, VllmProcess, prompt_of, require_vllm, routed, started_workers
from tests.support.waiting import until

Workers = dict[str, VllmProcess]
MAX_TOKENS = 16
TIMEOUT_S = 180.0

# Parameters that choose tokens, one for each request in turn.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    require_vllm()
    with started_workers(tmp_path_factory.mktemp("vllm"), ("prefill", 0), ("decode", 0), ("decode", 1)) as started:
        yield started


# Around the edges of blocks; the second half repeats prompts, whose blocks are cached by then.
EDGES = [k * BLOCK_SIZE + edge for k in (1, 2, 4, 8) for edge in (-1, 0, 1)] + [1, 2, 5, 50, 100, 200, 333, 700]
PROMPTS = [prompt_of(number, num_tokens) for number, num_tokens in enumerate(EDGES)] * 2


async def completions(
    client: AsyncClient, prompts: list[list[int]], max_tokens: int, cache_salt: str = ""
) -> list[Completion]:
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": cache_salt}
    calls = [
        client.complete(prompt, TIMEOUT_S, **options, **SAMPLINGS[place % len(SAMPLINGS)])
        for place, prompt in enumerate(prompts)
    ]
    return await asyncio.gather(*calls)


async def answers(client: AsyncClient, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in await completions(client, prompts, max_tokens)]


async def test_a_pair_shakes_hands_before_its_first_hand_off(workers: Workers) -> None:
    """Runs first, with a pair that has not met."""
    owner, reader = workers["prefill-0"], workers["decode-0"]
    assert reader.num_handshakes() == 0
    async with routed([owner, reader], local_prefill="never") as (client, router):
        await until(lambda: reader.num_handshakes() == 1, "they have shaken hands", 30.0)

        def record_of(worker: VllmProcess) -> WorkerRecord:
            record = router._shell.view.worker(worker.endpoint.service_id)
            assert record is not None
            return record

        for worker in (owner, reader):  # which appears in no figure
            record = record_of(worker)
            assert (record.load.num_calls, record.load.num_sampled_tokens, record.load.ledger[Column.HELD]) == (0, 0, 0)
        answer = await client.complete(PROMPTS[0], TIMEOUT_S, max_tokens=4)
        assert answer.path == "disaggregated"
        assert reader.num_handshakes() == 1
        await until(lambda: record_of(reader).load.transferred_bytes > 0, "what it has read is counted", 30.0)
        assert record_of(owner).load.transferred_bytes == 0


async def test_forty_prompts_have_the_tokens_of_one_engine(workers: Workers) -> None:
    async with routed([workers["decode-0"]]) as (client, _):
        alone = await answers(client, PROMPTS)
    async with routed([workers["prefill-0"], workers["decode-1"]], local_prefill="never") as (client, _):
        assert await answers(client, PROMPTS) == alone
        answer = await client.complete(PROMPTS[0], TIMEOUT_S, max_tokens=4)
        assert (answer.path, answer.num_attempts) == ("disaggregated", 1)
    log = workers["decode-1"].log.read_text()
    assert "VerifiedConnector" in log
    assert "vLLM recomputes" not in log, "a hand-off was not verified"


async def test_min_tokens_and_log_probabilities_count_from_the_true_prompt(workers: Workers) -> None:
    prompt, options = PROMPTS[5], {"max_tokens": 12, "min_tokens": 8, "temperature": 0.9, "seed": 5, "logprobs": 2}
    found = []
    for names in (["decode-0"], ["prefill-0", "decode-1"]):
        async with routed([workers[name] for name in names], local_prefill="never") as (client, _):
            found.append(await client.complete(prompt, TIMEOUT_S, **options))  # type: ignore[arg-type]
    alone, split = found
    assert split.token_ids == alone.token_ids
    assert len(split.token_ids) >= 8
    assert [one.token_id for one in split.logprobs] == list(split.token_ids)
    for one, other in zip(split.logprobs, alone.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(one.top) == 2


SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["town", "size"],
    "additionalProperties": False,
}


async def test_outputs_have_their_format_and_the_tokens_of_one_engine(workers: Workers) -> None:
    form = {"json_schema": SCHEMA}
    found = []
    for names in (["decode-0"], ["prefill-0", "decode-1"]):
        async with routed([workers[name] for name in names], local_prefill="never") as (client, _):
            calls = [
                client.complete(
                    PROMPTS[place], TIMEOUT_S, max_tokens=60, output_format=form, **SAMPLINGS[place % len(SAMPLINGS)]
                )
                for place in range(10)
            ]
            found.append(await asyncio.gather(*calls))
    alone, split = found
    assert [answer.token_ids for answer in split] == [answer.token_ids for answer in alone]
    ended = [answer for answer in split if answer.finish_reason == "stop"]
    assert len(ended) >= 5
    for answer in ended:
        jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize("num_requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_cancelled_requests_leave_no_block_behind(workers: Workers, num_requests: int) -> None:
    """vLLM tells the use of its pool with a step, so one more request shows what the others have left."""
    draws, at_a_time = random.Random(0), asyncio.Semaphore(60)

    async def one(client: AsyncClient, number: int) -> None:
        async with at_a_time:
            await ask(client, number)

    async def ask(client: AsyncClient, number: int) -> None:
        prompt, cancelled = prompt_of(1000 + number, draws.randint(40, 300)), number % 3 == 0
        async with client.stream(prompt, TIMEOUT_S, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
            limit = draws.uniform(0.0, 2.0) if cancelled else TIMEOUT_S
            try:
                async with asyncio.timeout(limit):
                    async for _ in stream:
                        pass
            except TimeoutError:
                return

    pools = [workers["prefill-0"], workers["decode-0"]]
    async with routed(pools, local_prefill="never") as (client, router):
        view = router._shell.view
        await asyncio.gather(*(one(client, number) for number in range(num_requests)))
        await until(lambda: not view.num_in_flight, "the router has open requests", 30.0)
        await asyncio.sleep(LEASE_S + 2.0)
        most = {worker.name: 0 for worker in pools}
        async with client.stream(prompt_of(2000, 40), TIMEOUT_S, max_tokens=40, ignore_eos=True) as stream:
            async for _ in stream:
                for worker in pools:
                    record = view.worker(worker.endpoint.service_id)
                    assert record is not None
                    most[worker.name] = max(most[worker.name], record.load.ledger[Column.HELD])
        assert 0 < most["decode-0"] <= 4, most  # 80 tokens in blocks of 32, and one in reserve
        assert most["prefill-0"] <= 4, most


@pytest.fixture(scope="module")
def all_workers(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Enough for a fault of each."""
    with started_workers(tmp_path_factory.mktemp("more"), ("prefill", 1), ("decode", 2)) as more:
        yield workers | more


def computes(record: WorkerRecord | None) -> bool:
    """A report of the worker has open calls of this router; that of a decode worker also sequences in decode."""
    if record is None or len(record.dispatched) == len(record.on_the_way):
        return False
    return record.role is ServiceRole.PREFILL or record.load.num_decoding > 0


@contextlib.asynccontextmanager
async def twelve_streams(
    workers: Workers, role: str, fault: str
) -> AsyncIterator[tuple[VllmProcess, Callable[[], Awaitable[None]]]]:
    """A worker of this role that computes some of the streams, and a check to await after its fault.

    The router chooses the workers of the streams, so the victim is one that it has chosen. Each fault has a cache salt
    of its own: with cached prompts, a prefill worker would have next to nothing to compute.
    """
    prompts = [prompt_of(3000 + number, 150 + number) for number in range(12)]
    alive = [worker for worker in workers.values() if worker.alive]
    pool = [worker for worker in alive if worker.endpoint.role.value == role]
    async with routed(alive, local_prefill="never" if role == "prefill" else "auto") as (client, router):
        view = router._shell.view
        undisturbed = await answers(client, prompts, 48)
        calls = asyncio.create_task(completions(client, prompts, 48, cache_salt=f"{role} {fault}"))

        def computing() -> list[VllmProcess]:
            return [worker for worker in pool if computes(view.worker(worker.endpoint.service_id))]

        async def go_on() -> None:
            found = await calls
            assert [answer.token_ids for answer in found] == undisturbed
            assert max(answer.num_attempts for answer in found) > 1, "the fault hit no request"

        await until(computing, f"no {role} worker computes a request", 30.0)
        yield computing()[0], go_on


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_twelve_streams_survive_a_worker_that_stands_still(all_workers: Workers, role: str) -> None:
    async with twelve_streams(all_workers, role, "stands still") as (victim, go_on):
        stopped = psutil.Process(victim.pid)
        stopped.suspend()
        try:
            await until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the victim is stopped")
            await go_on()
            assert stopped.status() == psutil.STATUS_STOPPED, "it did not stay stopped"
        finally:
            stopped.resume()


@pytest.mark.parametrize(
    ("role", "part"), [("decode", "engine"), ("prefill", "engine"), ("decode", "worker"), ("prefill", "worker")]
)
async def test_twelve_streams_survive_a_kill(all_workers: Workers, role: str, part: str) -> None:
    """Runs last: nobody starts the victim again. Two prefill workers and two of three decode workers end here."""
    async with twelve_streams(all_workers, role, f"{part} killed") as (victim, go_on):
        os.kill(victim.engine().pid if part == "engine" else victim.pid, signal.SIGKILL)
        await go_on()
        await until(lambda: not victim.group(), "processes of the victim still run", 20.0)
