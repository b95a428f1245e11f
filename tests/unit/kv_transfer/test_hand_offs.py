"""Hand-offs whose messages are lost, doubled or late, whose leases end or peers go: each ends right, or typed and once.

test_transfer_machine.py has those of foreign and malformed messages.
"""

from tests.unit.kv_transfer.transfer_words import transcripts

test_messages = transcripts(
    """
readys that come in the wrong order are repeated after a heartbeat
  offer 0                     -> owner connect puller; owner digests 1
  pull 0..2                   -> puller connect owner; puller want: 0..2
  run                         -> owner ready: 0; puller read: 0
  add 1                       -> owner digests 1; owner ready: 1
  add 2 last=1                -> owner digests 1; owner ready: 2 last 42
  reverse
  run                         -> puller read: 1
  dropped                     -> puller gap 1
  wait 2                      -> puller heartbeat: ready 2 verified 2; owner ready: 2 last 42
                              -> owner heartbeat answered; puller read: 2
  run                         -> puller release; puller completed 3 blocks, tokens 42; puller path owner fine
                              -> owner offer released by RELEASE

a lost last ready without blocks is repeated
  offer 0                     -> owner connect puller; owner digests 1
  pull 0                      -> puller connect owner; puller want: 0
  run                         -> owner ready: 0; puller read: 0
  add last=1                  -> owner ready: last 42
  lose ready
  wait 4                      -> puller heartbeat: ready 1 verified 1; owner ready: last 42; owner heartbeat answered
                              -> puller release; puller completed 1 blocks, tokens 42; puller path owner fine
                              -> owner offer released by RELEASE

doubled messages do nothing twice
  offer 0..2 last=1           -> owner connect puller; owner digests 3
  pull 0..2                   -> puller connect owner; puller want: 0..2
  double                      -> owner ready: 0..2 last 42
  double                      -> puller read: 0..2
  wait 2 deliver=0            -> puller heartbeat: ready 3
  double                      -> owner heartbeat answered
  double
  reads                       -> puller release; puller completed 3 blocks, tokens 42; puller path owner fine
  double                      -> owner offer released by RELEASE
  dropped                     -> owner old 2; owner late 1; puller old 2

a lost abort is repeated when the puller goes on asking
  offer 0                     -> owner connect puller; owner digests 1
  pull 0 1                    -> puller connect owner; puller want: 0 1
  run                         -> owner ready: 0; puller read: 0
  abort_offer                 -> owner abort prefill_failed
  lose abort
  wait 2                      -> puller heartbeat: ready 1 verified 1; owner abort prefill_failed
                              -> owner heartbeat answered; puller release prefill_failed
                              -> puller failed prefill_failed (the owner ended it)
                              -> owner offer aborted prefill_failed by RELEASE

a want that comes before its offer waits for it
  pull 0 1                    -> puller connect owner; puller want: 0 1
  deliver
  wait 3                      -> puller heartbeat: ready 0; puller want: 0 1
  offer 0 1 last=1            -> owner connect puller; owner ready:; owner digests 2; owner ready: 0 1 last 42
  run                         -> puller read: 0 1; puller release; puller completed 2 blocks, tokens 42
                              -> puller path owner fine; owner offer released by RELEASE

a ready that was just sent is not repeated
  offer 0 1 last=1            -> owner connect puller; owner digests 2
  reserve_pull                -> puller connect owner
  wait 1.8
  start 0 1                   -> puller want: 0 1
  deliver want                -> owner ready: 0 1 last 42
  wait 0.6 deliver=0          -> puller heartbeat: ready 0; puller want: 0 1
  deliver heartbeat           -> owner heartbeat answered
  run                         -> puller read: 0 1; puller release; puller completed 2 blocks, tokens 42
                              -> puller path owner fine; owner offer released by RELEASE
"""
)

