"""VllmMachine: each call ends once, whatever its router, its hand-off and its engine do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import QueueFull, TandemError
from decode_worker.events import DecodeDone, DecodeFailed
from prefill_worker.machine import PrefillDone, PrefillFailed
from tests.support.vllm_words import TIMEOUT_S, VllmReplay, transcripts
from vllm_worker.awaited_handoffs import EARLY_HANDOFF_S, MAX_EARLY_HANDOFFS
from vllm_worker.events import Abort, Submit
from vllm_worker.handshakes import MAX_PEERS

SETUP = """
  machine
"""

test_calls = transcripts(
    """
a prompt is submitted and answered with its hand-off
  prefill a                   -> submit a offers
  wait 3
  output a 3 ends=length handoff=kv num_cached_tokens=4 scheduled_at=1 -> done a 0: 3, cached 4, queue 1, prefill 2
  idle                        -> yes

a first token that ends the text hands nothing over
  prefill a                   -> submit a offers
  output a 7 ends=length handoff=kv -> done a 0: 7, stop

a first token at the limit hands nothing over
  prefill a max_tokens=1      -> submit a offers
  output a 3 ends=length handoff=kv -> done a 0: 3, length

a prompt without a hand-off fails retryably
  prefill a                   -> submit a offers
  output a 3 ends=length      -> fail a TransferFailed: the engine keeps no KV of this prompt

a decode call and its hand-off may arrive in any order
  decode a ticket=5
  handoff 5                   -> submit a reads kv
  handoff 6
  decode b ticket=6           -> submit b reads kv

from its hand-off to its first token a call waits for the transfer
  decode a ticket=5
  wait 1
  handoff 5                   -> submit a reads kv
  wait 2
  output a 3                  -> tokens a 0: 3
  output a 7 ends=stop        -> tokens a 1: 7; done a stop, queue 1, transfer 2

tokens are numbered from the true prompt on
  decode a delivered=3        -> submit a
  output a 1 2                -> tokens a 3: 1, a 4: 2
  output a 4 ends=stop        -> tokens a 5: 4; done a stop
  idle                        -> yes

a failed load is retryable and a refused request is not
  decode a                    -> submit a
  decode b                    -> submit b
  output a error=lost         -> fail a TransferFailed: the engine failed this request: lost
  output b error=bad invalid=1 -> fail b InvalidRequest: request: vLLM refuses it: bad

a cancelled call is aborted in the engine only if the engine has it
  decode a                    -> submit a
  decode b ticket=5
  cancel a                    -> abort a; fail a RequestCancelled: the router cancelled the call
  cancel b                    -> fail b RequestCancelled: the router cancelled the call
  output a 3

an engine with a transfer agent gets both calls at once, and moves the blocks by itself
  machine agent=1
  prefill a                   -> submit a offers to other by 5
  output a 3 ends=length      -> done a 0: 3
  decode b ticket=5           -> submit b from other by 5
  cancel b                    -> abort b; fail b RequestCancelled: the router cancelled the call
  decode b ticket=5           -> submit b from other by 5
  output b 3 num_cached_tokens=5 -> tokens b 0: 3

an engine that got the first token with the blocks samples from the second one on
  machine agent=1
  decode a ticket=5           -> submit a from other by 5
  step 1 0 0.1 0 0 pulled=3 of=5 -> tokens a 0: 3
  output a 4 num_pulled_tokens=1 num_cached_tokens=6 -> tokens a 1: 4
  output a 8                  -> tokens a 2: 8
  output a 7 ends=stop        -> tokens a 3: 7; done a stop, cached 6

an engine with a transfer agent refuses another layout
  machine agent=1
  decode c ticket=6 heads=2   -> refused LayoutMismatch: KV layouts differ in num_kv_heads: 1 here, 2 there
  decode c                    -> submit c

a deadline ends a call that waits for its hand-off
  decode a ticket=5
  deadline                    -> in 100
  wait 100                    -> fail a DeadlineExceeded: the deadline passed on the worker in stage queue

