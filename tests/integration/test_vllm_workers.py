"""vLLM workers behind a real router, with fake engines: tokens, faults, cancellation, reports, and every front door."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator

import grpc
import openai
import pytest

from benchmarks.asking import ask
from benchmarks.dataplane.load import ask_worker
from core.errors import TandemError
from core.lifecycle import ServiceRole
from gateway.fleets import Fleets
from protos import kserve_pb2, kserve_pb2_grpc
from tandem_client import CallFailed
from tandem_client.stubs import inference_pb2
from tests.support.deployment import make_request
from tests.support.eager_reads import route_eagerly
from tests.support.gateway import serving_gateway
from tests.support.vllm_workers import FakeEngineFleet, deploy_fakes, expected
from tests.support.waiting import until
from vllm_worker.fake_engine import ADAPTERS, FakeEngine

PROMPT = list(range(1, 41))


@pytest.mark.parametrize(("have_agents", "lengths"), [(False, (12,)), (True, (1, 2, 12))])
async def test_two_pools_give_the_tokens_of_one_engine(have_agents: bool, lengths: tuple[int, ...]) -> None:
    """Engines with agents get both calls at once, and the first token is the owner's."""
    requests = list(itertools.product((1, 15, 16, 17, 40), lengths, (None, 5)))
    async with deploy_fakes(have_agents=have_agents) as fleet:
        for num_tokens, max_tokens, seed in requests:
            sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
            answer = await fleet.generate(PROMPT[:num_tokens], max_tokens, **sampling)
            assert answer.token_ids == expected(PROMPT[:num_tokens], max_tokens, seed)
            assert (answer.path, answer.num_attempts, answer.finish_reason) == ("disaggregated", 1, "length")
        assert fleet.cluster.num_handoffs == len(requests)
        await fleet.settle()
        assert not fleet.cluster.kept  # read, or its lease has ended: a Decode call may be cancelled on its way
        if have_agents:
            prefill, decode = fleet.engines["prefill-0"], fleet.engines["decode-0"]
            decode.loses_loads = True
            for lease_s, place in ((prefill.lease_s, 7), (0.0, 8)):
                prefill.lease_s, prompt = lease_s, [*PROMPT, place]
                answer = await fleet.generate(prompt, 12)
                assert (answer.token_ids, answer.num_attempts) == (expected(prompt, 12), 1)


async def test_turn_two_reads_the_history_from_the_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for an adapter, of which a source does not know."""
    route_eagerly(monkeypatch, late_s=30.0)
    async with deploy_fakes(have_agents=True, step_s=0.02, peer_prefixes="auto") as fleet:
        for model, can_read in (("", True), ("red", False)):
            first = await fleet.generate(PROMPT, 40, model=model)
            await fleet.settle()
            history = [*PROMPT, *first.token_ids, 5, 6, 7]
            fleet.cluster.num_prefix_tokens = 0
            answer = await fleet.generate(history, 12, model=model)
            assert (fleet.cluster.num_prefix_tokens > 0) == can_read, model
            assert answer.token_ids == expected(history, 12, adapter=model)
            await fleet.settle()


async def test_a_first_hand_off_finds_its_handshake_done() -> None:
    async with deploy_fakes(num_prefill=2, num_decode=2) as fleet:
        await fleet.have_met()
        for service in fleet.services.values():  # no handshake is in a figure
            load = service._machine.worker_load()
            assert (load.num_calls, load.num_prefilled_tokens, load.num_sampled_tokens) == (0, 0, 0)
            assert not service._view.cached_blocks
        for place in range(8):
            await fleet.generate([*PROMPT, place])
        assert fleet.cluster.num_handoffs == 8
        assert fleet.cluster.num_late_handshakes == 0
        old = fleet.engines["prefill-0"]
        old.die()
        del fleet.endpoints["prefill-0"]
        new = FakeEngine(fleet.cluster, name="prefill-2", info=old.info, next_token=old._next_token)
        await fleet.add(ServiceRole.PREFILL, 2, new)
        await fleet.have_met()
        await _answers(fleet, 8, 8)
        assert fleet.cluster.num_late_handshakes == 0


async def _answers(fleet: FakeEngineFleet, count: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Half of them sampled."""
    calls = [
        fleet.generate([*PROMPT, place], max_tokens, **({} if place % 2 else {"temperature": 1.0, "seed": place}))
        for place in range(count)
    ]
    return [answer.token_ids for answer in await asyncio.gather(*calls)]


def _expected(count: int, max_tokens: int) -> list[tuple[int, ...]]:
    return [expected([*PROMPT, place], max_tokens, None if place % 2 else place) for place in range(count)]


@pytest.mark.parametrize(("victim", "have_agents"), [("decode-0", True), ("prefill-0", False)])
async def test_the_death_of_an_engine_costs_no_stream_and_no_token(victim: str, have_agents: bool) -> None:
    async with deploy_fakes(num_prefill=2, num_decode=2, step_s=0.01, have_agents=have_agents) as fleet:
        engine = fleet.engines[victim]
        calls = asyncio.create_task(_answers(fleet, 12, 40))
        await until(lambda: engine.num_open, "the victim has a request")
        engine.die()
        error = await asyncio.wait_for(fleet.services[victim].failed(), 30.0)
        assert "killed by a test" in str(error)
        del fleet.endpoints[victim]
        await fleet.publish()
        assert await calls == _expected(12, 40)


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


