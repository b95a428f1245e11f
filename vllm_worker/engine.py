"""The engine of a vLLM worker, as its machine and its shell see it.

vllm_worker/async_llm.py has vLLM behind this interface, and vllm_worker/fake_engine.py a fake for tests, which injects
faults. Neither the machine nor this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.handoff import AgentAddress, PrefixSource, TransferId
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason
from core.request import Request
from core.scheduling.block_pool import BlockEvent
from core.scheduling.ledger import BlockHolder
from core.step import SampledToken


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says of itself."""

    num_blocks: int  # of the KV pool
    layout: KVLayout  # `block_size` counts the tokens of a block of the prefix cache
    eos_token_ids: frozenset[int]
    vocab_size: int
    context_length: int
    max_step_tokens: int
    agent: AgentAddress | None = None  # its transfer agent; None: vLLM's own connector moves the blocks
    address: bytes = b""  # where engines that read from it shake hands with it; empty: at the first hand-off


@dataclass(frozen=True, slots=True)
class EngineTransfer:
    """A hand-off of our protocol: an offer to a reader, or a pull from an owner."""

    transfer_id: TransferId
    peer: AgentAddress
    is_offer: bool
    deadline: float  # of the call, in time of `time.monotonic`
    is_move: bool = False  # the owner decodes the request until the reader has its blocks


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request for the engine."""

    request_id: str
    request: Request
    offers: bool  # sample one token, and keep the KV for another engine
    handoff: bytes = b""  # of the engine that has the KV; empty: compute the prompt
    transfer: EngineTransfer | None = None  # in place of `handoff`, if the engine has a transfer agent
    prefix: PrefixSource | None = None  # a peer that has cached what this engine may lack


# ---- what an engine reports


class EngineOutput(NamedTuple):
    """New tokens of one request. The last output has `finish_reason`, or `error` if the request failed."""

    request_id: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt
    handoff: bytes = b""  # for the engine that continues
    scheduled_at: float = 0.0  # start of the first step, on the monotonic clock of the machine; 0 = not known
    error: str = ""
    invalid: bool = False  # the request itself is at fault
    num_pulled_tokens: int = 0  # that came with the pull, so the tokens of this engine begin behind them
    is_moved: bool = False  # with the last output: the engine of a peer goes on
    num_prefix_tokens: int | None = None  # read from `Prompt.prefix`, with the last output; None: no read began


class EngineStep(NamedTuple):
    """One step of the engine."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the pool that requests and leases hold
    num_decodes: int
    prompt_tokens: int  # computed in the step
    num_lent: int = 0  # references of peers to blocks, which they may still read
    holders: tuple[BlockHolder, ...] = ()  # transfers that hold blocks
    lost_moves: tuple[TransferId, ...] = ()  # whose blocks do not come, on both sides; the owner's request goes on
    pulled_tokens: tuple[tuple[TransferId, tuple[int, ...]], ...] = ()  # that came with blocks, before any sampled one
    read_bytes: int = 0  # KV from peers, since the step before, as the connector counts it
    read_seconds: float = 0.0  # ... in which reads were in flight


class BlocksChanged(NamedTuple):
    """The prefix cache of the engine has changed."""

    events: tuple[BlockEvent, ...]


class HandshakeEnded(NamedTuple):
    """The end of `Engine.shake_hands`."""

    peer: str
    error: str = ""


class EngineDied(NamedTuple):
    """The engine has ended, and every request with it."""

    detail: str


EngineReport = EngineOutput | EngineStep | BlocksChanged | HandshakeEnded | EngineDied


class Engine(Protocol):
    """Calls `report` on the event loop that has started it."""

    async def start(self, report: Callable[[EngineReport], None]) -> EngineInfo:
        """Load the model. Raises `TandemError`."""
        ...

    def submit(self, prompt: Prompt) -> None:
        """Compute a request, and report its tokens until it ends."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; no report of it follows."""
        ...

    def move(self, request_id: str, transfer: EngineTransfer, num_known_tokens: int) -> None:
        """Let the engine of a peer go on with a running request, of which the peer knows so many tokens.

        The request runs until the peer has its blocks. Its last output `is_moved`, unless it ends before, or a step
        has the move among its `lost_moves`.
        """
        ...

    def stay(self, request_id: str, transfer_id: TransferId) -> None:
        """End a move. Does nothing once the request has left."""
        ...

    def give_prefix(self, transfer: EngineTransfer, token_ids: tuple[int, ...], cache_salt: str) -> None:
        """Offer what the prefix cache has of these tokens to a peer, which asks before the deadline or never."""
        ...

    def shake_hands(self, peer: str, address: bytes) -> None:
        """Connect to the engine of a peer before the first hand-off from it, and report `HandshakeEnded`.

        One at a time. Without it, or if it fails, the first hand-off connects.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
