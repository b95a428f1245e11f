"""The router's table of workers: their newest reports, their cached prefixes, and the open calls of this router."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import nlargest

from core.block_hash import PromptHashes, hash_on_disk, root_hash
from core.config import RouterConfig
from core.cost.step_cost import PRIOR
from core.errors import InvalidRequest, LayoutMismatch
from core.lifecycle import MoveReason, ServiceRole
from core.request import Request
from core.scheduling.worker_load import WorkerChanges
from router.routing.path_speeds import PathSpeeds
from router.routing.policy import MAX_SOURCES, alone, move_target
from router.routing.prefix_index import PrefixIndex
from router.routing.question import Candidate, Option, Policy, RoutingQuestion
from router.routing.worker_record import WorkerRecord

NOT_TIMED = nullcontext()
NOBODY = ("", 0)
START_PATIENCE = 1.5  # times the expected time of a start
RESERVE_SHARE = {MoveReason.DRAIN: 0.0, MoveReason.ROOM: 0.1}  # of its pool that the target of a move keeps free
REUSE_WEIGHT = 1 / 64  # of a prompt in `reuse_share`
UNREPORTED_BLOCKS = 2  # at most, that a sequence has filled since the last report of its worker


class WorkerTable:
    """The workers by id, and the prefix index. A worker without a report for `report_stale_s` gets no request.

    `room_changed` is True if a worker may have room that it did not have when the flag was last cleared, or if other
    workers serve than then. The owner of the table clears the flag.
    """

    def __init__(
        self, config: RouterConfig, policy: Policy, decision_timer: AbstractContextManager[object] = NOT_TIMED
    ) -> None:
        """`decision_timer` is entered around each decision."""
        self.config = config
        self._policy = policy
        self.compared: Sequence[Candidate] = ()  # the candidates that the last `choose` compared, in no order
        self._decision_timer = decision_timer
        self._records: dict[str, WorkerRecord] = {}
        self.reuse_share = 0.0  # as in `RoutingQuestion`
        self.path_speeds = PathSpeeds(lambda: (record.view for record in self))
        self._pools: dict[ServiceRole, dict[str, WorkerRecord]] = {role: {} for role in ServiceRole}
        self._block_sizes: dict[ServiceRole, int] = {}  # of roles with a worker
        self._versions: tuple[int, ...] = ()  # of the hand-off protocol, of decode workers; the newest first
        self._longest_request: int | None = None
        self.decode_limits: tuple[int, ...] = ()  # most tokens of a request, of serving decode workers, rising
        self._other_routers: Counter[str] = Counter()  # router id -> workers with open calls of this router
        self.start_s = 0.0  # of a worker that the planner brings; 0 = none comes
        self._num_routers = 1  # with open calls; this router counts always
        self.index = PrefixIndex()
        self.had_prefill = False  # a prefill worker has served
        self.served_until = -math.inf  # time when the last serving decode worker left; inf while one serves
        self.room_changed = True

    def step_seconds(self, worker_id: str, num_tokens: int) -> float:
        """Predicted time of a step of a decode worker with one more sequence of `num_tokens` in decode, and without
        prompts."""
        view = self._records[worker_id].view
        return view.streams_s + view.cost.sequence_s + num_tokens * view.cost.context_s

    @property
    def wait_s(self) -> float:
        """Without a decode worker for so long, requests fail. A start may take longer than expected."""
        return max(self.config.worker_wait_s, START_PATIENCE * self.start_s)

    def set_config(self, config: RouterConfig) -> None:
        self.config, self.room_changed = config, True
        for record in self._records.values():
            record.set_max_in_flight(config.max_in_flight(record.agent.location.on_gpu))

    # ---- workers join, report and leave

    def join(self, record: WorkerRecord, cached_blocks: Collection[int]) -> None:
        """Add a worker, or replace its record by a new snapshot. Raises `LayoutMismatch`, as `refuse_layout` does."""
        self.refuse_layout(record)
        known = self._records.get(record.worker_id)
        if known is not None:
            record.dispatched, record.on_the_way, record.release = known.dispatched, known.on_the_way, known.release
            record.leaves, record.most_dispatched = known.leaves, known.most_dispatched
            record.link_until, record.sources = known.link_until, known.sources
            record.take_load(record.load)
            self._count_routers(known, -1)
        self._count_routers(record, 1)
        record.num_routers = self._num_routers
        record.refresh()
        self._records[record.worker_id] = self._pools[record.role][record.worker_id] = record
        self._set_num_routers()
        self._share_costs()
        self.path_speeds.note_workers()
        self.index.replace(record.worker_id, cached_blocks)
        self._update_pools(record.reported_at)

    def refuse_layout(self, record: WorkerRecord) -> None:
        """Raise `LayoutMismatch` if the layout differs from that of another worker. Only the block sizes of the two
        pools may differ, and one must be a multiple of the other."""
        layout = record.agent.layout
        for other in self._records.values():
            if other.agent.layout == layout:
                continue
            differences = other.agent.layout.differences(layout)
            small, large = sorted((layout.block_size, other.agent.layout.block_size))
            if other.role is not record.role and large % small == 0:
                differences.pop("block_size", None)
            if differences and other.worker_id != record.worker_id:
                raise LayoutMismatch(differences)

    def take_report(self, worker_id: str, changes: WorkerChanges, now: float) -> bool:
        """False if the worker has not joined."""
        record = self._records.get(worker_id)
        if record is None:
            return False
        was_usable, served = self._usable(record, now), record.serves
        record.reported_at, was_suspect, record.suspect = now, record.suspect, False
        if changes.load is not None:
            self._count_routers(record, -1)
            last_cost = record.load.step_cost
            record.take_load(changes.load)
            if last_cost != changes.load.step_cost:
                self._share_costs()
            self._count_routers(record, 1)
            self._set_num_routers()
        elif was_suspect:
            record.refresh()
        for sequence_hashes, is_stored in changes.blocks:
            if is_stored:
                self.index.store(worker_id, sequence_hashes)
            else:
                self.index.remove(worker_id, sequence_hashes)
        record.paths |= {path.peer: path for path in changes.paths}
        for peer in changes.removed_paths:
            record.paths.pop(peer, None)
        owners = (*(path.peer for path in changes.paths), *changes.removed_paths)
        self.path_speeds.note_paths(record.agent.name, owners)
        if record.serves != served:
            self._update_pools(now)
        self.room_changed = self.room_changed or (record.has_room and not was_usable)
        return True

    def note_leaving(self, worker_id: str, now: float) -> None:
        """The worker will drain, which its own reports say later. Does nothing if it has not joined."""
        record = self._records.get(worker_id)
        if record is not None and not record.leaves:
            record.leaves = True
            record.refresh()
            self._update_pools(now)

    def leave(self, worker_id: str, now: float) -> WorkerRecord | None:
        record = self._records.pop(worker_id, None)
        if record is not None:
            self._count_routers(record, -1)
            self.index.forget(worker_id)
            self.path_speeds.note_workers()
            del self._pools[record.role][worker_id]
            for reader in self:
                if reader.sources.pop(record.agent.name, None) is not None:
                    reader.refresh()
            self._set_num_routers()
            self._update_pools(now)
        return record

    def _count_routers(self, record: WorkerRecord, change: int) -> None:
        """Add (1) or remove (-1) the other routers in the load of a worker. Call `_set_num_routers` afterwards."""
        for router_id in _other_routers(record):
            self._other_routers[router_id] += change
            if not self._other_routers[router_id]:
                del self._other_routers[router_id]

    def _set_num_routers(self) -> None:
        """Tell every record how many routers have open calls, this one included."""
        if self._num_routers != len(self._other_routers) + 1:
            self._num_routers = len(self._other_routers) + 1
            for record in self._records.values():
                record.num_routers = self._num_routers
                if record.on_the_way:  # only these calls count once for each router
                    record.refresh()

    def _share_costs(self) -> None:
        """Price workers that have measured no step like their measured peers. Else nobody would try them."""
        measured = {record.role: record.step_cost for record in self._records.values() if record.has_measured}
        for record in self._records.values():
            peer_cost = measured.get(record.role) or next(iter(measured.values()), PRIOR)
            if not record.has_measured and record.peer_cost != peer_cost:
                record.peer_cost = peer_cost
                record.refresh()

    def _update_pools(self, now: float) -> None:
        """Compute what follows from the workers of both pools and from their states."""
        self._block_sizes = {
            role: next(iter(pool.values())).agent.layout.block_size for role, pool in self._pools.items() if pool
        }
        decode = self._pools[ServiceRole.DECODE].values()
        self._versions = tuple(sorted({record.agent.protocol_version for record in decode}, reverse=True))
        self._longest_request = max((record.pool_tokens + 1 for record in decode), default=None)
        self.decode_limits = tuple(sorted({record.pool_tokens + 1 for record in decode if record.serves}))
        self.had_prefill = self.had_prefill or self.has_role(ServiceRole.PREFILL)
        if self.has_role(ServiceRole.DECODE):
            self.served_until = math.inf
        elif self.served_until == math.inf:
            self.served_until = now
        self.room_changed = True

    # ---- queries

    def get(self, worker_id: str) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def has_role(
        self,
        role: ServiceRole,
        avoid: frozenset[str] = frozenset(),
        protocol_version: int | None = None,
        num_tokens: int = 0,
    ) -> bool:
        """True if a worker of this role, and of this version unless it is None, serves that is not one of `avoid`, and
        whose whole pool holds so many tokens."""
        return any(
            record.serves
            and record.worker_id not in avoid
            and protocol_version in (None, record.agent.protocol_version)
            and num_tokens <= record.pool_tokens
            for record in self._pools[role].values()
        )

    def places(self) -> tuple[int, int]:
        """Of the decode workers that serve, for calls: the free ones, and all."""
        decode = [record for record in self._pools[ServiceRole.DECODE].values() if record.serves]
        return sum(record.num_free for record in decode), sum(record.max_in_flight for record in decode)

    def refuse_oversized(self, request: Request) -> None:
        """Raise `InvalidRequest` if the whole pool of no decode worker has room for the request."""
        longest = self._longest_request
        if longest is not None and request.max_total_tokens > longest:
            raise InvalidRequest(
                "prompt" if request.num_prompt_tokens >= longest else "max_tokens",
                f"prompt ({request.num_prompt_tokens}) + max_tokens ({request.sampling.max_tokens}) is "
                f"{request.max_total_tokens}, over the context of {longest} tokens of the largest decode worker",
            )

    def can_decode(self, request: Request) -> bool:
        """Whether a decode worker serves whose whole pool holds the request."""
        return self.decode_limits[-1:] >= (request.max_total_tokens,)

    def has_room_for_shorter(self, request: Request, num_tokens: int, now: float) -> bool:
        """Whether a worker has room whose whole pool is too small for `request`, with `num_tokens` to compute now."""
        return any(
            self._usable(record, now) and not record.holds(num_tokens, request.max_total_tokens) for record in self
        )

    def choose(
        self,
        prompt: PromptHashes,
        avoid: frozenset[str],
        now: float,
        preferred: tuple[str, int] = NOBODY,
        *,
        max_total_tokens: int = 0,
        goes_on: bool = False,
    ) -> Candidate | None:
        """The cheapest candidate for a prompt now; None if the request has to wait for a worker with room. Prompt and
        output have `max_total_tokens` at most. No worker is asked whose whole pool is too small for them.

        `preferred` is a worker that has the KV of so many first tokens, which its reports may not say yet. A decode
        worker serves the prompt alone if it has room and is not in `avoid`; a prefill worker counts as having them in
        its cache. With `goes_on`, the prompt ends with the start of its output, and a decode worker that has the KV of
        all but the newest blocks serves it alone.
        """
        with self._decision_timer:
            questions = self._questions(prompt, max_total_tokens, avoid, now, preferred)
            holder = None
            if preferred[0] not in avoid:
                holder = _preferred(questions, preferred[0])
            if holder is None and goes_on:
                holder = next(filter(None, (_holder(question, avoid) for question in questions)), None)
            if holder is not None:
                self.compared = (holder,)
                return holder
            return self._cheapest(questions) if questions else None

    def _cheapest(self, questions: list[RoutingQuestion]) -> Candidate | None:
        found, compared = [], []
        for question in questions:
            chosen = self._policy.choose(question)
            if chosen is not None:
                found.append(chosen)
                self.reuse_share += (question.cached_share - self.reuse_share) * REUSE_WEIGHT
            compared.append(self._policy.compared)
        self.compared = compared[0] if len(compared) == 1 else [one for part in compared for one in part]
        return min(found, key=_order, default=None)

    def choose_target(
        self,
        sequence: PromptHashes,
        max_total_tokens: int,
        source: str,
        avoid: frozenset[str],
        now: float,
        reason: MoveReason = MoveReason.DRAIN,
    ) -> Candidate | None:
        """The decode worker to which a running sequence should move from `source`; None if none has room for it."""
        owner = self._records.get(source)
        usable = self._with_room(ServiceRole.DECODE, avoid | {source}, now, max_total_tokens - 1)
        if owner is None or not owner.load.takes_moves:
            return None
        others = _of_version(usable, owner.agent.protocol_version)
        records = [record for record in others if record is not owner and record.load.takes_moves]
        if not records:
            return None
        block_size = self._block_sizes[ServiceRole.DECODE]
        matched = self.index.match(sequence.chain(block_size))
        options = _options(records, matched, block_size)
        question = RoutingQuestion(sequence.num_tokens, (), options, False, block_size, now)
        return move_target(question, owner.view, max_total_tokens, RESERVE_SHARE[reason])

    def candidates(
        self, prompt: PromptHashes, avoid: frozenset[str], now: float, max_total_tokens: int = 0
    ) -> list[Candidate]:
        """The candidates for a prompt now, cheapest first."""
        questions = self._questions(prompt, max_total_tokens, avoid, now)
        found = [self._policy.candidates(question) for question in questions]
        if len(found) < 2:
            return found[0] if found else []
        first = min((part[0] for part in found if part), key=_order, default=None)
        others = [candidate for part in found for candidate in part if candidate is not first]
        return [] if first is None else [first, *sorted(others, key=_order)]

    def has_fitted_cost(self, candidate: Candidate) -> bool:
        """True if the worker that computes the prompt, or a peer, has measured steps."""
        return self.chosen(candidate.prefill_worker or candidate.decode_worker).step_cost != PRIOR

    def _questions(
        self,
        prompt: PromptHashes,
        max_total_tokens: int,
        avoid: frozenset[str],
        now: float,
        preferred: tuple[str, int] = NOBODY,
    ) -> list[RoutingQuestion]:
        """One for each version of the hand-off protocol, because a policy may pair all workers of a question.

        Empty if no decode worker has room. Then no block of the prompt is hashed.
        """
        num_tokens = max(prompt.num_tokens, max_total_tokens - 1)
        decode = self._with_room(ServiceRole.DECODE, avoid, now, num_tokens)
        if len(self._versions) == 1:
            return [self._question(prompt, avoid, now, preferred, decode, self._versions[0])] if decode else []
        return [
            self._question(prompt, avoid, now, preferred, of_version, version)
            for version in self._versions
            if (of_version := _of_version(decode, version))
        ]

    def _question(
        self,
        prompt: PromptHashes,
        avoid: frozenset[str],
        now: float,
        preferred: tuple[str, int],
        decode: list[WorkerRecord],
        version: int,
    ) -> RoutingQuestion:
        """`decode` workers have room and speak `version`."""
        num_tokens, prefill = prompt.num_tokens, list[WorkerRecord]()
        prefill_alive = self.has_role(ServiceRole.PREFILL, avoid, version, num_tokens)
        # If every prefill worker has failed the request, the decode worker prefills, whatever the others have cached.
        if prefill_alive:
            prefill = _of_version(self._with_room(ServiceRole.PREFILL, avoid, now, num_tokens), version)
        block_size = self._block_sizes[ServiceRole.DECODE]
        matched = self.index.match(prompt.chain(block_size))
        decode_options = _options(decode, matched, block_size)
        # `OfferPrefix` names tokens and a salt, but no adapter.
        sources = [] if prompt.has_adapter else self._sources(matched, (*decode, *prefill), avoid, version, now)
        on_disk = self._on_disk(prompt, decode)
        if prefill and self._block_sizes[ServiceRole.PREFILL] != block_size:
            block_size = self._block_sizes[ServiceRole.PREFILL]
            matched = self.index.match(prompt.chain(block_size))
        on_disk |= self._on_disk(prompt, prefill)
        holder, num_held = preferred
        if holder:
            matched[holder] = max(matched.get(holder, 0), num_held // block_size)
        return RoutingQuestion(
            num_tokens,
            _options(prefill, matched, block_size),
            decode_options,
            prefill_alive,
            self._block_sizes[ServiceRole.DECODE],
            now,
            sources,
            on_disk,
            self.reuse_share,
            self.path_speeds.estimate,
        )

    def _on_disk(self, prompt: PromptHashes, records: list[WorkerRecord]) -> dict[str, int]:
        """The tokens of the prompt that each of these workers of one role has on its disk."""
        with_disk = [record for record in records if record.view.disk_bytes_per_s]
        if not with_disk:
            return {}
        block_size = with_disk[0].view.block_size
        matched = self.index.match(map(hash_on_disk, prompt.chain(block_size)))
        return {record.worker_id: matched.get(record.worker_id, 0) * block_size for record in with_disk}

    def _sources(
        self,
        matched: dict[str, int],
        readers: Sequence[WorkerRecord],
        avoid: frozenset[str],
        version: int,
        now: float,
    ) -> list[Option]:
        """The workers with the longest cached parts of a prompt that may give them to others, even while they drain.
        Of equal ones, those whose links are free first. Each has more than one of the readers.

        None if the pools have different block sizes, because the hashes of their blocks differ.
        """
        sizes = set(self._block_sizes.values())
        if self.config.peer_prefixes == "never" or not matched or len(sizes) > 1:
            return []
        least = min(matched.get(record.worker_id, 0) for record in readers)
        oldest, block_size = now - self.config.report_stale_s, self._block_sizes[ServiceRole.DECODE]
        more = (self._records.get(worker_id) for worker_id, num_blocks in matched.items() if num_blocks > least)
        giving = [
            record
            for record in more
            if record is not None and record.load.gives_prefixes and record.agent.protocol_version == version
            and not record.suspect and record.reported_at >= oldest and record.worker_id not in avoid
        ]  # fmt: skip
        options = _options(giving, matched, block_size)
        return nlargest(MAX_SOURCES, options, key=lambda option: (option[1], -max(option[0].link_until, now)))

    def end_read(self, candidate: Candidate, num_tokens: int | None, began_at: float, now: float) -> None:
        """A call has returned that read so many tokens from the source of the candidate; None: it began no read, for
        reasons of the reader."""
        reader = self._records.get(candidate.prefill_worker or candidate.decode_worker)
        source = None if candidate.read.source is None else self._records.get(candidate.read.source)
        if reader is not None and source is not None:
            reader.end_read(source.agent.name, num_tokens, began_at, now)

    def _with_room(self, role: ServiceRole, avoid: frozenset[str], now: float, num_tokens: int) -> list[WorkerRecord]:
        """Workers of this role that can take a request now, and whose whole pool holds so many tokens. Those in `avoid`
        only if there are no others."""
        oldest = now - self.config.report_stale_s
        usable = [
            record
            for record in self._pools[role].values()
            if record.has_room and record.reported_at >= oldest and num_tokens <= record.pool_tokens
        ]
        return [record for record in usable if record.worker_id not in avoid] or usable if avoid else usable

    def _usable(self, record: WorkerRecord, now: float) -> bool:
        return record.has_room and record.reported_at >= now - self.config.report_stale_s

    # ---- the calls of this router

    def chosen(self, worker_id: str) -> WorkerRecord:
        record = self._records.get(worker_id)
        assert record is not None, f"worker {worker_id} was chosen but has not joined"
        return record

    def remove_dispatch(self, worker_id: str, dispatch_id: str) -> None:
        """Forget a call that has ended. Does nothing after the worker has left."""
        record = self._records.get(worker_id)
        if record is not None:
            had_room = record.has_room
            record.remove_call(dispatch_id)
            self.room_changed = self.room_changed or (record.has_room and not had_room)

    def suspect(self, worker_id: str) -> None:
        """Dispatch nothing to this worker until its next report, because a call to it failed."""
        record = self._records.get(worker_id)
        if record is not None:
            record.suspect = True
            record.refresh()

    def check(self) -> None:
        self.index.check()
        assert (self.served_until == math.inf) == self.has_role(ServiceRole.DECODE)
        assert sum(map(len, self._pools.values())) == len(self._records)
        routers = Counter(name for record in self._records.values() for name in _other_routers(record))
        assert routers == self._other_routers
        assert all(r.num_routers == self._num_routers == len(routers) + 1 for r in self._records.values())
        for record in self._records.values():
            record.check()


def _preferred(questions: list[RoutingQuestion], worker_id: str) -> Candidate | None:
    for question in questions:
        for worker, _ in question.decode:
            if worker.worker_id == worker_id:
                return alone(question, worker, question.num_full_block_tokens)
    return None


def _holder(question: RoutingQuestion, avoid: frozenset[str]) -> Candidate | None:
    least = max(1, question.num_full_block_tokens - UNREPORTED_BLOCKS * question.block_size)
    holders = [(worker, cached) for worker, cached in question.decode if cached >= least]
    found = [alone(question, worker, cached) for worker, cached in holders if worker.worker_id not in avoid]
    return min(found, key=lambda candidate: (candidate.uncached_tokens, candidate.order), default=None)


def hashes_of(request: Request) -> PromptHashes:
    root = root_hash(request.cache_salt, request.adapter)
    return PromptHashes(request.packed_token_ids(), root, has_adapter=bool(request.adapter))


def _of_version(records: list[WorkerRecord], version: int) -> list[WorkerRecord]:
    return [record for record in records if record.agent.protocol_version == version]


def _order(candidate: Candidate) -> tuple[float, int, str, str]:
    return candidate.order


def _options(records: list[WorkerRecord], matched: dict[str, int], block_size: int) -> list[Option]:
    return [(record.view, matched.get(record.worker_id, 0) * block_size) for record in records]


def _other_routers(record: WorkerRecord) -> list[str]:
    """Other routers with open calls on a worker. A call that no router has sent has the id ""."""
    return [name for name in record.load.router_calls if name not in ("", record.router_id)]
