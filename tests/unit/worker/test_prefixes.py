"""Cached prefixes that workers read from each other, in the machines of both roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.block_hash import extend_full_blocks
from core.handoff import PrefixSource
from decode_worker.events import DecodeArrived, DecodeDone
from kv_transfer.protocol import puller
from prefill_worker.machine import PrefillArrived, PrefillDone
from tests.support.driven_worker import LAYOUT, address, request
from tests.support.transcripts import transcripts_of
from tests.support.worker_words import WorkerReplay
from worker import prefixes
from worker.prefixes import PrefixRequested


class PrefixReplay(WorkerReplay):
    """The peer, which is the other side of every hand-off, is also the source of prefix 9 or its reader."""

    def seek(self, name: str, tokens: int, prefix: int, **options: Any) -> list[Any]:
        """A prompt of which the peer has the first `prefix` tokens, as the router says."""
        agent = address("other", layout=replace(LAYOUT, dtype="float16")) if options.pop("other", 0) else self.peer
        source = PrefixSource(options.pop("ticket", 9), agent, prefix, options.pop("limit", 0.5))
        salt, deadline = str(options.pop("salt", "")), self.now + options.pop("timeout", 60)
        prompt = replace(request(name, tokens, options.pop("max", 2), **options), cache_salt=salt)
        if hasattr(self.machine, "pulls"):
            return self.post(DecodeArrived(prompt, None, deadline, prefix=source))
        return self.post(PrefillArrived(prompt, 1, self.peer, deadline, prefix=source))

    def asked(self, ticket: int, tokens: int, first: int = 1, **options: Any) -> list[Any]:
        """The router says that the peer will read this prefix."""
        reader = address("other", layout=replace(LAYOUT, dtype="float16")) if options.get("other") else self.peer
        salt, limit = options.get("salt", ""), options.get("limit", 0.5)
        return self.post(PrefixRequested(ticket, reader, tuple(range(first, first + tokens)), salt, limit))

    def cached(self) -> list[str]:
        return [f"{len(self.pool.registered_hashes())}"]

    def seen(self, action: Any) -> str:
        words = super().seen(action)
        if isinstance(action, PrefillDone | DecodeDone) and action.prefix is not None:
            words += f", read {action.prefix.num_tokens}"
        return words


def test_a_read_takes_no_more_blocks_than_a_want_can_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefixes, puller):
        monkeypatch.setattr(module, "MAX_POSITIONS", 2)
    replay = PrefixReplay()
    replay.line("decode")
    assert replay.line("seek a 18 prefix=16")[-1] == "  -> want 9: 0 1"


def test_an_ask_for_a_prefix_hashes_no_more_tokens_than_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(blocks: list[Any], token_ids: Sequence[int], *others: Any) -> None:
        hashed.append(len(token_ids))
        extend_full_blocks(blocks, token_ids, *others)

    monkeypatch.setattr(prefixes, "extend_full_blocks", counted)
    PrefixReplay("decode blocks=8", "asked 9 1000")
    assert hashed == [8 * LAYOUT.block_size]


def transcripts(text: str, setup: str) -> Callable[[str], None]:
    return transcripts_of(PrefixReplay, text, setup)


test_decode_reader = transcripts(
    """
a prompt waits for its prefix and computes only the rest
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  blocks                        -> incoming 2
  ready 9 0 1 last=1            -> read 9: 0 1
  reads                         -> first step a 8+2; release 9; path peer fine
  blocks                        -> held 3
  cached                        -> 2
  run                           -> tokens a 0: 10 11; done a length, cached 8, read 8
  blocks

a part that the worker has is not read
  arrive b 4 max=1              -> first step b 0+4
  run                           -> tokens b 0: 4; done b length
  seek a 14 prefix=12           -> connect peer; want 9: 1 2
  blocks                        -> held 1; incoming 2
  ready 9 1 2 last=1            -> read 9: 1 2
  reads                         -> first step a 12+2; release 9; path peer fine
  run                           -> tokens a 0: 14 15; done a length, cached 12, read 8

