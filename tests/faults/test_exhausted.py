"""A process that has used up its file descriptors serves what is connected, and accepts connections again later."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from runtime.rpc.grpc_server import open_channel
from tandem_client.stubs import inference_pb2_grpc
from tests.support.deployment import deploy
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.limits import no_more_descriptors

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
