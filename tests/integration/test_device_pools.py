"""Pools on pretended devices: hand-offs between two devices and between a device and host memory over nixl, and a whole
deployment. The digests of both sides are those of the host."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from core.config import TransferConfig
from core.kv_layout import KVLayout
from core.paths import PathState
from engine.gpu.device_memory import CudaDeviceMemory
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.transport import PoolMemory
from tandem_client.stubs import inference_pb2
from tests.integration.transfer_owner_process import device_pool
from tests.integration.transfer_worker import HandOff, Kind
from tests.support.deployment import Deployment, deploy, tiny_config, transfers
from tests.support.device_runner import HostNixl, put_pools_on_devices
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until

# ---- hand-offs

CONFIG = TransferConfig(max_blocks_per_read=16, read_grace_s=20.0)  # a busy machine is no broken path
HOST = Kind(HostNixl)
DEVICE, OTHER_DEVICE = (Kind(HostNixl, functools.partial(device_pool, device=device)) for device in (0, 1))


def engine_pool(layout: KVLayout, num_blocks: int) -> tuple[np.ndarray, PoolMemory]:
    """A pool over the memory that the engine's runner gives a worker, here with its operators for the CPU."""
    tensor = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    memory: Any = CudaDeviceMemory(tensor, probe_bytes=1 << 20)
    return tensor.numpy(), PoolMemory(tensor.data_ptr(), num_blocks, layout, None, 0, 0, memory)


ENGINE = Kind(HostNixl, engine_pool)


@pytest.mark.parametrize(
    ("owner", "puller"),
    [
        pytest.param(DEVICE, OTHER_DEVICE, id="two devices"),
        pytest.param(ENGINE, ENGINE, id="the engine's memory"),
        pytest.param(HOST, DEVICE, id="host to device"),
        pytest.param(DEVICE, HOST, id="device to host"),
    ],
)
def test_a_hand_off_moves_every_block_and_its_digests_fit(owner: Kind, puller: Kind) -> None:
    hand_off = HandOff(owner, puller, CONFIG)
    hand_off.run()
    assert hand_off.assert_moved().stats.num_blocks_reread == 0
    hand_off.close()


# ---- a whole deployment

PROMPT = tuple(range(1, 120))
NUM_OUTPUT = 12


@pytest.fixture
async def deployment(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    put_pools_on_devices(monkeypatch)
    async with deploy(tiny_config(transport="nixl")) as deployed:
        yield deployed


async def test_every_token_is_that_of_one_engine_and_the_path_is_in_the_reports(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = deployment.decode

    def found() -> list[object]:
        return [path.state for path in transfers(worker).paths]

    await until(lambda: found() == [PathState.FINE], lambda: f"{transfers(worker).paths}")
    (measured,) = transfers(worker).paths
    assert measured.expected_bytes_per_s == 1e6, "both pools are on one GPU"
    monkeypatch.undo()
    reference = CoLocatedEngine(deployment.config.engine)
    tokens = reference.tokens(PROMPT, NUM_OUTPUT)
    for _ in range(2):
        answer = await deployment.generate(token_ids=PROMPT, max_tokens=NUM_OUTPUT)
        assert answer.token_ids == tokens
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        assert answer.finished.attempts == 1
        await deployment.settle()
        deployment.drop_caches(deployment.decode)
    reference.close()
    pool: PoolMemory = worker._parts.agent.pool
    assert isinstance(pool.memory, FakeDeviceMemory)
    assert transfers(worker).counters.num_digest_mismatches == 0
