"""Two schedulers of the installed vLLM with `TandemConnector`s, in one process of vLLM's environment, without a model.

    python -m tests.support.tandem_schedulers FIRST_SEED END_SEED [early]

Each seed hands prompts from one to the other, in chunks, with equal prompts, shared prefixes, preemptions, cancels on
both sides and reads that flip bits. Half of the seeds begin with two equal prompts in one step, of the owner or of a
reader whose prefix the owner has. Either engine may read a prefix that the other one has cached, and the second one
computes some prompts alone. Every block must be written when it is offered; `early` plants the opposite, blocks that
are offered when their step is scheduled. The cache row of a token holds a number that all tokens before it decide, and
a step reads the rows of all tokens: so a wrong row gives a wrong token. The last line is JSON: counts of what
happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import vllm_worker.kv.connector
from cli.diagnosis.vllm_environment import default_model_dir
from core.config import TransferConfig
from core.errors import TandemError
from core.handoff import PrefixSource
from kv_transfer.protocol.plan import Runs
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory
from tests.support.vllm_caches import allocate_caches
from vllm_worker.engine import EngineTransfer
from vllm_worker.engine_reports import decode_pulled
from vllm_worker.kv.handoffs import Handoffs
from vllm_worker.kv.hooks import REQUEST_FIELDS
from vllm_worker.kv.parameters import LOST_MOVES, PULLED_TOKENS, RequestEnd, decode_end, encode_request
from vllm_worker.kv.transfers import BlocksComputed, Command

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 32, 16, 2
CHUNK, LONGEST_CHUNK = 160, 72  # tokens of a step, and of one request in it
NUM_OUTPUTS = 4
WRONG = 1  # the token of a step that has read a wrong row
PATIENCE_S = 60.0

happened: Counter[str] = Counter()


class FlippingTransport(NixlTransport):
    """Flips a bit of some reads after their end."""

    draws = random.Random(0)  # of the transfer threads: the order of a seed's events has its own
    rate = 0.0

    @classmethod
    def begin(cls, seed: int, rate: float) -> None:
        cls.draws, cls.rate = random.Random(f"flips of {seed}"), rate

    def register(self, pool: PoolMemory) -> None:
        super().register(pool)
        self._bytes = pool.view
        self._runs: dict[int, Runs] = {}

    def start_read(self, peer: str, runs: Runs) -> int:
        handle = super().start_read(peer, runs)
        self._runs[handle] = runs
        return handle

    def try_complete(self, handle: int) -> bool:
        done = super().try_complete(handle)
        if done:
            self._flip(handle)
        return done

    def poll(self) -> list[Any]:
        events = super().poll()
        for event in events:
            if (handle := getattr(event, "handle", None)) is not None:
                self._flip(handle)
        return events

    def _flip(self, handle: int) -> None:
        runs = self._runs.pop(handle)
        if self.draws.random() < self.rate:
            _, target, num_bytes = self.draws.choice(list(runs))
            assert self._bytes is not None
            self._bytes[target + self.draws.randrange(num_bytes)] ^= 1 << self.draws.randrange(8)
            happened["flipped"] += 1


def row_of(token_ids: Sequence[int]) -> float:
    number = 0
    for token_id in token_ids:
        number = (31 * number + token_id) % 65_521
    return float(number)


def next_token(token_ids: Sequence[int]) -> int:
    return 2 + int(row_of(token_ids)) % 1000


@dataclass
class Engine:
    """A scheduler with its connectors, and the cache that its steps write and read."""

    name: str
    outputs: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)  # as they were submitted
    num_pulled: dict[str, int] = field(default_factory=dict)  # tokens, with the first output
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    offered: dict[int, list[int]] = field(default_factory=dict)  # prompts by transfer id
    lost_moves: set[int] = field(default_factory=set)
    pulled_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by transfer id

    def __post_init__(self) -> None:
        transfer = TransferConfig(lease_s=3.0)
        options = {"worker": self.name, "model": "m", "transfer": json.dumps(asdict(transfer))}
        config = EngineArgs(
            model=str(default_model_dir()), dtype="float32", block_size=BLOCK_SIZE, max_model_len=512,
            max_num_batched_tokens=CHUNK, long_prefill_token_threshold=LONGEST_CHUNK, max_num_seqs=8,
            enforce_eager=True, async_scheduling=False,
            distributed_executor_backend="uni", hf_overrides={"num_hidden_layers": NUM_LAYERS},
            kv_transfer_config=KVTransferConfig(
                kv_connector="TandemConnector", kv_connector_module_path="vllm_worker.kv.connector", kv_role="kv_both",
                kv_load_failure_policy="recompute", kv_buffer_device="cpu",
                kv_connector_extra_config={"tandem": options},
            ),
        ).create_engine_config()  # fmt: skip
        caches, views = allocate_caches(config, NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE)
        self.layers = list(views.values())  # [num_blocks, heads, rows, content] each
        self.rank = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        self.rank.register_kv_caches(views)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.rank
        self._post = self.rank.transfers.post
        self.rank.transfers.post = self.post
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, log_stats=True,
        )  # fmt: skip
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._num_to_load = self.rank.handoffs.pulls.num_to_load
        self.rank.handoffs.pulls.num_to_load = self.num_to_load
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    @property
    def address(self) -> Any:
        return self.rank.transfers.address

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Blocks of the prefix cache."""
        hashes = self.rank.handoffs._hashes_of(token_ids, "")
        return sum(1 for _ in takewhile(lambda one: self.pool.get_cached_block(one, [0]), hashes))

    def wait_for_news(self, timeout_s: float) -> None:
        pass

    def post(self, command: Command) -> None:
        """To the transfers. Whatever is offered is written, and stays as it is."""
        if isinstance(command, BlocksComputed):
            for position, block in command.blocks:
                prompt = self.offered[command.transfer_id]
                assert self.is_written(prompt, position, block), "a block is offered before it is written"
        self._post(command)

    def num_to_load(self, request: Request, num_local_tokens: int) -> int | None:
        num_tokens: int | None = self._num_to_load(request, num_local_tokens)
        happened["waited for a read of their prefix"] += num_tokens is None
        return num_tokens

    def is_written(self, token_ids: Sequence[int], position: int, block: int) -> bool:
        """Whether a block has the rows of these tokens. `position`: of the block."""
        first = position * BLOCK_SIZE
        return all(
            bool((layer[block, :, row, :] == row_of(token_ids[: first + row + 1]) + number).all())
            for number, layer in enumerate(self.layers)
            for row in range(min(BLOCK_SIZE, len(token_ids) - first))
        )

    def submit(
        self,
        name: str,
        prompt: list[int],
        transfer: EngineTransfer | None,
        max_tokens: int,
        stops: Sequence[int] = (),
        prefix: PrefixSource | None = None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stops),
            extra_args={"kv_transfer_params": encode_request(name, transfer, prefix)},
        )  # fmt: skip
        sampling.update_from_generation_config({}, None)
        self.outputs[name], self.prompts[name] = [], list(prompt)
        if transfer is not None and transfer.is_offer:
            self.offered[transfer.transfer_id] = prompt
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        assert not [field for field in REQUEST_FIELDS if not hasattr(request, field)]
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """The newest request, as vLLM does without a free block."""
        if running := self.scheduler.running:
            self.scheduler._preempt_request(running.pop(), time.monotonic())

    def step(self) -> bool:
        """One step of vLLM's engine core. Returns whether it computed tokens."""
        scheduler = self.scheduler
        if not scheduler.has_requests():
            return False
        planned = scheduler.schedule()
        self._note(planned)
        self.rank.bind_connector_metadata(planned.kv_connector_metadata)
        sampled = {name: self._compute(name, count) for name, count in planned.num_scheduled_tokens.items()}
        self.rank.wait_for_save()
        results = self.rank.get_transfer_results(planned.finished_req_ids)
        happened["received"] += len(results.finished_recving)
        happened["failed"] += len(results.failed_recving)
        transferred = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.rank.get_block_ids_with_load_errors(),
        )
        self.rank.clear_connector_metadata()
        names = list(sampled)
        output = ModelRunnerOutput(
            names, {name: place for place, name in enumerate(names)}, list(sampled.values()),
            kv_connector_output=transferred,
        )  # fmt: skip
        for core_outputs in scheduler.update_from_output(planned, output).values():
            told = core_outputs.scheduler_stats.kv_connector_stats if core_outputs.scheduler_stats else {}
            self.lost_moves |= {int(transfer_id, 16) for transfer_id in told.get(LOST_MOVES, ())}
            self.pulled_tokens |= decode_pulled(told.get(PULLED_TOKENS, ()))
            for one in core_outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    num_known = len(self.prompts[one.request_id])
                    self.num_pulled[one.request_id] = max(0, one.prefill_stats.num_cached_tokens + 1 - num_known)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = end = decode_end(one.kv_transfer_params)
                    if end.num_prefix_tokens is not None:
                        happened["prefixes read" if end.num_prefix_tokens else "prefixes not read"] += 1
        self.rank.handoffs.check()
        return bool(names)

    def _note(self, planned: Any) -> None:
        happened["preempted"] += len(planned.preempted_req_ids or ())
        for new in planned.scheduled_new_reqs:
            last = new.num_computed_tokens // BLOCK_SIZE - 1  # position of the last block that counts as computed
            if last >= 0 and not self.is_written(new.prompt_token_ids, last, new.block_ids[0][last]):
                happened["joined a step that writes its prefix"] += 1

    def _compute(self, name: str, count: int) -> list[int]:
        """Write the rows of `count` tokens, and sample behind the last one of the request."""
        request = self.scheduler.requests[name]
        token_ids, end = list(request.all_token_ids), request.num_computed_tokens
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        right = True
        for position in range(end):
            block, row = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            expected = row_of(token_ids[: position + 1])
            for number, layer in enumerate(self.layers):
                if position >= end - count:
                    layer[block, :, row, :] = expected + number
                elif not bool((layer[block, :, row, :] == expected + number).all()):
                    right = False
        if end < len(token_ids):
            return []
        return [next_token(token_ids) if right else WRONG]


