"""The data behind the page: fetched once for all viewers of one fleet, at most twice a second.

A viewer sees what the router lets its key see: viewers with different keys share nothing. What viewers share is JSON
already: 512 requests are 330 KB, which take 15 ms of the loop to encode. Where a fleet has no keys, anybody may come
with many: so one feed at a time fetches from a router, and a turn of the loop encodes REQUESTS_PER_TURN.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from core.errors import DeadlineExceeded, TandemError
from core.service import Metadata
from gateway.dashboard.views import Json, answering_router, fleet_view, request_view, trace_view
from gateway.formats.encoded import EncodedItems, EncodedValue, json_bytes
from gateway.router_calls import RouterCalls

MAX_AGE_S = 0.5  # an answer younger than this is shared
TIMEOUT_S = 3.0  # for both calls of a refresh
MAX_REQUESTS = 512  # requests kept for viewers, as many as the router keeps; beyond: the oldest is dropped
REQUESTS_PER_TURN = 64
MAX_FEEDS = 32  # pairs of a fleet and a key on the dashboard; beyond: the one unused for longest is dropped


Credentials = tuple[tuple[str, str], ...]  # metadata of a call in the name of a viewer


class Feed:
    """The fleet and the last requests, as one router reports them. `await refresh()` before each look.

    `pick` chooses a router of the fleet. It may raise `TandemError`, for a fleet that is away. The feed stays with its
    router until a call fails, because each router knows its own requests only.
    """

    def __init__(
        self, pick: Callable[[], RouterCalls], metadata: Metadata, lock_of: Callable[[str], asyncio.Lock]
    ) -> None:
        """`lock_of`: the address of a router."""
        self._pick, self._metadata, self._lock_of = pick, metadata, lock_of
        self._client: RouterCalls | None = None
        self._lock = asyncio.Lock()
        self._tried_at = float("-inf")
        self._failed: TandemError | None = None
        self._failing_since: float | None = None
        self._router = ""
        self._newest = 0
        self._requests: deque[tuple[int, bytes]] = deque(maxlen=MAX_REQUESTS)  # number and JSON, oldest first
        self._fleet: Json = {}  # its values are JSON

    async def refresh(self) -> None:
        """Fetch, unless a fetch has just ended. Raises `TandemError` as long as the fetches fail."""
        async with self._lock:
            if time.monotonic() - self._tried_at >= MAX_AGE_S:
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        client = self._client = self._client or self._pick()
                        async with self._lock_of(client.address):
                            await self._fetch(client)
                    self._failed = self._failing_since = None
                except TandemError as error:
                    self._note_failure(error)
                except TimeoutError:
                    message = f"no answer from a router within {TIMEOUT_S:g} s"
                    self._note_failure(DeadlineExceeded(message))
                self._tried_at = time.monotonic()
        if self._failed is not None:
            raise self._failed

    async def _fetch(self, client: RouterCalls) -> None:
        fleet = await client.fleet(self._metadata)
        if (router := answering_router(fleet)) != self._router:  # another router counts its requests from 1
            self._router, self._newest = router, 0
            self._requests.clear()
        answer = await client.list_requests(MAX_REQUESTS, self._newest, self._metadata)
        for place, summary in enumerate(reversed(answer.requests), start=1):
            self._requests.append((summary.number, json_bytes(request_view(summary))))
            self._newest = max(self._newest, summary.number)
            if place % REQUESTS_PER_TURN == 0:
                await asyncio.sleep(0)
        view = fleet_view(fleet) | {"now_unix_ms": time.time() * 1e3}
        self._fleet = {name: EncodedValue(value) for name, value in view.items()}

    def _note_failure(self, error: TandemError) -> None:
        self._failed, self._client = error, None
        if self._failing_since is None:
            self._failing_since = time.monotonic()

    @property
    def failing_s(self) -> float:
        """Seconds since the first of the fetches in a row that failed."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    async def trace(self, id: str) -> Json:
        """The spans of one request of the feed's router. Raises `TandemError`."""
        client = self._client or self._pick()
        return trace_view(await client.get_trace(id, self._metadata))

    def fleet(self) -> Json:
        """For `json_pieces`, as the requests."""
        return self._fleet

    def requests(self, router: str, after: int) -> Json:
        """The requests, oldest first, with a number above `after`: all, if `after` counts another router's requests."""
        newer = after if router == self._router else 0
        requests = [encoded for number, encoded in self._requests if number > newer]
        return {"router": self._router, "requests": EncodedItems(requests)}


class Feeds:
    """The feeds by fleet and key."""

    def __init__(self) -> None:
        self._feeds: OrderedDict[tuple[str, Credentials], Feed] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}  # by the address of a router

    def get(self, model: str, credentials: Credentials, pick: Callable[[], RouterCalls]) -> Feed:
        """`credentials`: of the viewer. The gateway has no key of its own to lend."""
        key = (model, credentials)
        if key not in self._feeds:
            self._feeds[key] = Feed(pick, credentials, self._lock_of)
            if len(self._feeds) > MAX_FEEDS:
                self._feeds.popitem(last=False)
        self._feeds.move_to_end(key)
        return self._feeds[key]

    def _lock_of(self, address: str) -> asyncio.Lock:
        return self._locks.setdefault(address, asyncio.Lock())
