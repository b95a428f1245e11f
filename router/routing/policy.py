"""The routing policy: the predicted seconds of every way that a request may take. The lowest sum wins.

For a pair (prefill worker P, decode worker D), and for D alone, which then computes the prompt itself:

    cost = queue_s         until the computing worker begins the prompt: its step, and the prompts that go first
         + prefill_s       to compute the uncached tokens, in steps that other prompts and D's streams share
           or read_s       in place of queue_s, if the worker reads a cached prefix from a peer for longer than that
         + transfer_s      that the second token is late for the part of the transfer which no compute hides
         + room_wait_s     until D has blocks, after the prompt is computed; for D alone, before
         + gap_s x num_streams    what D's steps become longer, times the sequences that feel it
         + evict_s     to compute again what the blocks of the prompt drive out of the caches

Every term follows from what the workers report: the fitted time of their steps (`core/cost/step_cost.py`), their
prompts by remaining work, their blocks, and the measured bandwidth of the paths. Nothing is weighed. A token
is late if its gap exceeds the step limit of D, which follows from `slo_itl_ms`. So streams within the limit cost
nothing, and D computes prompts while it has time to spare. Among candidates of nearly the same cost, the workers with
the fewest requests of this router win.

A worker that computes a prompt may first read a part of it that a peer has cached (docs/adr/0060), if the first token
then comes sooner than on the cheapest way without a read. The read and the queue pass at the same time.

A path belongs to a pair, so pairs are compared, but only those of the cheapest workers of each pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import ceil
from typing import NamedTuple

from core.config import RouterConfig
from core.paths import PathState
from core.scheduling.step_budget import MIN_PROMPT_TOKENS
from core.scheduling.worker_load import size_class
from router.routing.question import (
    MESSAGE_S,
    NO_READ,
    UNKNOWN_BYTES_PER_S,
    Candidate,
    Option,
    PathSpeed,
    PrefixRead,
    RoutingQuestion,
    WorkerView,
)

MAX_TIMED = 8  # of each role: the workers whose times are predicted, those with the least work by a rough estimate
MAX_PAIRED = 4  # of each role: the workers whose pairs are compared
NEAR_TIE_SHARE = 0.02
NEAR_TIE_S = 0.0005
LEAST_GAIN_SHARE, LEAST_GAIN_S = 0.02, 0.0005  # of reading a prefix over computing it
DISK_READ_S = 0.002  # of a read from disk, beside the time of its bytes
UNKNOWN_ROOM_WAIT_S = 1.0  # for a full decode worker that has released nothing yet
MAX_SOURCES = 16  # workers with the longest cached parts of a prompt, from which others may read
MAX_READS = 4  # of these that are priced for a reader, those that it avoids left out


NO_PATH = frozenset({PathState.UNREACHABLE, PathState.REFUSED})

_new_tuple = tuple.__new__  # a decision makes a hundred candidates, and the constructor takes twice as long


class SecondsPolicy:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.compared: Sequence[Candidate] = ()

    def choose(self, question: RoutingQuestion) -> Candidate | None:
        self.compared = found = self._all(question)
        return _spread(found) if found else None

    def candidates(self, question: RoutingQuestion) -> list[Candidate]:
        found = self._all(question)
        if not found:
            return []
        chosen = _spread(found)
        return [chosen, *sorted((c for c in found if c is not chosen), key=lambda candidate: candidate.order)]

    def _all(self, question: RoutingQuestion) -> list[Candidate]:
        is_local = self._config.local_prefill == "auto" or not question.prefill_alive
        starts = [begin(question, *option) for option in _promising(question, question.decode)] if is_local else []
        prefill_starts: list[Start] = []
        targets = question.decode
        if question.prefill and targets:
            prefill_starts = [begin(question, *option) for option in _promising(question, question.prefill)]
            if len(targets) > MAX_PAIRED:
                targets = nsmallest(MAX_PAIRED, targets, key=lambda option: _reading_cost(question, *option))
        found = _candidates(question, starts, prefill_starts, targets)
        if not question.sources or not found:
            return found
        starts, prefill_starts = _with_peers(question, starts), _with_peers(question, prefill_starts)
        reading = _candidates(question, starts, prefill_starts, targets)
        # A hand-off brings the same blocks after the first token. So a read must bring the first token sooner.
        first_s = min(found, key=lambda candidate: candidate.order).first_token_s
        return found + [candidate for candidate in reading if _pays(candidate.first_token_s, first_s)]


def _candidates(
    question: RoutingQuestion, starts: list[Start], prefill_starts: list[Start], targets: Sequence[Option]
) -> list[Candidate]:
    """Of these starts on decode workers, which then decode alone, and on prefill workers."""
    found = [_alone(question, start) for start in starts]
    promising = nsmallest(MAX_PAIRED, prefill_starts, key=lambda start: (start.total_s, start.worker.worker_id))
    return found + [pair(question, start, worker, cached) for start in promising for worker, cached in targets]


def _pays(with_s: float, without_s: float) -> bool:
    """Whether a read saves enough."""
    return without_s - with_s > LEAST_GAIN_SHARE * without_s + LEAST_GAIN_S


def _promising(question: RoutingQuestion, options: Sequence[Option]) -> Sequence[Option]:
    if len(options) <= MAX_TIMED:
        return options
    rough_s = [
        (_rough_s(question, worker, cached) + worker.streams_s + worker.prompts_s, worker.num_dispatched, place)
        for place, (worker, cached) in enumerate(options)
    ]
    return [options[place] for _, _, place in nsmallest(MAX_TIMED, rough_s)]


def _rough_s(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> float:
    """To compute what is neither in the pool nor on the disk of the worker. A peer gives all workers the same."""
    token_s, num_tokens = worker.cost.token_s, question.num_tokens
    computed_s = (num_tokens - cached_tokens) * token_s
    on_disk = question.on_disk.get(worker.worker_id, 0)
    read = disk_read(question, worker, cached_tokens, on_disk) if on_disk > cached_tokens else None
    if read is None:
        return computed_s
    return min(computed_s, read.seconds + (num_tokens - cached_tokens - read.num_tokens) * token_s)


class PromptTimes(NamedTuple):
    """Seconds of a prompt on the worker that computes it."""

    queue_s: float
    prefill_s: float
    gap_s: float  # that steps with this prompt are longer than the step limit; without a limit, than other steps

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s


class Start(NamedTuple):
    """How a worker comes to the first token of a prompt."""

    worker: WorkerView
    times: PromptTimes
    cached_tokens: int  # with those that it reads
    read: PrefixRead = NO_READ
    evict_s: float = 0.0

    @property
    def pool_tokens(self) -> int:
        """Of the prompt, those that the pool of the worker has."""
        return self.cached_tokens - self.read.num_tokens

    @property
    def total_s(self) -> float:
        return max(self.times.queue_s, self.read.seconds) + self.times.prefill_s


_COMPUTED = PromptTimes(0.0, 0.0, 0.0)


def begin(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> Start:
    """With the prefix on the worker's disk, if the prompt is then computed sooner."""
    evict_s = _evict_s(question, worker, cached_tokens)  # a read takes as many blocks as a computation
    start = Start(worker, prompt_times(question, worker, cached_tokens), cached_tokens, NO_READ, evict_s)
    on_disk = question.on_disk.get(worker.worker_id, 0)
    read = disk_read(question, worker, cached_tokens, on_disk) if on_disk > cached_tokens else None
    return start if read is None else _sooner(question, start, read) or start


