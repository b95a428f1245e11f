"""The dashboard's JSON: what the page reads, shared among viewers, and failures that it can explain."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from core.errors import ModelNotFound, TandemError, Unauthenticated, WorkerUnavailable
from gateway.dashboard import feed, routes
from gateway.fleets import ModelUnknown
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2

SERVING = worker_pb2.WORKER_STATE_SERVING
GONE = WorkerUnavailable("no router at 127.0.0.1:50051")


@dataclass
class FakeFleet:
    """Set `failure` to make every call fail, `router_id` and `requests` to play another router."""

    router_id: str = "router-0-aa"
    address: str = "127.0.0.1:50051"
    failure: TandemError | None = None
    key: str = ""  # if set, the one authorization that is accepted
    num_calls: int = 0
    seen_metadata: list[tuple[str, str]] = field(default_factory=list)
    requests: list[cluster_pb2.RequestSummary] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = [make_worker(role) for role in (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)]

    async def fleet(self, metadata: Sequence[tuple[str, str]]) -> cluster_pb2.GetFleetResponse:
        self._check(metadata)
        own = cluster_pb2.FleetRouter(
            router_id=self.router_id, address="127.0.0.1:50051", state=SERVING, num_queued=3, num_in_flight=9
        )
        other = cluster_pb2.FleetRouter(router_id="router-9-zz", address="127.0.0.1:50051", state=SERVING)
        return cluster_pb2.GetFleetResponse(
            workers=self.workers, routers=[own, other], num_queued=3, num_in_flight=9, wanted_prefill=2, wanted_decode=2
        )

    async def list_requests(
        self, limit: int, after: int, metadata: Sequence[tuple[str, str]]
    ) -> cluster_pb2.ListRequestsResponse:
        self._check(metadata)
        newer = [summary for summary in self.requests if summary.number > after]
        return cluster_pb2.ListRequestsResponse(requests=newer[::-1][:limit])

    async def get_trace(self, id: str, metadata: Sequence[tuple[str, str]]) -> cluster_pb2.Trace:
        self._check(metadata)
        found = [summary for summary in self.requests if id in (summary.request_id, summary.trace_id)]
        if not found:
            raise ModelNotFound(f"the router does not keep request {id!r}")
        root = cluster_pb2.Span(name="tandem.request", process=self.router_id, duration_ms=found[0].total_ms)
        pair = cluster_pb2.Candidate(prefill_worker="prefill-0", decode_worker="decode-0", chosen=True, cost_ms=36.5)
        alone = cluster_pb2.Candidate(decode_worker="decode-0", cost_ms=73.0)
        return cluster_pb2.Trace(requests=found, spans=[root], candidates=[pair, alone])

    def _check(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.num_calls += 1
        self.seen_metadata = list(metadata)
        if self.failure is not None:
            raise self.failure
        if self.key and dict(metadata).get("authorization") != self.key:
            raise Unauthenticated("authorization: an API key is needed")


class FakeFleets:
    """In the place of `gateway.fleets.Fleets`."""

    def __init__(self, **clients: FakeFleet) -> None:
        self._clients = clients

    def listed(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, model=name) for name in self._clients]

    def resolve(self, model: str) -> SimpleNamespace:
        if model and model not in self._clients:
            raise ModelUnknown(model, list(self._clients))
        return SimpleNamespace(router=self._clients[model or next(iter(self._clients))])


def make_worker(role: worker_pb2.WorkerRole) -> cluster_pb2.FleetWorker:
    load = worker_pb2.LoadReport(
        state=SERVING, num_decoding=4, decode_context=2000,
        ledger=worker_pb2.Ledger(free=600, cached=200, held=120, leased=50, incoming=30),
        step_cost=worker_pb2.StepCost(step_s=0.004, sequence_s=0.0005, context_s=1e-6),
    )  # fmt: skip
    return cluster_pb2.FleetWorker(worker_id=f"worker-{role}", role=role, state=SERVING, load=load)


def make_summary(number: int, **changes: object) -> cluster_pb2.RequestSummary:
    """A request that has ended."""
    timings = inference_pb2.PhaseTimings(prefill_ms=40.0, transfer_ms=5.0, decode_ms=200.0)
    summary = cluster_pb2.RequestSummary(
        number=number, request_id=f"req-{number:04d}", trace_id=f"{number:032x}", total_ms=250.0, timings=timings,
        arrived_at_unix_ms=1.7e12 + number, end="stop", path=inference_pb2.REQUEST_PATH_DISAGGREGATED,
    )  # fmt: skip
    summary.MergeFrom(cluster_pb2.RequestSummary(**changes))  # type: ignore[arg-type]
    return summary


def app_over(**clients: FakeFleet) -> httpx.AsyncClient:
    app = Starlette(routes=routes.ROUTES)
    app.state.fleets, app.state.feeds = FakeFleets(**clients), feed.Feeds()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(requests=[make_summary(number) for number in range(1, 6)])


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with app_over(tiny=fleet) as client:
        yield client


@pytest.fixture
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_AGE_S", 0.0)


async def test_viewers_share_the_encoded_requests(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 viewers who asked at once stopped the router for 1.4 s: each answer was encoded anew."""
    encoded: list[object] = []

    def encode(value: object) -> bytes:
        encoded.append(value)
        return json.dumps(value).encode()

    monkeypatch.setattr(feed, "json_bytes", encode)
    answers = await asyncio.gather(*(client.get(f"/dashboard/api/requests?after={after}") for after in range(6)))
    assert [len(answer.json()["requests"]) for answer in answers] == [5] * 6, "no viewer has named the router"
    router = answers[0].json()["router"]
    answer = (await client.get("/dashboard/api/requests", params={"router": router, "after": 3})).json()
    assert [request["number"] for request in answer["requests"]] == [4, 5]
    assert len(encoded) == 5