the death of the engine ends every call and the worker
  prefill a                   -> submit a offers
  decode b ticket=5
  died                        -> fail a WorkerUnavailable: the engine of this worker died: killed
                              -> fail b WorkerUnavailable: the engine of this worker died: killed
                              -> fail the worker: killed
  decode c                    -> refused WorkerUnavailable: the engine of this worker is dead

an engine that reports no step hangs
  decode a                    -> submit a
  wait 20
  step 1 0 0.1 1 0
  wait 29
  wait 1
      -> fail a WorkerUnavailable: the engine of this worker died: no step has ended for 30 s (step_timeout_s)
                              -> fail the worker: no step has ended for 30 s (step_timeout_s)

a refused call changes nothing
  machine max_waiting=2
  decode a                    -> submit a
  decode a                    -> refused InvalidRequest: request_id: a is being served already
  decode b ticket=5
  decode c                    -> refused QueueFull: 2 requests are open already (max_waiting + max_running)
  load                        -> serving; waiting 1; queued tokens 6; calls 2; of the router 2; backlog 3; free 100

the engine keeps an offer that the router withdraws
  withdraw 5 -> refused InvalidRequest: transfer_id: the engine of this worker keeps an offer until its lease ends

a call for the hand-off of another call is refused
  decode a ticket=5
  decode b ticket=5           -> refused InvalidRequest: transfer_id: another call waits for this hand-off
  load                        -> serving; calls 1; of the router 1; free 100

calls beyond a lowered limit go on and the engine keeps its sizes
  machine max_running=1
  decode a                    -> submit a
  decode b                    -> submit b
  decode c                    -> submit c
  config 3 max_running=64 max_batched_tokens=64 max_waiting=1 slo_itl_ms=50
  decode d                    -> refused QueueFull: 2 requests are open already (max_waiting + max_running)
  deadline                    -> in 3
  load                        -> serving; waiting 3; queued tokens 18; calls 3; of the router 3; slo 0.05; backlog 3
                              -> free 100

a draining worker refuses new calls and finishes its own
  decode a                    -> submit a
  drain
  prefill b                   -> refused WorkerDrains: this worker drains
  load                        -> draining; waiting 1; queued tokens 6; calls 1; of the router 1; backlog 3; free 100
  output a 1 ends=length      -> tokens a 0: 1; done a length

the load counts prompts, decodes and the pool
  decode a num_tokens=20      -> submit a
  decode b num_tokens=8       -> submit b
  step 1 1 0.05 0 12
  load                        -> serving; waiting 1; queued tokens 16; calls 2; of the router 2; backlog 4; free 95
                              -> held 5
  output a 1                  -> tokens a 0: 1
  load                        -> serving; waiting 1; queued tokens 8; decoding 1; context 21; calls 2; of the router 2
                              -> backlog 4; free 95; held 5
  cancel a                    -> abort a; fail a RequestCancelled: the router cancelled the call
  cancel b                    -> abort b; fail b RequestCancelled: the router cancelled the call
  load                        -> serving; free 100  # vLLM does not tell while it is idle

the blocks of transfers are in columns of their own and have names
  decode a num_tokens=20      -> submit a
  step 1 0 0.05 0 12
  wait 2
  decode b num_tokens=8       -> submit b
  output b 1                  -> tokens b 0: 1
  step 2 0 0.1 1 0 lent=3 reads=2
  wait 1
  load                        -> serving; queued tokens 8; decoding 1; context 9; calls 2; of the router 2; busy 2
                              -> backlog 10; free 90; held 5; leased 3; incoming 2
  holders                     -> waiting a 3 3 3 s; offered offer 3 3 1 s; reading pull 2 2 1 s; running b 3 2 1 s
  cancel a                    -> abort a; fail a RequestCancelled: the router cancelled the call
  cancel b                    -> abort b; fail b RequestCancelled: the router cancelled the call
  load                        -> serving; busy 2; free 90; held 5; leased 3; incoming 2
  step 0 0 0 0 0
  load                        -> serving; busy 2; free 100