def _with_peers(question: RoutingQuestion, starts: list[Start]) -> list[Start]:
    """Those of the workers that compute the prompt sooner with the prefix of a peer."""
    found = []
    for start in starts:
        # A token costs about the same everywhere, so few reads are worth a closer look.
        worker, token_s = start.worker, start.worker.cost.token_s
        reads = _peer_reads(question, worker, start.pool_tokens) if worker.reads_prefixes else []
        if reads:
            read = min(reads, key=lambda read: read.seconds - read.num_tokens * token_s)
            reading = _sooner(question, start, read)
            found += [] if reading is None else [reading]
    return found


def _sooner(question: RoutingQuestion, start: Start, read: PrefixRead) -> Start | None:
    """With this read in place of that of `start`, if the prompt is then computed sooner."""
    cached_tokens = start.pool_tokens + read.num_tokens
    times = prompt_times(question, start.worker, cached_tokens)
    total_s = max(times.queue_s, read.seconds) + times.prefill_s
    if not _pays(total_s, start.total_s):
        return None
    return Start(start.worker, times, cached_tokens, read._replace(gain_s=start.total_s - total_s), start.evict_s)


def _peer_reads(question: RoutingQuestion, reader: WorkerView, cached_tokens: int) -> list[PrefixRead]:
    """From the first `MAX_READS` sources that have a longer part of the prompt than the reader, and a path to it."""
    reads: list[PrefixRead] = []
    for owner, owned_tokens in question.sources:
        if owned_tokens <= cached_tokens:
            break  # the longest parts are first
        read = prefix_read(question, reader, cached_tokens, owner, owned_tokens)
        if read is not None:
            reads.append(read)
            if len(reads) == MAX_READS:
                break
    return reads