the source has less than was promised
  seek a 14 prefix=12           -> connect peer; want 9: 0..2
  ready 9 0 last=1              -> read 9: 0
  blocks                        -> incoming 3
  reads                         -> first step a 4+8; release 9; path peer fine
  run                           -> tokens a 0: 14 15; done a length, cached 4, read 4
  blocks

a source that is late costs its time
  seek a 10 prefix=8 limit=0.5  -> connect peer; want 9: 0 1
  deadline                      -> in 0.5
  wait 0.4
  wait 0.2                      -> first step a 0+8; release 9 deadline
  blocks                        -> held 2
  run                           -> tokens a 0: 10 11
                                -> done a length, block seconds 0.2, queue 0.5, prefill 0.1, read 0
  blocks

a late read keeps its targets until it ends
  seek a 10 prefix=8 limit=0.5  -> connect peer; want 9: 0 1
  ready 9 0 1 last=1            -> read 9: 0 1
  wait 0.6                      -> first step a 0+8
  blocks                        -> held 2; incoming 2
  run                           -> tokens a 0: 10 11
                                -> done a length, block seconds 0.2, queue 0.5, prefill 0.1, read 0
  blocks                        -> incoming 2
  reads                         -> release 9 deadline
  blocks

a source that is gone costs its time
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  peer_lost                     -> first step a 0+8
  run                           -> tokens a 0: 10 11; done a length, read 0
  blocks

the last token is computed even if the source has it
  seek a 8 prefix=8             -> connect peer; want 9: 0
  ready 9 0 last=1              -> read 9: 0
  reads                         -> first step a 4+4; release 9; path peer fine
  run                           -> tokens a 0: 8 9; done a length, cached 4, read 4

prompts with the same prefix wait for one read
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  seek b 14 prefix=8 ticket=8
  load                          -> serving; waiting 2
  ready 9 0 1 last=1            -> read 9: 0 1
  reads                         -> first step a 8+2, b 8+6; release 9; path peer fine
  run                           -> tokens a 0: 10 11; tokens b 0: 14 15
                                -> done a length, cached 8, read 8; done b length, cached 8, read 8

the part that the worker has takes room from the rest
  decode blocks=8
  arrive b 4 max=1              -> first step b 0+4
  run                           -> tokens b 0: 4; done b length
  arrive r 8 first=60 max=2     -> first step r 0+8
  seek a 26 prefix=24
  blocks                        -> held 2

a prompt that differs in length, salt, tokens or limit has a read of its own
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  seek longer 14 prefix=12 ticket=8 -> want 8: 0..2
  seek salted 10 prefix=8 ticket=7 salt=s -> want 7: 0 1
  seek other 10 prefix=8 ticket=6 first=2 -> want 6: 0 1
  seek hurried 10 prefix=8 ticket=5 limit=0.4 -> want 5: 0 1

the others compute when the call that reads is cancelled
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  seek b 10 prefix=8 ticket=8
  seek c 10 prefix=8 ticket=7
  cancel b                      -> fail b RequestCancelled: the router cancelled the call
  blocks                        -> incoming 2
  cancel a                      -> first step c 0+8; fail a RequestCancelled: the router cancelled the call
                                -> release 9 cancelled

a read has the rank of its highest prompt
  decode blocks=8
  seek a 18 prefix=16 limit=9 priority=5 -> connect peer; want 9: 0..3
  seek b 18 prefix=16 limit=9 ticket=8
  arrive h 12 first=40 ticket=1 priority=1 -> want 1: 0..2
  ready 1 0..2 last=1           -> read 1: 0..2
  arrive i 16 first=60 ticket=2 priority=1
  blocks                        -> incoming 7

a hand-off that waits for blocks goes first
  decode blocks=4
  arrive h 12 first=40 ticket=1 -> connect peer; want 1: 0..2
  seek a 10 prefix=8            -> first step a 0+8
  load                          -> serving; promised 4

a read gives its blocks to hand-offs of higher rank
  decode blocks=8
  seek a 18 prefix=16 limit=9 priority=5 -> connect peer; want 9: 0..3
  arrive h 12 first=40 ticket=1 priority=1 -> want 1: 0..2
  ready 1 0                     -> read 1: 0
  arrive i 16 first=60 ticket=2 -> first step a 0+8; release 9 overloaded; want 2: 0..3
  blocks                        -> held 2; incoming 1