the time of a step is learned from the reports while the engine has work
  wait 5
  decode a num_tokens=20      -> submit a
  wait 0.3
  step 1 0 0.1 0 20  # since the prompt came
  output a 1                  -> tokens a 0: 1
  wait 0.1
  step 0 0 0.1 1 0  # since the step before
  load                        -> serving; decoding 1; context 21; calls 1; of the router 1; busy 0.4; free 90; held 10
  output a 2 ends=length      -> tokens a 1: 2; done a length, prefill 0.3, decode 0.1
  wait 3
  decode b ticket=5
  handoff 5                   -> submit b reads kv
  wait 0.5
  step 1 0 0.1 1 0  # waited for its KV: not known
  load                        -> serving; calls 1; of the router 1; busy 0.4; free 90; held 10
""",
    SETUP,
)

test_moves = transcripts(
    """
a worker that drains moves what it decodes and its call ends when the engine has given it away
  decode a                    -> submit a
  output a 1                  -> tokens a 0: 1
  drain                       -> ask to move a (drain)
  move a 5 known=7            -> move a to other by 5, 7 known
  output a 2                  -> tokens a 1: 2
  step 1 0 0.1 1 0 lent=2
  output a 4 ends=length is_moved=1 -> tokens a 2: 4; handed over a 3; done a handoff
  idle                        -> no  # the peer still reads
  step 0 0 0 0 0
  idle                        -> yes

requests are asked for a few at once and again after a while
  decode a                    -> submit a
  decode b                    -> submit b
  decode c max_tokens=4       -> submit c
  drain
  output a 1                  -> tokens a 0: 1; ask to move a (drain)
  output c 1                  -> tokens c 0: 1  # it ends before it could have moved
  deadline                    -> in 0.5
  wait 0.4
  output b 1                  -> tokens b 0: 1; ask to move b (drain)
  wait 0.1                    -> ask to move a (drain)
  move a 5 known=7            -> move a to other by 5, 7 known
  wait 0.4                    -> ask to move b (drain)
  move a 6 known=7            -> refused TransferFailed: a moves already
  move b 5 known=7            -> refused TransferFailed: another request moves by this transfer
  cancel a                    -> abort a; fail a RequestCancelled: the router cancelled the call

a request whose reader has failed goes on here and is asked for again
  decode a                    -> submit a
  output a 1                  -> tokens a 0: 1
  drain                       -> ask to move a (drain)
  move a 5 known=7            -> move a to other by 5, 7 known
  resume a 6
  resume a 5                  -> stay a 5
  output a 2                  -> tokens a 1: 2
  wait 0.5                    -> ask to move a (drain)
  move a 6                    -> move a to other by 6, 8 known
  output a 7 ends=stop        -> tokens a 2: 7; done a stop, decode 0.5  # before it could move
  resume a 6

a request whose reader the engine has lost goes on here and is asked for again
  decode a                    -> submit a
  output a 1                  -> tokens a 0: 1
  drain                       -> ask to move a (drain)
  move a 5 known=7            -> move a to other by 5, 7 known
  wait 0.25
  step 1 0 0.1 1 0 lost=6  # of no request
  step 1 0 0.1 1 0 lost=5
  resume a 5
  wait 0.25
  wait 0.25                   -> ask to move a (drain)
  move a 7 known=7            -> move a to other by 7, 7 known
  step 1 0 0.1 1 0 lost=5
  output a 2 ends=length is_moved=1 -> tokens a 1: 2; handed over a 2; done a handoff, decode 0.75

a reader that the router tells of other tokens than this worker has sent is refused
  decode a delivered=2        -> submit a
  output a 1                  -> tokens a 2: 1
  move a 5 known=10           -> refused TransferFailed: a has not sent 10 tokens, or was called with more
  move a 5 known=7            -> refused TransferFailed: a has not sent 7 tokens, or was called with more
  move a 5 known=9            -> move a to other by 5, 9 known

