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
from itertools import takewhile

import xxhash

from core.block_hash import pack_token_ids, root_hash, sequence_hashes
from core.errors import TandemError
from core.handoff import AgentAddress, TransferId
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
    EngineTransfer,
    HandshakeEnded,
    Prompt,
)

VOCAB_SIZE = 256
ADAPTERS = ("red", "green")
INFO = EngineInfo(
    num_blocks=1024,
    layout=KVLayout("0" * 16, "float32", num_layers=1, num_kv_heads=1, block_size=16, head_dim=2),
    eos_token_ids=frozenset(),
    vocab_size=VOCAB_SIZE + 3,  # the special tokens of its tokenizer are in prompts
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


def handoff_of(transfer: EngineTransfer) -> bytes:
    return transfer.transfer_id.to_bytes(16)


@dataclass(slots=True)
class FakeCluster:
    """The KV that engines keep for each other: hand-off -> name of the owner, and tokens; and who has met whom.

    The hand-off of a transfer is its id. Its reader may be there before the KV is.
    """

    kept: dict[bytes, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    over: set[bytes] = field(default_factory=set)  # transfers that one of the two sides has ended
    awaited: set[bytes] = field(default_factory=set)  # transfers whose readers are there
    agents: set[str] = field(default_factory=set)  # names of the agents of engines that live
    num_prefix_tokens: int = 0  # read from peers
    num_agents: int = 0
    prefixes: dict[TransferId, set[int]] = field(default_factory=dict)  # sequence hashes that a peer may read
    met: set[tuple[str, str]] = field(default_factory=set)  # (reader, owner)
    num_handoffs: int = 0
    num_late_handshakes: int = 0  # at the first hand-off of a pair

    def keep(self, owner: str, token_ids: list[int]) -> bytes:
        self.num_handoffs += 1
        handoff = f"handoff {self.num_handoffs}".encode()
        self.kept[handoff] = (owner, tuple(token_ids))
        return handoff

    def keep_for(self, owner: str, transfer: EngineTransfer, token_ids: tuple[int, ...]) -> None:
        """`token_ids`: with the token behind the KV."""
        self.num_handoffs += 1
        if handoff_of(transfer) not in self.over:
            self.kept[handoff_of(transfer)] = (owner, token_ids)

    def end_transfer(self, transfer: EngineTransfer) -> None:
        """As a RELEASE or an ABORT."""
        self.over.add(handoff_of(transfer))
        self.awaited.discard(handoff_of(transfer))
        self.kept.pop(handoff_of(transfer), None)

    def end_lease(self, handoff: bytes) -> bool:
        """Returns whether the KV was still kept: nobody has read it, nor will."""
        if self.kept.pop(handoff, None) is None:
            return False
        self.over.add(handoff)
        return True

    def forget(self, owner: str) -> None:
        """The owner has ended."""
        for handoff in [handoff for handoff, (name, _) in self.kept.items() if name == owner]:
            del self.kept[handoff]
        self.met = {pair for pair in self.met if owner not in pair}

    def open_agent(self, name: str, info: EngineInfo) -> AgentAddress:
        self.num_agents += 1
        agent = AgentAddress(f"{name}.{self.num_agents}", self.num_agents, b"", 0, info.num_blocks, info.layout, 1.0)
        self.agents.add(agent.name)
        return agent


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    token_ids: list[int]  # in the KV
    num_cached: int
    num_uncomputed: int  # of the prompt
    waits: bool = False  # for the KV of its transfer
    num_pulled: int = 0  # tokens that came with that KV
    move: EngineTransfer | None = None  # it leaves for the engine of a peer
    num_prefix_tokens: int | None = None  # read from the source of its prompt


class FakeCore:
    """`name` owns the KV that this engine keeps. `has_agent`: it moves KV by transfers of our protocol."""

    def __init__(
        self,
        cluster: FakeCluster,
        name: str = "",
        info: EngineInfo = INFO,
        next_token: NextToken = next_token,
        has_agent: bool = False,
    ) -> None:
        self.name, self.info = name, replace(info, address=b"" if has_agent else name.encode())
        if has_agent:
            self.info = replace(self.info, agent=cluster.open_agent(name, info))
        self._cluster, self._next_token = cluster, next_token
        self._sequences: dict[str, _Sequence] = {}
        self._lost: dict[str, str] = {}  # request id -> why it cannot be computed
        self._lost_moves: list[TransferId] = []  # since the last step
        self._pulled_tokens: list[tuple[TransferId, tuple[int, ...]]] = []  # likewise
        self._cached: dict[int, None] = {}  # sequence hashes, oldest first
        self.adapters: tuple[str, ...] = ADAPTERS
        self.loses_loads = False
        self.num_aborted = 0

    @property
    def num_open(self) -> int:
        return len(self._sequences) + len(self._lost)

    @property
    def num_decoding(self) -> int:
        return sum(not sequence.num_uncomputed and not sequence.waits for sequence in self._sequences.values())

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
        hashes = self._hashes(request, request.token_ids[:-1])  # the last token is always computed
        num_hit = next((place for place, one in enumerate(hashes) if one not in self._cached), len(hashes))
        num_cached = num_hit * self.info.layout.block_size
        num_uncomputed = 0 if prompt.handoff else len(token_ids) - num_cached
        transfer, waits = prompt.transfer, False
        if transfer is not None and not transfer.is_offer:
            self._cluster.awaited.add(handoff_of(transfer))
            waits = True
        self._sequences[prompt.request_id] = _Sequence(prompt, list(token_ids), num_cached, num_uncomputed, waits)

    def meet(self, owner: str) -> bool:
        """Returns whether they have met before."""
        pair, known = (self.name, owner), len(self._cluster.met)
        self._cluster.met.add(pair)
        return len(self._cluster.met) == known

    def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        sequence = self._sequences.pop(request_id, None)
        for transfer in () if sequence is None else (sequence.prompt.transfer, sequence.move):
            if transfer is not None:
                self._cluster.end_transfer(transfer)
        self._lost.pop(request_id, None)

    def move(self, request_id: str, transfer: EngineTransfer, num_known_tokens: int) -> None:  # noqa: ARG002
        """The next step is its last one here, once the reader is there."""
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.move = transfer

    def stay(self, request_id: str, transfer_id: TransferId) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.move is not None and sequence.move.transfer_id == transfer_id:
            self._cluster.end_transfer(sequence.move)
            sequence.move = None

    def give_prefix(self, transfer: EngineTransfer, token_ids: tuple[int, ...], cache_salt: str) -> None:
        hashes = sequence_hashes(token_ids, self.info.layout.block_size, root_hash(cache_salt))
        self._cluster.prefixes[transfer.transfer_id] = {one for one in hashes if one in self._cached}

    def clear(self) -> None:
        """Forget the requests, and the KV for others."""
        if self.info.agent is not None:
            self._cluster.agents.discard(self.info.agent.name)
        self._sequences.clear()
        self._lost.clear()
        self._cluster.forget(self.name)

    def next_step(self) -> EngineStep:
        """The step that `step` will compute now."""
        sequences = [sequence for sequence in self._sequences.values() if not sequence.waits]
        num_prompt_tokens = sum(sequence.num_uncomputed for sequence in sequences)
        num_decodes = sum(not sequence.num_uncomputed for sequence in sequences)
        return EngineStep(len(sequences), 0, self._usage, num_decodes, num_prompt_tokens, self._num_lent)

    def step(self) -> list[EngineReport]:
        reports: list[EngineReport] = [EngineOutput(name, (), error=why) for name, why in self._lost.items()]
        self._lost.clear()
        for sequence in self._sequences.values():
            if sequence.waits:
                self._load(sequence)
            if sequence.prompt.prefix is not None and sequence.num_prefix_tokens is None:
                self._read_prefix(sequence)
            if sequence.move is not None and handoff_of(sequence.move) in self._cluster.over:
                self._lost_moves.append(sequence.move.transfer_id)
                sequence.move = None
        step, sampled = self.next_step(), list[EngineReport]()
        is_step = bool(self._sequences) or self.info.agent is not None
        for sequence in [sequence for sequence in self._sequences.values() if not sequence.waits]:
            sampled += self._store(sequence)
            sampled.append(self._sample(sequence))
        lost_moves, pulled_tokens = tuple(self._lost_moves), tuple(self._pulled_tokens)
        self._lost_moves, self._pulled_tokens = [], []
        told = step._replace(num_lent=self._num_lent, lost_moves=lost_moves, pulled_tokens=pulled_tokens)
        steps = [told] if is_step else []
        return [*reports, *steps, *sampled]

    @property
    def _num_lent(self) -> int:
        """Blocks that peers read by transfers of ours."""
        if self.info.agent is None:
            return 0
        lent = [token_ids for owner, token_ids in self._cluster.kept.values() if owner == self.name]
        return sum(map(self.info.layout.num_blocks_for, map(len, lent)))

    @property
    def _usage(self) -> float:
        """The share of the pool that requests and leases hold."""
        held = [len(sequence.token_ids) for sequence in self._sequences.values()]
        held += [len(token_ids) for owner, token_ids in self._cluster.kept.values() if owner == self.name]
        return min(1.0, sum(map(self.info.layout.num_blocks_for, held)) / self.info.num_blocks)

    def _load(self, sequence: _Sequence) -> None:
        """The KV of a transfer has come, or will not come: then the prompt is computed."""
        prompt, transfer = sequence.prompt, sequence.prompt.transfer
        assert transfer is not None
        handoff = handoff_of(transfer)
        kept = self._cluster.kept.pop(handoff, None)
        if kept is not None:
            self._cluster.awaited.discard(handoff)
        if kept is not None and not self.loses_loads:
            token_ids, num_known = list(kept[1]), len(prompt.request.token_ids)
            ends = prompt.request.sampling.stop_tokens(self.info.eos_token_ids)
            sequence.token_ids, sequence.num_uncomputed, sequence.waits = token_ids[:num_known], 0, False
            if token_ids[-1] not in ends and len(token_ids) < prompt.request.max_total_tokens:
                sequence.token_ids, sequence.num_pulled = token_ids, len(token_ids) - num_known
                sequence.num_cached = num_known - 1
                self._pulled_tokens.append((transfer.transfer_id, tuple(token_ids[num_known:])))
        elif kept is not None or handoff in self._cluster.over or transfer.peer.name not in self._cluster.agents:
            sequence.waits = False
            self._lost_moves += [transfer.transfer_id] if transfer.is_move else []

    def _read_prefix(self, sequence: _Sequence) -> None:
        """What has not been offered by the first step is computed."""
        request, prefix = sequence.prompt.request, sequence.prompt.prefix
        assert prefix is not None
        offered, block_size = self._cluster.prefixes.pop(prefix.transfer_id, set()), self.info.layout.block_size
        hashes = self._hashes(request, request.token_ids[: min(prefix.num_tokens, len(request.token_ids) - 1)])
        num_here = sequence.num_cached // block_size
        read = list(takewhile(offered.__contains__, hashes[num_here:]))
        sequence.num_prefix_tokens = len(read) * block_size
        self._cluster.num_prefix_tokens += sequence.num_prefix_tokens
        sequence.num_cached += sequence.num_prefix_tokens
        sequence.num_uncomputed -= sequence.num_prefix_tokens

    def _sample(self, sequence: _Sequence) -> EngineOutput:
        prompt, request = sequence.prompt, sequence.prompt.request
        token_id = self._next_token(request, sequence.token_ids)
        handoff, finish_reason = b"", None
        if prompt.transfer is not None and prompt.transfer.is_offer:
            self._cluster.keep_for(self.name, prompt.transfer, (*sequence.token_ids, token_id))
            finish_reason = FinishReason.LENGTH
        elif prompt.offers:
            handoff, finish_reason = self._cluster.keep(self.name, sequence.token_ids), FinishReason.LENGTH
        sequence.token_ids.append(token_id)
        sequence.num_uncomputed = 0
        is_moved = False
        if token_id in request.sampling.stop_tokens(self.info.eos_token_ids):
            finish_reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        elif sequence.move is not None and handoff_of(sequence.move) in self._cluster.awaited:
            finish_reason, is_moved = FinishReason.LENGTH, True
            self._cluster.keep_for(self.name, sequence.move, tuple(sequence.token_ids))
        if sequence.move is not None and finish_reason is not None and not is_moved:
            self._cluster.end_transfer(sequence.move)
        if finish_reason is not None:
            del self._sequences[prompt.request_id]
        token = SampledToken(token_id, None if request.sampling.num_logprobs is None else -1.0)
        return EngineOutput(
            prompt.request_id,
            (token,),
            finish_reason,
            sequence.num_cached,
            handoff,
            num_pulled_tokens=sequence.num_pulled,
            is_moved=is_moved,
            num_prefix_tokens=None if finish_reason is None else sequence.num_prefix_tokens,
        )

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
    """An `Engine`, with a step each `step_s`. KV that nobody reads is kept for `lease_s`.

    `refuses_start`, `die`, `hangs`, `loses_loads` and `refuses_handshakes` are the faults.
    """

    def __init__(
        self,
        cluster: FakeCluster,
        step_s: float = 0.001,
        name: str = "",
        info: EngineInfo = INFO,
        next_token: NextToken = next_token,
        has_agent: bool = False,
    ) -> None:
        super().__init__(cluster, name, info, next_token, has_agent)
        self._step_s, self.lease_s = step_s, 5.0
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
            kept = set(self._cluster.kept)
            for report in self.step():
                self._report(report)
            for handoff in self._cluster.kept.keys() - kept:
                asyncio.get_running_loop().call_later(self.lease_s, self._cluster.end_lease, handoff)
            if not (self.num_open or self._num_lent):
                self._work.clear()