a read keeps its blocks while only lower ranks lack some
  decode blocks=8
  seek a 18 prefix=16 limit=9   -> connect peer; want 9: 0..3
  arrive h 12 first=40 ticket=1 priority=1 -> want 1: 0..2
  ready 1 0..2 last=1           -> read 1: 0..2
  arrive i 16 first=60 ticket=2 priority=1
  blocks                        -> incoming 7

blocks in flight are others' once the reads have ended, and no further read ends while they suffice
  decode blocks=12
  seek a 18 prefix=16 limit=9 priority=5 -> connect peer; want 9: 0..3
  seek b 18 prefix=16 limit=9 priority=4 first=100 ticket=8 -> want 8: 0..3
  ready 9 0..3 last=1           -> read 9: 0..3
  arrive h 24 first=40 ticket=1
  blocks                        -> incoming 8
  reads                         -> first step a 0+8; release 9 overloaded; want 1: 0..5

a read ends before a running sequence is preempted or asked to move
  decode blocks=9
  arrive r 4 first=60 max=16    -> first step r 0+4
  step                          -> step r 4+1; tokens r 0: 4
  arrive q 8 first=80 max=9
  step                          -> step r 5+1, q 0+7; tokens r 1: 5
  seek a 14 prefix=12 limit=9   -> connect peer; want 9: 0..2
  step                          -> step r 6+1, q 7+1; tokens r 2: 6
  step                          -> step r 7+1, q 8+1; tokens r 3: 7, q 0: 8
  step                          -> step r 8+1, q 9+1; tokens r 4: 8, q 1: 9; release 9 overloaded
  load                          -> serving; waiting 1; promised 4

a source with another layout is not read
  seek a 10 prefix=8 other=1    -> first step a 0+8

the deadline of a call ends its pull
  seek a 10 prefix=8 limit=5 timeout=1 -> connect peer; want 9: 0 1
  wait 2                        -> fail a DeadlineExceeded: the deadline passed on the decode worker in stage queue
                                -> release 9 deadline
  blocks
  idle                          -> yes

a drain sends the waiting prompt back
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  drain                         -> fail a WorkerDrains: this decode worker drains, and has not begun with the request
                                -> release 9 cancelled
  blocks

a salted prompt is cached under its salt
  seek a 10 prefix=8 salt=s     -> connect peer; want 9: 0 1
  ready 9 0 1 last=1            -> read 9: 0 1
  reads                         -> first step a 8+2; release 9; path peer fine
  run                           -> tokens a 0: 10 11; done a length, cached 8, read 8
  seek b 10 prefix=8 ticket=8   -> want 8: 0 1
  cancel b                      -> fail b RequestCancelled: the router cancelled the call; release 8 cancelled
  seek c 10 prefix=8 salt=s ticket=7 -> first step c 8+2
""",
    "  decode\n",
)

test_prefill_reader = transcripts(
    """
a prefix is read before the prompt is computed and offered with it
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  want 1 0..2                   -> ready 1:
  ready 9 0 1 last=1            -> read 9: 0 1
  reads                         -> first step a 8+2; release 9; path peer fine
  run                           -> digests 3; ready 1: 0..2 last 10; done a 0: 10, cached 8, read 8
  release 1
  blocks

a source that is late costs its time
  seek a 10 prefix=8 limit=0.5  -> connect peer; want 9: 0 1
  wait 0.6                      -> first step a 0+8; release 9 deadline

a full queue refuses a prompt with a source
  prefill max_waiting=1
  arrive b 8 first=40 ticket=2  -> first step b 0+8; connect peer
  arrive c 8 first=60 ticket=3
  arrive d 8 first=80 ticket=4  -> refused QueueFull: 1 sequences wait already (max_waiting)
  seek a 10 prefix=8            -> refused QueueFull: 1 sequences wait already (max_waiting)

