"""A router that stands still costs itself and nobody else. One without file descriptors serves what is connected.

The worker keeps a bounded number of tokens for a router that stands still, then ends the token stream and its calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest

from core.lifecycle import ServiceRole
from decode_worker import token_stream
from decode_worker.servicer import DecodeServicer
from runtime.rpc.grpc_server import open_channel
from tandem_client.stubs import inference_pb2_grpc
from tests.support.deployment import Answer, deploy, make_request
from tests.support.faults import Stream, expected, fault_config, prompt_of, serves_on
from tests.support.limits import no_more_descriptors
from tests.support.processes import Fleet
from tests.support.steps import slow_down
from tests.support.waiting import until

# A token with 20 log-probabilities takes some 200 bytes, so the smallest window of HTTP/2 is soon full.
NUM_LOGPROBS = 20
BUSY_MACHINE_S = 2.0  # a write to a router that reads may take this long on a machine with more work than cores


async def generate(fleet: Fleet, seed: int, num_tokens: int) -> Answer:
    """Through the router of the fleet, with log-probabilities."""
    request = make_request(token_ids=prompt_of(seed), max_tokens=num_tokens, logprobs=NUM_LOGPROBS)
    answer = Answer()
    async for response in fleet.inference.Generate(request, timeout=90.0):
        answer.take(response)
    return answer


async def test_a_router_that_stands_still_is_cut_off_and_continues_its_requests_when_it_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "MAX_WRITE_S", BUSY_MACHINE_S)
    async with deploy(fault_config()) as deployment:
        slow_down(deployment.decode[0], 0.01)
        servicer = deployment.decode[0]._servicers[ServiceRole.DECODE]
        assert isinstance(servicer, DecodeServicer)
        config = replace(deployment.config, router=replace(deployment.config.router, port=0))
        async with Fleet.start(config, {}, others=list(deployment.endpoints.values())) as fleet:
            await until(lambda: len(servicer._streams) == 2, "each router has a token stream")
            own, frozen = servicer._streams
            bystander = await Stream(deployment.inference, prompt_of(1), 800, timeout_s=60.0).reach(3)
            victims = [asyncio.create_task(generate(fleet, seed, 600)) for seed in range(20, 28)]
            await until(lambda: len(servicer._calls) == 9, "all requests decode")
            async with fleet.stopped("router-0"):
                await until(lambda: list(servicer._streams) == [own], "the stopped router is cut off", seconds=20.0)
                left = [servicer._streams[own].router_id]
                await until(
                    lambda: [call.stream.router_id for call in servicer._calls.values()] == left, "its calls have ended"
                )
                num_tokens = bystander.num_tokens
                await bystander.reach(num_tokens + 20)
            answers = await asyncio.gather(*victims)
            assert len(servicer._streams) == 2
            assert frozen not in servicer._streams, "the router opens a stream with another id"
            for seed, answer in zip(range(20, 28), answers, strict=True):
                assert answer.token_ids == expected(prompt_of(seed), 600)
                assert answer.finished.attempts > 1
            await bystander.right()
            assert bystander.finished.attempts == 1
        await deployment.settle()


# ---- a process that has used up its file descriptors serves what is connected, and accepts connections again later

NUM_REQUESTS = 5


@pytest.mark.usefixtures("fabric")
async def test_without_descriptors_open_connections_are_served_and_later_ones_when_descriptors_are_back() -> None:
    async with deploy(fault_config()) as deployment:
        host, _, port = deployment.router_address.rpartition(":")
        await Stream(deployment.inference, prompt_of(0)).right()
        with socket.socket() as refused:
            refused.setblocking(False)
            with no_more_descriptors():
                with pytest.raises(OSError, match="Too many open files"):
                    os.open(os.devnull, os.O_RDONLY)
                await asyncio.get_running_loop().sock_connect(refused, (host, int(port)))  # the router cannot accept
                for seed in range(1, 1 + NUM_REQUESTS):
                    await Stream(deployment.inference, prompt_of(seed)).right()
        async with open_channel(deployment.router_address, 4 << 20) as channel:
            await serves_on(inference_pb2_grpc.InferenceStub(channel))
        await deployment.settle()
