"""Ray itself dies under a fleet that serves: what runs goes on to its end, then everything ends, with the reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.command import PATIENCE_S, Served, serving
from tests.support.deployment import make_request

NUM_OUTPUT = 1500  # 3 s at least; without a raylet, Ray's processes last for about ten
CONFIG = """
[router]
drain_timeout_s = 60.0
"""


@contextlib.asynccontextmanager
async def serving_patiently(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "tandem.toml").write_text(CONFIG)
    async with serving("--config", str(tmp_path / "tandem.toml")) as fleet:
        yield fleet


async def says_that_ray_ended(fleet: Served) -> bool:
    assert fleet.process.stdout is not None
    return await fleet.process.stdout.readline() == b"Ray has failed; draining\n"


async def assert_ended_because_of(fleet: Served, name: str) -> None:
    code, left, err = await fleet.ended_saying()
    assert (code, left) == (1, [])
    assert err.startswith(f"error: Ray cannot go on: {name} has ended; the logs are in /")
    assert len(err.splitlines()) == 1


class Reader:
    """A client that reads a long answer in the background."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.num_tokens = 0
        self.some = asyncio.Event()
        request = make_request(text="a long story", max_tokens=NUM_OUTPUT)
        self._call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=PATIENCE_S)  # type: ignore[no-untyped-call]
        self.whole: asyncio.Task[inference_pb2.Finished] = asyncio.create_task(self._read())

    async def _read(self) -> inference_pb2.Finished:
        async for response in self._call:
            if response.HasField("finished"):
                return response.finished
            self.num_tokens += len(response.tokens.token_ids)
            if self.num_tokens > 10:
                self.some.set()
        raise AssertionError("the stream has no end")


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
async def test_a_ray_that_dies_takes_no_request_with_it_and_its_fleet_ends_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    async with serving_patiently(tmp_path) as fleet, asyncio.timeout(PATIENCE_S):
        victim = next(process for process in fleet.family if process.name() == name)
        async with grpc.aio.insecure_channel(fleet.address) as channel:
            reader = Reader(channel)
            await reader.some.wait()
            victim.kill()
            assert await says_that_ray_ended(fleet)
            num_before = reader.num_tokens
            assert num_before < NUM_OUTPUT, "the answer had ended: nothing was tested"
            finished = await reader.whole
            assert reader.num_tokens == finished.usage.completion_tokens == NUM_OUTPUT
            await assert_ended_because_of(fleet, name)


async def test_a_fleet_whose_ray_has_lost_its_keeper_ends_with_the_reason(tmp_path: Path) -> None:
    async with serving_patiently(tmp_path) as fleet, asyncio.timeout(PATIENCE_S):
        keeper = next(process for process in fleet.family if "fleet/ray/starter.py" in " ".join(process.cmdline()))
        keeper.kill()
        assert await says_that_ray_ended(fleet)
        await assert_ended_because_of(fleet, "the process that keeps it")
