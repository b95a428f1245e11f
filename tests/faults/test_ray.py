"""Ray itself dies under a fleet that serves: what runs goes on to its end, then everything ends, with the reason.

Here the raylet dies; at the end of test_several_routers.py the GCS server does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from cli.credentials import client_of, find_credentials
from tests.support.command import PATIENCE_S, Served, line_with, serving
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer

NUM_OUTPUT = 1500  # 3 s at least; without a raylet, Ray's processes last for about ten
CONFIG = """
[router]
drain_timeout_s = 60.0
"""


async def end_of(fleet: Served, name: str) -> str:
    """What the fleet says in the end, after this process of Ray has died under a request."""
    victim = next(process for process in fleet.family if process.name() == name)
    async with asyncio.timeout(PATIENCE_S):
        async with client_of(fleet.address, find_credentials(None, fleet.address)) as client:
            answer = await Answer(client, prompt_of(1), NUM_OUTPUT).begun()
            victim.kill()
            await line_with(fleet.process, "Ray has failed; draining")
            assert not answer.ended, "nothing was tested"
            await answer.right()
        code, left, err = await fleet.ended_saying()
    assert (code, left) == (1, [])
    assert err.splitlines()[-1].startswith(f"error: Ray cannot go on: {name} has ended; the logs are in /")
    return err


async def test_a_raylet_that_dies_takes_no_request_with_it_and_its_fleet_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tandem.toml").write_text(CONFIG)
    async with serving("--config", str(tmp_path / "tandem.toml")) as fleet:
        assert len((await end_of(fleet, "raylet")).splitlines()) == 1
