"""Two schedulers of the installed vLLM between which running requests move, in one process of vLLM's environment.

    python -m tests.support.moving_schedulers FIRST_SEED END_SEED [miscount]

Each seed decodes streams on two engines and moves them to and fro, at any step, with chunks, shared prefixes,
preemptions, stop tokens, reads that flip bits, owners that are lost, also with the tokens of their last step, and
readers that end, never come or come twice. A `Stream` stands for the router and the machines of the workers. No stream
may fail or get a wrong token, at most one engine may sample for it, and no block may be lost. `miscount` plants a
fault: the tokens of a reader are numbered one too low. The last line is JSON: counts of what happened.
"""

from __future__ import annotations

import math
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_worker import move_asks
from tests.support.tandem_schedulers import (
    NUM_BLOCKS,
    PATIENCE_S,
    Engine,
    FlippingTransport,
    happened,
    next_token,
    run_seeds,
)
from vllm_worker.engine import EngineTransfer
from vllm_worker.kv.pulls import EnginePulls

NUM_STREAMS, MAX_OUTPUTS, MOST_LEFT = 4, 48, 4
move_asks.ROOM_WAIT_S = 0.2
numbers = iter(range(1 << 30))


@dataclass(eq=False)
class Call:
    """One request of one engine."""

    engine: Engine
    tokens: list[int]  # that it begins with
    transfer_id: int = 0  # of the move that brings its KV
    name: str = field(default_factory=lambda: f"call {next(numbers)}")

    @property
    def sampled(self) -> list[int]:
        return self.engine.outputs[self.name]

    @property
    def num_pulled(self) -> int:
        return self.engine.num_pulled.get(self.name, 0)

    @property
    def has_ended(self) -> bool:
        return self.name in self.engine.ends

    @property
    def has_moved(self) -> bool:
        return self.has_ended and self.engine.ends[self.name].is_moved

    @property
    def runs(self) -> bool:
        return bool(self.sampled) and not self.has_ended


class Stream:
    def __init__(self, prompt: list[int], engines: tuple[Engine, Engine], draws: random.Random) -> None:
        self.engines, self.draws, self.tokens = engines, draws, list(prompt)
        self.expected = list(prompt)
        for _ in range(MAX_OUTPUTS):
            self.expected.append(next_token(self.expected))
        self.max_tokens, first = len(self.expected), len(prompt)
        self.stops = self.expected[-1:]
        if draws.random() < 0.4:
            self.stops = [draws.choice(self.expected[first:])]
        del self.expected[self.expected.index(self.stops[0], first) + 1 :]
        self.target: Call | None = None
        self.unread: int | None = None  # the move of the call, whose reader never comes
        self.is_cut = False  # the owner dies with its last tokens, when its blocks are out
        self.call = self._begin(draws.choice(engines), None)

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == len(self.expected)

    def advance(self) -> None:
        """Take the new tokens, and follow the call that goes on."""
        if not (self.is_cut and self.call.has_moved):
            self._deliver(self.call)
        target = self.target
        if self.unread is not None and (self.call.has_ended or self.unread in self.call.engine.lost_moves):
            happened["readers that never came"] += not self.call.has_ended
            self.unread = None
        if target is not None and not target.num_pulled and target.transfer_id in target.engine.lost_moves:
            happened["prompts computed for nothing"] += bool(target.sampled)
            self._end_target("reads that failed")
            if not self.call.has_moved:
                self.call.engine.rank.handoffs.end_move(self.call.name, target.transfer_id)
        elif target is not None and target.sampled:
            assert target.num_pulled, "a reader has computed what its owner may still sample behind"
            assert self.call.has_moved, "two engines sample for one stream"
            self._follow(target)
        elif self.call.has_ended and not self.call.has_moved and target is not None:
            self._end_target("ends before the move")
        if self.call.has_moved and self.target is None and not self.is_complete:
            happened["computed again"] += 1
            self.call = self._begin(self.draws.choice(self.engines), None)

    def _follow(self, target: Call) -> None:
        happened["moves"] += 1
        happened["tokens computed again by moves"] += target.num_pulled - 1
        pulled = target.engine.pulled_tokens.get(target.transfer_id, ())
        happened["tokens of lost owners"] += max(0, len(target.tokens) + len(pulled) - len(self.tokens))
        self._accept(len(target.tokens), pulled)
        self.call, self.target, self.unread = target, None, None
        self._deliver(target)

    def _deliver(self, call: Call) -> None:
        """Each index once, in order."""
        self._accept(len(call.tokens) + call.num_pulled, call.sampled)

    def _accept(self, first: int, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids, first):
            assert place <= len(self.tokens), "a token is missing"
            if place == len(self.tokens):
                self.tokens.append(token_id)
                assert self.tokens == self.expected[: len(self.tokens)], "a wrong token"

    def move(self) -> None:
        if self.target is None and self.unread is None and self._can_move:
            target = self._other_engine
            pull = EngineTransfer(self._move_out(), self.call.engine.address, False, math.inf, is_move=True)
            self.target, self.is_cut = self._begin(target, pull), self.draws.random() < 0.3

    def move_to_nobody(self) -> None:
        if self.target is None and self.unread is None and self._can_move:
            self.unread = self._move_out()

    def move_again(self) -> None:
        """While it moves: the second transfer is lost, and the first one goes on."""
        if self.target is not None and self._can_move:
            self.unread = self._move_out()

    @property
    def _can_move(self) -> bool:
        return self.call.runs and len(self.expected) - len(self.tokens) >= MOST_LEFT

    @property
    def _other_engine(self) -> Engine:
        return self.engines[self.call.engine is self.engines[0]]

    def _move_out(self) -> int:
        source, transfer_id = self.call.engine, secrets.randbits(127) | 1
        source.offered[transfer_id] = list(self.tokens)
        offer = EngineTransfer(transfer_id, self._other_engine.address, True, math.inf, is_move=True)
        source.rank.handoffs.begin_move(self.call.name, offer, len(self.tokens))
        return transfer_id

    def lose_owner(self) -> None:
        """As a router that has lost the worker of the call: what that worker has sampled since is lost with it."""
        if not self.call.has_ended:
            happened["lost owners"] += 1
            self.call.engine.abort(self.call.name)
            self._end_target("readers of lost owners")
            self.unread = None
            self.call = self._begin(self.draws.choice(self.engines), None)

    def lose_reader(self) -> None:
        """Its call ends, and the router lets the owner go on, or the owner sees by itself that the reader is gone."""
        target = self.target
        if target is not None:
            self._end_target("lost readers")
            if self.draws.random() < 0.5:
                self.call.engine.rank.handoffs.end_move(self.call.name, target.transfer_id)
            else:
                self.unread = target.transfer_id

    def _begin(self, engine: Engine, pull: EngineTransfer | None) -> Call:
        call = Call(engine, list(self.tokens), 0 if pull is None else pull.transfer_id)
        engine.submit(call.name, call.tokens, pull, self.max_tokens - len(self.tokens), self.stops)
        return call

    def _end_target(self, why: str) -> None:
        if self.target is not None:
            happened[why] += 1
            self.target.engine.abort(self.target.name)
            self.target = None


