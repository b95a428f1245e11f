"""Ray itself dies under a fleet that serves: what runs goes on to its end, then everything ends, with the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.credentials import client_of, find_credentials
from tests.support.command import PATIENCE_S, serving
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer

NUM_OUTPUT = 1500  # 3 s at least; without a raylet, Ray's processes last for about ten
CONFIG = """
[router]
drain_timeout_s = 60.0
"""


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
async def test_a_ray_that_dies_takes_no_request_with_it_and_its_fleet_ends_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "tandem.toml").write_text(CONFIG)
    async with serving("--config", str(tmp_path / "tandem.toml")) as fleet, asyncio.timeout(PATIENCE_S):
        victim = next(process for process in fleet.family if process.name() == name)
        async with client_of(fleet.address, find_credentials(None, fleet.address)) as client:
            answer = await Answer(client, prompt_of(1), NUM_OUTPUT).begun()
            victim.kill()
            assert fleet.process.stdout is not None
            assert await fleet.process.stdout.readline() == b"Ray has failed; draining\n"
            assert not answer.ended, "nothing was tested"
            await answer.right()
        code, left, err = await fleet.ended_saying()
    assert (code, left) == (1, [])
    assert err.startswith(f"error: Ray cannot go on: {name} has ended; the logs are in /")
    assert len(err.splitlines()) == 1
