"""The shell of RouterMachine: performs its actions on the links to the workers and on the streams of the clients."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import assert_never

from core.config import RouterConfig, with_live
from core.errors import DeadlineExceeded, TandemError
from core.lifecycle import Stage, Timeline
from core.service import Endpoint
from core.traffic import RouterTraffic
from router.links.worker_link import WorkerLink
from router.operations.decision_timer import DecisionTimer
from router.operations.fleet_metrics import readings
from router.operations.request_metrics import RequestMetrics
from router.operations.request_ring import RequestRing
from router.operations.request_spans import spans_of
from router.operations.traffic_count import TrafficCount
from router.requests import events
from router.requests.events import RouterAction, RouterEvent
from router.requests.machine import RouterMachine
from router.requests.routed_request import request_id_of
from router.routing.question import Policy
from router.serving.choice_stream import ChoiceStream
from router.serving.ended_choice import EndedChoice
from runtime.driver import Driver
from runtime.prometheus.metrics import Metric
from runtime.prometheus.metrics_page import Metrics
from runtime.rpc.security import Credentials
from runtime.tracing.telemetry import Telemetry

# Limit: the last tokens of a worker that has left, below `PUBLISH_TIMEOUT_S`; beyond: another computes what is open
LAST_WORDS_S = 0.5
MAX_REPORTS_PER_S = 1000  # of all workers together: less than a third of a core

logger = logging.getLogger(__name__)


class RouterShell:
    """Runs on one asyncio loop. Call every method on that loop."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        eos_token_ids: frozenset[int],
        telemetry: Telemetry,
        credentials: Credentials,
        router_id: str,
    ) -> None:
        self.config = config
        self.telemetry = telemetry
        self._credentials = credentials
        self.router_id = router_id
        timer = DecisionTimer()
        machine = RouterMachine(
            config, lambda: secrets.randbits(128), eos_token_ids, router_id, policy, decision_timer=timer
        )
        self.view = machine.view
        self.links: dict[str, WorkerLink] = {}  # by worker id
        self._linking = asyncio.Lock()  # one list of workers at a time
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._driver: Driver[RouterEvent, RouterAction] = Driver(machine, self._perform, self._on_fatal)
        self._streams: dict[str, ChoiceStream] = {}  # open ones, by the request id of the choice
        self._num_requests = 0
        self.ring = RequestRing()
        self.metrics = Metrics(telemetry.config, readings(self.view))
        timer.durations = self.metrics.buckets(Metric.DECISION_DURATION)
        self._request_metrics = RequestMetrics(self.metrics, config.slo_ttft_ms)
        self._traffic = TrafficCount()

    def now(self) -> float:
        return self._driver.now()

    def new_request_id(self) -> str:
        """Unique in the cluster."""
        self._num_requests += 1
        return f"{self.router_id}.{self._num_requests}"

    def set_config(self, config: RouterConfig) -> None:
        """Take the live options of `config`."""
        self.config = with_live(self.config, config)
        self._request_metrics.slo_ttft_ms = self.config.slo_ttft_ms
        self._driver.post(events.ConfigChanged(self.config))

    # ---- streams

    def open(self, streams: list[ChoiceStream], deadline: float, num_following: int = 0) -> None:
        """Pass the choices of a call to the machine, which admits all of them or none. `num_following`: choices of
        later calls that are of use only together with this one.

        Raises `DeadlineExceeded`, `QueueFull`, `InvalidRequest`, or `WorkerUnavailable` if the machine has failed.
        """
        first, *others = (stream.request for stream in streams)
        if not streams[0].token_ids:
            self._traffic.arrived(len(streams))
        self._streams |= {stream.request.request_id: stream for stream in streams}
        try:
            if deadline <= self.now():
                raise DeadlineExceeded("the deadline passed before the request could start")
            delivered = tuple(streams[0].token_ids)
            self._driver.ask(
                events.RequestArrived(first, streams[0].arrived_at, deadline, tuple(others), delivered, num_following)
            )
        except TandemError as error:
            for stream in streams:
                timeline = Timeline(Stage.TOKENIZE, stream.arrived_at)
                timeline.enter(Stage.FINISHED, self.now())
                self._end(events.Fail(stream.request.request_id, error, timeline))
            raise

    def refuse(
        self,
        error: TandemError,
        headers: Mapping[str, str],
        arrived_at: float,
        operation: str,
        names: tuple[str, str],
    ) -> None:
        """Count and trace a call that was refused before it had a stream. `names`: of the model, of the request."""
        self._request_metrics.refused(error)
        trace, now, (model, request_id) = self.telemetry.start_trace(headers), self.now(), names
        arrived_unix_s = time.time() - (now - arrived_at)
        self._trace(
            EndedChoice(
                trace, request_id, 0, operation, model, arrived_at, now, arrived_unix_s,
                error_code=error.code.value, error=str(error),
            )
        )  # fmt: skip

    def _trace(self, ended: EndedChoice) -> None:
        self.ring.add(ended)
        if self.telemetry.keeps(ended.trace, ended.total_s, failed=ended.outcome is None):
            self.telemetry.export(ended.trace, spans_of(ended, self.router_id))

    def traffic(self, start_s: float) -> RouterTraffic:
        """As `RouterControl.traffic`."""
        if start_s != self.view.start_s:
            self._driver.post(events.StartExpected(start_s))
        return self._traffic.reading(self.view, self.config.slo_ttft_ms / 1e3)

    def count_refusal(self, error: TandemError) -> None:
        """Count a call that was refused before the request was read."""
        self._request_metrics.refused(error)

    def post(self, event: RouterEvent) -> None:
        self._driver.post(event)

    def close(self, stream: ChoiceStream) -> None:
        """Cancel the choice if it is still open, and end its trace. Call it when the client's call has ended."""
        stream.end_pause()
        if stream.request.request_id in self._streams and not self._driver.stopped:
            self._driver.post(events.ClientCancelled(stream.request.request_id))
        self._trace(stream.ended(self.now()))

    @property
    def num_open(self) -> int:
        return len(self._streams)

    # ---- workers

    async def set_workers(self, endpoints: list[Endpoint]) -> None:
        """Link to these workers and to no other. A worker that has left is lost once its last words have been read."""
        async with self._linking:
            wanted = {endpoint.service_id: endpoint for endpoint in endpoints}
            gone = [
                link
                for worker_id, link in self.links.items()
                if worker_id not in wanted or link.endpoint.has_switched(wanted[worker_id])
            ]
            for link in gone:
                link.end_watch()  # else a report that has arrived already lets the worker join again
            leaving = {endpoint.service_id for endpoint in endpoints if endpoint.draining}
            for worker_id in leaving | {link.endpoint.service_id for link in gone}:
                self.post(events.WorkerLeaves(worker_id))
            self._link(wanted)
            await asyncio.gather(*(link.until_ended(LAST_WORDS_S) for link in gone))
            # Post every loss before any link is removed: until then the machine may dispatch to one of these workers.
            for link in gone:
                self.post(
                    events.WorkerLost(
                        link.endpoint.service_id, "the supervisor removed the worker, or gave it another role"
                    )
                )
            for link in gone:
                del self.links[link.endpoint.service_id]
            self._link(wanted)
            await asyncio.gather(*(link.close() for link in gone))

    def _link(self, wanted: Mapping[str, Endpoint]) -> None:
        """Make the links that are missing, and update the others, but for those to workers with another role."""
        interval_ms = report_interval_ms(len(wanted))
        for worker_id, endpoint in wanted.items():
            link = self.links.get(worker_id)
            if link is None:
                self.links[worker_id] = WorkerLink(
                    endpoint, self.router_id, self.post, self._is_known, self._credentials, interval_ms
                )
            elif not link.endpoint.has_switched(endpoint):
                link.endpoint = endpoint
                link.pace_reports(interval_ms)

    def _is_known(self, worker_id: str) -> bool:
        return self.view.worker(worker_id) is not None

    async def close_links(self) -> None:
        self._driver.stop()
        async with self._linking:
            await asyncio.gather(*(link.close() for link in self.links.values()))

    # ---- actions

    def _perform(self, action: RouterAction) -> None:
        if type(action) is events.Deliver:  # by far the most frequent, and a `match` of it costs a microsecond
            self._deliver(action)
            return
        match action:
            case events.Deliver():
                self._deliver(action)
            case events.StartDecode():
                if not action.is_move:
                    self._streams[request_id_of(action.dispatch_id)].dispatched(action.promise)
                self.links[action.worker_id].perform(action)
            case events.OfferPrefix() if action.worker_id not in self.links:
                pass  # the reader computes the prefix
            case (
                events.StartPrefill() | events.HandOver() | events.WithdrawOffer() | events.OfferPrefix()
                | events.StartMove() | events.ResumeSequence()
            ):  # fmt: skip
                self.links[action.worker_id].perform(action)
            case events.UpdatePeers(worker_id, changes):
                self.links[worker_id].update_peers(changes)
            case events.CancelDispatch(dispatch_id, only):
                for worker_id, link in self.links.items():
                    if not only or only == worker_id:
                        link.cancel(dispatch_id)
            case events.Finish() | events.Fail():
                self._end(action)
            case _:
                assert_never(action)

    def _deliver(self, action: events.Deliver) -> None:
        stream = self._streams[action.request_id]
        self._request_metrics.note_tokens(stream, len(action.token_ids), self.now())
        if stream.deliver(action):  # later: the machine has not finished this event
            asyncio.get_running_loop().call_soon(self.post, events.StopMatched(action.request_id))

    def _end(self, result: events.Finish | events.Fail) -> None:
        stream = self._streams.pop(result.request_id)
        stream.end(result)
        self._request_metrics.ended(stream, result, self.now())
        self._traffic.ended(result, self.config.slo_ttft_ms / 1e3)

    def _on_fatal(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


def report_interval_ms(num_workers: int) -> int:
    """Of each worker, at least, so that a router can read the reports of all."""
    return 1000 * num_workers // MAX_REPORTS_PER_S