CHANCES = {
    Stream.move: 0.2,
    Stream.move_to_nobody: 0.01,
    Stream.move_again: 0.02,
    Stream.lose_owner: 0.01,
    Stream.lose_reader: 0.02,
}


def run_seed(seed: int, first: Engine, second: Engine) -> None:
    draws, engines = random.Random(seed), (first, second)
    FlippingTransport.begin(seed, draws.choice((0.0, 0.0, 0.3, 1.0)))
    shared = [draws.randrange(2, 5000) for _ in range(64)]
    streams = []
    for _ in range(NUM_STREAMS):
        own = [draws.randrange(2, 5000) for _ in range(draws.randint(1, 70))]
        streams.append(Stream(shared[: draws.choice((0, 40, 64))] + own, engines, draws))
    deadline = time.monotonic() + PATIENCE_S
    while not all(stream.is_complete for stream in streams):
        assert time.monotonic() < deadline, f"seed {seed}: streams without an end"
        _step(draws.sample(engines, draws.randint(1, 2)))
        for stream in streams:
            stream.advance()
        if draws.random() < 0.05:
            draws.choice(engines).preempt()
        for act, chance in CHANCES.items():
            if draws.random() < chance:
                act(draws.choice(streams))
    while any(engine.scheduler.has_requests() or engine.num_free < NUM_BLOCKS - 1 for engine in engines):
        assert time.monotonic() < deadline, f"seed {seed}: {[engine.num_free for engine in engines]} blocks are free"
        _step(engines)
    happened["right"] += len(streams)


def _step(engines: Any) -> None:
    computed = [engine.step() for engine in engines]
    if not any(computed):
        time.sleep(0.0005)  # for the transfer threads; what is found does not depend on it


def plant_miscount() -> None:
    take_tokens = EnginePulls._take_tokens

    def take_one_less(self: EnginePulls, pull: Any, token_ids: tuple[int, ...]) -> None:
        take_tokens(self, pull, token_ids)
        pull.request.prefill_stats.num_cached_tokens -= len(token_ids) > 1

    EnginePulls._take_tokens = take_one_less  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[3:] == ["miscount"]:
        plant_miscount()
    run_seeds(int(sys.argv[1]), int(sys.argv[2]), run_seed)
