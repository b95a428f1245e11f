"""A runner without a model. One wrong byte of KV makes its tokens wrong. Imports no torch.

The fake runner keeps the contract of the real runner on a real pool. The bytes of a slot come from the hash of

    (the bytes of the previous slot, read from the pool; the slot's token; the slot's position)

and the token at position p comes from the hash of all bytes of slots 0 .. p - 1, read through the block table. A stale,
torn, misplaced or foreign block therefore changes every later token. `expected_tokens` computes the same answer without
a pool; tests compare with that answer.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from core.config import EngineConfig
from core.cost.model_work import ModelSizes
from core.errors import ConfigError
from core.kv_layout import FLOAT8, KVLayout
from core.model_info import ModelInfo
from core.output_grammar import Grammars
from core.request import Request
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.drafting import Drafter, Proposer
from engine.histories import Histories
from engine.sampling import Sampler
from engine.step_queue import NOTHING_COMPUTED, Computed, PromisedTokens, QueuedRunner, tokens_of
from model_files.builtin_configs import FAKE_CONFIGS
from model_files.model_source import describe, resolve_model

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so the product is a bijection modulo 2^64
_SHIFT = np.uint64(29)


class FakeRunner(QueuedRunner[StepPlan]):
    """`info` and `layout` set the size; `FakeRunner.from_config` makes both for a spec such as fake:tiny."""

    def __init__(
        self,
        info: ModelInfo,
        layout: KVLayout,
        num_blocks: int,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        step_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.info = info
        self.layout = layout
        self.num_blocks = num_blocks
        self.sizes: ModelSizes | None = None
        self._mapping = mmap.mmap(-1, num_blocks * layout.block_bytes)  # page-aligned, like the real pool
        self._use_memory(np.frombuffer(self._mapping, np.uint8))
        self._pool[:] = 0
        self._closed = False
        self._grammars = grammars
        self.takes_grammars = grammars is not None
        self.proposes = drafter is not None
        self._proposer = Proposer(drafter, grammars)
        self._histories = Histories()
        self._step_s = step_s

    @classmethod
    def from_config(
        cls, config: EngineConfig, grammars: Grammars | None = None, drafter: Drafter | None = None
    ) -> FakeRunner:
        """Raises `ConfigError` if kv_memory_mb holds no block, `ModelNotFound` for an unknown spec."""
        source = resolve_model(config.model)
        shape = FAKE_CONFIGS[source.config_name]
        info = describe(source, config.max_context)
        layout = KVLayout(
            model=info.fingerprint,
            dtype=FLOAT8 if config.kv_dtype == "fp8" else "bfloat16" if config.dtype == "bfloat16" else "float32",
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            block_size=config.block_size,
            head_dim=shape.head_dim,
            quantization=config.quantization,
        )
        num_blocks = min((config.host_kv_memory_mb << 20) // layout.block_bytes, shape.max_blocks)
        if num_blocks < 1:
            raise ConfigError(f"kv_memory_mb = {config.kv_memory_mb} holds no KV block of {layout.block_bytes} bytes")
        return cls(info, layout, num_blocks, grammars, drafter, shape.step_s)

    def _use_memory(self, memory: np.ndarray) -> None:
        """Keep the pool in these bytes. # uint8 [num_blocks * block_bytes]"""
        layout, num_blocks = self.layout, self.num_blocks
        num_rows = layout.num_layers * 2 * layout.num_kv_heads
        self._pool = memory.reshape(num_blocks, layout.block_bytes)
        self._arrays = [  # values, and scales if there are any: views of [num_blocks, rows, block_size, bytes]
            self._pool[:, first : first + num_rows * layout.block_size * size].reshape(
                num_blocks, num_rows, layout.block_size, size
            )
            for first, size in layout.arrays
        ]

    def pool_address(self) -> int:
        return int(self._pool.ctypes.data)

    def pool_memory(self) -> memoryview:
        return memoryview(self._mapping)

    def pool_device(self) -> int | None:
        return None

    def device_memory(self) -> None:
        return None

    def start_background_work(self) -> None:
        """The fake runner has no background work."""

    def close(self) -> None:
        self._closed = True

    def _prepare(self, step: StepPlan) -> StepPlan:
        assert not self._closed, "the runner is closed"
        return step

    def _compute(self, step: StepPlan, promised: PromisedTokens) -> Computed:
        assert not self._closed, "the runner is closed"
        if self._step_s:
            time.sleep(self._step_s)
        chunks = step.chunks
        logits = []
        for chunk in chunks:
            previous = self._read(chunk, chunk.start - 1, chunk.start)
            for position, token_id in enumerate(tokens_of(chunk, promised), start=chunk.start):
                previous = slot_content(previous, token_id, position, self.layout.token_bytes)
                self._write(chunk, position, previous)
            if chunk.samples:
                first_end = chunk.start + chunk.num_tokens
                ends = range(first_end, first_end + len(chunk.drafts) + 1)
                logits += [logits_after(self._read(chunk, 0, end), self.info.vocab_size) for end in ends]
        if not logits:
            return NOTHING_COMPUTED
        sampler = Sampler(chunks, self.info.eos_token_ids, self._histories)
        masks = sampler.begin_masks(self._grammars, promised)()
        sampled = sampler.sample(np.stack(logits), promised, masks=masks)
        return Computed(sampled, masks.failed, self._proposer.propose(step, promised, sampled))

    def _read(self, chunk: ScheduledChunk, start: int, end: int) -> bytes:
        """The pool's current bytes of slots [max(start, 0), end), in order."""
        positions = np.arange(max(start, 0), end)
        blocks = np.asarray(chunk.sequence.block_table)[positions // self.layout.block_size]
        parts = [array[blocks, :, positions % self.layout.block_size] for array in self._arrays]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)).tobytes()

    def _write(self, chunk: ScheduledChunk, position: int, content: bytes) -> None:
        block, offset = (
            chunk.sequence.block_table[position // self.layout.block_size],
            position % self.layout.block_size,
        )
        rows = np.frombuffer(content, np.uint8).reshape(self._arrays[0].shape[1], -1)
        first = 0
        for array in self._arrays:
            size = array.shape[-1]
            array[block, :, offset] = rows[:, first : first + size]
            first += size


def slot_content(previous: bytes, token_id: int, position: int, num_bytes: int) -> bytes:
    """The bytes of one slot. `previous`: the bytes of the previous slot, empty for the first."""
    state = xxhash.xxh3_64_intdigest(previous + struct.pack("<QQ", token_id, position))
    return _stream(state, -(-num_bytes // 8)).tobytes()[:num_bytes]


def logits_after(all_slots: bytes, vocab_size: int) -> np.ndarray:
    """The fake model's logits after these slots, uniform in [-4, 4). # float32 [vocab]"""
    words = _stream(xxhash.xxh3_64_intdigest(all_slots), vocab_size)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-21)) - np.float32(4.0)


def _stream(state: int, count: int) -> np.ndarray:
    """`count` hashed values of a counter that starts at `state`. # uint64 [count]"""
    words = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(state)) * _MULTIPLIER
    words = (words ^ (words >> _SHIFT)) * _MULTIPLIER
    return words ^ (words >> _SHIFT)


