"""RouterShell: a worker that leaves gets no call and does not join again; a fault in an action ends the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

import router.shell
from core.config import RouterConfig, TelemetryConfig
from core.errors import WorkerUnavailable
from core.lifecycle import ServiceRole
from core.service import Endpoint
from router.links.worker_link import WorkerLink
from router.requests import events
from router.routing.policy import SecondsPolicy
from router.shell import RouterShell, report_interval_ms
from runtime.rpc.security import OPEN
from runtime.tracing.telemetry import Telemetry
from tests.support.waiting import until
from tests.unit.router.fake_reports import FakeWorker, snapshot

CONFIG = RouterConfig()
ROLES = {"p": ServiceRole.PREFILL, "d": ServiceRole.DECODE}


def endpoint(worker_id: str) -> Endpoint:
    return Endpoint(worker_id, "127.0.0.1:1", ROLES[worker_id])


@pytest_asyncio.fixture
async def shell(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RouterShell]:
    monkeypatch.setattr(router.shell, "LAST_WORDS_S", 0.01)  # the streams of a fake worker never end
    telemetry = TelemetryConfig()
    shell = RouterShell(CONFIG, SecondsPolicy(CONFIG), frozenset(), Telemetry(telemetry, "router"), OPEN, "router-0.1")
    yield shell
    await shell.close_links()
    shell.metrics.close()


async def watch(shell: RouterShell, *worker_ids: str) -> list[FakeWorker]:
    await shell.set_workers([endpoint(worker_id) for worker_id in worker_ids])
    workers = [FakeWorker() for _ in worker_ids]
    for worker_id, worker in zip(worker_ids, workers, strict=True):
        shell.links[worker_id]._worker = shell.links[worker_id]._decode = worker  # type: ignore[assignment]
    await until(lambda: all(worker.num_watches for worker in workers), "the router watches them")
    await turn_the_loop()  # each watch waits for its first report
    return workers


async def join(shell: RouterShell, *worker_ids: str) -> list[FakeWorker]:
    workers = await watch(shell, *worker_ids)
    for worker_id, worker in zip(worker_ids, workers, strict=True):
        worker.reports.put(snapshot(worker_id, ROLES[worker_id]))
    await turn_the_loop()
    return workers


def room(shell: RouterShell) -> dict[str, bool]:
    return {record.worker_id: record.has_room for record in shell.view.workers()}


async def turn_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_removed_worker_does_not_join_by_a_snapshot_that_arrived_before(shell: RouterShell) -> None:
    prefill, decode = await watch(shell, "p", "d")
    prefill.reports.put(snapshot("p", ServiceRole.PREFILL))
    await turn_the_loop()
    decode.reports.put(snapshot("d"))  # the link reads the report in the next turn of the loop
    await shell.set_workers([endpoint("p")])
    await turn_the_loop()
    assert room(shell) == {"p": True}
    await shell.set_workers([])
    assert room(shell) == {}
    assert not shell.failure.done()


async def test_a_cancel_reaches_the_worker_that_it_names_or_each(
    shell: RouterShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[tuple[str, str]] = []
    monkeypatch.setattr(WorkerLink, "cancel", lambda link, name: reached.append((name, link.endpoint.service_id)))
    await watch(shell, "p", "d")
    shell._perform(events.CancelDispatch("r#1", "p"))
    shell._perform(events.CancelDispatch("r#2"))
    assert reached == [("r#1", "p"), ("r#2", "p"), ("r#2", "d")]


async def test_a_worker_that_will_drain_gets_no_new_call(shell: RouterShell) -> None:
    _, decode = await join(shell, "p", "d")
    await shell.set_workers([endpoint("p"), replace(endpoint("d"), draining=True)])
    assert room(shell) == {"p": True, "d": False}
    decode.reports.put(snapshot("d"))
    await turn_the_loop()
    assert room(shell) == {"p": True, "d": False}


async def test_a_removed_worker_is_lost_once_its_token_stream_has_ended_and_gets_no_call_until_then(
    shell: RouterShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.shell, "LAST_WORDS_S", 10.0)
    (decode,) = await join(shell, "d")
    removing = asyncio.create_task(shell.set_workers([endpoint("p")]))
    await turn_the_loop()
    assert room(shell) == {"d": False}
    assert shell.links.keys() == {"d", "p"}, "a new worker waits for one that has left"
    decode.tokens[0].put(WorkerUnavailable("the worker has stopped"))
    await asyncio.wait_for(removing, 5)
    assert room(shell) == {}
    assert shell.links.keys() == {"p"}


async def test_a_worker_with_another_role_is_lost_and_joins_again_by_its_next_snapshot(shell: RouterShell) -> None:
    await join(shell, "d")
    await shell.set_workers([replace(endpoint("d"), draining=True)])
    link = shell.links["d"]
    await shell.set_workers([replace(endpoint("d"), role=ServiceRole.PREFILL)])
    assert shell.links["d"] is not link
    assert room(shell) == {}
    worker = shell.links["d"]._worker = FakeWorker()  # type: ignore[assignment]
    await until(lambda: worker.num_watches, "the router watches it")
    worker.reports.put(snapshot("d", ServiceRole.PREFILL))
    await turn_the_loop()
    assert [(record.role, record.has_room) for record in shell.view.workers()] == [(ServiceRole.PREFILL, True)]


async def test_a_worker_that_switched_twice_while_the_router_was_slow_gets_calls_again(shell: RouterShell) -> None:
    await watch(shell, "p", "d")
    await shell.set_workers([endpoint("p"), replace(endpoint("d"), draining=True)])
    links = dict(shell.links)
    await shell.set_workers([endpoint("p"), endpoint("d")])
    assert {name: shell.links[name] is link for name, link in links.items()} == {"p": True, "d": False}


async def test_the_more_workers_a_router_follows_the_fewer_reports_of_each_it_asks_for(shell: RouterShell) -> None:
    prefill, decode = await join(shell, "p", "d")
    assert report_interval_ms(128) == 128
    assert prefill.intervals_ms == decode.intervals_ms == [report_interval_ms(2)]
    await shell.set_workers([endpoint("p")])
    await turn_the_loop()
    assert prefill.intervals_ms == [report_interval_ms(2), report_interval_ms(1)]
    assert decode.intervals_ms == [report_interval_ms(2)]


async def test_a_fault_in_performing_an_action_ends_the_router(shell: RouterShell) -> None:
    prefill, decode = await watch(shell, "p", "d")
    prefill.reports.put(snapshot("p", ServiceRole.PREFILL))
    await turn_the_loop()
    link = shell.links.pop("p")  # the action that tells p of d finds no link
    decode.reports.put(snapshot("d"))
    assert isinstance(await asyncio.wait_for(shell.failure, 5), KeyError)
    await link.close()
