"""kill -9 or SIGSTOP of one of two routers under streams: each stream goes on at the other router, by content.

The routers are processes. The workers are in the process of the test: their steps are slow, so that the fault comes in
mid-stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
import pytest_asyncio

from cli import compose
from kv_transfer.transports.memory_transport import MemoryFabric
from tandem_client import AsyncClient, Client, credentials
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.deployment import Answer, Deployment, deploy, make_request, trailers_of
from tests.support.faults import Prompt, expected, fault_config, prompt_of
from tests.support.gateway import over_the_wire, serving_gateway
from tests.support.processes import Fleet
from tests.support.steps import slow_down
from tests.support.waiting import until
from text.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
NUM_OUTPUT = 150
BLOCK_SIZE = 16
TIMEOUT_S = 60.0


@dataclass
class Scene:
    deployment: Deployment
    fleet: Fleet

    @property
    def addresses(self) -> list[str]:
        """The one to be killed comes first."""
        return [self.fleet.services[name].endpoint.address for name in ("router-0", "router-1")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "FABRIC", MemoryFabric())
        config = fault_config(local_prefill="auto")
        async with deploy(config) as deployment:
            slow_down(deployment.decode[0], 0.02)
            config = replace(config, router=replace(config.router, port=0))
            workers = list(deployment.endpoints.values())
            async with Fleet.start(config, {"router": 2}, others=workers) as fleet:
                yield Scene(deployment, fleet)


@pytest_asyncio.fixture(loop_scope="module")
async def scene(running: Scene) -> AsyncIterator[Scene]:
    yield running
    await running.deployment.settle()
    await running.fleet.heal()


@dataclass
class Read(Answer):
    """What the caller of a client gets."""

    prompt: Prompt = ()
    num_started: int = 0

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        super().take(response)
        self.num_started += response.HasField("started")

    def is_right(self) -> None:
        assert self.token_ids == expected(self.prompt, NUM_OUTPUT)
        assert self.indices == list(range(NUM_OUTPUT))
        assert self.num_started == 1
        assert self.finished.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert self.finished.usage.prompt_tokens == len(self.prompt)
        assert self.finished.usage.completion_tokens == NUM_OUTPUT


def long_request(prompt: Prompt) -> inference_pb2.GenerateRequest:
    return make_request(token_ids=prompt, max_tokens=NUM_OUTPUT)


async def read(client: AsyncClient, prompt: Prompt, into: Read) -> None:
    async for response in client.generate(long_request(prompt), TIMEOUT_S):
        into.take(response)


def read_blocking(addresses: list[str], prompt: Prompt, into: Read) -> None:
    with Client(addresses) as client:
        for response in client.generate(long_request(prompt), TIMEOUT_S):
            into.take(response)


async def knows_the_caches(scene: Scene, prompts: list[Prompt]) -> None:
    """The other router has the reports of the blocks of these prompts."""
    async with asyncio.timeout(TIMEOUT_S), AsyncClient(scene.addresses[1]) as client:
        for prompt in prompts:
            wanted = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
            while max(way.cached_tokens for way in (await client.explain(long_request(prompt))).candidates) < wanted:
                await asyncio.sleep(0.01)


async def test_streams_of_a_killed_router_go_on_at_the_other_one_with_at_most_one_block_computed_again(
    scene: Scene,
) -> None:
    reads = [Read(prompt=prompt_of(seed)) for seed in range(NUM_STREAMS)]
    async with AsyncClient(scene.addresses) as client:
        reading = [asyncio.create_task(read(client, each.prompt, each)) for each in reads[1:]]
        blocking = asyncio.to_thread(read_blocking, scene.addresses, reads[0].prompt, reads[0])
        reading.append(asyncio.create_task(blocking))
        await until(lambda: all(len(each.token_ids) >= 5 for each in reads), "all streams run")
        await knows_the_caches(scene, [each.prompt for each in reads])
        assert not any(each.end for each in reads), "a stream had ended: nothing was tested"
        await scene.fleet.kill("router-0")
        await asyncio.gather(*reading)
    for each in reads:
        each.is_right()
        assert 1 <= each.finished.recomputed_tokens <= BLOCK_SIZE
        assert each.finished.request_id.startswith("router-0."), "the name of the request changed"


async def test_another_grpc_client_gets_a_status_to_retry_and_resumes_by_itself(scene: Scene) -> None:
    prompt, token_ids = prompt_of(60), []
    started = inference_pb2.Started()

    async def follow_until_killed() -> None:
        async for response in scene.fleet.inference.Generate(long_request(prompt), timeout=TIMEOUT_S):
            if response.HasField("started"):
                started.CopyFrom(response.started)
            token_ids.extend(response.tokens.token_ids)
            if len(token_ids) >= 5 and scene.fleet.services["router-0"].alive:
                await scene.fleet.kill("router-0")

    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await follow_until_killed()
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "tandem-retryable" not in trailers_of(broken.value), "a router gave the status"
    request = long_request(prompt)
    request.request_id, request.sampling.seed = started.request_id, started.seed
    request.stop.max_tokens, request.resume[:] = started.max_tokens, token_ids
    other = inference_pb2_grpc.InferenceStub(scene.fleet.services["router-1"].channel)  # type: ignore[no-untyped-call]
    async for response in other.Generate(request, timeout=TIMEOUT_S):
        token_ids += response.tokens.token_ids
    assert token_ids == expected(prompt, NUM_OUTPUT)


class HttpStreams:
    """Streams of a gateway: each prompt, its text so far, and the line that ended it."""

    def __init__(self, url: str, first_seed: int) -> None:
        self._url, self._first_seed = url, first_seed
        self.texts: list[list[str]] = []
        self.ends: list[str] = []

    async def follow(self) -> None:
        found: list[str] = []
        self.texts.append(found)
        prompt = prompt_of(self._first_seed + len(self.texts) - 1)
        body = {"prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S) as http,
            http.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    found += [choice["text"] for choice in event["choices"]]
                elif line:
                    self.ends.append(line)

    async def start(self) -> list[asyncio.Task[None]]:
        """Streams that all run."""
        tasks = [asyncio.create_task(self.follow()) for _ in range(NUM_STREAMS)]
        await until(lambda: self.texts and all(len(found) >= 5 for found in self.texts), "all streams run")
        assert not self.ends, "a stream had ended: nothing was tested"
        return tasks

    def are_right(self) -> None:
        tokenizer = load_tokenizer("fake:tiny")
        assert self.ends == ["data: [DONE]"] * len(self.texts)
        for seed, found in enumerate(self.texts, self._first_seed):
            assert "".join(found) == tokenizer.decode(expected(prompt_of(seed), NUM_OUTPUT))


async def test_http_streams_through_tandem_gateway_do_not_break(scene: Scene) -> None:
    async with serving_gateway(over_the_wire(*scene.addresses)) as url:
        streams = HttpStreams(url, 70)
        following = await streams.start()
        await scene.fleet.kill("router-0")
        await asyncio.gather(*following, streams.follow())  # one more, in the moment of the death
    streams.are_right()


async def test_http_streams_of_a_stopped_router_go_on_at_the_other_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000}
    options = [(name, quick.get(name, value)) for name, value in credentials.CHANNEL_OPTIONS]
    monkeypatch.setattr(credentials, "CHANNEL_OPTIONS", tuple(options))
    async with serving_gateway(over_the_wire(*scene.addresses)) as url:
        streams = HttpStreams(url, 90)
        following = await streams.start()
        async with scene.fleet.stopped("router-0"):
            await asyncio.gather(*following, streams.follow(), streams.follow())
    streams.are_right()