def expected_tokens(
    request: Request,
    layout: KVLayout,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
    grammars: Grammars | None = None,
) -> list[int]:
    """The tokens that the fake runner must generate after `request.token_ids`, computed without a pool."""
    token_ids = list(request.token_ids)
    slots: list[bytes] = []
    while len(token_ids) < request.max_total_tokens:
        for position in range(len(slots), len(token_ids)):
            previous = slots[-1] if slots else b""
            slots.append(slot_content(previous, token_ids[position], position, layout.token_bytes))
        token_id = _drawn(logits_after(b"".join(slots), vocab_size), token_ids, request, eos_token_ids, grammars)
        token_ids.append(token_id)
        if token_id in request.sampling.stop_token_ids:
            break
        if token_id in eos_token_ids and not request.sampling.ignore_eos:
            break
    return token_ids[len(request.token_ids) :]


def _drawn(
    logits: np.ndarray,
    token_ids: Sequence[int],
    request: Request,
    eos_token_ids: frozenset[int],
    grammars: Grammars | None,
) -> int:
    view = SequenceView(request.request_id, token_ids, request.num_prompt_tokens, (), request.sampling)
    chunk = ScheduledChunk(view, 0, len(token_ids), samples=True, promised=False)
    sampler = Sampler([chunk], eos_token_ids)
    return sampler.sample(logits[None], masks=sampler.begin_masks(grammars)())[request.request_id][0].token_id
