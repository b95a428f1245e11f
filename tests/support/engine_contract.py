"""The contract of `vllm_worker.engine.Engine`. A subclass of `EngineContract` has the fixture `pair`:

    tests/unit/vllm_worker/test_fake_engine.py    two fakes
    tests/vllm/test_engine.py                     two real vLLMs in processes of their own

The tests run in order: the last one kills the reader.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from core.block_hash import root_hash, sequence_hashes
from core.lifecycle import FinishReason
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockStored
from vllm_worker.engine import (
    BlocksChanged,
    EngineDied,
    EngineInfo,
    EngineOutput,
    EngineReport,
    EngineStep,
    HandshakeEnded,
    Prompt,
)
from vllm_worker.fake_engine import ADAPTERS

TIMEOUT_S = 60.0
MAX_TOKENS = 12
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 5},
    "with penalties": {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
}
_numbers = itertools.count()


class Submits(Protocol):
    def submit(self, prompt: Prompt) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def shake_hands(self, peer: str, address: bytes) -> None: ...


class WatchedEngine:
    """A started engine, with its reports since the test began. `report` takes them."""

    info: EngineInfo

    def __init__(self, engine: Submits) -> None:
        self.engine = engine
        self.reports: list[EngineReport] = []
        self._has_more = asyncio.Event()

    def report(self, report: EngineReport) -> None:
        self.reports.append(report)
        self._has_more.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._has_more.clear()
                await self._has_more.wait()

    def submit(self, request: Request, *, offers: bool = False, handoff: bytes = b"") -> str:
        """The engine gets a request id of its own, because earlier tests have used others."""
        request_id = f"{request.request_id}-{next(_numbers)}"
        self.engine.submit(Prompt(request_id, replace(request, request_id=request_id), offers, handoff))
        return request_id

    def outputs(self, request_id: str) -> list[EngineOutput]:
        return [one for one in self.reports if isinstance(one, EngineOutput) and one.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token.token_id for output in self.outputs(request_id) for token in output.tokens]

    def stored_blocks(self) -> set[int]:
        """Sequence hashes of the blocks that the prefix cache has stored."""
        changes = [event for one in self.reports if isinstance(one, BlocksChanged) for event in one.events]
        return {event.sequence_hash for event in changes if isinstance(event, BlockStored)}

    async def ended(self, request_id: str) -> EngineOutput:
        """The last output, once the request has ended."""
        await self.until(lambda: any(one.finish_reason or one.error for one in self.outputs(request_id)))
        return self.outputs(request_id)[-1]

    async def complete(self, request: Request, *, handoff: bytes = b"") -> list[int]:
        request_id = self.submit(request, handoff=handoff)
        last = await self.ended(request_id)
        assert not last.error, last.error
        return self.tokens(request_id)

    async def shake_hands(self, peer: str, address: bytes) -> str:
        """The error, once the handshake has ended."""
        known = len(self.reports)

        def ended() -> list[HandshakeEnded]:
            return [one for one in self.reports[known:] if isinstance(one, HandshakeEnded)]

        self.engine.shake_hands(peer, address)
        await self.until(ended)
        assert [one.peer for one in ended()] == [peer]
        return ended()[0].error

    async def offer(self, request: Request) -> tuple[int, bytes]:
        """The first token, and the hand-off."""
        request_id = self.submit(request, offers=True)
        last = await self.ended(request_id)
        assert last.finish_reason is FinishReason.LENGTH, last
        (token_id,) = self.tokens(request_id)
        return token_id, last.handoff


@dataclass(frozen=True, slots=True)
class EnginePair:
    owner: WatchedEngine  # of a prefill worker
    reader: WatchedEngine  # of a decode worker
    kill_reader: Callable[[], None]


def a_request(number: int, num_tokens: int, *, delivered: list[int] | None = None, **options: Any) -> Request:
    """`delivered`: the tokens behind the prompt, of a request that goes on elsewhere."""
    salt, draws = options.pop("cache_salt", ""), random.Random(number)
    prompt = [draws.randint(1000, 40_000) for _ in range(num_tokens)]
    sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True} | options)
    return Request("contract", (*prompt, *(delivered or ())), num_tokens, sampling, cache_salt=salt)


class EngineContract:
    async def test_tokens_come_in_order_and_the_last_output_alone_ends_the_request(self, pair: EnginePair) -> None:
        reader, request = pair.reader, a_request(1, 40)
        request_id = reader.submit(request)
        last = await reader.ended(request_id)
        assert last.finish_reason is FinishReason.LENGTH
        assert [one.finish_reason for one in reader.outputs(request_id)[:-1]].count(None) == MAX_TOKENS - 1
        assert all(len(one.tokens) == 1 for one in reader.outputs(request_id))
        assert reader.tokens(request_id) == await reader.complete(request)

    async def test_requests_beside_each_other_have_their_own_tokens(self, pair: EnginePair) -> None:
        requests = [a_request(100 + number, 10 + 9 * number) for number in range(4)]
        together = await asyncio.gather(*map(pair.reader.complete, requests))
        assert list(together) == [await pair.reader.complete(request) for request in requests]
        assert len({tuple(tokens) for tokens in together}) == len(requests)

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    @pytest.mark.parametrize("edge", [-1, 0, 1])
    async def test_a_reader_of_an_offer_goes_on_like_an_engine_alone(
        self, pair: EnginePair, edge: int, sampling: str
    ) -> None:
        size = 2 * pair.owner.info.layout.block_size + edge
        request = a_request(200 + edge, size, **SAMPLINGS[sampling])
        first, handoff = await pair.owner.offer(request)
        alone = await pair.reader.complete(replace(request, cache_salt="alone"))
        assert await pair.reader.complete(request, handoff=handoff) == alone
        assert alone[0] == first

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    async def test_a_stream_goes_on_at_any_position_with_the_same_draws(self, pair: EnginePair, sampling: str) -> None:
        options = SAMPLINGS[sampling]
        whole = await pair.reader.complete(a_request(300, 37, **options))
        for count in (1, 5):
            resumed = a_request(300, 37, delivered=whole[:count], **options)
            first, handoff = await pair.owner.offer(resumed)
            assert first == whole[count]
            assert await pair.reader.complete(resumed, handoff=handoff) == whole[count:]

    async def test_another_seed_draws_other_tokens(self, pair: EnginePair) -> None:
        found = [await pair.reader.complete(a_request(301, 37, temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
        assert found[0] == found[2] != found[1]

    async def test_a_stop_token_ends_a_request(self, pair: EnginePair) -> None:
        whole = await pair.reader.complete(a_request(400, 20, temperature=1.0, seed=3))
        end = whole.index(whole[4]) + 1
        request = a_request(400, 20, temperature=1.0, seed=3, stop_token_ids=frozenset({whole[4]}))
        request_id = pair.reader.submit(request)
        last = await pair.reader.ended(request_id)
        assert last.finish_reason is FinishReason.STOP
        assert pair.reader.tokens(request_id) == whole[:end]

    async def test_log_probabilities_come_only_where_they_are_asked_for(self, pair: EnginePair) -> None:
        for num_logprobs in (None, 0):
            request_id = pair.reader.submit(a_request(401, 20, num_logprobs=num_logprobs))
            await pair.reader.ended(request_id)
            tokens = [token for output in pair.reader.outputs(request_id) for token in output.tokens]
            assert all((token.logprob is None) == (num_logprobs is None) for token in tokens)

    async def test_full_blocks_of_a_prompt_are_stored_under_the_hashes_of_routers(self, pair: EnginePair) -> None:
        reader, size = pair.reader, pair.reader.info.layout.block_size
        request = a_request(500, 2 * size + 1, cache_salt="tenant")
        await reader.complete(request)
        stored = sequence_hashes(request.token_ids, size, root_hash("tenant"))
        assert len(stored) == 2

        await reader.until(lambda: reader.stored_blocks() >= set(stored))
        again = await reader.ended(reader.submit(request))
        assert again.num_cached_tokens == 2 * size
        other = await reader.ended(reader.submit(replace(request, cache_salt="other")))
        assert other.num_cached_tokens == 0

    async def test_each_adapter_has_tokens_and_cached_blocks_of_its_own(self, pair: EnginePair) -> None:
        owner, reader, size = pair.owner, pair.reader, pair.reader.info.layout.block_size
        plain = a_request(550, 2 * size + 1, temperature=0.7, seed=9)
        found, stored = {}, {}
        for name in ("", *ADAPTERS):
            request = replace(plain, adapter=name, cache_salt="tenant")
            request_id = reader.submit(request)
            assert (await reader.ended(request_id)).num_cached_tokens == 0
            found[name] = reader.tokens(request_id)
            stored[name] = sequence_hashes(request.token_ids, size, root_hash("tenant", name))
            assert (await reader.ended(reader.submit(request))).num_cached_tokens == 2 * size
            _, handoff = await owner.offer(offered := replace(plain, adapter=name))
            assert await reader.complete(offered, handoff=handoff) == found[name]
        assert len(set(map(tuple, found.values()))) == len(found)
        await reader.until(lambda: reader.stored_blocks() >= {one for hashes in stored.values() for one in hashes})
        together = await asyncio.gather(*(reader.complete(replace(plain, adapter=name)) for name in found))
        assert list(together) == list(found.values())

    async def test_an_adapter_that_an_engine_lacks_fails_its_own_request_alone(self, pair: EnginePair) -> None:
        reader = pair.reader
        other = reader.submit(a_request(560, 20))
        failed = await reader.ended(reader.submit(replace(a_request(561, 20), adapter="blue")))
        assert "no adapter 'blue'" in failed.error
        assert not failed.invalid  # another worker may have it
        assert (await reader.ended(other)).finish_reason is FinishReason.LENGTH

    async def test_steps_tell_the_computed_tokens_and_the_use_of_the_pool(self, pair: EnginePair) -> None:
        reader, request = pair.reader, a_request(600, 50, cache_salt="steps")
        before = len(reader.reports)
        await reader.complete(request)

        def steps() -> list[EngineStep]:
            return [one for one in reader.reports[before:] if isinstance(one, EngineStep)]

        await reader.until(lambda: sum(step.num_decodes for step in steps()) >= MAX_TOKENS - 1)
        assert sum(step.prompt_tokens for step in steps()) == 50
        assert sum(step.num_decodes for step in steps()) == MAX_TOKENS - 1
        assert max(step.kv_usage for step in steps()) > 0.0
        assert all(0.0 <= step.kv_usage <= 1.0 for step in steps())

    async def test_an_abort_ends_one_request_without_another_report_of_it(self, pair: EnginePair) -> None:
        reader = pair.reader
        aborted, other = reader.submit(a_request(700, 20, max_tokens=400)), reader.submit(a_request(701, 20))
        await reader.until(lambda: len(reader.tokens(aborted)) >= 2)
        reader.engine.abort(aborted)
        num_reports = len(reader.outputs(aborted))
        assert (await reader.ended(other)).finish_reason is FinishReason.LENGTH
        await reader.complete(a_request(702, 20))
        assert not any(one.finish_reason or one.error for one in reader.outputs(aborted))
        assert len(reader.outputs(aborted)) <= num_reports + self.most_late_reports

    most_late_reports = 0  # of an aborted request, on the way when it is aborted

    async def test_a_wrong_hand_off_fails_its_own_request_alone(self, pair: EnginePair) -> None:
        reader = pair.reader
        other = reader.submit(a_request(800, 20))
        failed = await reader.ended(reader.submit(a_request(801, 20), handoff=b"not a hand-off"))
        assert failed.error
        assert not failed.invalid  # the request is fine: it is computed again
        assert (await reader.ended(other)).finish_reason is FinishReason.LENGTH

    async def test_a_reader_shakes_hands_without_a_step_and_then_reads(self, pair: EnginePair) -> None:
        owner, reader = pair.owner, pair.reader
        for _ in range(2):  # the second handshake finds the first one
            assert not await reader.shake_hands("owner", owner.info.address)
        reports = [*owner.reports, *reader.reports]  # the last steps of the test before may come late
        assert not any(isinstance(one, EngineOutput) for one in reports)
        assert sum(one.prompt_tokens for one in reports if isinstance(one, EngineStep)) == 0
        _, handoff = await owner.offer(request := a_request(850, 20))
        assert len(await reader.complete(request, handoff=handoff)) == MAX_TOKENS

    async def test_a_handshake_that_fails_costs_no_request(self, pair: EnginePair) -> None:
        owner, reader = pair.owner, pair.reader
        running = reader.submit(a_request(851, 20))
        assert await reader.shake_hands("nobody", b"")
        assert (await reader.ended(running)).finish_reason is FinishReason.LENGTH
        assert not await reader.shake_hands("owner", owner.info.address)

    async def test_kept_kv_that_nobody_reads_ends_with_its_lease(self, pair: EnginePair) -> None:
        owner, prompts = pair.owner, itertools.count(870)

        async def usage() -> float:
            known = len(owner.reports)
            await owner.complete(a_request(next(prompts), 20))
            return max(one.kv_usage for one in owner.reports[known:] if isinstance(one, EngineStep))

        alone = await usage()
        await owner.offer(a_request(860, 400))
        assert await usage() > alone
        async with asyncio.timeout(TIMEOUT_S):
            while await usage() > alone:
                pass

    async def test_the_death_of_an_engine_ends_all_its_requests(self, pair: EnginePair) -> None:
        """Runs last."""
        reader = pair.reader
        names = [reader.submit(a_request(900 + number, 20, max_tokens=400)) for number in range(3)]
        await reader.until(lambda: all(map(reader.tokens, names)))
        pair.kill_reader()
        await reader.until(lambda: any(isinstance(one, EngineDied) for one in reader.reports))
        assert not any(one.finish_reason or one.error for name in names for one in reader.outputs(name))
        first, handoff = await pair.owner.offer(a_request(910, 20))  # the other engine serves on
        assert first >= 0
        assert handoff
