"""`vllm.grpc.engine` on workers: what a router of another project may ask, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the extra smg: pip install smg-grpc-proto")

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from core.config import SecurityConfig
from core.handoff import OwnerState, PullerState
from runtime.rpc.security import load_credentials
from tests.support.deployment import Deployment, busy_blocks, deploy, machine_of, tiny_config, trailers_of, transfers
from tests.support.steps import slow_down
from tests.support.vllm_calls import REMOTE_DECODE, complete, engine_of, generate_request, with_vllm_engine
from tests.support.waiting import until

PROMPT = list(range(10, 50))
LONG = 200


@dataclass
class Engines:
    deployment: Deployment
    prefill: Any
    decode: Any


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with deploy(with_vllm_engine(tiny_config())) as deployment:
        async with (
            engine_of(deployment, deployment.prefill[0]) as prefill,
            engine_of(deployment, deployment.decode[0]) as decode,
        ):
            yield Engines(deployment, prefill, decode)
        await deployment.settle()


async def hand_off(engines: Engines, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Prefill, then decode with the parameters of the answer, as smg does."""
    first = generate_request(
        PROMPT, sampling={"max_tokens": 1} | (sampling or {}), kv_transfer_params_json=REMOTE_DECODE
    )
    (prefilled,) = await complete(engines.prefill, first)
    params = prefilled.kv_transfer_params_json
    return await complete(
        engines.decode, generate_request(PROMPT, sampling=sampling or {}, kv_transfer_params_json=params, **fields)
    )


async def read_to_end(call: Any) -> Any:
    """The last message."""
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        last = message
    return last


async def expected(engines: Engines, **request: Any) -> list[int]:
    """The tokens of Tandem's own router."""
    return (await engines.deployment.generate(token_ids=PROMPT, **request)).token_ids


async def test_a_hand_off_by_parameters_gives_the_tokens_of_one_engine(engines: Engines) -> None:
    (done,) = await hand_off(engines)
    assert list(done.output_ids) == await expected(engines)
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("length", len(PROMPT), 8)
    decode = transfers(engines.deployment.decode[0]).counters
    assert decode.pulls[PullerState.COMPLETE.value] >= 1
    assert decode.num_bytes_read > 0


async def test_a_decode_worker_alone_serves_a_plain_request_and_reports_its_cache(engines: Engines) -> None:
    (first,) = await complete(engines.decode, generate_request(PROMPT))
    (second,) = await complete(engines.decode, generate_request(PROMPT))
    assert first.output_ids == second.output_ids == await expected(engines)
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


async def test_a_stream_has_each_token_once_and_then_the_end(engines: Engines) -> None:
    chunks: list[Any] = []
    ends: list[Any] = []
    async for response in engines.decode.Generate(generate_request(PROMPT, stream=True, sampling={"n": 2}), timeout=30):
        (chunks if response.HasField("chunk") else ends).append(getattr(response, response.WhichOneof("response")))
    for end in ends:
        assert [t for chunk in chunks if chunk.index == end.index for t in chunk.token_ids] == list(end.output_ids)
    assert sorted(end.index for end in ends) == [0, 1]
    assert ends[0].output_ids == ends[1].output_ids, "greedy choices are equal"


async def test_log_probabilities_of_a_hand_off_equal_those_of_one_worker(engines: Engines) -> None:
    (moved,) = await hand_off(engines, {"logprobs": 2})
    (alone,) = await complete(engines.decode, generate_request(PROMPT, sampling={"logprobs": 2}))
    assert moved.output_logprobs.token_ids == alone.output_logprobs.token_ids == moved.output_ids
    assert moved.output_logprobs.token_logprobs == pytest.approx(alone.output_logprobs.token_logprobs)
    assert [len(top.token_ids) for top in moved.output_logprobs.top_logprobs] == [2] * 8


async def test_a_prompt_without_remote_decode_leaves_no_offer(engines: Engines) -> None:
    (done,) = await complete(engines.prefill, generate_request(PROMPT, sampling={"max_tokens": 1}))
    assert not done.HasField("kv_transfer_params_json")
    assert transfers(engines.deployment.prefill[0]).num_alive == 0