async def test_viewers_with_many_keys_take_one_turn_of_the_loop_after_the_other(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fleet has no keys, each of them opens a feed: twenty at once took 0.7 s of one turn."""
    fleet.requests = [make_summary(number) for number in range(1, feed.MAX_REQUESTS + 1)]
    num_encoded, most_in_turn = 0, 0

    def encode(value: object) -> bytes:
        nonlocal num_encoded
        num_encoded += 1
        return json.dumps(value).encode()

    async def count_turns() -> None:
        nonlocal most_in_turn
        before = 0
        while True:
            before, most_in_turn = num_encoded, max(most_in_turn, num_encoded - before)
            await asyncio.sleep(0)

    monkeypatch.setattr(feed, "json_bytes", encode)
    counting = asyncio.create_task(count_turns())
    async with app_over(tiny=fleet) as client:
        keys = [{"authorization": f"Bearer {number}"} for number in range(5)]
        answers = await asyncio.gather(*(client.get("/dashboard/api/requests", headers=key) for key in keys))
    counting.cancel()
    assert [len(answer.json()["requests"]) for answer in answers] == [feed.MAX_REQUESTS] * 5
    assert num_encoded == 5 * feed.MAX_REQUESTS
    assert most_in_turn <= 2 * feed.REQUESTS_PER_TURN, "the end of a feed, and the start of the next"


async def test_the_page_names_files_that_exist_and_allows_no_other_source(client: httpx.AsyncClient) -> None:
    page = await client.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    total = len(page.content)
    for path in sorted(routes.STATIC.iterdir()):
        found = await client.get(f"/dashboard/static/{path.name}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
        total += len(found.content)
    assert total < 200_000


@pytest.mark.parametrize("name", ["..%2froutes.py", "routes.py", "nothing.js", "%00"])
async def test_no_other_file_is_served(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/dashboard/static/{name}")).status_code == 404


async def test_an_unchanged_file_is_not_sent_again(client: httpx.AsyncClient) -> None:
    etag = (await client.get("/dashboard/static/main.js")).headers["etag"]
    again = await client.get("/dashboard/static/main.js", headers={"If-None-Match": etag})
    assert again.status_code == 304
    assert not again.content


async def test_no_script_writes_markup() -> None:
    for path in routes.STATIC.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(")), path.name


async def test_the_fleet_is_told_worker_by_worker(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    told = (await client.get("/dashboard/api/fleet")).json()
    assert told["router"] == "router-0-aa"
    assert told["models"] == ["tiny"]
    assert told["wanted"] == {"prefill": 2, "decode": 2, "router": 0}
    assert [router["num_queued"] for router in told["routers"]] == [3, None]
    worker, source = told["workers"][0], fleet.workers[0]
    assert (worker["role"], worker["state"]) == ("prefill", "serving")
    assert sum(worker["blocks"].values()) == 1000
    assert worker["blocks"]["held"] == source.load.ledger.held
    assert worker["step_ms"] == pytest.approx(4 + 4 * 0.5 + 2000 * 1e-3)


@pytest.mark.usefixtures("always_fresh")
async def test_requests_come_once_and_in_order_and_a_new_router_starts_its_count_again(
    client: httpx.AsyncClient, fleet: FakeFleet
) -> None:
    first = (await client.get("/dashboard/api/requests")).json()
    assert [request["number"] for request in first["requests"]] == [1, 2, 3, 4, 5]
    assert first["requests"][0]["phases"]["prefill_ms"] > 0
    assert first["requests"][0]["path"] == "disaggregated"
    fleet.requests.append(make_summary(6, end="unavailable"))
    after = {"router": first["router"], "after": 5}
    second = (await client.get("/dashboard/api/requests", params=after)).json()
    assert [(request["number"], request["end"]) for request in second["requests"]] == [(6, "unavailable")]
    fleet.router_id, fleet.requests = "router-0-bb", [make_summary(1)]
    found = (await client.get("/dashboard/api/requests", params=after)).json()
    assert found["router"] == "router-0-bb"
    assert [request["number"] for request in found["requests"]] == [1]


async def test_many_viewers_cost_one_fetch(
    client: httpx.AsyncClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_AGE_S", float("inf"))  # however late the last viewer is
    answers = await asyncio.gather(*(client.get("/dashboard/api/fleet") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert fleet.num_calls == 2  # the fleet, and its requests


async def test_the_trace_has_spans_and_the_chosen_candidate(client: httpx.AsyncClient) -> None:
    trace = (await client.get("/dashboard/api/trace/req-0003")).json()
    assert trace["requests"][0]["id"] == "req-0003"
    assert trace["spans"][0]["name"] == "tandem.request"
    assert [candidate["chosen"] for candidate in trace["candidates"]] == [True, False]
    gone = await client.get("/dashboard/api/trace/none")
    assert gone.status_code == 404
    assert gone.json()["error"]["kind"] == "gone"


@pytest.mark.usefixtures("always_fresh")
async def test_a_router_that_is_away_is_told_with_its_seconds(
    client: httpx.AsyncClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.failure = GONE
    assert (await client.get("/dashboard/api/fleet")).status_code == 503
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 12)
    error = (await client.get("/dashboard/api/fleet")).json()["error"]
    assert error["kind"] == "unreachable"
    assert 12 <= error["failing_s"] < 20
    fleet.failure = None
    assert (await client.get("/dashboard/api/fleet")).status_code == 200
    fleet.failure = GONE
    assert (await client.get("/dashboard/api/fleet")).json()["error"]["failing_s"] < 5


async def test_a_router_that_does_not_answer_is_given_up(
    client: httpx.AsyncClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(feed, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(fleet, "fleet", never)
    answer = await client.get("/dashboard/api/fleet")
    assert answer.status_code == 503
    assert "within 0.01 s" in answer.json()["error"]["message"]


async def test_a_key_is_passed_on_and_opens_nothing_for_others(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.key = "Bearer of-an-operator"
    refused = await client.get("/dashboard/api/fleet")
    assert refused.status_code == 401
    assert refused.json()["error"]["kind"] == "key"
    key = {"Authorization": fleet.key}
    assert (await client.get("/dashboard/api/fleet", headers=key)).status_code == 200
    assert fleet.seen_metadata == [("authorization", fleet.key)]
    assert (await client.get("/dashboard/api/fleet")).status_code == 401
    assert (await client.get("/dashboard/api/trace/req-0001", headers=key)).status_code == 200
    await client.get("/dashboard/api/fleet", headers=[("Authorization", "Bearer other"), *key.items()])
    assert [value for _, value in fleet.seen_metadata] == ["Bearer other", fleet.key], "for the router to refuse"
    too_long = {"Authorization": "Bearer " + "k" * 2000}
    assert (await client.get("/dashboard/api/fleet", headers=too_long)).status_code == 400


async def test_keys_without_number_take_bounded_room() -> None:
    def key(number: int) -> feed.Credentials:
        return (("authorization", f"Bearer {number}"),)

    feeds = feed.Feeds()
    fleet: Any = FakeFleet()
    first = feeds.get("", key(0), lambda: fleet)
    for number in range(1, feed.MAX_FEEDS + 1):
        feeds.get("", key(number), lambda: fleet)
    assert feeds.get("", key(0), lambda: fleet) is not first


async def test_each_model_shows_its_own_fleet() -> None:
    fast, heavy = FakeFleet(router_id="router-fast"), FakeFleet(router_id="router-heavy")
    async with app_over(fast=fast, heavy=heavy) as client:
        told = (await client.get("/dashboard/api/fleet")).json()
        assert told["router"] == "router-fast"
        assert told["models"] == ["fast", "heavy"]
        assert (await client.get("/dashboard/api/fleet?model=heavy")).json()["router"] == "router-heavy"
        assert (await client.get("/dashboard/api/fleet?model=none")).status_code == 404


@pytest.mark.parametrize("after", ["-1", "x"])
async def test_a_number_that_is_none_is_refused(client: httpx.AsyncClient, after: str) -> None:
    assert (await client.get(f"/dashboard/api/requests?after={after}")).status_code == 400