async def test_the_router_learns_the_prefix_cache_of_the_engine() -> None:
    async with deploy_fakes() as fleet:
        await fleet.generate(PROMPT)
        request = make_request(token_ids=[*PROMPT, 1, 2])
        assert isinstance(request, inference_pb2.GenerateRequest)

        async def cached_tokens() -> int:
            explained = await fleet.client.explain(request)
            return max(candidate.cached_tokens for candidate in explained.candidates)

        for _ in range(600):
            if found := await cached_tokens():
                break
            await asyncio.sleep(0.05)
        assert found == 32
        again = await fleet.generate([*PROMPT, 1, 2])
        assert again.usage.cached_tokens == 32
        assert again.token_ids == expected([*PROMPT, 1, 2], 8)


@pytest.mark.parametrize("have_agents", [False, True])
async def test_a_drained_worker_finishes_its_streams_or_moves_them(have_agents: bool) -> None:
    async with deploy_fakes(num_decode=2, step_s=0.005, have_agents=have_agents) as fleet:
        calls = [asyncio.create_task(fleet.generate([*PROMPT, place], 400)) for place in range(6)]
        decoding = [fleet.engines[name] for name in ("decode-0", "decode-1")]
        await until(lambda: sum(engine.num_decoding for engine in decoding) == 6, "all requests are in decode")
        assert decoding[0].num_decoding
        await fleet.services["decode-0"].drain(60.0)
        assert not fleet.engines["decode-0"].num_open
        answers = await asyncio.gather(*calls)
        assert [answer.token_ids for answer in answers] == [expected([*PROMPT, place], 400) for place in range(6)]
        assert {answer.num_attempts for answer in answers} == {1}
        assert ("migrated" in {answer.path for answer in answers}) == have_agents
        await fleet.settle()


async def test_an_engine_that_does_not_start_says_why() -> None:
    async with deploy_fakes(num_decode=1) as fleet:
        engine = type(fleet.engines["decode-0"])(fleet.cluster)
        engine.refuses_start = True
        with pytest.raises(TandemError, match="does not start"):
            await fleet.add(ServiceRole.DECODE, 1, engine)
        assert (await fleet.generate(PROMPT)).token_ids == expected(PROMPT, 8)


# ---- the front doors, which know nothing of engines


@contextlib.asynccontextmanager
async def openai_client(fleet: FakeEngineFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving_gateway(Fleets([fleet.router.calls])) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="no-key", max_retries=0) as client,
    ):
        yield client


async def test_a_name_of_an_adapter_in_place_of_the_model_reaches_both_engines() -> None:
    async with deploy_fakes() as fleet, openai_client(fleet) as client:
        models = (await client.models.list()).data
        assert [(model.id, (model.model_extra or {})["parent"]) for model in models] == [
            ("fake:tiny", None), ("red", "fake:tiny"), ("green", "fake:tiny")
        ]  # fmt: skip
        for name in ("red", "green", "fake:tiny"):
            answer = await fleet.generate(PROMPT, 12, model=name)
            assert answer.token_ids == expected(PROMPT, 12, adapter=name if name in ADAPTERS else "")
            assert (answer.path, answer.usage.cached_tokens) == ("disaggregated", 0)
            assert (await fleet.generate(PROMPT, 12, model=name)).usage.cached_tokens == 32
            completion = await client.completions.create(
                model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            assert completion.choices[0].text == answer.text
            assert completion.model == name
            assert (await _infer(fleet, name)) == expected(PROMPT, 8, adapter=name if name in ADAPTERS else "")
        with pytest.raises(CallFailed, match="the served model is 'fake:tiny', with the adapters red, green"):
            await fleet.generate(PROMPT, model="blue")
        with pytest.raises(openai.NotFoundError, match="served: fake:tiny, red, green"):
            await client.completions.create(model="blue", prompt=PROMPT)


async def test_a_worker_that_lacks_an_adapter_leaves_the_request_to_another_one() -> None:
    """While a roll changes `[vllm] adapters`, a router may know more than a worker."""
    async with deploy_fakes(num_prefill=0, num_decode=2) as fleet:
        fleet.engines["decode-0"].adapters = ()
        answers = await asyncio.gather(*(fleet.generate([*PROMPT, place], model="red") for place in range(6)))
        assert [answer.token_ids for answer in answers] == [
            expected([*PROMPT, place], 8, adapter="red") for place in range(6)
        ]


async def _infer(fleet: FakeEngineFleet, model: str) -> tuple[int, ...]:
    request = kserve_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="input_ids", datatype="INT32", shape=[1, len(PROMPT)])
    tensor.contents.int_contents.extend(PROMPT)
    for name, value in {"max_tokens": 8, "temperature": 0}.items():
        request.parameters[name].int64_param = value
    request.parameters["ignore_eos"].bool_param = True
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        answer = await kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert answer.model_name == model
    found = next(
        bytes(raw)
        for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        if tensor.name == "output_ids"
    )
    return struct.unpack(f"<{len(found) // 4}i", found)


async def test_the_benchmark_of_a_worker_times_every_token() -> None:
    async with deploy_fakes(num_prefill=0) as fleet:
        prompts = [[number] * 20 for number in range(1, 5)]
        found = await asyncio.to_thread(ask_worker, fleet.endpoints["decode-0"].address, prompts, 9)
        assert [len(times) for times in found] == [9] * 4
        assert all(times == sorted(times) for times in found)
        answer = await ask(fleet.client, PROMPT, 5, 30.0, 0.0)
        assert len(answer.times) == 5
        assert answer.promised_ttft_s is not None
