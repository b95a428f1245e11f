"""The two machines of a rank. Neither waits, nor knows vLLM: they are called in each step.

    Owner     digests the blocks of finished requests, and publishes the digests under the secrets of their tickets
    Reader    claim -> its digests are fetched, its blocks are read -> its blocks are digested -> a verdict

The law of the reader: a request is received when the digests of its blocks agree. If they do not, or there are none in
time, it is received with the blocks that vLLM must recompute. A request without a claim fails as a whole.

An error of the digests, such as a device without memory, ends in the same way, and never leaves a machine: it would end
the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from verified_kv.ticket import Ticket

EARLY_STEPS = 4  # for which an owner remembers requests that were sent before they were offered

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers


class Verdict(Enum):
    VERIFIED = "verified"
    WRONG = "wrong"  # at least one block is not the block that was computed
    UNVERIFIED = "unverified"  # nothing to compare with: recomputed
    SKIPPED = "skipped"  # not in the sample, by the operator's choice


@dataclass(frozen=True, slots=True)
class Offer:
    """Of a producer's scheduler to its ranks."""

    secret: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a reader's scheduler to its ranks: the blocks that the inner connector was asked to fill."""

    blocks: tuple[int, ...]
    first_place: int  # of the first block, in the request
    num_tokens: int  # of the request, up to the last one in these blocks
    ticket: Ticket | None
    skip: bool = False  # not in the sample


class PendingDigests(Protocol):
    def poll(self) -> list[bytes] | None: ...

    def wait(self) -> list[bytes]: ...


class Digests(Protocol):
    @property
    def layout(self) -> str: ...

    def begin(self, blocks: Sequence[int]) -> PendingDigests: ...


class Failed:
    """No digests, and never any."""

    def poll(self) -> list[bytes]:
        return []

    def wait(self) -> list[bytes]:
        return []


def _begin(digests: Digests, blocks: Sequence[int]) -> PendingDigests:
    try:
        return digests.begin(blocks)
    except Exception:
        logger.exception("The digests of %d KV blocks failed.", len(blocks))
        return Failed()


def _poll(pending: PendingDigests) -> list[bytes] | None:
    try:
        return pending.poll()
    except Exception:
        logger.exception("The digests of KV blocks failed.")
        return []


class Owner:
    """With steps in flight, a reader may have read the blocks before the step that brings their offer."""

    def __init__(
        self, digests: Digests, publish: Callable[[str, PendingDigests], object], retire: Callable[[str], None]
    ) -> None:
        self._digests, self._publish, self._retire = digests, publish, retire
        self._offered: dict[str, tuple[str, PendingDigests]] = {}  # by request, until its blocks are sent
        self._sent: set[str] = set()  # requests that wait for their digests
        self._early: deque[set[str]] = deque(maxlen=EARLY_STEPS)  # requests sent without an offer, by step

    def begin(self, offers: Mapping[str, Offer]) -> None:
        """The blocks belong to the inner connector until it reports them as sent, so they do not change."""
        for request_id, offer in offers.items():
            pending = _begin(self._digests, offer.blocks)
            self._publish(offer.secret, pending)
            if any(request_id in sent for sent in self._early):
                self._retire(offer.secret)
            else:
                self._offered[request_id] = (offer.secret, pending)

    def release(self, sent: Iterable[str]) -> set[str]:
        """The requests whose blocks may be freed. Others stay until they are digested."""
        released, early = set(), set()
        for request_id in self._sent | set(sent):
            if request_id not in self._offered:
                early.add(request_id)
            elif _poll(self._offered[request_id][1]) is None:
                continue
            else:
                self._retire(self._offered.pop(request_id)[0])
            released.add(request_id)
        self._early.append(early)
        self._sent = (self._sent | set(sent)) - released
        return released


@dataclass(slots=True)
class _Open:
    claim: Claim
    expected: Future[list[bytes] | None] | None  # of the producer; None: there is nobody to ask
    found: PendingDigests | None = None  # once the blocks are read
    deadline: float = 0.0  # from then on


@dataclass(slots=True)
class Settled:
    received: set[str] = field(default_factory=set)  # no longer held back
    failed: set[str] = field(default_factory=set)  # those of `received` that fail as a whole
    failed_blocks: set[int] = field(default_factory=set)  # for vLLM to recompute
    verdicts: dict[str, Verdict] = field(default_factory=dict)


# The digests of the ticket's request, of which the producer has `num_digests`: the first `num_needed`, or None.
Fetch = Callable[[Ticket, int, int], "Future[list[bytes] | None]"]


class Reader:
    """`timeout_s` after its blocks are read, a request waits no longer, even if its fetch never ends."""

    def __init__(
        self,
        digests: Digests,
        fetch: Fetch,
        *,
        num_ranks: int,
        block_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._digests, self._fetch, self._num_ranks, self._block_size = digests, fetch, num_ranks, block_size
        self._timeout_s, self._clock = timeout_s, clock
        self._open: dict[str, _Open] = {}  # by request
        self._held: set[str] = set()  # requests whose blocks are read

    def begin(self, claims: Mapping[str, Claim]) -> None:
        for request_id, claim in claims.items():
            expected, ticket = None, claim.ticket
            if ticket is not None and not claim.skip and self._is_comparable(ticket, claim):
                num_digests = -(-ticket.num_tokens // self._block_size)
                expected = self._fetch(ticket, num_digests, claim.first_place + len(claim.blocks))
            self._open[request_id] = _Open(claim, expected)

    def _is_comparable(self, ticket: Ticket, claim: Claim) -> bool:
        same_shape = ticket.layout == self._digests.layout and len(ticket.addresses) == self._num_ranks
        return same_shape and ticket.num_tokens >= claim.num_tokens

    def settle(self, received: Iterable[str], failed: Iterable[str], ended: Iterable[str]) -> Settled:
        """`received` and `failed` are those of the inner connector. `ended` requests need no blocks any more."""
        settled = Settled(failed=set(failed))
        self._held |= set(received)
        for request_id in ended:
            self._open.pop(request_id, None)
        for request_id in self._held:
            request = self._open.get(request_id)
            if request is None:
                settled.failed.add(request_id)
            elif request_id not in settled.failed:
                verdict = self._judge(request, settled.failed_blocks)
                if verdict is None:
                    continue
                settled.verdicts[request_id] = verdict
            self._open.pop(request_id, None)
            settled.received.add(request_id)
        self._held -= settled.received
        return settled

    def _judge(self, request: _Open, failed_blocks: set[int]) -> Verdict | None:
        """None until both sides have digested. Adds to `failed_blocks`."""
        claim = request.claim
        if claim.skip:
            return Verdict.SKIPPED
        if request.expected is None:
            failed_blocks.update(claim.blocks)
            return Verdict.UNVERIFIED
        if request.found is None:
            request.found = _begin(self._digests, claim.blocks)
            request.deadline = self._clock() + self._timeout_s
        found = _poll(request.found)
        if (found is None or not request.expected.done()) and self._clock() < request.deadline:
            return None
        expected = _result(request.expected) if request.expected.done() else None
        if not found or expected is None:
            failed_blocks.update(claim.blocks)
            return Verdict.UNVERIFIED
        pairs = zip(claim.blocks, found, expected[claim.first_place :], strict=True)
        differing = [block for block, one, other in pairs if one != other]
        failed_blocks.update(differing)
        return Verdict.WRONG if differing else Verdict.VERIFIED


def _result(fetched: Future[list[bytes] | None]) -> list[bytes] | None:
    return None if fetched.cancelled() or fetched.exception() is not None else fetched.result()