@dataclass
class HandOff:
    name: str
    prompt: list[int]
    transfer_id: int = field(default_factory=lambda: secrets.randbits(127) | 1)
    is_cancelled: bool = False


def run_seed(seed: int, owner: Engine, reader: Engine) -> None:
    draws = random.Random(seed)
    FlippingTransport.begin(seed, draws.choice((0.0, 0.3, 1.0)))
    shared = [draws.randrange(2, 5000) for _ in range(200)]
    if draws.random() < 0.8:
        _compute_alone(f"{seed}.shared", shared, draws.choice((owner, reader)))
    handoffs: list[HandOff] = []
    if draws.random() < 0.5:
        handoffs += _begin_in_one_step(seed, draws, owner, reader)
    for number in range(5):
        prompt = _draw_prompt(shared, handoffs, draws)
        handoffs.append(_begin(f"{seed}.{number}", prompt, draws, owner, reader))
    deadline = time.monotonic() + PATIENCE_S
    while any(engine.scheduler.has_requests() for engine in (owner, reader)) or owner.num_free < NUM_BLOCKS - 1:
        assert time.monotonic() < deadline, f"seed {seed}: no end, {owner.num_free} of {NUM_BLOCKS - 1} blocks are free"
        moved = [engine.step() for engine in draws.sample((owner, reader), draws.randint(1, 2))]
        if not any(moved):
            time.sleep(0.0005)  # for the transfer threads; what is found does not depend on it
        if draws.random() < 0.1:
            draws.choice((owner, reader)).preempt()
        if draws.random() < 0.1:
            _cancel(draws.choice(handoffs), draws, owner, reader)
    assert reader.num_free == NUM_BLOCKS - 1, f"seed {seed}: the reader has lost blocks"
    for handoff in handoffs:
        if not handoff.is_cancelled:
            expected = list(handoff.prompt)
            for _ in range(NUM_OUTPUTS):
                expected.append(next_token(expected))
            found = reader.outputs[handoff.name]
            if len(found) < NUM_OUTPUTS:  # the first token came with the blocks
                found = [*reader.pulled_tokens[handoff.transfer_id], *found]
                happened["first tokens"] += 1
            assert found == expected[len(handoff.prompt) :], f"seed {seed}: {found}"
            happened["right"] += 1