async def test_an_offer_that_is_gone_makes_the_decode_worker_compute_the_prompt(engines: Engines) -> None:
    first = generate_request(PROMPT, sampling={"max_tokens": 1}, kv_transfer_params_json=REMOTE_DECODE)
    (prefilled,) = await complete(engines.prefill, first)
    params = prefilled.kv_transfer_params_json
    ends = [
        await complete(engines.decode, generate_request(PROMPT, kv_transfer_params_json=params, request_id=name))
        for name in ("reads", "comes too late")
    ]
    assert ends[0][0].output_ids == ends[1][0].output_ids
    offers = transfers(engines.deployment.prefill[0]).counters.offers
    await until(lambda: offers[OwnerState.RELEASED.value] == 1, lambda: f"one offer is read and released: {offers}")


async def test_the_parameters_of_another_prompt_are_refused(engines: Engines) -> None:
    first = generate_request(PROMPT, sampling={"max_tokens": 1}, kv_transfer_params_json=REMOTE_DECODE)
    (prefilled,) = await complete(engines.prefill, first)
    other = generate_request([1, 2, 3], kv_transfer_params_json=prefilled.kv_transfer_params_json)
    await refused(engines.decode, other, "kv_transfer_params_json")
    await complete(engines.decode, generate_request(PROMPT, kv_transfer_params_json=prefilled.kv_transfer_params_json))


async def test_a_stop_string_ends_the_output_with_its_name(engines: Engines) -> None:
    answer = await engines.deployment.generate(token_ids=PROMPT, max_tokens=40)
    stop = answer.text[6:8]
    assert stop.strip()
    (done,) = await complete(engines.decode, generate_request(PROMPT, sampling={"max_tokens": 40, "stop": [stop]}))
    assert (done.finish_reason, done.matched_stop_str) == ("stop", stop)
    assert list(done.output_ids) == answer.token_ids[: len(done.output_ids)]
    assert len(done.output_ids) < 40


async def test_a_stop_token_is_named(engines: Engines) -> None:
    tokens = await expected(engines)
    (done,) = await complete(engines.decode, generate_request(PROMPT, sampling={"stop_token_ids": [tokens[3]]}))
    assert (done.finish_reason, done.matched_token_id) == ("stop", tokens[3])


async def test_text_is_tokenized_here(engines: Engines) -> None:
    request = generate_request([])
    request.text = "hello there"
    (done,) = await complete(engines.decode, request)
    answer = await engines.deployment.generate(text="hello there")
    assert list(done.output_ids) == answer.token_ids


async def test_abort_ends_a_request_by_its_id(engines: Engines) -> None:
    slow_down(engines.deployment.decode[0], 0.02)
    request = generate_request(PROMPT, stream=True, request_id="long", sampling={"max_tokens": LONG})
    call = engines.decode.Generate(request, timeout=30)
    await call.read()
    await engines.decode.Abort(vllm_engine_pb2.AbortRequest(request_ids=["long", "unknown"]), timeout=10)
    last = await read_to_end(call)
    assert last.complete.finish_reason == "abort"
    assert 0 < len(last.complete.output_ids) < LONG
    await until(lambda: not busy_blocks(engines.deployment.decode[0]), "the aborted request still holds blocks")


async def test_a_router_that_goes_away_frees_everything(engines: Engines) -> None:
    request = generate_request(PROMPT, stream=True, sampling={"max_tokens": LONG, "n": 2})
    call = engines.decode.Generate(request, timeout=30)
    await call.read()
    call.cancel()
    await until(lambda: not busy_blocks(engines.deployment.decode[0]), "the cancelled request still holds blocks")
    assert machine_of(engines.deployment.decode[0]).idle


async def refused(
    engine: Any, request: vllm_engine_pb2.GenerateRequest, field: str, code: str = "INVALID_ARGUMENT"
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(engine, request)
    assert error.value.code().name == code
    assert field in (error.value.details() or "")
    assert field in trailers_of(error.value)["tandem-field"]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 99}, "n"),
        ({"seed": -1}, "seed"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logit_bias": {5: 1000.0}}, "logit_bias"),
    ],
)
async def test_what_the_engine_lacks_is_refused_by_name(engines: Engines, sampling: dict[str, Any], field: str) -> None:
    await refused(engines.decode, generate_request(PROMPT, sampling=sampling), field)


async def test_a_parameter_of_a_newer_protocol_is_refused(engines: Engines) -> None:
    request = generate_request(PROMPT)
    request.sampling_params.MergeFromString(bytes([0xC0, 0x3E, 1]))  # field 1000, a varint
    await refused(engines.decode, request, "sampling_params")