test_leases = transcripts(
    """
bytes read after the lease ended are not trusted
  pair digests=0
  offer 0 last=1              -> owner connect puller; owner digests 1
  pull 0                      -> puller connect owner; puller want: 0
  deliver                     -> owner ready: 0 last 42; puller read: 0
  wait 4 deliver=0            -> puller heartbeat: ready 1; puller heartbeat: ready 1
  lose
  later 12 owner              -> owner offer expired lease_expired
  reads                       -> puller heartbeat: ready 1 verified 1
  state                       -> verifying
  deliver                     -> owner abort lease_expired; owner heartbeat answered; puller release lease_expired
                              -> puller failed lease_expired (the owner ended it)

three heartbeats without an answer mean the owner is lost
  pull 0                      -> puller connect owner; puller want: 0
  wait 6 deliver=0            -> puller heartbeat: ready 0; puller want: 0; puller heartbeat: ready 0; puller want: 0
                              -> puller heartbeat: ready 0; puller want: 0
  wait 2 deliver=0            -> puller release peer_lost; puller failed peer_lost (3 heartbeats without an answer)

an offer that comes after the puller gave up ends at once
  pull 0                      -> puller connect owner; puller want: 0
  deliver
  cancel_pull                 -> puller release cancelled; puller cancelled cancelled
  deliver
  offer 0 last=1              -> owner connect puller; owner offer released cancelled by RELEASE
  blocks                      -> incoming 1

a read that times out gives the pull up at once and keeps the targets until its end
  offer 0..9 last=1           -> owner connect puller; owner digests 10
  pull 0..9                   -> puller connect owner; puller want: 0..9
  deliver                     -> owner ready: 0..9 last 42; puller read: 0..3; puller read: 4..7
  read_times_out 0            -> puller given up read_failed (no end in time)
  read_times_out 1
  # the puller renews the lease no more, so the owner ends it
  wait 36                     -> owner offer expired lease_expired
  blocks                      -> incoming 10
  read_fails 0
  read_fails 1                -> puller release read_failed; puller failed read_failed (no end in time)
"""
)

# The puller reads one of two blocks.
READING = """
  offer 0                     -> owner connect puller; owner digests 1
  pull 0 1                    -> puller connect owner; puller want: 0 1
  deliver                     -> owner ready: 0; puller read: 0
"""

test_during_a_read = transcripts(
    """
a ready that has arrived is not repeated while the puller reads
  add 1 last=1                -> owner digests 1; owner ready: 1 last 42
  deliver                     -> puller read: 1
  wait 6                      -> puller heartbeat: ready 2; owner heartbeat answered; puller heartbeat: ready 2
                              -> owner heartbeat answered; puller heartbeat: ready 2; owner heartbeat answered
  run                         -> puller release; puller completed 2 blocks, tokens 42; puller path owner fine
                              -> owner offer released by RELEASE

an aborted offer keeps its blocks and takes no more until the puller has stopped reading
  abort_offer                 -> owner abort prefill_failed
  deliver                     -> puller given up prefill_failed (the owner ended it)
  add 1 last=1
  blocks                      -> leased 1; incoming 2
  reads                       -> puller release prefill_failed; puller failed prefill_failed (the owner ended it)
  deliver                     -> owner offer aborted prefill_failed by RELEASE
  blocks                      -> incoming 2

a puller whose connection broke may still read until its lease ends
  lost puller
  blocks                      -> leased 1; incoming 2
  later 12 owner              -> owner offer aborted peer_lost
  blocks                      -> incoming 2
""",
    READING,
)

# The puller wants five blocks of a sequence, and has the two that the owner has offered.
COPIED = """
  offer 0 1                   -> owner connect puller; owner digests 2
  grow 5                      -> puller connect owner; puller want: 0..4
  deliver                     -> owner ready: 0 1; puller targets: 0 1
  place                       -> puller read: 0 1
  reads                       -> puller heartbeat: ready 2 verified 2
  deliver                     -> owner caught up; owner heartbeat answered
"""

test_growing_pulls = transcripts(
    """
more tokens than wanted blocks fail the pull
  add 2..4 last=1 tokens=0..11 -> owner digests 3; owner ready: 2..4 last 0..11
  deliver                     -> puller release read_failed
                              -> puller failed read_failed (the sequence has outgrown the wanted blocks)
                              -> owner offer released read_failed by RELEASE

a last ready that lacks a block fails the pull
  add last=1 tokens=11,12,13  -> owner ready: last 11..13
  deliver                     -> puller release prefill_failed
                              -> puller failed prefill_failed (the owner ended with 2 of 3 blocks)
                              -> owner offer released prefill_failed by RELEASE

a complete pull counts as such although the owner had lost the puller
  add 2 last=1 tokens=11,12,13 -> owner digests 1; owner ready: 2 last 11..13
  deliver                     -> puller targets: 2 last
  place                       -> puller read: 2
  reads                       -> puller release; puller completed 3 blocks, tokens 11..13; puller path owner fine
  lost puller
  # only the RELEASE says that the puller has everything
  deliver                     -> owner offer released by RELEASE

news without an answer are no silence of the owner
  add 2                       -> owner digests 1; owner ready: 2
  deliver                     -> puller targets: 2
  place                       -> puller read: 2
  reads                       -> puller heartbeat: ready 3 verified 3
  lose
  add 3                       -> owner digests 1; owner ready: 3
  deliver                     -> puller targets: 3
  place                       -> puller read: 3
  reads                       -> puller heartbeat: ready 4 verified 4
  lose
  add 4                       -> owner digests 1; owner ready: 4
  deliver                     -> puller targets: 4
  place                       -> puller read: 4
  reads                       -> puller heartbeat: ready 5 verified 5
  lose
  later 2 puller              -> puller heartbeat: ready 5 verified 5
  state                       -> wanting
""",
    COPIED,
)
