"""A router and vLLM workers with fake engines, in one process: real gRPC, real machines.

async with deploy_fakes(num_decode=2) as fleet:
    answer = await fleet.generate(token_ids=[1, 2, 3])
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from core.config import VllmConfig, WorkerConfig
from core.lifecycle import ServiceRole
from core.output_grammar import GrammarRow
from core.request import Request, SamplingParams
from core.service import Endpoint
from core.step import SequenceView
from router.service import RouterService
from tandem_client import AsyncClient, Completion
from tests.support.deployment import running_router, tiny_config
from tests.support.waiting import until
from text.grammars import GrammarReader
from text.tokenizer import ModelTokenizer, load_tokenizer
from vllm_worker.fake_engine import ADAPTERS, INFO, FakeCluster, FakeEngine, next_token
from vllm_worker.machine import Limits
from vllm_worker.service import VllmService


def expected(prompt: list[int], max_tokens: int, seed: int | None = None, adapter: str = "") -> tuple[int, ...]:
    """The tokens that a fake engine makes of a prompt."""
    sampling = SamplingParams(max_tokens, temperature=0.0) if seed is None else SamplingParams(max_tokens, seed=seed)
    request, token_ids = Request("expected", tuple(prompt), len(prompt), sampling, adapter=adapter), list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(request, token_ids))
    return tuple(token_ids[len(prompt) :])


class FormattedTokens:
    """A `NextToken` whose outputs keep their grammars: any token that is allowed, the same one everywhere."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._grammars = GrammarReader(lambda: tokenizer)

    def __call__(self, request: Request, token_ids: list[int]) -> int:
        token_id = next_token(request, token_ids)
        if not request.sampling.grammar:
            return token_id
        view = SequenceView(request.request_id, token_ids, request.num_prompt_tokens, (), request.sampling)
        (mask,) = self._grammars.begin([GrammarRow(view, len(token_ids))])().allowed[request.request_id]
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        return int(allowed[token_id % len(allowed)])


@dataclass
class FakeEngineFleet:
    cluster: FakeCluster
    router: RouterService
    client: AsyncClient
    address: str  # of the router
    engines: dict[str, FakeEngine] = field(default_factory=dict)  # by name of the worker
    services: dict[str, VllmService] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    async def generate(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> Completion:
        options = {"temperature": 0.0, "ignore_eos": True} | options
        return await self.client.complete(prompt, 30.0, max_tokens=max_tokens, **options)

    async def add(self, role: ServiceRole, ordinal: int, engine: FakeEngine) -> None:
        name, config = f"{role.value}-{ordinal}", WorkerConfig()
        limits = Limits(config.step_timeout_s, max_waiting=64, max_running=0)
        service = VllmService(role, ordinal, config, engine, limits)
        self.engines[name], self.services[name] = engine, service
        self.endpoints[name] = await service.start()
        await self.publish()

    async def publish(self) -> None:
        await self.router.set_workers(list(self.endpoints.values()))
        shell = self.router._shell
        known = [endpoint.service_id for endpoint in self.endpoints.values()]
        await until(lambda: all(shell.view.worker(name) is not None for name in known), "the router knows the workers")

    async def have_met(self) -> None:
        """The engine of each decode worker has shaken hands with those of all prefill workers."""
        readers, owners = (
            [name for name, endpoint in self.endpoints.items() if endpoint.role is role]
            for role in (ServiceRole.DECODE, ServiceRole.PREFILL)
        )
        pairs = {(reader, owner) for reader in readers for owner in owners}
        await until(lambda: pairs <= self.cluster.met, "the engines have met")

    async def stop(self) -> None:
        for service in self.services.values():
            await service.stop()

    async def settle(self) -> None:
        """No engine has a request, no machine a call, and the router knows which blocks are cached."""
        await until(lambda: not any(engine.num_open for engine in self.engines.values()), "an engine has a request")
        for service in self.services.values():
            machine = service._machine
            await until(lambda: machine.idle, "a worker has a call")  # noqa: B023 - awaited in this round
            machine.check()
        router: Any = self.router._shell._driver.machine
        held = router.workers.index.held
        for name, endpoint in self.endpoints.items():
            view, worker_id = self.services[name]._view, endpoint.service_id
            await until(lambda: held(worker_id) == set(view.cached_blocks), "a report is on its way")  # noqa: B023


@contextlib.asynccontextmanager
async def deploy_fakes(
    num_prefill: int = 1,
    num_decode: int = 1,
    step_s: float = 0.002,
    have_agents: bool = False,
    **router: Any,
) -> AsyncIterator[FakeEngineFleet]:
    config = tiny_config(**router)
    adapters = tuple(f"{name}=/adapters/{name}" for name in ADAPTERS)
    config = replace(config, engine=replace(config.engine, name="vllm"), vllm=VllmConfig(adapters=adapters))
    tokenizer = load_tokenizer(config.engine.model)
    tokens = FormattedTokens(tokenizer)
    info = replace(INFO, eos_token_ids=tokenizer.eos_token_ids, context_length=tokenizer.info.context_length)
    async with contextlib.AsyncExitStack() as stack:
        router_service, address = await stack.enter_async_context(running_router(config))
        client = await stack.enter_async_context(AsyncClient(address))
        fleet = FakeEngineFleet(FakeCluster(), router_service, client, address)
        stack.push_async_callback(fleet.stop)
        for role, count in ((ServiceRole.PREFILL, num_prefill), (ServiceRole.DECODE, num_decode)):
            for ordinal in range(count):
                engine = FakeEngine(fleet.cluster, step_s, f"{role.value}-{ordinal}", info, tokens, have_agents)
                await fleet.add(role, ordinal, engine)
        yield fleet