def _compute_alone(name: str, prompt: list[int], engine: Engine) -> None:
    engine.submit(name, prompt, None, 1)
    while name not in engine.ends:
        engine.step()


def _draw_prompt(shared: list[int], before: list[HandOff], draws: random.Random) -> list[int]:
    if before and draws.random() < 0.5:
        return before[-1].prompt + [draws.randrange(2, 5000) for _ in range(draws.choice((0, 0, 40)))]
    num_shared, num_own = draws.choice((0, 40, 150, 150)), draws.randint(1, 130)
    return shared[:num_shared] + [draws.randrange(2, 5000) for _ in range(num_own)]


def _begin_in_one_step(seed: int, draws: random.Random, owner: Engine, reader: Engine) -> list[HandOff]:
    """One prompt twice, so that the second one joins the step that writes its prefix, or finds that the first one
    reads it, whatever else happens."""
    prompt = [draws.randrange(2, 5000) for _ in range(LONGEST_CHUNK + draws.randint(1, 60))]
    handoffs = [HandOff(f"{seed}.twin.{number}", prompt) for number in range(2)]
    is_read = draws.random() < 0.5
    if is_read:
        _compute_alone(f"{seed}.cached", prompt, owner)
    for handoff in handoffs:
        if is_read:
            prefix, give = _prefix_of(prompt, owner, reader, 2.0)
            give()
            reader.submit(handoff.name, prompt, None, NUM_OUTPUTS, prefix=prefix)
        else:
            for submit in _submits(handoff, owner, reader):
                submit()
    (reader if is_read else owner).step()
    return handoffs


