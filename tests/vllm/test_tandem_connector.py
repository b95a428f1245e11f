"""`TandemConnector` as the transfer of two pools of real vLLM workers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from core.scheduling.block_pool import Column
from tandem_client import AsyncClient, Completion
from tests.support.child_processes import ChildEnded
from tests.support.eager_reads import route_eagerly
from tests.support.vllm_fleet import BLOCK_SIZE, VllmProcess, prompt_of, require_vllm, routed, started_workers
from tests.support.waiting import until

Workers = dict[str, VllmProcess]
MAX_TOKENS = 16
TIMEOUT_S = 180.0
LEASE_S = 3600.0  # no lease ends in these tests


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    require_vllm()
    directory = tmp_path_factory.mktemp("tandem")
    changes = {"vllm": {"connector": "tandem", "lease_s": LEASE_S}}
    with started_workers(directory, ("prefill", 0), ("decode", 0), changes=changes) as started:
        yield started


LENGTHS = [k * BLOCK_SIZE + edge for k in (1, 2, 8) for edge in (-1, 0, 1)] + [1, 50, 333, 700]
PROMPTS = [prompt_of(number, num_tokens) for number, num_tokens in enumerate(LENGTHS)] * 2  # then they are cached


def num_used(ledger: Mapping[Column, int]) -> int:
    return ledger[Column.HELD] + ledger[Column.LEASED] + ledger[Column.INCOMING]


async def answers(client: AsyncClient) -> list[tuple[int, ...]]:
    calls = []
    for place, prompt in enumerate(PROMPTS):
        sampling = {"temperature": 0.0} if place % 2 else {"temperature": 0.8, "seed": place}
        max_tokens = (1, 2, MAX_TOKENS)[place % 3]
        calls.append(client.complete(prompt, TIMEOUT_S, max_tokens=max_tokens, ignore_eos=True, **sampling))  # type: ignore[arg-type]
    done = await asyncio.gather(*calls)
    assert {answer.num_attempts for answer in done} == {1}
    return [answer.token_ids for answer in done]


async def test_two_pools_have_the_tokens_of_one_engine(workers: Workers) -> None:
    async with routed([workers["prefill-0"], workers["decode-0"]], local_prefill="never") as (client, _):
        handed_off = await answers(client)
        answer = await client.complete(PROMPTS[0], TIMEOUT_S, max_tokens=4)
        assert (answer.path, answer.num_attempts) == ("disaggregated", 1)
    log = workers["decode-0"].log.read_text()
    assert "TandemConnector" in log
    assert "vLLM computes the prompt" not in log, "the KV of a prompt did not come"
    async with routed([workers["decode-0"]]) as (client, _):
        assert await answers(client) == handed_off


async def test_a_cancelled_hand_off_leaves_no_block_behind(workers: Workers) -> None:
    """At any moment, and without another request or the end of a lease."""
    pools = [workers["prefill-0"], workers["decode-0"]]
    draws = random.Random(0)
    async with routed(pools, local_prefill="never") as (client, router):
        view = router._shell.view

        def held() -> dict[str, int]:
            records = {worker.name: view.worker(worker.endpoint.service_id) for worker in pools}
            return {name: num_used(record.load.ledger) for name, record in records.items() if record is not None}

        for number in range(12):
            async with client.stream(prompt_of(100 + number, 300), TIMEOUT_S, max_tokens=MAX_TOKENS) as stream:
                try:
                    async with asyncio.timeout(draws.uniform(0.0, 0.6)):
                        async for _ in stream:
                            pass
                except TimeoutError:
                    continue
        await until(lambda: not view.num_in_flight, "the router has open requests", 60.0)
        await until(lambda: held() == {"prefill-0": 0, "decode-0": 0}, "a worker holds blocks", 60.0)


async def test_turn_two_reads_the_history_from_the_decode_worker(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    route_eagerly(monkeypatch, late_s=60.0)
    pools = [workers["prefill-0"], workers["decode-0"]]
    options: dict[str, Any] = {"max_tokens": 2 * BLOCK_SIZE, "ignore_eos": True, "temperature": 0.0}
    async with routed(pools, local_prefill="never", peer_prefixes="auto") as (client, router):
        prompt = prompt_of(900, 200)
        first = await client.complete(prompt, TIMEOUT_S, **options)
        history = [*prompt, *first.token_ids, 5, 6, 7]
        second = await client.complete(history, TIMEOUT_S, **options)
        (ended,) = (entry.ended for entry in router._shell.ring.newest(1, 0))
    assert ended.outcome is not None
    assert ended.outcome.read_tokens >= BLOCK_SIZE
    async with routed([workers["decode-0"]]) as (client, _):
        alone = await client.complete(history, TIMEOUT_S, cache_salt="computed", **options)
    assert second.token_ids == alone.token_ids


@pytest.fixture(scope="module")
def decode_workers(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmProcess]]:
    """Three, of which each test drains one."""
    changes = {"vllm": {"connector": "tandem", "lease_s": LEASE_S}}
    with started_workers(tmp_path_factory.mktemp("more"), ("decode", 1), ("decode", 2), changes=changes) as more:
        yield [workers["decode-0"], *more.values()]


LONG = 160
STREAMS = [prompt_of(500 + number, 40 + 17 * number) for number in range(8)]


async def decode(client: AsyncClient, prompt: list[int], runs: asyncio.Event | None = None) -> Completion:
    async with client.stream(prompt, TIMEOUT_S, max_tokens=LONG, ignore_eos=True, temperature=0.0) as stream:
        num_tokens = 0
        async for piece in stream:
            num_tokens += len(piece.token_ids)
            if runs is not None and num_tokens >= 3:
                runs.set()
    return stream.result


@pytest.mark.parametrize("is_killed", [False, True])
async def test_eight_streams_leave_a_worker_that_drains(decode_workers: list[VllmProcess], is_killed: bool) -> None:
    """`is_killed`: it is killed when some of them have left."""
    source, target = decode_workers[2 if is_killed else 0], decode_workers[1]
    async with routed([source]) as (client, router):
        undisturbed = await asyncio.gather(*(decode(client, prompt) for prompt in STREAMS))
        run = [asyncio.Event() for _ in STREAMS]
        calls = [asyncio.create_task(decode(client, *each)) for each in zip(STREAMS, run, strict=True)]
        await asyncio.gather(*(each.wait() for each in run))
        await router.set_workers([source.endpoint, target.endpoint])
        view = router._shell.view
        await until(lambda: view.worker(target.endpoint.service_id) is not None, "the router knows the target")
        draining = asyncio.create_task(source.drain())
        if is_killed:
            await until(lambda: view.num_moved, "a stream has moved")
            record = view.worker(source.endpoint.service_id)
            assert record is not None
            assert record.dispatched, "the kill comes too late"
            os.kill(source.pid, signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
        if is_killed:
            with pytest.raises(ChildEnded, match="decode-2 ended"):
                await draining
            return
        await draining
        assert {(answer.num_attempts, answer.num_moves, answer.path) for answer in answers} == {(1, 1, "migrated")}
        assert max(answer.recomputed_tokens for answer in answers) < BLOCK_SIZE
        held = view.worker(target.endpoint.service_id)
        assert held is not None
        await until(lambda: not num_used(held.load.ledger), "the target holds no block", 60.0)
