"""Hand-offs of vLLM's scheduler: no block is used while a peer may read or write it, and every load ends once.

Two engines in any interleaving, whose schedulers are as strict as vLLM's. The real one is in tests/vllm/.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import root_hash, sequence_hashes
from core.config import TransferConfig
from core.handoff import AbortReason, AgentAddress, PrefixSource, Ready
from core.kv_layout import KVLayout
from core.machine import Tick
from decode_worker.move_asks import ROOM_WAIT_S
from kv_transfer.protocol.events import AgentAction, MessageReceived, ReadFailed, ReadFinished, SendMessage, StartRead
from vllm_worker.engine import EngineTransfer
from vllm_worker.kv.handoffs import Handoffs
from vllm_worker.kv.hooks import CLASS_HOOKS, POOL_METHODS, RANK_HOOKS, SCHEDULER_HOOKS, unmet, unsupported
from vllm_worker.kv.ledger import decode_holders
from vllm_worker.kv.parameters import HOLDERS, LOST_MOVES, READ_BYTES, RequestEnd, encode_request
from vllm_worker.kv.transfers import Command, EngineTransfers

BLOCK_SIZE, NUM_BLOCKS, LEASE_S = 4, 16, 12.0
LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2)
ADDRESSES = {name: AgentAddress(name, 1, b"", 0, NUM_BLOCKS, LAYOUT, LEASE_S) for name in ("owner", "reader")}


class Pool:
    """vLLM's: a block without references is free."""

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}  # hash -> block
        self.blocks: Sequence[Any] = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(NUM_BLOCKS)]

    def get_cached_block(self, block_hash: int, kv_cache_group_ids: list[int]) -> list[Any] | None:
        assert kv_cache_group_ids == [0]
        return [self.blocks[self.cached[block_hash]]] if block_hash in self.cached else None

    def get_num_free_blocks(self) -> int:
        return self.num_free

    def allocate(self, count: int) -> list[int] | None:
        free = [block for block in self.blocks if not block.ref_cnt][:count]
        if len(free) < count:
            return None
        self.touch(free)
        return [block.block_id for block in free]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt, "a reference is given back twice"
            block.ref_cnt -= 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        assert all(self.blocks[block].ref_cnt for block in block_ids)

    def free(self, block_ids: list[int]) -> None:
        self.free_blocks([self.blocks[block] for block in block_ids])

    @property
    def num_free(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)


def block_hashes(token_ids: Sequence[int], cache_salt: str) -> list[int]:
    return sequence_hashes(token_ids, BLOCK_SIZE, root_hash(cache_salt))


class Engine:
    """A scheduler, and the transfers whose commands wait in `commands`."""

    def __init__(self, name: str) -> None:
        self.name, self.failure, self.pool = name, "", Pool()
        self.machine = EngineTransfers(TransferConfig(lease_s=LEASE_S, max_blocks_per_read=1), ADDRESSES[name], 1 << 32)
        self.handoffs = Handoffs(self, BLOCK_SIZE)
        self.handoffs.bind(self.pool, block_hashes)
        self.commands: deque[Command] = deque()
        self.reads: dict[int, StartRead] = {}
        self.content = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.tables: dict[str, list[int]] = {}  # blocks of requests
        self.loading: set[str] = set()
        self.outcomes: dict[str, bool] = {}  # of loads: whether the blocks came
        self.ends: list[RequestEnd] = []

    def wait_for_news(self, timeout_s: float) -> None:
        pass

    def post(self, command: Command) -> None:
        self.commands.append(command)


def request_of(num_tokens: int, transfer: EngineTransfer | None, max_tokens: int = 1) -> Any:
    """As vLLM has it, of a worker that calls it w."""
    token_ids = list(range(num_tokens))
    return SimpleNamespace(
        request_id="r", kv_transfer_params=encode_request("w", transfer), num_prompt_tokens=num_tokens,
        num_computed_tokens=0, num_in_flight_tokens=0, num_output_tokens=0, num_tokens=num_tokens,
        prompt_token_ids=token_ids[:], _all_token_ids=token_ids, max_tokens=max_tokens,
        sampling_params=SimpleNamespace(stop_token_ids=()), status=SimpleNamespace(name="RUNNING"),
        is_finished=lambda: False, update_block_hashes=Mock(), block_hashes=block_hashes(token_ids, ""),
        prefill_stats=Mock(),
    )  # fmt: skip