def prefix_read(
    question: RoutingQuestion, reader: WorkerView, cached_tokens: int, owner: WorkerView, owned_tokens: int
) -> PrefixRead | None:
    """What the reader would read; None if it has as much, no room, or no path, or if the owner needs its blocks.

    Blocks that this router has sent over their links come first.
    """
    block_size = question.block_size
    # The last prompt token is always computed: the first output token is drawn from its logits.
    num_tokens = min(owned_tokens, (question.num_tokens - 1) // block_size * block_size) - cached_tokens
    if num_tokens <= 0 or owner is reader or reader.avoided_sources.get(owner.agent_name, 0.0) > question.now:
        return None
    if num_tokens // block_size + _num_held_hits(question, reader, cached_tokens) > reader.num_free_blocks:
        return None
    if num_tokens // block_size > owner.num_free_blocks:
        return None  # an owner gives none of the blocks that hand-offs and running sequences wait for
    path = reader.paths.get(owner.agent_name)
    if path is not None and path.state in NO_PATH:
        return None
    latency_s = 0.0 if path is None else path.latency_s
    behind_s = max(0.0, reader.link_until - question.now, owner.link_until - question.now)
    moved_s = move_seconds(reader, owner, num_tokens // block_size, question.path_speed)
    return _new_tuple(PrefixRead, (owner.worker_id, num_tokens, MESSAGE_S + latency_s + behind_s + moved_s, 0.0))


def move_seconds(reader: WorkerView, owner: WorkerView, num_blocks: int, path_speed: PathSpeed) -> float:
    """Of so many blocks of the reader's size, over links that carry nothing else.

    A read that is priced too low is given up, and measures nothing.
    """
    path = reader.paths.get(owner.agent_name)
    bytes_per_s = 0.0 if path is None else path.bytes_per_s or path.expected_bytes_per_s
    if not bytes_per_s and (back := owner.paths.get(reader.agent_name)) is not None:
        bytes_per_s = back.bytes_per_s or back.expected_bytes_per_s  # until the reader has measured its own
    return num_blocks * reader.block_bytes / (bytes_per_s or path_speed(reader, owner))


def disk_read(question: RoutingQuestion, worker: WorkerView, cached_tokens: int, on_disk: int) -> PrefixRead | None:
    """The read of a prefix from the worker's own disk. None if the pool has as much of the prompt, or no room."""
    block_size = worker.block_size
    num_tokens = min(on_disk, (question.num_tokens - 1) // block_size * block_size) - cached_tokens
    num_blocks = num_tokens // block_size
    if num_tokens <= 0 or not worker.disk_bytes_per_s:
        return None
    if num_blocks + _num_held_hits(question, worker, cached_tokens) > worker.num_free_blocks:
        return None
    return PrefixRead(
        worker.worker_id, num_tokens, DISK_READ_S + num_blocks * worker.block_bytes / worker.disk_bytes_per_s
    )


def prompt_times(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> PromptTimes:
    """A step computes all streams, and then prompts, those with the least work first, up to its limit.

    |  step that runs | streams | prompts that go first | streams | first | this prompt | others fill the step |
     <----------------------- queue_s -------------------------------> <------------ prefill_s --------------->
    """
    cost = worker.cost
    uncached = question.num_tokens - cached_tokens or 1
    start = question.num_tokens - uncached
    work_s = cost.prompt_seconds(uncached, start)
    streams_s, age_s = worker.streams_s, max(0.0, question.now - worker.reported_at)
    token_s, spare_s = work_s / uncached, 0.0
    chunk_s = max(token_s * worker.max_step_tokens, 1e-9)
    if worker.num_decoding and worker.step_limit_s:
        spare_s = max(0.0, worker.step_limit_s - streams_s)
        chunk_s = min(chunk_s, max(spare_s, token_s * MIN_PROMPT_TOKENS, 1e-9))

    place, reported, arriving = size_class(work_s) + 1, worker.reported_s, worker.arriving_s
    reported_s = reported[place] if place < len(reported) else reported[-1]
    behind_s = reported[-1] - reported_s
    # A worker without prompts that go first runs a step of its streams and longer prompts, and reports at its end.
    is_busy = worker.num_decoding or behind_s
    rest_s = max(0.0, streams_s + min(chunk_s, behind_s) - age_s) if is_busy and not reported_s else 0.0
    done_s = age_s * chunk_s / (chunk_s + streams_s)  # in the time since the report
    ahead_s = max(0.0, reported_s - done_s)
    if len(arriving) > 1:
        arriving_s = arriving[min(place, len(arriving) - 1)]
        ahead_s += arriving_s
        behind_s += arriving[-1] - arriving_s
    num_before, num_after = int(ahead_s / chunk_s), ceil((ahead_s + work_s) / chunk_s)  # steps
    fill_s = min(behind_s, max(0.0, num_after * chunk_s - ahead_s - work_s))
    queue_s = rest_s + ahead_s + num_before * streams_s
    prefill_s = work_s + fill_s + (num_after - num_before) * streams_s
    gap_s = max(0.0, min(chunk_s, work_s) - spare_s) if worker.num_decoding else 0.0
    return _new_tuple(PromptTimes, (queue_s, prefill_s, gap_s))


def pair(question: RoutingQuestion, start: Start, decode: WorkerView, decode_cached: int) -> Candidate:
    prefill, times = start.worker, start.times
    missing, uncached = question.missing_blocks(decode_cached), question.uncached(start.cached_tokens)
    transfer_s = _late_transfer_s(question, prefill, decode, missing, times.prefill_s)
    terms = (
        prefill.worker_id, decode.worker_id, question.num_tokens - uncached, uncached, missing,
        prefill.num_dispatched + decode.num_dispatched, times.queue_s, times.prefill_s, transfer_s,
        _room_wait_s(question, decode, decode_cached, start.total_s), _stream_s(question, decode), decode.num_sequences,
        start.read, start.evict_s + _evict_s(question, decode, decode_cached),
    )  # fmt: skip
    return _new_tuple(Candidate, terms)


def move_target(
    question: RoutingQuestion, source: WorkerView, max_total_tokens: int, reserve_share: float
) -> Candidate | None:
    """The cheapest decode worker with free blocks for a running sequence up to its end, and a share of its pool to
    spare. Its blocks come from `source`.

    `transfer_blocks` of the candidate are those that the sequence takes up to its end.
    """
    found = []
    for worker, cached in question.decode:
        # The last token is sampled but never computed, so it needs no slot.
        num_blocks = -(-(max_total_tokens - 1) // question.block_size) - cached // question.block_size
        num_taken = num_blocks + _num_held_hits(question, worker, cached)
        if num_taken + ceil(reserve_share * worker.num_blocks) <= worker.num_free_blocks:
            candidate = pair(question, Start(source, _COMPUTED, question.num_tokens), worker, cached)
            found.append(candidate._replace(transfer_blocks=num_blocks))
    return _spread(found) if found else None


def alone(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> Candidate:
    """The decode worker computes the prompt, in steps that its streams share. It reads from no peer."""
    return _alone(question, begin(question, worker, cached_tokens))


def _alone(question: RoutingQuestion, start: Start) -> Candidate:
    worker, times, uncached = start.worker, start.times, question.uncached(start.cached_tokens)
    terms = (
        None, worker.worker_id, question.num_tokens - uncached, uncached, 0, worker.num_dispatched, times.queue_s,
        times.prefill_s, 0.0, _room_wait_s(question, worker, start.pool_tokens, 0.0),
        times.gap_s + _stream_s(question, worker), worker.num_sequences, start.read,
        start.evict_s,
    )  # fmt: skip
    return _new_tuple(Candidate, terms)


def _reading_cost(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> tuple[float, int, str]:
    missing = question.missing_blocks(cached_tokens)
    moved_s = missing * worker.block_bytes / UNKNOWN_BYTES_PER_S
    room_wait_s, stream_s = _room_wait_s(question, worker, cached_tokens, 0.0), _stream_s(question, worker)
    cost = room_wait_s + moved_s + stream_s * worker.num_sequences
    return cost, worker.num_dispatched, worker.worker_id


def _evict_s(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> float:
    """To compute the cached blocks again that must leave for those of the prompt, if they are asked for again as often
    as those of recent prompts. A read brings blocks, too, so a copy of a prefix is not free."""
    num_empty = max(0, worker.num_free_blocks - worker.num_cached_blocks)
    num_evicted = max(0, question.missing_blocks(cached_tokens) - num_empty)
    return num_evicted * question.block_size * worker.cost.token_s * question.reuse_share


def _stream_s(question: RoutingQuestion, worker: WorkerView) -> float:
    """Seconds that one more sequence in decode adds to each step."""
    return worker.cost.sequence_s + question.num_tokens * worker.cost.context_s


def _late_transfer_s(
    question: RoutingQuestion, prefill: WorkerView, decode: WorkerView, missing: int, prefill_s: float
) -> float:
    """Blocks move while the prompt is computed. What remains is the last chunk, or what a slow path lags behind.

    The first token does not wait for it. The second one is late if it takes longer than the step limit.
    """
    if not missing:
        return 0.0
    path = decode.paths.get(prefill.agent_name)
    bytes_per_s = path.bytes_per_s or path.expected_bytes_per_s if path is not None else 0.0
    total_s = missing * decode.block_bytes / (bytes_per_s or UNKNOWN_BYTES_PER_S)
    last_blocks = min(missing, -(-prefill.max_step_tokens // question.block_size))
    exposed_s = max(total_s - prefill_s, total_s * last_blocks / missing) + (0.0 if path is None else path.latency_s)
    return max(0.0, exposed_s - decode.step_limit_s)


def _room_wait_s(question: RoutingQuestion, worker: WorkerView, cached_tokens: int, later_s: float) -> float:
    """Until the blocks that the worker lacks are free, counted from `later_s` on."""
    num_blocks = question.missing_blocks(cached_tokens) + _num_held_hits(question, worker, cached_tokens)
    lacking = num_blocks - worker.num_free_blocks
    if lacking <= 0:
        return 0.0
    if worker.blocks_released_per_s <= 0.0:
        return UNKNOWN_ROOM_WAIT_S
    return max(0.0, lacking / worker.blocks_released_per_s - later_s)


def _num_held_hits(question: RoutingQuestion, worker: WorkerView, cached_tokens: int) -> int:
    """Cached blocks that the prompt itself will hold, so that none of its other blocks can take them."""
    return min(cached_tokens // question.block_size, worker.num_cached_blocks)


def _spread(found: list[Candidate]) -> Candidate:
    """Of the candidates that cost about as little as the cheapest, the one with the fewest requests of this router."""
    costs = [candidate.cost for candidate in found]
    most = min(costs) * (1.0 + NEAR_TIE_SHARE) + NEAR_TIE_S
    near = [candidate for candidate, cost in zip(found, costs, strict=True) if cost <= most]
    return min(near, key=lambda candidate: (candidate.num_dispatched, *candidate.order))


def reason_for(candidate: Candidate, has_prefill_workers: bool, own_policy: str = "") -> str:
    """The sentence of `ExplainResponse.reason`. `own_policy`: `[router] policy`, if it made the choice."""
    if own_policy:
        return f"the choice of {own_policy}, with a predicted cost of {candidate.cost:.3f} s"
    if candidate.prefill_worker is not None:
        return f"the lowest predicted cost ({candidate.cost:.3f} s), the first token in {candidate.first_token_s:.3f} s"
    if not has_prefill_workers:
        return "no prefill worker serves: the decode worker computes the prompt"
    return (
        f"the decode worker alone costs least ({candidate.cost:.3f} s), the first token in "
        f"{candidate.first_token_s:.3f} s"
    )
