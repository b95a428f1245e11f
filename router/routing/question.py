"""The interface of a routing policy: the question that the router asks, and the candidate that the policy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from core.cost.step_cost import PRIOR, StepCost, StepWork
from core.lifecycle import RequestPath
from core.paths import PathStatus

MESSAGE_S = 0.002  # from the router to a worker and back
UNKNOWN_BYTES_PER_S = 1e10  # of a path that nobody has measured: high, so that its first transfer measures it

_NONE_ARRIVING = (0.0,)


@dataclass(slots=True)
class WorkerView:
    """One worker, as the policy compares it for all requests. Never changed: a change of the worker makes a new view.

    Calls that no report has yet are counted.
    """

    worker_id: str
    num_sequences: int
    num_dispatched: int  # requests of this router
    cost: StepCost = PRIOR
    step_limit_s: float = 0.0  # of a step with sequences in decode; 0 = no limit
    max_step_tokens: int = 512
    num_decoding: int = 0  # sequences in decode
    decode_context: int = 0  # their tokens
    backlog: tuple[float, ...] = ()  # seconds of prompt work in the newest report, by size class
    reported_at: float = 0.0  # time of this report; the worker has worked since then
    arriving: tuple[float, ...] = ()  # seconds of prompt work that no report has yet, by size class
    num_free_blocks: int = 2**31  # available, less those promised
    num_cached_blocks: int = 0  # of these, those in the prefix cache
    blocks_released_per_s: float = 0.0
    block_bytes: int = 0
    block_size: int = 16  # tokens
    agent_name: str = ""
    machine: str = ""
    paths: Mapping[str, PathStatus] = field(default_factory=dict)  # over which the worker reads, by name of the owner
    num_blocks: int = 0  # of the whole pool
    reads_prefixes: bool = False  # of peers
    link_until: float = 0.0  # when the blocks that it reads or gives, as far as this router knows, will have moved
    disk_bytes_per_s: float = 0.0  # of its disk; 0 = nothing is there
    avoided_sources: Mapping[str, float] = field(default_factory=dict)  # agent of a peer -> not to be read until then
    streams_s: float = field(init=False)  # of a step without prompts
    reported_s: tuple[float, ...] = field(init=False)  # prompt work of the report in classes below 0, 1, 2, ...
    arriving_s: tuple[float, ...] = field(init=False)  # likewise of `arriving`
    prompts_s: float = field(init=False)  # all prompt work

    def __post_init__(self) -> None:
        self.streams_s = self.cost.seconds(StepWork(self.num_decoding, self.decode_context, 0, 0.0))
        self.reported_s = tuple(accumulate(self.backlog, initial=0.0))
        self.arriving_s = tuple(accumulate(self.arriving, initial=0.0)) if self.arriving else _NONE_ARRIVING
        self.prompts_s = self.reported_s[-1] + self.arriving_s[-1]


PathSpeed = Callable[[WorkerView, WorkerView], float]  # reader, owner -> bytes/s of a path that nobody has measured
Option = tuple[WorkerView, int]  # a worker with room, and the number of tokens of the prompt that it has cached


def _unknown_speed(_reader: WorkerView, _owner: WorkerView) -> float:
    return UNKNOWN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class RoutingQuestion:
    """A prompt and its possible workers. Those with room are options.

    `prefill_alive` is True if a prefill worker serves, with room or without, that has not failed the request.
    `block_size` is that of the decode workers.
    """

    num_tokens: int
    prefill: Sequence[Option]
    decode: Sequence[Option]
    prefill_alive: bool
    block_size: int
    now: float = 0.0
    sources: Sequence[Option] = ()  # the longest cached parts first, of the same layout; with room or without
    on_disk: Mapping[str, int] = field(default_factory=dict)  # worker id -> tokens of the prompt on its disk
    reuse_share: float = 0.0  # of the tokens of recent prompts, those that a worker had cached
    path_speed: PathSpeed = _unknown_speed

    @property
    def cached_share(self) -> float:
        """Of the prompt, on the worker that has most of it."""
        return max((cached for _, cached in (*self.prefill, *self.decode)), default=0) / self.num_tokens

    def uncached(self, cached_tokens: int) -> int:
        # The last prompt token is always computed: the first output token is drawn from its logits.
        return self.num_tokens - cached_tokens or 1

    @property
    def num_full_block_tokens(self) -> int:
        """Of the prompt, as decode workers cut it."""
        return self.num_tokens // self.block_size * self.block_size

    def missing_blocks(self, cached_tokens: int) -> int:
        return -(-self.num_tokens // self.block_size) - cached_tokens // self.block_size


class PrefixRead(NamedTuple):
    """A cached part of the prompt that the computing worker reads before it computes the rest."""

    source: str | None  # a peer, or the worker itself: from its disk. None: it reads nothing
    num_tokens: int  # that it lacks
    seconds: float  # from the dispatch to the last block
    gain_s: float = 0.0  # that the first token comes sooner


NO_READ = PrefixRead(None, 0, 0.0)


class Candidate(NamedTuple):
    """A way to serve a request, with its predicted times in seconds."""

    prefill_worker: str | None  # None: the decode worker computes the prompt
    decode_worker: str
    cached_tokens: int  # on the worker that computes the prompt, with those that it reads from a peer
    uncached_tokens: int
    transfer_blocks: int
    num_dispatched: int  # requests of this router on the workers
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    room_wait_s: float = 0.0
    gap_s: float = 0.0
    num_streams: int = 0
    read: PrefixRead = NO_READ
    evict_s: float = 0.0

    @property
    def path(self) -> RequestPath:
        return RequestPath.LOCAL if self.prefill_worker is None else RequestPath.DISAGGREGATED

    @property
    def begin_s(self) -> float:
        """Until the computing worker begins the prompt: the queue and the read pass at the same time."""
        return max(self.queue_s, self.read.seconds)

    @property
    def first_token_s(self) -> float:
        """Predicted, from the dispatch on."""
        wait_s = self.room_wait_s if self.prefill_worker is None else 0.0
        return wait_s + self.begin_s + self.prefill_s + MESSAGE_S

    @property
    def cost(self) -> float:
        """Seconds."""
        ready_s = self.begin_s + self.prefill_s + self.transfer_s + self.room_wait_s
        return ready_s + self.gap_s * self.num_streams + self.evict_s

    @property
    def order(self) -> tuple[float, int, str, str]:
        return self.cost, self.num_dispatched, self.prefill_worker or "", self.decode_worker


# Its times, and their names in messages and traces
TERMS = {name: f"{name.removesuffix('_s')}_ms" for name in Candidate._fields if name.endswith("_s")}


class Policy(Protocol):
    """Chooses the workers of each request. `[router] policy` names a function that makes one from a `RouterConfig`.

    The router calls a policy in its event loop, for each attempt to dispatch a request, so a policy must not wait.
    """

    compared: Sequence[Candidate]  # by the last `choose`

    def choose(self, question: RoutingQuestion) -> Candidate | None:
        """A candidate of workers of the question; None if the request has to wait for a worker with room."""

    def candidates(self, question: RoutingQuestion) -> list[Candidate]:
        """The candidates that `choose` compares, its choice first. Changes nothing."""