class World:
    """Nothing moves unless the test draws it."""

    most_outputs = 0  # behind the prompt, in blocks of the owner

    def __init__(self, num_tokens: int, is_flipping: bool) -> None:
        self.now, self.is_flipping = 0.0, is_flipping
        self.owner, self.reader = Engine("owner"), Engine("reader")
        self.mail: deque[tuple[Engine, Engine, Any]] = deque()
        self.requests = {}
        for engine, other in ((self.owner, self.reader), (self.reader, self.owner)):
            transfer = EngineTransfer(7, ADDRESSES[other.name], engine is self.owner, math.inf)
            self.requests[engine.name] = request_of(num_tokens, transfer)
        self.begun: set[str] = set()
        self.ended: set[str] = set()

    # ---- what may happen next

    def begin(self, engine: Engine) -> None:
        if engine.name not in self.begun:
            self.begun.add(engine.name)
            engine.handoffs.on_new_request(self.requests[engine.name])

    def step_owner(self) -> None:
        engine, request = self.owner, self.requests["owner"]
        engine.handoffs.take_back()
        if engine.name not in self.begun or engine.name in self.ended:
            return
        if "r" not in engine.tables:
            blocks = engine.pool.allocate(-(-(request.num_prompt_tokens + self.most_outputs) // BLOCK_SIZE))
            assert blocks is not None
            engine.tables["r"] = blocks
        engine.handoffs.begin_step({"r"}, lambda name: engine.tables[name])
        self.compute(engine, request, engine.tables["r"])
        engine.handoffs.end_step()

    def compute(self, engine: Engine, request: Any, blocks: list[int]) -> None:
        """A chunk of one block and a half."""
        request.num_computed_tokens = min(request.num_prompt_tokens, request.num_computed_tokens + 6)
        for position, block in enumerate(blocks):
            if (position + 1) * BLOCK_SIZE <= request.num_computed_tokens or position == len(blocks) - 1:
                engine.content[block] = 100 + position
        if request.num_computed_tokens == request.num_prompt_tokens:
            request.num_output_tokens = 1
            request._all_token_ids.append(9)
            self.end(engine, "FINISHED_LENGTH_CAPPED")

    def step_reader(self) -> None:
        engine, request = self.reader, self.requests["reader"]
        engine.handoffs.take_back()
        if engine.name in self.begun and engine.name not in self.ended and "r" not in engine.tables:
            num_tokens = engine.handoffs.pulls.num_to_load(request, 0)
            assert num_tokens in (0, request.num_prompt_tokens)
            if num_tokens and (blocks := engine.pool.allocate(-(-num_tokens // BLOCK_SIZE))) is not None:
                engine.tables["r"] = blocks
                engine.loading.add("r")
                engine.handoffs.pulls.place(request, blocks, num_tokens)
        loads = engine.handoffs.pulls.loads()
        assert loads.failed <= loads.received <= engine.loading, "vLLM ends the engine"
        for name in loads.received:
            engine.loading.remove(name)
            engine.outcomes[name] = name not in loads.failed
            if name not in loads.failed:
                assert [engine.content[block] for block in engine.tables[name]] == [
                    100 + position for position in range(len(engine.tables[name]))
                ]
            engine.pool.free(engine.tables[name])
        engine.handoffs.check()

    def end(self, engine: Engine, status: str) -> None:
        """vLLM frees the blocks of a request that has ended, but not those of a load."""
        if engine.name in self.begun and engine.name not in self.ended:
            self.ended.add(engine.name)
            request = self.requests[engine.name]
            request.status = SimpleNamespace(name=status)
            engine.ends.append(engine.handoffs.finish(request, engine.tables.get("r", [])))
            if "r" in engine.tables and "r" not in engine.loading and "r" not in engine.outcomes:
                engine.pool.free(engine.tables["r"])

    def transfer(self, engine: Engine) -> None:
        if engine.commands:
            self.act(engine, engine.machine.handle(engine.commands.popleft(), self.now))

    def deliver(self, lost: bool = False) -> None:
        if self.mail:
            sender, receiver, message = self.mail.popleft()
            if not lost:
                self.act(receiver, receiver.machine.handle(MessageReceived(sender.name, message), self.now))

    def end_read(self, fails: bool = False) -> None:
        for read_id in list(self.reader.reads)[:1]:
            read = self.reader.reads.pop(read_id)
            event: Any = ReadFailed(read_id, AbortReason.READ_FAILED, "the test said so")
            if not fails:
                flip = 1000 if self.is_flipping else 0
                for source, target in read.pairs:
                    assert self.owner.pool.blocks[source].ref_cnt, "a block is read that may be used again"
                    assert self.reader.pool.blocks[target].ref_cnt, "a read writes into a free block"
                    self.reader.content[target] = self.owner.content[source] + flip
                digests = tuple(self.reader.content[target] + 1 for _, target in read.pairs)
                event = ReadFinished(read_id, digests, 0.01)
            self.act(self.reader, self.reader.machine.handle(event, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for engine in (self.owner, self.reader):
            self.act(engine, engine.machine.handle(Tick(), self.now))

    def act(self, engine: Engine, actions: list[AgentAction]) -> None:
        other = self.reader if engine is self.owner else self.owner
        for action in actions:
            if isinstance(action, SendMessage):
                self.mail.append((engine, other, _with_digests(engine, action.message)))
            elif isinstance(action, StartRead):
                engine.reads[action.read_id] = action
        engine.machine.check()

    def run(self, steps: list[str]) -> set[str]:
        """Returns the words of the steps."""
        engines = {"owner": self.owner, "reader": self.reader}
        for step in steps:
            word, _, name = step.partition(" ")
            match word:
                case "begin" | "transfer":
                    getattr(self, word)(engines[name])
                case "abort":
                    self.end(engines[name], "FINISHED_ABORTED")
                case "lose":
                    self.deliver(lost=True)
                case "fail_read":
                    self.end_read(fails=True)
                case "wait":
                    self.wait(3.0)
                case _:
                    getattr(self, word)()
        return {step.partition(" ")[0] for step in steps}

    def settle(self) -> None:
        """Everything that can happen happens, then every lease ends."""
        for engine in (self.owner, self.reader):
            self.begin(engine)
        for _ in range(60):
            self.step_owner()
            self.step_reader()
            for engine in (self.owner, self.reader):
                self.transfer(engine)
            self.deliver()
            self.end_read()
        for _ in range(12):
            self.wait(LEASE_S / 4)
            for _ in range(20):
                self.deliver()
                self.end_read()
                self.step_owner()
                self.step_reader()
        self.end(self.reader, "FINISHED_STOPPED")
        for _ in range(3):
            self.transfer(self.reader)
            self.step_reader()


def _with_digests(engine: Engine, message: Any) -> Any:
    if not isinstance(message, Ready):
        return message
    digests = tuple(engine.content[block] + 1 for block in message.blocks.blocks)
    return replace(message, blocks=replace(message.blocks, digests=digests))


STEPS = [
    "begin owner", "begin reader", "step_owner", "step_reader", "transfer owner", "transfer reader", "deliver", "lose",
    "end_read", "fail_read", "wait", "abort owner", "abort reader",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(num_tokens=st.integers(1, 30), is_flipping=st.booleans(), steps=st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_block_comes_back_and_no_wrong_one_is_used(num_tokens: int, is_flipping: bool, steps: list[str]) -> None:
    world = World(num_tokens, is_flipping)
    troubles = world.run(steps)
    world.settle()
    assert world.owner.pool.num_free == world.reader.pool.num_free == NUM_BLOCKS
    assert not world.reader.loading
    assert not world.owner.handoffs.num_lent
    if not is_flipping and not troubles & {"abort", "lose", "fail_read", "wait"}:
        assert world.reader.outcomes == {"r": True}
        told = [world.reader.handoffs.step_stats()[READ_BYTES] for _ in range(2)]
        assert told == [LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes, 0]
    if is_flipping:
        assert True not in world.reader.outcomes.values()


MOST_OUTPUTS, LIMIT_S = 24, 5.0


class MovingWorld(World):
    """The owner decodes, and the reader knows three tokens more than the prompt. It gets one token of each step."""

    most_outputs, num_handed_over = MOST_OUTPUTS, 0

    def __init__(self, num_tokens: int, is_flipping: bool) -> None:
        super().__init__(num_tokens, is_flipping)
        self.num_known = num_tokens + 3
        self.transfer_out = EngineTransfer(7, ADDRESSES["reader"], is_offer=True, deadline=math.inf, is_move=True)
        source = EngineTransfer(7, ADDRESSES["owner"], is_offer=False, deadline=math.inf, is_move=True)
        self.requests = {
            "owner": request_of(num_tokens, None, MOST_OUTPUTS),
            "reader": request_of(self.num_known, source, MOST_OUTPUTS - 3),
        }

    def move(self) -> None:
        if "owner" in self.begun and self.requests["owner"].num_output_tokens >= 3:
            self.owner.handoffs.begin_move("w", self.transfer_out, self.num_known)

    def stay(self) -> None:
        self.owner.handoffs.end_move("w", 7)

    def compute(self, engine: Engine, request: Any, blocks: list[int]) -> None:
        """The prompt in one step, then a token of each step. A block that a step still fills changes with it."""
        request.num_computed_tokens = request.num_tokens
        request._all_token_ids.append(1000 + request.num_tokens)
        request.num_output_tokens, request.num_tokens = request.num_output_tokens + 1, request.num_tokens + 1
        is_over = request.num_output_tokens >= request.max_tokens
        for position, block in enumerate(blocks):
            is_full = (position + 1) * BLOCK_SIZE <= request.num_computed_tokens
            engine.content[block] = 100 + position if is_full or is_over else -request.num_computed_tokens
        if is_over:
            self.end(engine, "FINISHED_LENGTH_CAPPED")

    def end(self, engine: Engine, status: str) -> None:
        """The reader goes on with the tokens of the owner, or computes those that it knows."""
        ends_now = engine is self.owner and engine.name in self.begun and engine.name not in self.ended
        super().end(engine, status)
        has_moved = ends_now and self.owner.ends[-1].is_moved
        self.num_handed_over += has_moved
        if ends_now and status == "FINISHED_LENGTH_CAPPED":
            assert has_moved or self.requests["owner"].num_output_tokens == MOST_OUTPUTS, "an answer is cut off"

    def settle(self) -> None:
        self.begin(self.owner)
        for _ in range(5):
            self.step_owner()
        self.move()
        super().settle()
        known, owned = self.requests["reader"], self.requests["owner"]
        if self.reader.outcomes.get("r"):
            assert known._all_token_ids[self.num_known :] == owned._all_token_ids[self.num_known :]
            assert self.num_handed_over == 1


MOVING_STEPS = [*STEPS, "step_owner", "move", "stay"]


@settings(max_examples=300, deadline=None)
@given(
    num_tokens=st.integers(1, 20), is_flipping=st.booleans(), steps=st.lists(st.sampled_from(MOVING_STEPS), max_size=60)
)
def test_a_request_moves_with_its_tokens_or_stays(num_tokens: int, is_flipping: bool, steps: list[str]) -> None:
    world = MovingWorld(num_tokens, is_flipping)
    troubles = world.run(steps)
    world.settle()
    assert world.owner.pool.num_free == world.reader.pool.num_free == NUM_BLOCKS
    assert not world.reader.loading
    if world.num_handed_over and not is_flipping and not troubles & {"abort", "lose", "fail_read", "wait", "stay"}:
        assert world.reader.outcomes == {"r": True}
    if is_flipping:
        assert True not in world.reader.outcomes.values()


@pytest.mark.parametrize("token_ids", [(), (9,), (9, 9)])
def test_an_owner_that_sends_no_first_token_or_more_ends_no_engine(token_ids: tuple[int, ...]) -> None:
    world = World(num_tokens=8, is_flipping=False)
    for engine in (world.owner, world.reader):
        world.begin(engine)
    for _ in range(2):
        world.step_owner()
        world.step_reader()
        exchange(world, lambda ready: replace(ready, token_ids=token_ids if ready.last else ()))
    world.step_reader()
    assert world.reader.outcomes == {"r": len(token_ids) <= 1}
    request = world.requests["reader"]
    assert request.num_prompt_tokens == 8
    cached = {"num_local_cached_tokens": 0, "num_external_cached_tokens": 7}  # the last token is computed again
    told = [call(num_prompt_tokens=8, **cached)] if len(token_ids) <= 1 else []
    assert request.prefill_stats.set.mock_calls == told


def caught_up() -> tuple[MovingWorld, Any]:
    """A move whose reader has all full blocks, and the request of the owner."""
    world = moving()
    world.begin(world.reader)
    world.step_owner()
    world.step_reader()
    exchange(world)
    return world, world.requests["owner"]


def test_a_request_that_moves_runs_until_its_reader_has_all_full_blocks() -> None:
    world, owned = caught_up()
    assert [world.reader.content[block] for block in world.reader.tables["r"]] == [100, 101, 102, 0]
    assert (owned.num_output_tokens, world.num_handed_over) == (5, 0)
    for _ in range(2):  # told again before its last step, it has one more token all the same
        world.owner.handoffs.take_back()
        assert owned.max_tokens == 6
        world.owner.machine.caught_up.append(7)
    world.step_owner()
    assert (owned.num_output_tokens, world.num_handed_over) == (6, 1)
    world.settle()
    assert world.reader.outcomes == {"r": True}
    request = world.requests["reader"]
    assert request._all_token_ids[13:] == owned._all_token_ids[13:]
    cached = {"num_local_cached_tokens": 0, "num_external_cached_tokens": 15}  # three of 16 tokens are new
    request.prefill_stats.set.assert_called_once_with(num_prompt_tokens=15, **cached)
    request.update_block_hashes.assert_called_once_with()


def test_a_request_that_stays_after_all_is_not_cut_off() -> None:
    world, owned = caught_up()
    world.owner.handoffs.take_back()
    world.stay()
    while "owner" not in world.ended:
        world.step_owner()
    assert (owned.num_output_tokens, world.num_handed_over) == (MOST_OUTPUTS, 0)
    world.settle()
    assert world.reader.outcomes == {"r": False}


@pytest.mark.parametrize("scheduled", [set(), {"other"}])
def test_only_a_step_that_computes_nothing_waits_for_news(scheduled: set[str]) -> None:
    engine, news = Engine("reader"), Mock()
    engine.wait_for_news = news  # type: ignore[method-assign]
    engine.handoffs.begin_step(scheduled, lambda _: [])
    engine.handoffs.pulls.loads()
    assert news.called == (not scheduled)


def exchange(world: World, change: Callable[[Ready], Ready] = lambda ready: ready) -> None:
    """All commands, messages and reads. Neither engine makes a step. `change`: what a READY says."""
    for _ in range(20):
        world.transfer(world.owner)
        world.transfer(world.reader)
        world.mail = deque((a, b, change(mail) if isinstance(mail, Ready) else mail) for a, b, mail in world.mail)
        world.deliver()
        world.end_read()


def moving() -> MovingWorld:
    """A move that has just begun, and whose owner has made no step since."""
    world = MovingWorld(num_tokens=10, is_flipping=False)
    world.begin(world.owner)
    for _ in range(4):
        world.step_owner()
    world.move()
    return world


def lost_moves(engine: Engine) -> list[int]:
    engine.handoffs.take_back()
    return [int(transfer_id, 16) for transfer_id in engine.handoffs.step_stats()[LOST_MOVES]]


def test_a_reader_that_waits_for_the_first_block_has_not_caught_up() -> None:
    world = moving()
    world.begin(world.reader)
    world.step_reader()
    exchange(world)
    for _ in range(2):
        world.step_owner()
        assert not world.num_handed_over
    exchange(world)
    world.step_owner()
    assert world.num_handed_over == 1
    world.settle()
    assert world.reader.outcomes == {"r": True}


def test_a_reader_that_never_asks_holds_no_move() -> None:
    world = moving()
    world.step_owner()
    exchange(world)
    assert lost_moves(world.owner) == []
    world.wait(ROOM_WAIT_S)
    assert lost_moves(world.owner) == [7]
    world.transfer_out = replace(world.transfer_out, transfer_id=8)
    world.move()
    world.owner.handoffs.begin_move("w", replace(world.transfer_out, transfer_id=9), world.num_known)
    assert lost_moves(world.owner) == [9], "it moves already"
    while "owner" not in world.ended:
        world.step_owner()
    assert world.num_handed_over == 0


def test_a_reader_that_ends_between_the_phases_leaves_the_request_here() -> None:
    world, owned = caught_up()
    world.owner.handoffs.take_back()
    assert owned.max_tokens == owned.num_output_tokens + 1
    world.end(world.reader, "FINISHED_ABORTED")
    exchange(world)
    assert lost_moves(world.owner) == [7]
    assert owned.max_tokens == MOST_OUTPUTS
    while "owner" not in world.ended:
        world.step_owner()
    assert (owned.num_output_tokens, world.num_handed_over) == (MOST_OUTPUTS, 0)


def test_a_worker_hears_at_once_that_the_blocks_of_a_move_do_not_come() -> None:
    world, _ = caught_up()
    world.end(world.owner, "FINISHED_ABORTED")
    exchange(world)
    world.step_reader()
    assert lost_moves(world.reader) == [7]
    assert lost_moves(world.owner) == []


def test_two_requests_never_offer_by_one_transfer() -> None:
    engine, transfer = Engine("owner"), EngineTransfer(7, ADDRESSES["reader"], True, math.inf)
    for name in "rs":
        request = request_of(4, transfer)
        request.request_id = name
        engine.handoffs.on_new_request(request)
    engine.handoffs.check()
    assert len(engine.commands) == 1


class PrefixWorld(World):
    """The owner has cached the first blocks of a prompt that the reader has to compute."""

    def __init__(self, num_prompt: int, num_cached: int, num_promised: int, is_flipping: bool = False) -> None:
        super().__init__(num_prompt, is_flipping)
        source = PrefixSource(9, ADDRESSES["owner"], num_promised, LIMIT_S)
        self.request = self.requests["reader"] = request_of(num_prompt, None)
        self.request.kv_transfer_params = encode_request("w", None, source)
        token_ids, pool = self.request.prompt_token_ids, self.owner.pool
        blocks = pool.allocate(min(num_cached, num_prompt // BLOCK_SIZE))
        assert blocks is not None
        pool.cached = dict(zip(block_hashes(token_ids, ""), blocks, strict=False))
        self.owner.content |= {block: 100 + position for position, block in enumerate(blocks)}
        pool.free(blocks)
        offer = EngineTransfer(9, ADDRESSES["reader"], True, LIMIT_S)
        self.owner.handoffs.give_prefix(offer, token_ids[:num_promised], "")
        self.begin(self.reader)

    def read(self, num_local: int) -> bool:
        """With so many blocks cached by the reader. Returns whether vLLM begins a load."""
        engine, local = self.reader, num_local * BLOCK_SIZE
        num_tokens = engine.handoffs.pulls.num_to_load(self.request, local)
        assert num_tokens is not None
        blocks = engine.pool.allocate((local + num_tokens) // BLOCK_SIZE)
        assert blocks is not None
        engine.tables["r"] = blocks
        engine.content |= {block: 100 + position for position, block in enumerate(blocks[:num_local])}
        self.request.num_computed_tokens = local + num_tokens
        engine.handoffs.pulls.place(self.request, blocks, num_tokens)
        for _ in range(2):
            exchange(self)
        return num_tokens > 0

    def finish(self) -> RequestEnd:
        for _ in range(12):
            self.wait(LEASE_S / 4)
            exchange(self)
        self.owner.handoffs.take_back()
        assert self.owner.pool.num_free == NUM_BLOCKS
        return self.reader.handoffs.finish(self.request, self.reader.tables.get("r", []))


@pytest.mark.parametrize("trouble", ["", "flipped bits", "late"])
@settings(max_examples=100, deadline=None)
@given(
    num_prompt=st.sampled_from((1, 4, 5, 8, 9, 17, 30)), num_cached=st.integers(0, 7),
    num_promised=st.sampled_from((3, 8, 17, 40)), num_local=st.integers(0, 3),
)  # fmt: skip
def test_a_prompt_has_the_first_blocks_of_its_source_or_computes_them(
    trouble: str, num_prompt: int, num_cached: int, num_promised: int, num_local: int
) -> None:
    is_flipping, is_late = trouble == "flipped bits", trouble == "late"
    world = PrefixWorld(num_prompt, num_cached, num_promised, is_flipping)
    num_local = min(num_local, (num_prompt - 1) // BLOCK_SIZE)
    if is_late:
        world.transfer(world.reader)
        world.wait(LIMIT_S)
    num_wanted = max(0, min(num_promised, num_prompt - 1) // BLOCK_SIZE - num_local)
    num_read = max(0, min(num_promised // BLOCK_SIZE, num_cached, num_local + num_wanted) - num_local)
    num_read = 0 if is_flipping or is_late else num_read
    assert world.read(num_local) == bool(num_wanted)
    loads = world.reader.handoffs.pulls.loads()
    world.reader.handoffs.check()
    assert loads.received == ({"r"} if num_wanted else set())
    assert loads.failed == ({"r"} if num_wanted and not num_read else set())
    if num_read:
        num_blocks = num_local + num_read
        assert world.request.num_computed_tokens == num_blocks * BLOCK_SIZE
        found = [world.reader.content[block] for block in world.reader.tables["r"][:num_blocks]]
        assert found == [100 + position for position in range(num_blocks)]
    assert world.finish().num_prefix_tokens == (num_read * BLOCK_SIZE if num_wanted else None)


def test_a_prompt_without_room_in_time_has_begun_no_read() -> None:
    world = PrefixWorld(num_prompt=30, num_cached=7, num_promised=30)
    exchange(world)
    world.wait(LIMIT_S)
    exchange(world)
    assert world.reader.handoffs.pulls.loads().received == set()
    assert world.reader.handoffs.pulls.num_to_load(world.request, 0) == 0
    assert world.finish().num_prefix_tokens is None


def test_a_prompt_waits_while_another_one_reads_its_prefix() -> None:
    world = PrefixWorld(num_prompt=30, num_cached=4, num_promised=16)
    pulls = world.reader.handoffs.pulls

    def ask(name: str, cache_salt: str = "") -> Any:
        request = request_of(20, None)
        source = PrefixSource(ord(name), ADDRESSES["owner"], 12, LIMIT_S)
        request.request_id, request.kv_transfer_params = name, encode_request(name, None, source)
        request.block_hashes = block_hashes(request.prompt_token_ids, cache_salt)
        world.reader.handoffs.on_new_request(request)
        return request

    same, salted = ask("s"), ask("t", "salt")
    assert pulls.num_to_load(same, 0) == 12  # nobody reads yet
    world.read(num_local=0)
    assert pulls.num_to_load(same, 0) is None
    assert pulls.num_to_load(same, 12) == 0
    assert pulls.num_to_load(salted, 0) == 12
    world.request.is_finished = lambda: True  # vLLM will not cache what it has read
    assert pulls.num_to_load(same, 0) == 12
    world.request.is_finished = lambda: False
    assert pulls.loads().received == {"r"}
    assert pulls.num_to_load(same, 4) == 8  # with what vLLM has kept of it


def test_cached_blocks_are_lent_while_as_many_others_stay_free() -> None:
    engine = Engine("owner")
    held, cached = engine.pool.allocate(4), engine.pool.allocate(10)
    assert held is not None
    assert cached is not None
    token_ids = list(range(14 * BLOCK_SIZE))
    engine.pool.cached = dict(zip(block_hashes(token_ids, ""), [*held, *cached], strict=True))
    engine.pool.free(cached)
    engine.handoffs.give_prefix(EngineTransfer(9, ADDRESSES["reader"], True, LIMIT_S), token_ids, "")
    assert (engine.pool.num_free, engine.handoffs.num_lent) == (6, 10)
    engine.handoffs.give_prefix(EngineTransfer(8, ADDRESSES["reader"], True, LIMIT_S), token_ids, "salt")
    assert (engine.pool.num_free, engine.handoffs.num_lent) == (6, 10)
    for ticket in (10, 11):  # each gets what is lent already
        engine.handoffs.give_prefix(EngineTransfer(ticket, ADDRESSES["reader"], True, LIMIT_S), token_ids, "")
    assert (engine.pool.num_free, engine.handoffs.num_lent) == (6, 30)


@pytest.mark.parametrize("is_move", [False, True])
def test_the_ticket_of_an_offer_that_runs_gets_no_prefix(is_move: bool) -> None:
    engine, transfer = Engine("owner"), EngineTransfer(7, ADDRESSES["reader"], True, LIMIT_S, is_move)
    request, cached = request_of(16, None if is_move else transfer), engine.pool.allocate(2)
    assert cached is not None
    if is_move:
        request.kv_transfer_params = encode_request("w", None)
    engine.handoffs.on_new_request(request)
    if is_move:
        engine.handoffs.begin_move("w", transfer, 16)
    token_ids = list(range(2 * BLOCK_SIZE))
    engine.pool.cached = dict(zip(block_hashes(token_ids, ""), cached, strict=True))
    engine.pool.free(cached)
    before = list(engine.commands)
    engine.handoffs.give_prefix(transfer, token_ids, "")
    assert (engine.handoffs.num_lent, list(engine.commands)) == (0, before)


def test_the_blocks_of_a_step_are_read_before_the_prompt_is_computed() -> None:
    world = World(num_tokens=16, is_flipping=False)  # three steps
    world.begin(world.reader)
    world.begin(world.owner)
    world.step_owner()
    world.step_reader()
    exchange(world)
    assert "owner" not in world.ended
    assert [world.reader.content[block] for block in world.reader.tables["r"]] == [100, 0, 0, 0]
    world.settle()
    assert world.reader.outcomes == {"r": True}


def test_a_step_tells_who_holds_blocks() -> None:
    """A block that its request holds, too, counts for the request."""
    world = World(num_tokens=16, is_flipping=False)
    world.begin(world.reader)
    world.begin(world.owner)
    world.step_owner()  # one block and a half
    world.step_reader()
    for _ in range(3):
        world.transfer(world.owner)
        world.transfer(world.reader)
        world.deliver()

    def holders(engine: Engine) -> list[tuple[str, int, int]]:
        told = decode_holders(engine.handoffs.step_stats()[HOLDERS])
        return [(holder.claim.column.value, len(holder.claim.blocks), holder.num_counted) for holder in told]

    assert holders(world.owner) == [("leased", 1, 0)]
    assert holders(world.reader) == [("incoming", 4, 4)]
    world.step_owner()
    world.step_owner()  # the request ends
    world.transfer(world.owner)
    world.transfer(world.owner)
    assert holders(world.owner) == [("leased", 4, 4)]
    world.settle()
    assert holders(world.owner) == holders(world.reader) == []


class Interface(ModuleType):
    def __init__(self, without: str = "") -> None:
        super().__init__("base")
        names = {*SCHEDULER_HOOKS, *RANK_HOOKS, *CLASS_HOOKS} - {without}
        self.KVConnectorBase_V1 = type("Base", (), dict.fromkeys(names))


@pytest.mark.parametrize(
    ("version", "without", "lacking", "words"),
    [
        ("0.32.0+cpu", "", "", ""),
        ("0.33.0", "", "", "vLLM 0.33.0 is not tested, 0.32.0 is"),
        ("0.32.0", "on_new_request", "", "this vLLM lacks the hook on_new_request of KV connectors (called before"),
        ("0.32.0", "", "touch", "the block pool of this vLLM lacks touch"),
    ],
)
def test_another_vllm_is_refused_with_the_line_that_it_breaks(
    version: str, without: str, lacking: str, words: str
) -> None:
    pool = type("Pool", (), dict.fromkeys(set(POOL_METHODS) - {lacking}))
    found = unmet(version, Interface(without), pool)
    assert found.startswith(words)
    assert bool(found) == bool(words)


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


def configs(**changes: Any) -> tuple[Any, Any]:
    """vLLM's, of a model with two layers of one head of 8 float32."""
    told: dict[str, Any] = {
        "tensor": 1, "asynchronous": False, "device": "cpu", "num_groups": 1, "spec": FullAttentionSpec, "layers": 2,
        "page_bytes": 1024,
    } | changes  # fmt: skip
    group = SimpleNamespace(
        kv_cache_spec=told["spec"](page_size_bytes=told["page_bytes"]),
        layer_names=[str(layer) for layer in range(told["layers"])],
    )
    model = SimpleNamespace(
        dtype="torch.float32", quantization=None, get_num_layers=lambda _: 2, get_total_num_kv_heads=lambda: 1,
        get_head_size=lambda: 8,
    )  # fmt: skip
    vllm_config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=told["tensor"]),
        scheduler_config=SimpleNamespace(async_scheduling=told["asynchronous"]),
        device_config=SimpleNamespace(device_type=told["device"]),
        cache_config=SimpleNamespace(block_size=16),
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=[group] * told["num_groups"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"tensor": 2}, "tensor parallelism: get_transfer_results must hear of all ranks"),
        ({"asynchronous": True}, "asynchronous scheduling: update_connector_output must come before"),
        ({"device": "cuda"}, "a KV cache on a device: register_kv_caches must give host memory"),
        ({"num_groups": 2}, "2 groups of KV caches: update_state_after_alloc must give one list"),
        ({"spec": SimpleNamespace}, "a KV cache of SimpleNamespace: register_kv_caches must give keys and values"),
        ({"layers": 1}, "1 KV caches for 2 layers: register_kv_caches must give one for each"),
        ({"page_bytes": 512}, "512 bytes in a block of a layer: register_kv_caches must give float32 and no more"),
    ],
)
def test_what_the_connector_cannot_move_is_refused_with_the_hook_that_it_breaks(
    changes: dict[str, Any], words: str
) -> None:
    found = unsupported(*configs(**changes))
    assert found.startswith(words)
    assert bool(found) == bool(words)
