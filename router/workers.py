"""The router's table of workers: their newest reports, their cached prefixes, and the open calls of this router."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from core.block_hash import root_hash, sequence_hashes
from core.config import RouterConfig
from core.errors import InvalidRequest, LayoutMismatch
from core.handoff import AgentAddress
from core.lifecycle import ServiceRole, WorkerState
from core.request import Request
from core.worker_load import WorkerLoad
from router.policy import Candidate, WorkerView, candidates
from router.prefix_index import PrefixIndex

PrefixHashes = Mapping[int, Sequence[int]]  # block size of a pool -> sequence hashes of a request's full blocks


@dataclass(slots=True)
class WorkerRecord:
    worker_id: str
    role: ServiceRole
    agent: AgentAddress
    load: WorkerLoad
    reported_at: float
    suspect: bool = False  # a call failed; the router dispatches nothing to the worker until its next report
    # Dispatches of this router that are open on the worker -> prompt tokens that the worker computes for each.
    dispatched: dict[str, int] = field(default_factory=dict)


class WorkerTable:
    """The workers by id, and the prefix index. A worker without a report for `report_stale_s` gets no request."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._records: dict[str, WorkerRecord] = {}
        self.index = PrefixIndex()
        self.served_until = -math.inf  # time when the last serving decode worker left; inf while one serves

    def join(self, record: WorkerRecord, cached_blocks: Iterable[int]) -> None:
        """Add a worker, or replace its record by a new snapshot. Raises `LayoutMismatch`, as `refuse_layout` does."""
        self.refuse_layout(record)
        known = self._records.get(record.worker_id)
        if known is not None:
            record.dispatched = known.dispatched
        self._records[record.worker_id] = record
        self.index.replace(record.worker_id, cached_blocks)
        self._update_served_until(record.reported_at)

    def refuse_layout(self, record: WorkerRecord) -> None:
        """Raise `LayoutMismatch` if the layout differs from that of another worker. Only the block sizes of the two
        pools may differ, and one must be a multiple of the other."""
        layout = record.agent.layout
        for other in self._records.values():
            differences = other.agent.layout.differences(layout)
            small, large = sorted((layout.block_size, other.agent.layout.block_size))
            if other.role is not record.role and large % small == 0:
                differences.pop("block_size", None)
            if differences and other.worker_id != record.worker_id:
                raise LayoutMismatch(differences)

    def take_report(
        self, worker_id: str, load: WorkerLoad, block_changes: Iterable[tuple[int, bool]], now: float
    ) -> bool:
        """False if the worker has not joined. `block_changes`: (sequence hash, True = stored, False = removed)."""
        record = self._records.get(worker_id)
        if record is None:
            return False
        record.load, record.reported_at, record.suspect = load, now, False
        for sequence_hash, is_stored in block_changes:
            if is_stored:
                self.index.store(worker_id, sequence_hash)
            else:
                self.index.remove(worker_id, sequence_hash)
        self._update_served_until(now)
        return True

    def leave(self, worker_id: str, now: float) -> WorkerRecord | None:
        self.index.forget(worker_id)
        record = self._records.pop(worker_id, None)
        self._update_served_until(now)
        return record

    def _update_served_until(self, now: float) -> None:
        if self.has_role(ServiceRole.DECODE):
            self.served_until = math.inf
        elif self.served_until == math.inf:
            self.served_until = now

    def get(self, worker_id: str) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def block_size(self, role: ServiceRole) -> int | None:
        """Tokens per block, the same for all workers of a role; None while no worker of the role has joined."""
        return next((r.agent.layout.block_size for r in self._records.values() if r.role is role), None)

    def has_role(self, role: ServiceRole, avoid: frozenset[str] = frozenset()) -> bool:
        """True if a worker of this role serves that is not one of `avoid`."""
        return any(
            record.role is role and record.load.state is WorkerState.SERVING and record.worker_id not in avoid
            for record in self._records.values()
        )

    def views(self, role: ServiceRole, hashes: PrefixHashes, avoid: frozenset[str], now: float) -> list[WorkerView]:
        """Workers of this role that can take a request now. Those in `avoid` only if there are no others."""
        matched = self.index.match(hashes.get(self.block_size(role) or 0, ()))
        usable = [record for record in self._records.values() if record.role is role and self._usable(record, now)]
        preferred = [record for record in usable if record.worker_id not in avoid]
        return [self._view(record, matched.get(record.worker_id, 0)) for record in preferred or usable]

    def _usable(self, record: WorkerRecord, now: float) -> bool:
        return (
            record.load.state is WorkerState.SERVING
            and not record.suspect
            and now - record.reported_at <= self._config.report_stale_s
            and len(record.dispatched) < self._config.max_in_flight_per_worker
        )

    def _view(self, record: WorkerRecord, matched_blocks: int) -> WorkerView:
        # A new dispatch is not in the report yet, and the report includes requests of other routers: take the larger.
        return WorkerView(
            worker_id=record.worker_id,
            num_queued_tokens=max(record.load.num_queued_tokens, sum(record.dispatched.values())),
            num_sequences=max(record.load.num_running + record.load.num_waiting, len(record.dispatched)),
            cached_tokens=matched_blocks * record.agent.layout.block_size,
        )

    def refuse_oversized(self, request: Request) -> None:
        """Raise `InvalidRequest` if the whole pool of no decode worker has room for the request."""
        longest = self.longest_request()
        if longest is not None and request.max_total_tokens > longest:
            raise InvalidRequest(
                "max_tokens",
                f"prompt + max_tokens must be at most {longest} tokens to fit the largest decode worker, "
                f"is {request.max_total_tokens}",
            )

    def longest_request(self) -> int | None:
        """Most tokens of prompt and output that fit the largest decode worker; None without a decode worker."""
        pools = [r.agent.num_blocks for r in self._records.values() if r.role is ServiceRole.DECODE]
        # The last token is sampled but never computed, so it needs no slot in the pool.
        return max(pools) * (self.block_size(ServiceRole.DECODE) or 1) + 1 if pools else None

    def hashes(self, request: Request) -> PrefixHashes:
        """Hashes of the full blocks of a request, for each block size; empty while no worker has joined."""
        sizes = sorted({record.agent.layout.block_size for record in self._records.values()})
        root = root_hash(request.cache_salt)
        return {size: sequence_hashes(request.token_ids, size, root) for size in sizes}

    def candidates(self, num_tokens: int, hashes: PrefixHashes, avoid: frozenset[str], now: float) -> list[Candidate]:
        """The candidates for a request of `num_tokens` now, cheapest first."""
        block_size = self.block_size(ServiceRole.DECODE)
        if block_size is None:
            return []
        decode = self.views(ServiceRole.DECODE, hashes, avoid, now)
        prefill_alive = self.has_role(ServiceRole.PREFILL, avoid)
        # If every prefill worker has failed the request, the decode worker prefills, whatever the others have cached.
        prefill = self.views(ServiceRole.PREFILL, hashes, avoid, now) if prefill_alive else []
        return candidates(num_tokens, prefill, decode, prefill_alive, self._config, block_size)

    def chosen(self, worker_id: str) -> WorkerRecord:
        record = self._records.get(worker_id)
        assert record is not None, f"worker {worker_id} was chosen but has not joined"
        return record

    def remove_dispatch(self, worker_id: str, dispatch_id: str) -> None:
        """Forget a call that has ended. Does nothing after the worker has left."""
        record = self._records.get(worker_id)
        if record is not None:
            record.dispatched.pop(dispatch_id, None)

    def suspect(self, worker_id: str) -> None:
        """Dispatch nothing to this worker until its next report, because a call to it failed."""
        record = self._records.get(worker_id)
        if record is not None:
            record.suspect = True

    def check(self) -> None:
        self.index.check()
        assert (self.served_until == math.inf) == self.has_role(ServiceRole.DECODE)
        for record in self._records.values():
            assert len(record.dispatched) <= self._config.max_in_flight_per_worker
