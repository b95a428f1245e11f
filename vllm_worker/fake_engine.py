"""A fake engine for tests: deterministic, its tokens read its own KV, and it fails on command.

The next token is a hash of the tokens in the KV, of the adapter, and of the seed if the request samples. An engine that
reads a hand-off takes the tokens that the owner kept, so a wrong hand-off gives other tokens. `FakeCluster` connects
the engines of one process.

    FakeCore     has no clock: `step` gives each sequence a token and returns the reports; the simulator drives it
    FakeEngine   an `Engine`: steps on the event loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import xxhash

from core.block_hash import pack_token_ids, root_hash, sequence_hashes
from core.errors import TandemError
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.block_pool import BlockEvent, BlockRemoved, BlockStored
from core.step import SampledToken
from vllm_worker.engine import (
    BlocksChanged,
    EngineDied,
    EngineInfo,
    EngineOutput,
    EngineReport,
    EngineStep,
    HandshakeEnded,
    Prompt,
)

VOCAB_SIZE = 256
ADAPTERS = ("red", "green")
INFO = EngineInfo(
    num_blocks=1024,
    layout=KVLayout("0" * 16, "float32", num_layers=1, num_kv_heads=1, block_size=16, head_dim=2),
    eos_token_ids=frozenset(),
    context_length=4096,
    max_step_tokens=512,
)
NextToken = Callable[[Request, list[int]], int]


def next_token(request: Request, token_ids: list[int]) -> int:
    """The token behind `token_ids`."""
    sampling = request.sampling
    seed = 0 if sampling.greedy else sampling.seed + 1
    adapted = pack_token_ids(token_ids) + request.adapter.encode()
    return xxhash.xxh3_64_intdigest(adapted, seed=seed) % VOCAB_SIZE


@dataclass(slots=True)
class FakeCluster:
    """The KV that engines keep for each other: hand-off -> name of the owner, and tokens; and who has met whom."""

    kept: dict[bytes, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    met: set[tuple[str, str]] = field(default_factory=set)  # (reader, owner)
    num_handoffs: int = 0
    num_late_handshakes: int = 0  # at the first hand-off of a pair

    def keep(self, owner: str, token_ids: list[int]) -> bytes:
        self.num_handoffs += 1
        handoff = f"handoff {self.num_handoffs}".encode()
        self.kept[handoff] = (owner, tuple(token_ids))
        return handoff

    def forget(self, owner: str) -> None:
        """The owner has ended."""
        for handoff in [handoff for handoff, (name, _) in self.kept.items() if name == owner]:
            del self.kept[handoff]
        self.met = {pair for pair in self.met if owner not in pair}


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    token_ids: list[int]  # in the KV
    num_cached: int
    num_uncomputed: int  # of the prompt


class FakeCore:
    """`name` owns the KV that this engine keeps."""

    def __init__(
        self, cluster: FakeCluster, name: str = "", info: EngineInfo = INFO, next_token: NextToken = next_token
    ) -> None:
        self.name, self.info = name, replace(info, address=name.encode())
        self._cluster, self._next_token = cluster, next_token
        self._sequences: dict[str, _Sequence] = {}
        self._lost: dict[str, str] = {}  # request id -> why it cannot be computed
        self._cached: dict[int, None] = {}  # sequence hashes, oldest first
        self.adapters: tuple[str, ...] = ADAPTERS
        self.loses_loads = False
        self.num_aborted = 0

    @property
    def num_open(self) -> int:
        return len(self._sequences) + len(self._lost)

    @property
    def cached_blocks(self) -> set[int]:
        """Sequence hashes in the prefix cache."""
        return set(self._cached)

    def submit(self, prompt: Prompt) -> None:
        request, token_ids = prompt.request, prompt.request.token_ids
        if request.adapter not in ("", *self.adapters):
            self._lost[prompt.request_id] = f"this worker has no adapter {request.adapter!r}"
            return
        if prompt.handoff:
            kept = self._cluster.kept.pop(prompt.handoff, None)
            if kept is None or self.loses_loads:
                self._lost[prompt.request_id] = "the KV could not be loaded"
                return
            owner, token_ids = kept
            if not self.meet(owner):
                self._cluster.num_late_handshakes += 1
        hashes = self._hashes(request, request.token_ids)
        num_hit = next((place for place, one in enumerate(hashes) if one not in self._cached), len(hashes))
        num_cached = num_hit * self.info.layout.block_size
        num_uncomputed = 0 if prompt.handoff else len(token_ids) - num_cached
        self._sequences[prompt.request_id] = _Sequence(prompt, list(token_ids), num_cached, num_uncomputed)

    def meet(self, owner: str) -> bool:
        """Returns whether they have met before."""
        pair, known = (self.name, owner), len(self._cluster.met)
        self._cluster.met.add(pair)
        return len(self._cluster.met) == known

    def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        self._sequences.pop(request_id, None)
        self._lost.pop(request_id, None)

    def clear(self) -> None:
        """Forget the requests, and the KV for others."""
        self._sequences.clear()
        self._lost.clear()
        self._cluster.forget(self.name)

    def next_step(self) -> EngineStep:
        """The step that `step` will compute now."""
        sequences = self._sequences.values()
        num_prompt_tokens = sum(sequence.num_uncomputed for sequence in sequences)
        num_decodes = sum(not sequence.num_uncomputed for sequence in sequences)
        return EngineStep(len(sequences), 0, self._usage, num_decodes, num_prompt_tokens)

    def step(self) -> list[EngineReport]:
        reports: list[EngineReport] = [EngineOutput(name, (), error=why) for name, why in self._lost.items()]
        self._lost.clear()
        if self._sequences:
            reports.append(self.next_step())
        for sequence in list(self._sequences.values()):
            reports += self._store(sequence)
            reports.append(self._sample(sequence))
        return reports

    @property
    def _usage(self) -> float:
        """The share of the pool that requests and leases hold."""
        held = [len(sequence.token_ids) for sequence in self._sequences.values()]
        held += [len(token_ids) for owner, token_ids in self._cluster.kept.values() if owner == self.name]
        return min(1.0, sum(map(self.info.layout.num_blocks_for, held)) / self.info.num_blocks)

    def _sample(self, sequence: _Sequence) -> EngineOutput:
        prompt, request = sequence.prompt, sequence.prompt.request
        token_id = self._next_token(request, sequence.token_ids)
        handoff, finish_reason = b"", None
        if prompt.offers:
            handoff, finish_reason = self._cluster.keep(self.name, sequence.token_ids), FinishReason.LENGTH
        sequence.token_ids.append(token_id)
        sequence.num_uncomputed = 0
        if token_id in request.sampling.stop_tokens(self.info.eos_token_ids):
            finish_reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            del self._sequences[prompt.request_id]
        token = SampledToken(token_id, None if request.sampling.num_logprobs is None else -1.0)
        return EngineOutput(prompt.request_id, (token,), finish_reason, sequence.num_cached, handoff)

    def _store(self, sequence: _Sequence) -> list[BlocksChanged]:
        """The prefix cache has as many blocks as the pool."""
        hashes = self._hashes(sequence.prompt.request, sequence.token_ids)
        new = [one for one in dict.fromkeys(hashes) if one not in self._cached]
        self._cached.update(dict.fromkeys(new))
        num_over = max(0, len(self._cached) - self.info.num_blocks)
        removed = [one for one, _ in zip(list(self._cached), range(num_over), strict=False)]
        for one in removed:
            del self._cached[one]
        events: list[BlockEvent] = [*map(BlockStored, new), *map(BlockRemoved, removed)]
        return [BlocksChanged(tuple(events))] if events else []

    def _hashes(self, request: Request, token_ids: list[int] | tuple[int, ...]) -> list[int]:
        return sequence_hashes(token_ids, self.info.layout.block_size, root_hash(request.cache_salt, request.adapter))


class FakeEngine(FakeCore):
    """An `Engine`, with a step each `step_s`.

    `refuses_start`, `die`, `hangs`, `loses_loads` and `refuses_handshakes` are the faults.
    """

    def __init__(
        self,
        cluster: FakeCluster,
        step_s: float = 0.001,
        name: str = "",
        info: EngineInfo = INFO,
        next_token: NextToken = next_token,
    ) -> None:
        super().__init__(cluster, name, info, next_token)
        self._step_s = step_s
        self._stepping: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._report: Callable[[EngineReport], None]
        self.refuses_start = self.hangs = self.refuses_handshakes = False

    async def start(self, report: Callable[[EngineReport], None]) -> EngineInfo:
        if self.refuses_start:
            raise TandemError("the fake engine does not start")
        self._report = report
        self._stepping = asyncio.create_task(self._run(), name="fake-engine")
        return self.info

    def submit(self, prompt: Prompt) -> None:
        super().submit(prompt)
        self._work.set()

    def shake_hands(self, peer: str, address: bytes) -> None:
        refused = self.refuses_handshakes or not address
        if not refused:
            self.meet(address.decode())
        error = "the fake peer does not answer" if refused else ""
        asyncio.get_running_loop().call_soon(self._report, HandshakeEnded(peer, error))

    async def close(self) -> None:
        self.clear()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    def die(self) -> None:
        """The process of the engine ends, with every request."""
        self.clear()
        if self._stepping is not None:
            self._stepping.cancel()
        self._report(EngineDied("killed by a test"))

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            if self.hangs:
                continue
            for report in self.step():
                self._report(report)
            if not self.num_open:
                self._work.clear()
