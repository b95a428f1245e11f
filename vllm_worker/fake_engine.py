"""A fake engine for tests: deterministic, its tokens read its own KV, and it fails on command.

The next token is a hash of the tokens in the KV, and of the seed if the request samples. An engine that reads a
hand-off takes the tokens that the owner kept, so a wrong hand-off gives other tokens. `FakeCluster` connects the
engines of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from core.block_hash import pack_token_ids, root_hash, sequence_hashes
from core.errors import TandemError
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.block_pool import BlockEvent, BlockStored
from core.step import SampledToken
from vllm_worker.engine import BlocksChanged, EngineDied, EngineInfo, EngineOutput, EngineReport, EngineStep, Prompt

VOCAB_SIZE = 256
BLOCK_SIZE = 16
NUM_BLOCKS = 1024
EOS_TOKEN_IDS: frozenset[int] = frozenset()


def next_token(request: Request, token_ids: list[int]) -> int:
    """The token behind `token_ids`."""
    sampling = request.sampling
    seed = 0 if sampling.greedy else sampling.seed + 1
    return xxhash.xxh3_64_intdigest(pack_token_ids(token_ids), seed=seed) % VOCAB_SIZE


@dataclass(slots=True)
class FakeCluster:
    """The KV that engines keep for each other, by hand-off."""

    kept: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    num_handoffs: int = 0


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    token_ids: list[int]  # in the KV
    num_cached: int


class FakeEngine:
    """An `Engine`. Each step of `step_s` gives every sequence a token.

    `refuses_start`, `dies`, `hangs` and `loses_loads` are the faults.
    """

    def __init__(self, cluster: FakeCluster, step_s: float = 0.001) -> None:
        self._cluster, self._step_s = cluster, step_s
        self._sequences: dict[str, _Sequence] = {}
        self._cached: set[int] = set()  # sequence hashes
        self._stepping: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._report: Callable[[EngineReport], None]
        self.refuses_start = self.hangs = self.loses_loads = False
        self.num_aborted = 0

    async def start(self, report: Callable[[EngineReport], None]) -> EngineInfo:
        if self.refuses_start:
            raise TandemError("the fake engine does not start")
        self._report = report
        self._stepping = asyncio.create_task(self._run(), name="fake-engine")
        layout = KVLayout("0" * 16, "float32", num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2)
        return EngineInfo(NUM_BLOCKS, layout, EOS_TOKEN_IDS, context_length=4096, max_step_tokens=512)

    def submit(self, prompt: Prompt) -> None:
        token_ids = prompt.request.token_ids
        if prompt.handoff:
            kept = self._cluster.kept.pop(prompt.handoff, None)
            if kept is None or self.loses_loads:
                asyncio.get_running_loop().call_soon(self._fail, prompt.request_id, "the KV could not be loaded")
                return
            token_ids = kept
        hashes = sequence_hashes(prompt.request.token_ids, BLOCK_SIZE, root_hash(prompt.request.cache_salt))
        num_cached = 0
        while num_cached < len(hashes) and hashes[num_cached] in self._cached:
            num_cached += 1
        self._sequences[prompt.request_id] = _Sequence(prompt, list(token_ids), num_cached * BLOCK_SIZE)
        self._work.set()

    def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        self._sequences.pop(request_id, None)

    async def close(self) -> None:
        self._sequences.clear()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    def die(self) -> None:
        """The process of the engine ends, with every request."""
        self._sequences.clear()
        if self._stepping is not None:
            self._stepping.cancel()
        self._report(EngineDied("killed by a test"))

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    def _fail(self, request_id: str, error: str) -> None:
        self._sequences.pop(request_id, None)
        self._report(EngineOutput(request_id, (), error=error))

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            if self.hangs:
                continue
            sequences = list(self._sequences.values())
            self._report(EngineStep(len(sequences), 0, self._usage, len(sequences), 0))
            for sequence in sequences:
                if sequence.prompt.request_id in self._sequences:
                    self._step(sequence)
            if not self._sequences:
                self._work.clear()

    @property
    def _usage(self) -> float:
        return sum(-(-len(s.token_ids) // BLOCK_SIZE) for s in self._sequences.values()) / NUM_BLOCKS

    def _step(self, sequence: _Sequence) -> None:
        prompt, request = sequence.prompt, sequence.prompt.request
        self._store(request, sequence.token_ids)
        token_id = next_token(request, sequence.token_ids)
        handoff, finish_reason = b"", None
        if prompt.offers:
            self._cluster.num_handoffs += 1
            handoff, finish_reason = f"handoff {self._cluster.num_handoffs}".encode(), FinishReason.LENGTH
            self._cluster.kept[handoff] = tuple(sequence.token_ids)
        sequence.token_ids.append(token_id)
        if token_id in request.sampling.stop_tokens(EOS_TOKEN_IDS):
            finish_reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            del self._sequences[prompt.request_id]
        token = SampledToken(token_id)
        self._report(EngineOutput(prompt.request_id, (token,), finish_reason, sequence.num_cached, handoff))

    def _store(self, request: Request, token_ids: list[int]) -> None:
        hashes = sequence_hashes(token_ids, BLOCK_SIZE, root_hash(request.cache_salt))
        new: list[BlockEvent] = [BlockStored(one) for one in dict.fromkeys(hashes) if one not in self._cached]
        if new:
            self._cached.update(hashes)
            self._report(BlocksChanged(tuple(new)))
