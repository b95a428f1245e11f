"""What the router knows of its workers: who they are, what they last said, and what it has sent them since."""

from __future__ import annotations

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
    suspect: bool = False  # a call to it failed; nothing goes there until it reports again
    # Dispatches of ours that are there now -> prompt tokens they have to compute there.
    dispatched: dict[str, int] = field(default_factory=dict)


class WorkerTable:
    """The workers by id, with the prefix index. A worker that reports too late is not asked again until it speaks."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._records: dict[str, WorkerRecord] = {}
        self.index = PrefixIndex()

    def join(self, record: WorkerRecord, cached_blocks: Iterable[int]) -> None:
        """Add a worker, or take its new snapshot. Raises `LayoutMismatch` where its KV would not fit the others'."""
        self.refuse_layout(record)
        known = self._records.get(record.worker_id)
        if known is not None:
            record.dispatched = known.dispatched
        self._records[record.worker_id] = record
        self.index.replace(record.worker_id, cached_blocks)

    def refuse_layout(self, record: WorkerRecord) -> None:
        """The block size may differ between the pools, one a multiple of the other; nothing else may."""
        ours = record.agent.layout
        for other in self._records.values():
            differences = other.agent.layout.differences(ours)
            small, large = sorted((ours.block_size, other.agent.layout.block_size))
            if other.role is not record.role and large % small == 0:
                differences.pop("block_size", None)
            if differences and other.worker_id != record.worker_id:
                raise LayoutMismatch(differences)

    def take_report(
        self, worker_id: str, load: WorkerLoad, block_changes: Iterable[tuple[int, bool]], now: float
    ) -> bool:
        """False where the worker is not here. `block_changes`: (sequence hash, True = stored, False = removed)."""
        record = self._records.get(worker_id)
        if record is None:
            return False
        record.load, record.reported_at, record.suspect = load, now, False
        for sequence_hash, is_stored in block_changes:
            if is_stored:
                self.index.store(worker_id, sequence_hash)
            else:
                self.index.remove(worker_id, sequence_hash)
        return True

    def leave(self, worker_id: str) -> WorkerRecord | None:
        self.index.forget(worker_id)
        return self._records.pop(worker_id, None)

    def get(self, worker_id: str) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def block_size(self, role: ServiceRole) -> int | None:
        """Tokens per block, the same in a whole pool; None while no worker of it is here."""
        return next((r.agent.layout.block_size for r in self._records.values() if r.role is role), None)

    def has_role(self, role: ServiceRole, avoid: frozenset[str] = frozenset()) -> bool:
        """Is a worker of this role, other than those to `avoid`, alive and not draining?"""
        return any(
            record.role is role and record.load.state is WorkerState.SERVING and record.worker_id not in avoid
            for record in self._records.values()
        )

    def views(self, role: ServiceRole, hashes: PrefixHashes, avoid: frozenset[str], now: float) -> list[WorkerView]:
        """Workers of this role that can take a request now, those to `avoid` only where there are no others."""
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
        # Our own count is ahead of its report, its report knows of other routers: the larger is the safer.
        return WorkerView(
            worker_id=record.worker_id,
            num_queued_tokens=max(record.load.num_queued_tokens, sum(record.dispatched.values())),
            num_sequences=max(record.load.num_running + record.load.num_waiting, len(record.dispatched)),
            cached_tokens=matched_blocks * record.agent.layout.block_size,
        )

    def refuse_oversized(self, request: Request) -> None:
        """Raise `InvalidRequest` where no decode worker's whole pool would hold the request to its end."""
        longest = self.longest_request()
        if longest is not None and request.max_total_tokens > longest:
            raise InvalidRequest(
                "max_tokens",
                f"prompt + max_tokens is {request.max_total_tokens} tokens, and the largest decode worker holds "
                f"{longest - 1}",
            )

    def longest_request(self) -> int | None:
        """Tokens of prompt and output that the largest decode worker's whole pool has room for; None without one."""
        pools = [r.agent.num_blocks for r in self._records.values() if r.role is ServiceRole.DECODE]
        # The last token is only ever sampled, never computed, so it needs no slot.
        return max(pools) * (self.block_size(ServiceRole.DECODE) or 1) + 1 if pools else None

    def hashes(self, request: Request) -> PrefixHashes:
        """Of the full blocks of a request; empty while no worker has said how long a block is."""
        sizes = sorted({record.agent.layout.block_size for record in self._records.values()})
        root = root_hash(request.cache_salt)
        return {size: sequence_hashes(request.token_ids, size, root) for size in sizes}

    def candidates(self, num_tokens: int, hashes: PrefixHashes, avoid: frozenset[str], now: float) -> list[Candidate]:
        """Every way a request of `num_tokens` may go now, cheapest first."""
        block_size = self.block_size(ServiceRole.DECODE)
        if block_size is None:
            return []
        decode = self.views(ServiceRole.DECODE, hashes, avoid, now)
        prefill_alive = self.has_role(ServiceRole.PREFILL, avoid)
        # Where all have failed it, the decode worker prefills: what they have cached must not draw it back to them.
        prefill = self.views(ServiceRole.PREFILL, hashes, avoid, now) if prefill_alive else []
        return candidates(num_tokens, prefill, decode, prefill_alive, self._config, block_size)

    def chosen(self, worker_id: str) -> WorkerRecord:
        record = self._records.get(worker_id)
        assert record is not None, f"{worker_id} was chosen but is not here"
        return record

    def take_off(self, worker_id: str, dispatch_id: str) -> None:
        """A call of ours on this worker has ended; nothing to do where the worker is gone."""
        record = self._records.get(worker_id)
        if record is not None:
            record.dispatched.pop(dispatch_id, None)

    def suspect(self, worker_id: str) -> None:
        """A call to it failed: it counts as saturated until its next report."""
        record = self._records.get(worker_id)
        if record is not None:
            record.suspect = True

    def check(self) -> None:
        self.index.check()
        for record in self._records.values():
            assert len(record.dispatched) <= self._config.max_in_flight_per_worker