def _submits(
    handoff: HandOff, owner: Engine, reader: Engine, prefix: PrefixSource | None = None
) -> list[Callable[[], None]]:
    """The calls of both engines. `prefix`: of the owner."""
    name, prompt = handoff.name, handoff.prompt
    offer = EngineTransfer(handoff.transfer_id, reader.address, True, math.inf)
    pull = EngineTransfer(handoff.transfer_id, owner.address, False, math.inf)
    return [
        lambda: owner.submit(name, prompt, offer, 1, prefix=prefix),
        lambda: reader.submit(name, prompt, pull, NUM_OUTPUTS),
    ]


def _begin(name: str, prompt: list[int], draws: random.Random, owner: Engine, reader: Engine) -> HandOff:
    handoff = HandOff(name, prompt)
    if draws.random() < 0.4:
        prefix, give = _draw_prefix(prompt, draws, owner, reader)
        submits = [lambda: reader.submit(name, prompt, None, NUM_OUTPUTS, prefix=prefix), give]
    else:
        prefix, give = _draw_prefix(prompt, draws, reader, owner)
        submits = [*_submits(handoff, owner, reader, prefix), give]
    for submit in draws.sample(submits, len(submits)):
        submit()
        for _ in range(draws.choice((0, 0, 1, 2))):
            draws.choice((owner, reader)).step()
    return handoff


def _draw_prefix(
    prompt: list[int], draws: random.Random, source: Engine, reader: Engine
) -> tuple[PrefixSource | None, Callable[[], None]]:
    """Perhaps a source of `reader`, and the call that makes it offer its blocks. Some limits are too short."""
    if draws.random() < (0.1 if source.num_cached(prompt) > reader.num_cached(prompt) else 0.8):
        return None, lambda: None
    num_tokens = max(1, len(prompt) - draws.choice((0, 0, 40)))
    return _prefix_of(prompt, source, reader, draws.choice((2.0, 2.0, 2.0, 0.002)), num_tokens)


def _prefix_of(
    prompt: list[int], source: Engine, reader: Engine, limit_s: float, num_tokens: int | None = None
) -> tuple[PrefixSource, Callable[[], None]]:
    transfer_id = secrets.randbits(127) | 1
    num_tokens = num_tokens or len(prompt)
    source.offered[transfer_id] = prompt
    return (
        PrefixSource(transfer_id, source.address, num_tokens, limit_s),
        lambda: source.rank.handoffs.give_prefix(
            EngineTransfer(transfer_id, reader.address, True, time.monotonic() + limit_s), prompt[:num_tokens], ""
        ),
    )


def _cancel(handoff: HandOff, draws: random.Random, owner: Engine, reader: Engine) -> None:
    """As a router does: both calls, in any order."""
    if not handoff.is_cancelled and handoff.name in reader.scheduler.requests:
        handoff.is_cancelled = True
        happened["cancelled"] += 1
        for engine in draws.sample((owner, reader), 2):
            if handoff.name in engine.scheduler.requests:
                engine.abort(handoff.name)


def plant_early_offers() -> None:
    """Offer what counts as computed when a step is scheduled."""
    begin_step = Handoffs.begin_step

    def begin_and_offer(
        self: Handoffs, scheduled: Collection[str], block_ids_of: Callable[[str], Sequence[int]]
    ) -> None:
        begin_step(self, scheduled, block_ids_of)
        self.end_step()

    Handoffs.begin_step = begin_and_offer  # type: ignore[method-assign]


def run_seeds(first: int, end: int, run_seed: Callable[[int, Engine, Engine], None]) -> None:
    """Prints the counts, or the traceback of what was found, and ends the process with 0 or 1.

    The transfer threads end first, and the exit skips the destructors of native libraries: either may abort the process
    otherwise, with a part of its output.
    """
    engines: list[Engine] = []
    code = 1
    try:
        init_none_hash(sha256)
        vllm_worker.kv.connector.NixlTransport = FlippingTransport  # type: ignore[attr-defined]
        engines += [Engine("prefill-0"), Engine("decode-0")]
        for seed in range(first, end):
            run_seed(seed, *engines)
        code = 0
    except Exception:  # noqa: BLE001  printed, and told by the code
        traceback.print_exc()
    for engine in engines:
        with contextlib.suppress(TandemError):  # a read that goes on after a failure
            engine.rank.shutdown()
    if not code:
        print(json.dumps(happened))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[3:] == ["early"]:
        plant_early_offers()
    run_seeds(int(sys.argv[1]), int(sys.argv[2]), run_seed)
