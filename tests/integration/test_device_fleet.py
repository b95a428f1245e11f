"""A whole deployment whose pools are on pretended devices: the tokens of one engine, and the path in every report."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from core.paths import PathState
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.transport import PoolMemory
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, tiny_config, transfers
from tests.support.device_runner import put_pools_on_devices
from tests.support.reference import CoLocatedEngine
from tests.support.waiting import until

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