only a request in decode moves and only to the same layout
  decode a                    -> submit a
  prefill b                   -> submit b offers to other by 5
  move a 6                    -> refused TransferFailed: a cannot move now
  move b 6                    -> refused TransferFailed: b cannot move now
  move c 6                    -> refused TransferFailed: c cannot move now
  output a 1                  -> tokens a 0: 1
  move a 6 heads=2            -> refused LayoutMismatch: KV layouts differ in num_kv_heads: 1 here, 2 there

the tokens of a reader begin behind those of the owner, which it sends too
  decode a ticket=5 delivered=2 is_move=1 -> submit a from other by 5
  step 1 0 0.1 0 0 pulled=7..9 of=6  # of a call that has ended
  step 1 0 0.1 0 0 pulled=1..3 of=5 -> tokens a 2: 1, a 3: 2, a 4: 3
  output a 4 num_pulled_tokens=3 num_cached_tokens=10 -> tokens a 5: 4
  output a 7 ends=stop        -> tokens a 6: 7; done a stop, cached 8, recomputed 2
  idle                        -> yes

a reader whose pull has failed samples nothing because the owner may still sample
  decode a ticket=5 delivered=2 is_move=1 -> submit a from other by 5
  output a 4                  -> abort a; fail a TransferFailed: the KV of a request that moves has not come
  decode b ticket=6 delivered=2 is_move=1 -> submit b from other by 6
  output b 4 ends=length      -> fail b TransferFailed: the KV of a request that moves has not come

a reader whose pull has failed ends before its engine computes what the owner has computed
  decode a ticket=5 delivered=2 is_move=1 -> submit a from other by 5
  decode b ticket=6           -> submit b from other by 6
  step 1 0 0.1 0 4 lost=5,6
                              -> abort a; fail a TransferFailed: the KV of a request that moves has not come
  output b 3                  -> tokens b 0: 3  # a hand-off, whose prompt this engine computes
  decode c ticket=7 delivered=2 is_move=1 -> submit c from other by 7
  output c 4 num_pulled_tokens=1 -> tokens c 3: 4
  step 1 0 0.1 1 0 lost=7

a worker without a transfer agent asks for no move
  machine
  decode a                    -> submit a
  output a 1                  -> tokens a 0: 1
  drain
  move a 5                    -> refused TransferFailed: the connector of this worker moves no request
""",
    SETUP + "  machine agent=1\n",
)

test_prefixes = transcripts(
    """
a prompt is computed with the prefix of a peer and its end tells what was read
  prefill a source=9          -> submit a offers to other by 5 with 4 of peer
  output a 3 ends=length num_prefix_tokens=4 num_cached_tokens=4 -> done a 0: 3, cached 4, read 4 of peer
  decode b source=9           -> submit b with 4 of peer
  output b 3 num_cached_tokens=0 -> tokens b 0: 3
  output b 7 ends=stop num_prefix_tokens=0 -> tokens b 1: 7; done b stop, read 0 of peer
  decode c source=9           -> submit c with 4 of peer
  output c 7 ends=stop        -> tokens c 0: 7; done c stop  # no read began

a source with another layout or for a request with an adapter is left out
  decode a source=9 heads=2   -> submit a
  decode b source=9 adapter=red -> submit b

a cached prefix is given to a peer with the same layout also while the worker drains
  asks 9                      -> give 4 to peer by 9
  asks 9 heads=2              -> refused LayoutMismatch: KV layouts differ in num_kv_heads: 1 here, 2 there
  asks 9 num_tokens=64        -> give 64 to peer by 9
  asks 9 num_tokens=65
      -> refused InvalidRequest: packed_token_ids: the engine holds 64 tokens of a sequence
  drain
  asks 9                      -> give 4 to peer by 9

a worker without a transfer agent gives no prefix and reads none
  machine
  asks 9
      -> refused InvalidRequest: transfer_id: the engine of this worker gives no cached prefix to peers
  decode a source=9           -> submit a
""",
    SETUP + "  machine agent=1\n",
)

test_handshakes = transcripts(
    """