@pytest.mark.parametrize(
    "params", ["{", "[]", '{"do_remote_prefill": true}', '{"tandem": {"version": 9}}', '{"tandem": 1}']
)
async def test_malformed_parameters_of_a_hand_off_are_refused(engines: Engines, params: str) -> None:
    await refused(engines.decode, generate_request(PROMPT, kv_transfer_params_json=params), "kv_transfer_params_json")


async def test_a_prefill_worker_refuses_to_decode(engines: Engines) -> None:
    await refused(engines.prefill, generate_request(PROMPT), "max_tokens")


async def test_the_prefix_cache_is_reported_as_a_snapshot_and_then_as_changes(engines: Engines) -> None:
    await complete(engines.prefill, generate_request(PROMPT, sampling={"max_tokens": 1}))
    call = engines.prefill.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=30)
    snapshot = await call.read()
    assert snapshot.snapshot.count == 1
    assert snapshot.events[0].HasField("cleared")
    (stored,) = [event.stored for event in snapshot.events[1:]]
    assert [list(block.token_ids) for block in stored.blocks] == [PROMPT[:16], PROMPT[16:32]]
    assert not stored.HasField("parent_block_hash")
    longer = [*PROMPT[:32], *range(100, 132)]
    await complete(engines.prefill, generate_request(longer, sampling={"max_tokens": 1}))
    change = await asyncio.wait_for(call.read(), 10)
    assert change.sequence_number == snapshot.sequence_number + 1
    assert change.events[0].stored.parent_block_hash == stored.blocks[-1].block_hash
    assert [list(block.token_ids) for block in change.events[0].stored.blocks] == [longer[32:48], longer[48:]]
    engines.deployment.drop_caches(engines.deployment.prefill)
    await complete(engines.prefill, generate_request([1, 2], sampling={"max_tokens": 1}))
    removed = await asyncio.wait_for(call.read(), 10)
    assert len([event for event in removed.events if event.HasField("removed")]) == 4
    call.cancel()


async def test_the_worker_describes_itself(engines: Engines) -> None:
    model = await engines.decode.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=10)
    own = await engines.deployment.inference.GetModel(
        __import__("protos.inference_pb2").inference_pb2.GetModelRequest()
    )
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == (
        own.name,
        own.vocab_size,
        own.context_length,
    )
    server = await engines.prefill.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=10)
    assert (server.kv_role, server.block_size, server.kv_connector) == ("kv_producer", 16, "NixlConnector")
    load = await engines.decode.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=10)
    assert load.loads[0].max_total_num_tokens > 0
    health = await engines.decode.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=10)
    assert health.healthy


async def test_it_is_off_by_default() -> None:
    async with deploy(tiny_config()) as deployment, engine_of(deployment, deployment.decode[0]) as engine:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=10)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["Embed", "GetTokenizer"])
async def test_calls_that_a_worker_lacks_are_unimplemented(engines: Engines, name: str) -> None:
    request = vllm_engine_pb2.EmbedRequest() if name == "Embed" else common_pb2.GetTokenizerRequest()
    call = getattr(engines.decode, name)(request, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (call if name == "Embed" else call.read())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_guarded_calls_need_the_token_of_the_cluster() -> None:
    config = with_vllm_engine(tiny_config(), "guarded")
    config = replace(config, security=SecurityConfig(cluster_token="0123456789abcdef0123"))
    async with deploy(config) as deployment, engine_of(deployment, deployment.decode[0]) as engine:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=10)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = load_credentials(config.security).metadata
        assert (await engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=10, metadata=metadata)).healthy


async def test_a_worker_that_stops_ends_calls_and_event_streams() -> None:
    config = with_vllm_engine(tiny_config())
    async with deploy(config) as deployment, engine_of(deployment, deployment.decode[0]) as engine:
        slow_down(deployment.decode[0], 0.05)
        events = engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=30)
        await events.read()
        call = engine.Generate(generate_request(PROMPT, stream=True, sampling={"max_tokens": LONG}), timeout=30)
        await call.read()
        await deployment.decode[0].stop()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_to_end(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as no_more:
            await read_to_end(events)
        assert no_more.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_deadline_that_nobody_set_is_the_default_timeout() -> None:
    config = with_vllm_engine(tiny_config())
    config = replace(config, worker=replace(config.worker, default_timeout_s=0.3))
    async with deploy(config) as deployment, engine_of(deployment, deployment.decode[0]) as engine:
        slow_down(deployment.decode[0], 0.05)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await complete(engine, generate_request(PROMPT, sampling={"max_tokens": LONG}), timeout_s=None)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not busy_blocks(deployment.decode[0]), "the request still holds blocks")
