"""Messages arrive as sent; those of strangers are dropped, counted, and change nothing.

tools/fuzz (test_fuzz.py) sends changed bytes and messages of peers to both machines.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core import handoff
from core.handoff import AbortReason, HandoffMessage, OfferedBlocks, Ping, Release, Want
from kv_transfer.protocol.events import MessageReceived, PullCompleted
from protos.handoff_codec import decode, encode
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, Pair

counters = st.integers(1, 2**64 - 1) | st.integers(1, 40)
transfer_ids = st.just(ID) | st.integers(0, 2**128 - 1)
incarnations = st.sampled_from([11, 22]) | counters  # mostly those of the pair
positions = st.integers(0, 30) | st.integers(0, 2**32 - 1)  # small ones have neighbours
rows = st.tuples(positions, positions, st.integers(0, 2**64 - 1))
one_block, blocks = (
    st.lists(rows, min_size=least, max_size=most).map(OfferedBlocks.of) for least, most in ((1, 1), (0, 6))
)
entries = st.builds(handoff.HeartbeatEntry, transfer_ids, positions, positions, positions)

messages: st.SearchStrategy[HandoffMessage] = st.one_of(
    st.builds(
        Want, transfer_ids, incarnations, counters, st.integers(0, 2**64 - 1),
        st.lists(positions, unique=True, max_size=20).map(lambda found: tuple(sorted(found))),
    ),
    st.builds(handoff.Ready, transfer_ids, incarnations, counters, counters, positions, one_block, st.just(False)),
    st.builds(
        handoff.Ready, transfer_ids, incarnations, counters, counters, positions, blocks, st.just(True),
        st.lists(positions, max_size=4).map(tuple),
    ),
    st.builds(
        handoff.Heartbeat, incarnations, counters, st.none() | counters, st.lists(entries, max_size=4).map(tuple)
    ),
    st.builds(Release, transfer_ids, incarnations, counters, st.none() | st.sampled_from(AbortReason)),
    st.builds(handoff.Abort, transfer_ids, incarnations, counters, st.sampled_from(AbortReason), st.text(max_size=40)),
    st.builds(Ping, incarnations, counters, st.none() | counters),
)  # fmt: skip


@given(messages)
def test_every_message_arrives_as_it_was_sent(message: HandoffMessage) -> None:
    assert decode(encode(message)) == message


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
