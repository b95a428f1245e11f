"""Hand-offs over UCX on TCP between machines whose link fails, loses packets, or is slow (three network namespaces)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from cli.screens.path_lines import paths_of
from core.paths import Lane, PathState, PathStatus
from tandem_client.stubs import cluster_pb2, inference_pb2
from tests.support.deployment import SLACK_S
from tests.support.faults import LEASE_S, Stream, fault_config, prompt_of
from tests.support.namespaces import Machines, why_not
from tests.support.processes import Fleet
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there"),
]

STEP_S = {"prefill": 0.25, "decode": 0.02}
LINK_BYTES_PER_S = 1.25e9  # 10 Gbit/s, which the devices promise
SLOW_BYTES_PER_S = 0.5e6  # a probe that takes longer than this waits for the link, however busy this machine is
TCP_GIVES_UP_S = 12.0  # three retries of machines in namespaces take 3 s; a busy machine takes its time
NEW_SEEDS = itertools.count(1000)  # of prompts that no cache holds
DISAGGREGATED = inference_pb2.REQUEST_PATH_DISAGGREGATED


@contextlib.asynccontextmanager
async def three_machines(transport: str) -> AsyncIterator[tuple[Machines, Fleet]]:
    config = fault_config(transport)
    # The pools and so the probes are small: unless the link is very slow, the load of this machine decides their speed.
    config = replace(config, transfer=replace(config.transfer, slow_path_share=SLOW_BYTES_PER_S / LINK_BYTES_PER_S))
    with Machines.made() as machines:
        async with machines.reachable() as reach:
            sizes = {"prefill": 1, "decode": 1}
            async with Fleet.start(config, sizes, STEP_S, site_of=machines.site_of, reach=reach) as fleet:
                yield machines, fleet


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world() -> AsyncIterator[tuple[Machines, Fleet]]:
    async with three_machines("nixl") as world:
        yield world


@pytest.fixture
def machines(world: tuple[Machines, Fleet]) -> Machines:
    return world[0]


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(world: tuple[Machines, Fleet]) -> AsyncIterator[Fleet]:
    """Hand-offs work before the test and after it."""
    await hands_off(world[1])
    yield world[1]
    await hands_off(world[1])
    await world[1].settle()


async def hands_off(fleet: Fleet) -> None:
    """TCP takes a while to find that a link works again; until then requests are recomputed, but never wrong."""
    deadline = time.monotonic() + 20.0
    while True:
        stream = await Stream(fleet.inference, prompt_of(next(NEW_SEEDS)), 5).right()
        if stream.finished.path == DISAGGREGATED:
            assert stream.finished.transferred_bytes > 0
            return
        assert time.monotonic() < deadline, "no hand-off works any more"


async def in_the_middle(fleet: Fleet, seed: int) -> tuple[Stream, Stream]:
    """A request whose first blocks have moved and whose others have not, and one in the middle of its tokens."""
    other = await Stream(fleet.inference, prompt_of(seed + 1, 30), 100).reach(2)
    (decode,) = fleet.pool("decode")
    await until(lambda: not decode.load.num_transfers, "its hand-off is over")
    pulled = decode.load.transferred_bytes
    stream = Stream(fleet.inference, prompt_of(seed, 450), 10)
    await until(lambda: decode.load.transferred_bytes > pulled, "the first blocks are there")
    assert decode.load.num_transfers == 1
    return stream, other


async def test_ucxx_too_connects_at_the_device_that_ucx_may_use() -> None:
    """A machine has two addresses that its peer can reach, and KV may pass at one of them only."""
    async with three_machines("ucxx") as (machines, fleet):
        await kv_moves(machines, fleet)


async def test_kv_moves_over_the_link_between_two_machines(machines: Machines, fleet: Fleet) -> None:
    assert (await path_in(fleet, PathState.FINE)).lane is Lane.TCP
    await kv_moves(machines, fleet)


async def kv_moves(machines: Machines, fleet: Fleet) -> None:
    before = machines.num_bytes_arrived()
    stream = await Stream(fleet.inference, prompt_of(10, 300), 20).right()
    assert stream.finished.path == DISAGGREGATED
    assert stream.finished.transferred_bytes > 0
    assert machines.num_bytes_arrived() - before > stream.finished.transferred_bytes


# A link that is down and one that loses everything are alike to TCP: it hears nothing from the other machine.
async def test_a_link_that_loses_everything_during_a_hand_off(machines: Machines, fleet: Fleet) -> None:
    stream, other = await in_the_middle(fleet, seed=20)
    (prefill,) = fleet.pool("prefill")
    expired = prefill.load.num_expired_leases
    machines.drop_packets(1.0)
    try:
        await stream.right()
        assert stream.finished.attempts == 2
        await until(lambda: not prefill.busy_blocks, "the router withdraws the offer", LEASE_S + SLACK_S)
        await other.right()
        while_down = await Stream(fleet.inference, prompt_of(40, 100), 5).right()
        assert while_down.finished.path != DISAGGREGATED
        await fleet.settle(within_s=TCP_GIVES_UP_S)  # the fault may have come during a read
        assert machines.num_dropped() > 0
        assert prefill.load.num_expired_leases == expired, "the router has told it that the reader gave up"
    finally:
        machines.drop_no_more()


async def test_a_link_that_is_cut_during_a_read(machines: Machines, fleet: Fleet) -> None:
    """Its target blocks stay in use, since bytes may still come, until TCP gives the connection up."""
    await path_in(fleet, PathState.FINE)  # no probe is left whose bytes would be taken for the blocks
    machines.slow_down("64kbit")  # the blocks take two seconds
    arrived = machines.num_bytes_arrived()
    stream = Stream(fleet.inference, prompt_of(50, 180), 200)  # the second attempt lasts as long as TCP tries
    await until(lambda: machines.num_bytes_arrived() > arrived + 3000, "the first blocks are on their way")
    machines.cut()
    try:
        assert machines.inside("decode", "cat", "/sys/class/net/dat/operstate").strip() == "down"
        (decode,) = fleet.pool("decode")
        # Looked for at once: on a busy machine the second attempt may end after the connection.
        await until(
            lambda: decode.load.num_running and "incoming" in str(decode.load.ledger),
            "the second attempt runs, and the read of the first one is still in flight",
        )
        await stream.right()
        assert stream.finished.attempts == 2
        await fleet.settle(within_s=TCP_GIVES_UP_S)
    finally:
        machines.mend()
        machines.slow_down_no_more()


async def test_a_link_that_loses_packets_costs_time_only(machines: Machines, fleet: Fleet) -> None:
    machines.drop_packets(0.1)
    try:
        streams = [Stream(fleet.inference, prompt_of(60 + n, 100), 5) for n in range(6)]
        await asyncio.gather(*(stream.right() for stream in streams))
        assert machines.num_dropped() > 0
        await fleet.settle(within_s=5.0)
    finally:
        machines.drop_no_more()


@pytest.mark.parametrize(("rate", "suffices"), [("1mbit", True), ("32kbit", False)])
async def test_a_slow_link(machines: Machines, fleet: Fleet, rate: str, suffices: bool) -> None:
    """A hand-off takes as long as it takes, up to the time a read may take; then the prompt is computed again."""
    machines.slow_down(rate)
    try:
        stream = await Stream(fleet.inference, prompt_of(80 + suffices, 180), 5).right()
        assert machines.num_held_up() > 0
        assert (stream.finished.path == DISAGGREGATED) == suffices
        assert (stream.finished.attempts == 1) == suffices
        await fleet.settle(within_s=5.0)
    finally:
        machines.slow_down_no_more()


async def path_in(fleet: Fleet, *states: PathState) -> PathStatus:
    """The only path of the fleet, once it is in one of these states."""
    async with asyncio.timeout(30):
        while True:
            paths = [path for _, path in paths_of(await fleet.cluster.GetFleet(cluster_pb2.GetFleetRequest()))]
            if paths and paths[0].state in states:
                return paths[0]
            await asyncio.sleep(0.02)