an engine shakes hands with one owner at a time and once with each
  joins P                     -> shake hands P at-P
  joins Q
  joins P
  joins Q
  met P                       -> shake hands Q at-Q
  met Q
  joins P
  idle                        -> yes  # a handshake is no call
  deadline                    -> none

a reader and an owner without an address need no handshake
  joins D reader=1
  joins P address=0

a failed handshake is repeated at the next announcement only
  joins P                     -> shake hands P at-P
  met P error=silent
  joins P                     -> shake hands P at-P

an owner that has left and a drain end the wait for a handshake
  joins P                     -> shake hands P at-P
  joins Q
  joins R
  leaves P  # during its handshake
  leaves Q
  met P error=silent          -> shake hands R at-R
  joins S
  drain
  met R
  joins T
""",
    SETUP,
)


def test_an_early_hand_off_is_forgotten_and_their_number_is_bounded() -> None:
    worker = VllmReplay()
    for ticket in range(MAX_EARLY_HANDOFFS):
        worker.handoff(ticket)
    with pytest.raises(QueueFull):
        worker.handoff(MAX_EARLY_HANDOFFS)
    worker.wait(EARLY_HANDOFF_S - 0.1)
    assert worker.deadline() == ["in 0.1"]
    worker.wait(0.1)
    assert worker.deadline() == ["none"]
    assert worker.decode("a", ticket=0) == [], "it waits for its hand-off"


def test_the_number_of_remembered_owners_is_bounded() -> None:
    worker = VllmReplay()
    for number in range(2 * MAX_PEERS + 2):
        worker.joins(f"P{number}")
    num_met, current = 0, "P0"
    while actions := worker.met(current):
        (shake,) = actions
        current, num_met = shake.peer, num_met + 1
    assert num_met == MAX_PEERS
    assert current == f"P{2 * MAX_PEERS + 1}", "the newest ones"


ENDS = (PrefillDone, PrefillFailed, DecodeDone, DecodeFailed)
EVENTS = [
    "prefill NAME", "decode NAME", "decode NAME ticket=TICKET", "handoff TICKET", "cancel_prefill NAME", "cancel NAME",
    "output NAME 3", "output NAME 7 ends=stop handoff=kv", "output NAME ends=length", "output NAME error=lost",
    "step 1 1 0.5 1 8", "move NAME TICKET", "resume NAME TICKET", "output NAME 3 ends=length is_moved=1",
    "decode NAME ticket=TICKET is_move=1", "step 1 1 0.5 1 8 lost=TICKET",
    "prefill NAME source=9", "decode NAME source=9", "asks TICKET",
    "joins NAME", "leaves NAME", "met NAME", "met NAME error=silent",
]  # fmt: skip
STEPS = st.tuples(st.sampled_from(EVENTS), st.sampled_from("abc"), st.sampled_from("012"), st.floats(0.0, 20.0))


@given(st.lists(STEPS, max_size=40), st.booleans(), st.booleans())
def test_every_accepted_call_ends_exactly_once(
    steps: list[tuple[str, str, str, float]], dies: bool, has_agent: bool
) -> None:
    worker = VllmReplay()
    worker.machine(max_waiting=2, agent=has_agent)
    open_calls: set[str] = set()
    submitted: set[str] = set()

    def act(word: str, *words: str) -> None:
        try:
            actions = worker.do(word, *words)
        except TandemError:
            return
        if word in ("prefill", "decode"):
            open_calls.add(words[0])
        for action in actions:
            if isinstance(action, Submit):
                assert action.prompt.request_id in open_calls
                submitted.add(action.prompt.request_id)
            elif isinstance(action, Abort):
                submitted.remove(action.request_id)
            elif isinstance(action, ENDS):
                open_calls.remove(action.request_id)  # a second end raises
                submitted.discard(action.request_id)

    for event, name, ticket, pause in steps:
        act("wait", str(pause))
        act(*event.replace("NAME", name).replace("TICKET", ticket).split())
    if dies:
        act("died")
    act("wait", str(2 * TIMEOUT_S))
    assert not open_calls
    assert worker.worker.idle
