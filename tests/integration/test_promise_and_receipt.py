"""A call's metadata says what the router predicts, before the first token, and at the end what the call took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tandem_client.client import AsyncClient
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, make_request, tiny_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "long enough for two workers, in several blocks"
RECEIPT = {
    "tandem-queue-ms",
    "tandem-prefill-ms",
    "tandem-decode-ms",
    "tandem-kv-block-seconds",
    "tandem-transferred-bytes",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        yield deployment


async def call(
    deployment: Deployment, request: inference_pb2.GenerateRequest
) -> tuple[dict[str, str], dict[str, str], list[Any]]:
    """Initial metadata, trailing metadata and the last messages of the choices."""
    generate = deployment.inference.Generate(request, timeout=30)
    promised = dict(await generate.initial_metadata())
    finished = [response.finished async for response in generate if response.HasField("finished")]
    return promised, dict(await generate.trailing_metadata()), finished


async def test_the_promise_comes_first_and_the_receipt_last(deployment: Deployment) -> None:
    promised, took, (finished,) = await call(deployment, make_request(text=PROMPT, max_tokens=20))
    assert promised["tandem-predicted-path"] == "disaggregated"
    assert float(promised["tandem-predicted-ttft-ms"]) == pytest.approx(finished.promise.ttft_ms, abs=1e-3)
    assert 0 < float(promised["tandem-predicted-tpot-ms"]) < 10_000
    assert finished.promise.path == finished.path
    assert took.keys() >= RECEIPT
    assert float(took["tandem-decode-ms"]) == pytest.approx(finished.timings.decode_ms, abs=1e-3)
    assert int(took["tandem-transferred-bytes"]) == finished.receipt.transferred_bytes == finished.transferred_bytes > 0
    busy_s = finished.timings.total_ms / 1e3
    num_blocks = -(-(finished.usage.prompt_tokens + 20) // 16)
    assert 0 < finished.receipt.kv_block_seconds < 2 * num_blocks * busy_s, "two workers at most, for the whole call"
    assert float(took["tandem-kv-block-seconds"]) == pytest.approx(finished.receipt.kv_block_seconds, abs=1e-6)


async def test_a_decode_worker_that_computes_the_prompt_is_promised_as_local() -> None:
    async with deploy(tiny_config(), num_prefill=0) as deployment:
        promised, _, (finished,) = await call(deployment, make_request(text=PROMPT))
    assert promised["tandem-predicted-path"] == "local"
    assert finished.receipt.kv_block_seconds > 0
    assert finished.receipt.transferred_bytes == 0


async def test_the_receipt_of_a_call_is_the_sum_over_its_choices(deployment: Deployment) -> None:
    _, took, finished = await call(deployment, make_request(text=PROMPT, n=3, temperature=1.0))
    assert len(finished) == 3
    block_seconds = sum(message.receipt.kv_block_seconds for message in finished)
    assert float(took["tandem-kv-block-seconds"]) == pytest.approx(block_seconds, abs=1e-5)


async def test_a_call_that_waits_for_a_worker_has_no_promise_until_one_takes_it(deployment: Deployment) -> None:
    await deployment.router.set_workers([])
    generate = deployment.inference.Generate(make_request(text=PROMPT), timeout=30)
    promise = asyncio.ensure_future(generate.initial_metadata())
    shell = deployment.router._shell
    async with asyncio.timeout(10):
        while not shell.view.num_queued:
            await asyncio.sleep(0.01)
    assert not promise.done()
    await deployment.router.set_workers(list(deployment.endpoints.values()))
    assert "tandem-predicted-ttft-ms" in dict(await promise)
    generate.cancel()


async def test_a_call_that_is_refused_has_no_promise(deployment: Deployment) -> None:
    generate = deployment.inference.Generate(make_request(text=PROMPT, temperature=-1.0), timeout=30)
    assert not any(name.startswith("tandem-predicted") for name, _ in await generate.initial_metadata() or ())
    with pytest.raises(grpc.aio.AioRpcError, match="temperature"):
        await generate.read()


async def test_a_choice_that_a_stop_string_ends_is_charged_for_its_decode_too(deployment: Deployment) -> None:
    _, _, (whole,) = await call(deployment, make_request(text=PROMPT, max_tokens=30))
    answer = await deployment.generate(text=PROMPT, max_tokens=30)
    stop = answer.text[10:12]
    _, _, (stopped,) = await call(deployment, make_request(text=PROMPT, max_tokens=30, stop_strings=[stop]))
    assert whole.receipt.kv_block_seconds > 0
    assert stopped.stop_match == stop
    assert stopped.receipt.kv_block_seconds >= stopped.receipt.decode_ms / 1e3 * 3


async def test_the_page_comes_over_grpc_without_a_metrics_port_and_adds_up_what_tenants_took() -> None:
    async with deploy(tiny_config()) as deployment, AsyncClient(deployment.router_address) as client:
        request = make_request(text=PROMPT, max_tokens=5)
        request.user = "acme"
        _, _, (finished,) = await call(deployment, request)
        text = await client.metrics()
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    charged = found["tandem_tenant_kv_block_seconds_total", ("tenant", "acme")]
    assert charged == pytest.approx(finished.receipt.kv_block_seconds)
    assert found["tandem_tenant_tokens_total", ("kind", "output"), ("tenant", "acme")] == 5
    gaps = [value for (name, *_), value in found.items() if name == "tandem_inter_token_latency_seconds_count"]
    assert gaps == [4]
    assert found["vllm:generation_tokens_total", ("model_name", "fake:tiny")] == 5
    assert found["tandem_workers", ("role", "decode"), ("state", "serving")] == 1
    assert found["tandem_router_decision_seconds_count",] == 1
