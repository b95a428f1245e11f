"""Messages arrive as sent; those of strangers, and garbage over nixl, are dropped, counted, and change nothing.

tools/fuzz (test_fuzz.py) sends changed bytes and messages of peers to both machines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import TransferConfig
from core.handoff import (
    Abort,
    AbortReason,
    HandoffMessage,
    Heartbeat,
    HeartbeatEntry,
    OfferedBlocks,
    Ping,
    Ready,
    Release,
    Want,
)
from core.kv_layout import KVLayout
from kv_transfer.protocol.events import AgentFailed, MessageReceived, PullCompleted
from kv_transfer.transports.nixl_transport import NixlTransport
from protos.handoff_codec import MalformedMessage, decode, encode
from tests.integration.transfer_owner_process import host_pool
from tests.integration.transfer_worker import TransferWorker, random_content, run_until_results
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair

counters = st.integers(1, 2**64 - 1) | st.integers(1, 40)
transfer_ids = st.just(ID) | st.integers(0, 2**128 - 1)
incarnations = st.sampled_from([11, 22]) | counters  # mostly those of the pair
positions = st.integers(0, 30) | st.integers(0, 2**32 - 1)  # small ones have neighbours
rows = st.tuples(positions, positions, st.integers(0, 2**64 - 1))
one_block, blocks = (
    st.lists(rows, min_size=least, max_size=most).map(OfferedBlocks.of) for least, most in ((1, 1), (0, 6))
)
entries = st.builds(HeartbeatEntry, transfer_ids, positions, positions, positions)

messages: st.SearchStrategy[HandoffMessage] = st.one_of(
    st.builds(
        Want, transfer_ids, incarnations, counters, st.integers(0, 2**64 - 1),
        st.lists(positions, unique=True, max_size=20).map(lambda found: tuple(sorted(found))),
    ),
    st.builds(Ready, transfer_ids, incarnations, counters, counters, positions, one_block, st.just(False)),
    st.builds(
        Ready, transfer_ids, incarnations, counters, counters, positions, blocks, st.just(True),
        st.lists(positions, max_size=4).map(tuple),
    ),
    st.builds(
        Heartbeat, incarnations, counters, st.none() | counters, st.lists(entries, max_size=4).map(tuple),
    ),
    st.builds(Release, transfer_ids, incarnations, counters, st.none() | st.sampled_from(AbortReason)),
    st.builds(Abort, transfer_ids, incarnations, counters, st.sampled_from(AbortReason), st.text(max_size=40)),
    st.builds(Ping, incarnations, counters, st.none() | counters),
)  # fmt: skip


# ---- the codec


@given(messages)
def test_every_message_arrives_as_it_was_sent(message: HandoffMessage) -> None:
    assert decode(encode(message)) == message


# ---- the machines


@settings(max_examples=200)
@given(st.lists(st.tuples(st.just("stranger"), st.booleans(), messages), min_size=1, max_size=12))
def test_messages_of_a_stranger_change_nothing_and_all_but_pings_are_counted(
    sent: list[tuple[str, bool, HandoffMessage]],
) -> None:
    pair = Pair()
    pair.offer([0, 1, 2])
    pair.pull([0, 1, 2])
    for sender, to_owner, message in sent:
        pair.event(pair.owner if to_owner else pair.puller, MessageReceived(sender, message))
    pair.run()
    assert isinstance(pair.pull_result(), PullCompleted)
    pair.wait(CONFIG.lease_s, deliver=False)  # drops messages that were kept for a later offer
    dropped = [side.machine.counters.dropped.total() for side in (pair.owner, pair.puller)]
    num_wants_and_releases = sum(isinstance(message, Want | Release) for _, _, message in sent)
    num_pings = sum(isinstance(message, Ping) and message.ack is None for _, _, message in sent)
    assert len(sent) - num_wants_and_releases - num_pings <= sum(dropped) <= len(sent)


# ---- the agent, over nixl

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=8)
NIXL_CONFIG = TransferConfig(max_blocks_per_read=4)
NUM_PAYLOADS = 300


@pytest.fixture
def pair_over_nixl() -> Iterator[tuple[TransferWorker, TransferWorker]]:
    workers = [TransferWorker(name, NixlTransport, NIXL_CONFIG, LAYOUT, 16) for name in ("fuzz-owner", "fuzz-puller")]
    yield workers[0], workers[1]
    for worker in workers:
        worker.close()


class Stranger:
    """A nixl agent outside the fleet. It has the metadata of a victim and sends it any bytes."""

    def __init__(self, name: str | bytes, victim: TransferWorker) -> None:
        self.transport = NixlTransport(name)  # type: ignore[arg-type]
        self._bytes, memory = host_pool(LAYOUT, 1)
        self.transport.register(memory)
        self.transport.connect(victim.machine.address)
        self.victim = victim

    def send(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self.transport.notify(self.victim.machine.address.name, payload)

    def until(self, num_malformed: int, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while self.victim.agent.num_malformed < num_malformed:
            assert time.monotonic() < end, f"{self.victim.agent.num_malformed} of {num_malformed} were counted"
            self.transport.poll()
            self.victim.step(0.001)


def hand_over(owner: TransferWorker, puller: TransferWorker) -> None:
    sources, targets = owner.pool.allocate(8), puller.pool.reserve(8)
    assert sources is not None
    assert targets is not None
    random_content(owner, sources, seed=3)
    now = time.monotonic()
    puller.act(puller.machine.reserve_pull(ID, owner.machine.address, now))
    puller.act(puller.machine.puller.start(ID, range(len(targets)), now))
    puller.act(puller.machine.puller.add_targets(ID, dict(enumerate(targets)), now))
    owner.act(owner.machine.offer(ID, puller.machine.address, now))
    owner.act(owner.machine.owner.add_ready(ID, list(enumerate(sources)), True, (42,), now))
    run_until_results([owner, puller], 1)
    assert isinstance(puller.results[0], PullCompleted)
    assert (puller.bytes[targets] == owner.bytes[sources]).all()


def malformed_payloads(rng: random.Random) -> list[bytes]:
    valid = [encode(Release(ID, 7, 9, None)), encode(Abort(ID, 7, 9, AbortReason.CANCELLED, "detail"))]
    found: list[bytes] = []
    while len(found) < NUM_PAYLOADS:
        payload = bytearray(rng.choice(valid)) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randrange(80)))
        for _ in range(rng.randrange(4)):
            if payload:
                payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            decode(bytes(payload))
        except MalformedMessage:
            found.append(bytes(payload))
    return found


def test_garbage_over_nixl_is_dropped_and_counted_and_hand_offs_continue(
    pair_over_nixl: tuple[TransferWorker, TransferWorker],
) -> None:
    owner, puller = pair_over_nixl
    for victim in (owner, puller):
        stranger = Stranger(f"stranger-of-{victim.agent.identity.worker_id}", victim)
        stranger.send(malformed_payloads(random.Random(17)))
        stranger.until(NUM_PAYLOADS)
        assert victim.agent.num_malformed == NUM_PAYLOADS
        stranger.transport.close()
    hand_over(owner, puller)
    assert not [result for worker in pair_over_nixl for result in worker.results if isinstance(result, AgentFailed)]


def test_a_message_of_a_sender_with_an_undecodable_name_is_dropped_and_counted(
    pair_over_nixl: tuple[TransferWorker, TransferWorker],
) -> None:
    owner, puller = pair_over_nixl
    stranger = Stranger(b"\xff\xfe", owner)
    stranger.send([encode(Release(ID, 7, 9, None))])
    stranger.until(1)
    stranger.transport.close()
    hand_over(owner, puller)