a prompt that waits for its prefix is no deadlock
  arrive b 8 first=40 ticket=2  -> first step b 0+8; connect peer
  run                           -> digests 2; done b 0: 8
  seek a 10 prefix=8 limit=3    -> want 9: 0 1
  want 1 0..2                   -> ready 1:
  wait 1.2
  blocks                        -> leased 2; incoming 2

a read gives its blocks to prompts of higher rank
  prefill blocks=16
  seek a 42 prefix=40 priority=5 -> connect peer; want 9: 0..9
  arrive p 40 first=80 ticket=3 -> first step p 0+8; release 9 overloaded
  blocks                        -> held 2

a read keeps its blocks if higher ranks have theirs
  prefill blocks=11
  seek a 42 prefix=40 priority=5 -> connect peer; want 9: 0..9
  arrive p 4 first=80 ticket=3  -> first step p 0+4

a prompt that stalls behind a read of higher rank gets its blocks before an offer is withdrawn
  prefill blocks=11
  seek a 42 prefix=40 limit=9   -> connect peer; want 9: 0..9
  arrive p 20 first=80 ticket=3
  want 3 0..4                   -> ready 3:
  wait 1.2                      -> release 9 overloaded; first step p 0+8

the end of the call aborts its offer and its pull
  seek a 10 prefix=8            -> connect peer; want 9: 0 1
  cancel a                      -> release 9 cancelled; abort 1 prefill_failed
                                -> fail a RequestCancelled: the router cancelled the call
  blocks
  idle                          -> yes
""",
    "  prefill\n",
)

CACHED = """
  decode
  arrive x 12 max=1             -> first step x 0+8
  run                           -> tokens x 0: 12; done x length
"""

test_owner = transcripts(
    """
only wanted blocks are hashed and once while they are leased
  asked 9 12                    -> connect peer
  want 9 1 2                    -> digests 2; ready 9: 1 2 last
  asked 8 12
  want 8 0..2                   -> digests 1; ready 8: 0..2 last
  release 9
  release 8
  asked 7 12
  want 7 2                      -> digests 1; ready 7: 2 last

only what the reader lacks stays leased
  want 9 1 2
  asked 9 12                    -> connect peer; ready 9:; digests 2; ready 9: 1 2 last
  blocks                        -> leased 2

a prefix of other tokens or with another salt is not offered
  asked 9 12 first=2            -> connect peer
  want 9 0..2                   -> ready 9: last
  release 9
  asked 8 12 salt=s
  blocks

a reader that never comes keeps no block
  asked 9 12 limit=0.5          -> connect peer
  wait 0.6                      -> abort 9 deadline (not read in time)
  blocks

a silent reader keeps the blocks for a lease
  asked 9 12 limit=20           -> connect peer
  want 9 0..2                   -> digests 3; ready 9: 0..2 last
  wait 11
  blocks                        -> leased 3
  wait 2
  blocks

a worker that drains gives as long as it has calls
  arrive y 12 first=40 max=3    -> first step y 0+8
  drain
  asked 9 12                    -> connect peer
  run                           -> tokens y 0: 12..14; done y length
  asked 8 12                    -> refused WorkerDrains: this decode worker has drained
  idle                          -> no
  release 9
  idle                          -> yes

a source under pressure gives what it has left
  decode blocks=6
  arrive x 12 max=1             -> first step x 0+8
  run                           -> tokens x 0: 12; done x length
  arrive y 12 first=40 max=2    -> first step y 0+8
  asked 9 12                    -> connect peer
  blocks                        -> held 2; leased 2

blocks of a running sequence cost nothing
  decode blocks=5
  arrive x 12 max=4             -> first step x 0+8
  step                          -> step x 8+4
  step                          -> step x 12+1; tokens x 0: 12
  asked 9 12                    -> connect peer
  want 9 0..2                   -> digests 3; ready 9: 0..2 last

another layout is refused
  asked 9 12 other=1            -> refused LayoutMismatch: KV layouts differ in dtype: 'float32' here, 'float16' there

a ticket is used once
  asked 9 12                    -> connect peer
  asked 9 12                    -> refused TransferFailed: transfer 00000000 was offered before
""",
    CACHED,
)
