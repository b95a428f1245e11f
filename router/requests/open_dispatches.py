"""The open dispatches of a router. Starts their calls, numbers them, and counts them on their workers."""

from __future__ import annotations

from collections.abc import Callable, Collection

from core.handoff import PrefixSource, TransferId
from core.request import Request
from router.requests import events
from router.requests.events import PrefillResult, RouterAction
from router.requests.routed_request import Dispatch, RoutedRequest, dispatch_id_of, dispatch_of
from router.routing.policy import move_seconds
from router.routing.question import Candidate
from router.routing.worker_record import CallWork, WorkerRecord
from router.routing.workers import WorkerTable

LATE_S = 0.05  # beyond twice its price; or half of its gain beyond its price: then the read of a prefix is late


class OpenDispatches:
    def __init__(self, workers: WorkerTable, new_ticket: Callable[[], TransferId]) -> None:
        self._workers = workers
        self._new_ticket = new_ticket
        self._num_calls = 0  # to all workers, ever
        self.by_id: dict[str, RoutedRequest] = {}
        self.by_call: dict[int, RoutedRequest] = {}  # by number of the decode call

    def start(self, routed: RoutedRequest, candidate: Candidate, now: float) -> list[RouterAction]:
        """Start an attempt on these workers."""
        dispatch_id = self._next_id(routed)
        call, has_prefill = self._next_call(), candidate.prefill_worker is not None
        routed.dispatch = Dispatch(
            dispatch_id, candidate, call, len(routed.delivered), has_prefill, self._workers.compared, now
        )
        routed.last_dispatch = routed.dispatch
        self.by_id[dispatch_id] = self.by_call[call] = routed
        # Workers see the dispatch id as request id: an earlier attempt may still be ending on the same worker.
        request = routed.resumed().derive(request_id=dispatch_id, age_s=now - routed.arrived_at)
        timeout_s = max(0.0, routed.deadline - now)
        uncached, cached = candidate.uncached_tokens, candidate.cached_tokens
        decode = self._workers.chosen(candidate.decode_worker)
        prefix, offered = self._read_prefix(dispatch_id, request, candidate, now)
        if candidate.prefill_worker is None:
            work_s = decode.step_cost.prompt_seconds(uncached, cached)
            num_blocks = -(-(uncached + candidate.read.num_tokens) // decode.agent.layout.block_size)
            decode.add_call(dispatch_id, call, CallWork(work_s, num_blocks))
            start = events.StartDecode(
                dispatch_id, decode.worker_id, request, None, timeout_s, call, routed.promise, prefix=prefix
            )
            return [start, *offered]
        prefill, ticket, prefill_call = (
            self._workers.chosen(candidate.prefill_worker),
            self._new_ticket(),
            self._next_call(),
        )
        routed.dispatch.transfer_id, routed.dispatch.source = ticket, prefill.worker_id
        work_s, moved_s = prefill.step_cost.prompt_seconds(uncached, cached), 0.0
        if self._workers.config.peer_prefixes != "never":
            num_blocks, speeds = candidate.transfer_blocks, self._workers.path_speeds
            moved_s = move_seconds(decode.view, prefill.view, num_blocks, speeds.estimate)
        until = _links_until(decode, prefill, moved_s, now)
        decode.add_call(dispatch_id, call, CallWork(0.0, candidate.transfer_blocks, until))
        prefill.add_call(dispatch_id, prefill_call, CallWork(work_s, 0, until))
        return [
            events.StartDecode(
                dispatch_id, decode.worker_id, request, (ticket, prefill.agent), timeout_s, call, routed.promise
            ),
            events.StartPrefill(
                dispatch_id, prefill.worker_id, request, ticket, decode.agent, timeout_s, prefill_call, prefix
            ),
            *offered,
        ]

    def _read_prefix(
        self, dispatch_id: str, request: Request, candidate: Candidate, now: float
    ) -> tuple[PrefixSource | None, list[RouterAction]]:
        """What the computing worker reads from a peer, and the action that tells the peer of it."""
        read, computing = candidate.read, candidate.prefill_worker or candidate.decode_worker
        if read.source is None or read.source == computing:  # the worker finds by itself what is on its disk
            return None, []
        source = self._workers.chosen(read.source)
        reader = self._workers.chosen(computing)
        behind_s = max(0.0, max(source.link_until, reader.link_until) - now)
        until = _links_until(reader, source, read.seconds - behind_s, now)
        for record in (source, reader):
            record.use_link(until)
        reader.begin_read(source.agent.name, now)
        limit_s = read.seconds + max(read.seconds + LATE_S, read.gain_s / 2)
        prefix = PrefixSource(self._new_ticket(), source.agent, candidate.cached_tokens, limit_s)
        offer = events.OfferPrefix(
            dispatch_id, source.worker_id, prefix.transfer_id, reader.agent,
            request.token_ids[: candidate.cached_tokens], request.cache_salt, limit_s,
        )  # fmt: skip
        return prefix, [offer]

    def end_read(self, dispatch: Dispatch, num_tokens: int | None, now: float) -> None:
        """The read of a prefix in this attempt has ended, or failed (0), or never began (None)."""
        self._workers.end_read(dispatch.candidate, num_tokens, dispatch.started_at, now)

    def open_move(self, routed: RoutedRequest, worker_id: str, now: float) -> Dispatch:
        """A dispatch of the same request on another decode worker, which takes over later."""
        source = dispatch_of(routed)
        return Dispatch(
            self._next_id(routed), source.candidate._replace(decode_worker=worker_id), self._next_call(),
            len(routed.delivered), False, source.compared, now, self._new_ticket(), prefill=source.prefill,
            source=source.candidate.decode_worker,
        )  # fmt: skip

    def replace(self, routed: RoutedRequest, dispatch: Dispatch) -> None:
        """Another dispatch becomes the current one. The worker of the replaced one keeps its call."""
        assert routed.dispatch is not None
        del self.by_id[routed.dispatch.dispatch_id], self.by_call[routed.dispatch.call]
        routed.dispatch = routed.last_dispatch = dispatch
        self.by_id[dispatch.dispatch_id] = self.by_call[dispatch.call] = routed

    def _next_id(self, routed: RoutedRequest) -> str:
        routed.num_dispatches += 1
        return dispatch_id_of(routed.request_id, routed.num_dispatches)

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def end_prefill(self, routed: RoutedRequest) -> str:
        """Note that the prefill call of the current attempt has ended. Returns its worker."""
        dispatch = dispatch_of(routed)
        prefill_worker = dispatch.candidate.prefill_worker
        assert prefill_worker is not None
        dispatch.prefill_open = False
        self._workers.remove_dispatch(prefill_worker, dispatch.dispatch_id)
        return prefill_worker

    def hand_over(self, routed: RoutedRequest, result: PrefillResult, now: float) -> list[RouterAction]:
        """Bring the hand-off in the answer of the prefill worker, if there is one, to the decode worker."""
        dispatch = routed.dispatch
        if dispatch is None or dispatch.transfer_id is None or not result.handoff or result.finish_reason is not None:
            return []
        if not dispatch.decode_open:  # nobody waits for it, and the worker may have left
            return []
        worker_id, timeout_s = dispatch.candidate.decode_worker, max(0.0, routed.deadline - now)
        return [events.HandOver(dispatch.dispatch_id, worker_id, dispatch.transfer_id, result.handoff, timeout_s)]

    def end(self, routed: RoutedRequest) -> list[RouterAction]:
        """Remove the current attempt, if any, from its workers. Cancel its open calls, and withdraw its offer."""
        dispatch, routed.dispatch = routed.dispatch, None
        if dispatch is None:
            return []
        del self.by_id[dispatch.dispatch_id], self.by_call[dispatch.call]
        self._workers.remove_dispatch(dispatch.candidate.decode_worker, dispatch.dispatch_id)
        if dispatch.prefill_open:
            assert dispatch.candidate.prefill_worker is not None
            self._workers.remove_dispatch(dispatch.candidate.prefill_worker, dispatch.dispatch_id)
        is_open = dispatch.prefill_open or dispatch.decode_open
        cancels: list[RouterAction] = [events.CancelDispatch(dispatch.dispatch_id)] if is_open else []
        return cancels + self._withdraw(routed, dispatch)

    def _withdraw(self, routed: RoutedRequest, dispatch: Dispatch) -> list[RouterAction]:
        """A cancelled or failed Decode call may never have reached its worker. Then no reader ends the offer.

        Only the decode worker sends a second token, so such an attempt has a reader. Each attempt has its own ticket.
        """
        worker_id, ticket = dispatch.candidate.prefill_worker, dispatch.transfer_id
        if worker_id is None or ticket is None or worker_id != dispatch.source or self._workers.get(worker_id) is None:
            return []  # no offer of a prefill worker that serves
        has_offer = dispatch.prefill_open or dispatch.prefill is not None
        num_tokens = len(routed.delivered) + len(routed.early_tokens) - dispatch.first_index
        if not has_offer or dispatch.decode is not None or num_tokens > 1:
            return []
        return [events.WithdrawOffer(dispatch.dispatch_id, worker_id, ticket)]

    def __len__(self) -> int:
        return len(self.by_id)

    def check(self, requests: Collection[RoutedRequest], moving: Collection[str]) -> None:
        """The current attempt of each request is open. The workers of its open calls carry it, so that their loss ends
        it, and no other worker does. Beside these, workers carry the calls of moves."""
        assert self.by_call.keys() == {r.dispatch.call for r in requests if r.dispatch}
        assert self.by_id.keys() == {r.dispatch.dispatch_id for r in requests if r.dispatch}
        for record in self._workers:
            assert record.dispatched.keys() <= self.by_id.keys() | set(moving)
            assert all(number <= self._num_calls for number in record.dispatched.values())
        carried = {(name, r.worker_id) for r in self._workers for name in r.dispatched if name in self.by_id}
        for name, dispatch in ((name, dispatch_of(routed)) for name, routed in self.by_id.items()):
            decode, prefill = (name, dispatch.candidate.decode_worker), (name, dispatch.candidate.prefill_worker)
            assert not dispatch.decode_open or decode in carried, f"waits for a worker that is lost: {decode}"
            assert not dispatch.prefill_open or prefill in carried, f"waits for a worker that is lost: {prefill}"
            carried -= {decode, prefill} if dispatch.prefill_open else {decode}
        assert not carried, f"workers that have no call of these any more carry them: {carried}"


def _links_until(reader: WorkerRecord, owner: WorkerRecord, seconds: float, now: float) -> float:
    """When blocks that take so long will have moved from the owner to the reader, behind those that are on their way.

    Other routers choose alike, so the blocks count once for each, as prompt work does.
    """
    return max(now, reader.link_until, owner.link_until) + reader.num_routers * seconds if seconds else 0.0
