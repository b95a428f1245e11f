"""`tandem role`: a worker of `tandem serve` changes its pool in its process, with 16 streams and idle."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from cli.commands.role import switch_role
from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient
from tests.support.command import Served, serving, tandem
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
NUM_OUTPUT = 2000  # 4 s at least; one decode worker has room for all streams
MAX_IDLE_S, MAX_WITH_STREAMS_S = 3.0, 10.0  # for a busy machine; ADR 0053 has the times
CONFIG = """
[engine]
dtype = "float32"
kv_memory_mb = 128
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp("fleet") / "tandem.toml"
    path.write_text(CONFIG)
    async with serving("--decode", "2", "--config", str(path)) as fleet:
        yield fleet
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ended() == (0, [])


def client(served: Served) -> AsyncClient:
    return client_of(served.address, find_credentials(None, served.address))


async def slots_of(served: Served) -> dict[str, dict[str, Any]]:
    _, out, _ = await tandem("status", "--json", "--router", served.address)
    return {slot["name"]: slot for slot in json.loads(out)["slots"]}


async def switch_seconds(served: Served, slot: str, role: str) -> float:
    """Of the newest switch of this slot, as the supervisor has noted it."""
    async with client(served) as connection:
        notes = [note for note in (await connection.events()).events if note.subject == slot]
    (began, ended) = notes[-2:]
    assert (began.what, ended.what) == (f"becomes a {role} worker", f"serves as {role} worker")
    return (ended.at_unix_ms - began.at_unix_ms) / 1e3


async def test_a_decode_worker_with_16_streams_becomes_a_prefill_worker_and_no_token_is_computed_again(
    served: Served,
) -> None:
    before = await slots_of(served)
    async with client(served) as connection:
        answers = [Answer(connection, prompt_of(seed), NUM_OUTPUT) for seed in range(NUM_STREAMS)]
        for answer in answers:
            await answer.begun()
        workers = (await connection.fleet()).workers
        slot = max(workers, key=lambda worker: (worker.role, worker.num_dispatched)).worker_id.partition(".")[0]
        # Without the command, whose process starts for seconds on a busy machine.
        await switch_role(contextlib.nullcontext(connection), slot, "prefill", Console(file=io.StringIO()))  # type: ignore[arg-type]
        for answer in answers:
            await answer.right()
        assert [answer.finished.recomputed_tokens for answer in answers] == [0] * NUM_STREAMS
        assert any(answer.finished.num_moves for answer in answers), "the worker had no stream: nothing was tested"
        await asyncio.gather(*(Answer(connection, prompt_of(100 + seed), 5).right() for seed in range(NUM_STREAMS)))
    assert await switch_seconds(served, slot, "prefill") < MAX_WITH_STREAMS_S
    after = await slots_of(served)
    assert {name: slot["id"] for name, slot in after.items()} == {name: slot["id"] for name, slot in before.items()}
    assert (after[slot]["role"], after[slot]["state"]) == ("prefill", "serving")


async def test_an_idle_worker_changes_its_pool_at_once_and_the_pools_still_scale(served: Served) -> None:
    code, out, err = await tandem("role", "prefill-0", "decode", "--router", served.address)
    assert (code, out) == (0, "prefill-0 serves as decode worker; wanted: 1 prefill, 2 decode\n"), err
    assert await switch_seconds(served, "prefill-0", "decode") < MAX_IDLE_S
    code, out, err = await tandem("scale", "--decode", "1", "--router", served.address)
    assert (code, out) == (0, "wanted: 1 prefill, 1 decode; `tandem status` shows the progress\n"), err
    async with client(served) as connection:
        await asyncio.gather(*(Answer(connection, prompt_of(200 + seed), 5).right() for seed in range(NUM_STREAMS)))


async def test_a_switch_that_cannot_begin_ends_with_the_reason(served: Served) -> None:
    code, _, err = await tandem("role", "router-0", "prefill", "--router", served.address)
    assert (code, err) == (1, "error: role: router-0 is a router and stays one\n")
    code, _, err = await tandem("role", "decode-1", "router", "--router", served.address)
    assert code == 2
    assert "'router' is not one of 'prefill', 'decode'" in err
