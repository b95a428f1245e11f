"""A connection that carries nothing any more and does not break: keepalive ends it.

Between a router and a worker, and between a client and a router. The pings of these tests are
quick: one second in place of fifteen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import pytest

from runtime.rpc import grpc_server
from tandem_client.stubs import cluster_pb2, inference_pb2_grpc
from tests.support.deployment import Deployment, another_router, deploy, machine_of, transfers
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.steps import slow_down
from tests.support.tcp_link import TcpLink
from tests.support.waiting import until
from worker.service import WorkerService

KEEPALIVE_S = 1.0  # until a connection without an answer breaks: the ping, and the wait for its answer
SLACK_S = 8.0  # for a busy machine; with it, less than the fifteen seconds


@pytest.fixture
def quick_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "KEEPALIVE_TIME_S", KEEPALIVE_S / 2)
    monkeypatch.setattr(grpc_server, "KEEPALIVE_TIMEOUT_S", KEEPALIVE_S / 2)


@dataclass
class Scene:
    """A router that reaches its first decode worker over `link`; `bystanders` reaches every worker directly."""

    deployment: Deployment
    bystanders: Deployment
    link: TcpLink

    @property
    def behind_the_link(self) -> WorkerService:
        return self.deployment.decode[0]

    def calls_of_the_router(self) -> list[str]:
        """Sequences of the router on the worker behind the link."""
        router = self.deployment.router._shell
        timelines = machine_of(self.behind_the_link).core.open_calls.timelines
        return [name for name in timelines if name.startswith(f"{router.router_id}.")]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    # The router takes a silent worker for lost only after 30 s, so that nothing but the keepalive can end a call.
    config = fault_config(report_stale_s=20.0, worker_lost_s=30.0)
    async with deploy(config, num_decode=2) as deployment, another_router(deployment) as bystanders:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        behind = deployment.endpoints[id(deployment.decode[0])]
        async with TcpLink.to(behind.address) as link:
            endpoints = [found for found in deployment.endpoints.values() if found is not behind]
            await deployment.router.set_workers(endpoints)
            await deployment.router.set_workers([*endpoints, replace(behind, address=link.address)])
            await until(lambda: is_known(deployment, behind.service_id), "the router reaches the worker over the link")
            yield Scene(deployment, bystanders, link)


def is_known(deployment: Deployment, worker_id: str) -> bool:
    return deployment.router._shell.view.worker(worker_id) is not None


async def one_on_each_worker(scene: Scene) -> tuple[Stream, Stream]:
    """Two streams of the router in the middle of their tokens; the first is on the worker behind the link."""
    first = await Stream(scene.deployment.inference, prompt_of(1), 400, timeout_s=60.0).reach(3)
    behind = bool(scene.calls_of_the_router())
    second = await Stream(scene.deployment.inference, prompt_of(2), 400, timeout_s=60.0).reach(3)
    assert len(scene.calls_of_the_router()) == 1
    return (first, second) if behind else (second, first)


@pytest.mark.usefixtures("quick_keepalive")
async def test_a_worker_behind_a_black_hole_loses_its_streams_to_another_and_frees_their_blocks(scene: Scene) -> None:
    cut_off, neighbour = await one_on_each_worker(scene)
    bystanders = [await Stream(scene.bystanders.inference, prompt_of(seed), 200).reach(3) for seed in (3, 4)]
    await until(lambda: not transfers(scene.deployment.prefill[0]).num_alive, "every hand-off is over")
    scene.link.vanish()
    num_tokens = cut_off.num_tokens
    await until(lambda: not scene.calls_of_the_router(), "the worker ends the call", KEEPALIVE_S + SLACK_S)
    await until(lambda: cut_off.num_tokens > num_tokens + 5, "another worker goes on", KEEPALIVE_S + SLACK_S)
    assert scene.link.num_bytes_held > 0
    await cut_off.right()
    assert cut_off.finished.attempts == 2
    for stream in (neighbour, *bystanders):
        await stream.right()
        assert stream.finished.attempts == 1
    await scene.deployment.settle()
    scene.link.mend()
    behind = scene.deployment.id_of(scene.behind_the_link)
    await until(lambda: is_known(scene.deployment, behind), "the router has the worker again")
    await serves_on(scene.deployment.inference)


async def test_a_worker_that_is_silent_is_listed_without_a_ledger_and_in_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = await Stream(scene.bystanders.inference, prompt_of(3), 700, timeout_s=60.0).reach(3)
    scene.link.vanish()
    for limit_s, timeout_s in ((1.5, 20.0), (20.0, 2.5)):
        within_s = min(limit_s, timeout_s)
        monkeypatch.setattr("router.operations.cluster_servicer.LEDGER_TIMEOUT_S", limit_s)
        started = time.monotonic()
        answer = await scene.deployment.cluster.GetLedger(cluster_pb2.GetLedgerRequest(), timeout=timeout_s)
        assert 0.8 * within_s < time.monotonic() - started < within_s + 3.0
        listed = {worker.worker_id.partition(".")[0]: worker for worker in answer.workers}
        assert sorted(listed) == ["decode-0", "decode-1", "prefill-0"]
        assert not listed["decode-0"].HasField("ledger")
        assert "Deadline Exceeded" in listed["decode-0"].error
        assert listed["decode-1"].HasField("ledger")
        assert listed["prefill-0"].HasField("ledger")
    assert scene.link.num_bytes_held > 0
    assert not bystander.ended
    await bystander.right()
    scene.link.mend()


@pytest.mark.usefixtures("quick_keepalive")
async def test_a_client_behind_a_black_hole_is_given_up_by_the_router_and_everything_is_free() -> None:
    """So is a client whose machine has lost its power. The deadline of the call is far away."""
    async with deploy(fault_config()) as deployment, TcpLink.to(deployment.router_address) as link:
        slow_down(deployment.decode[0], 0.01)
        shell = deployment.router._shell
        bystander = await Stream(deployment.inference, prompt_of(1), 400, timeout_s=60.0).reach(3)
        # This channel sends no keepalive pings.
        async with grpc.aio.insecure_channel(link.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            stream = await Stream(stub, prompt_of(2), 1000, timeout_s=60.0).reach(3)
            assert shell.num_open == 2
            link.vanish()
            await until(lambda: shell.num_open == 1, "the router gives the client up", KEEPALIVE_S + SLACK_S)
            assert link.num_bytes_held > 0
            assert not stream.ended, "the client knows"
            assert not bystander.ended
            await bystander.right()
            await deployment.settle()
            stream.cancel()
            await stream.typed(grpc.StatusCode.CANCELLED)
            await asyncio.sleep(0)
