"""FleetMachine gives services another config: by a roll, or while they serve."""

from __future__ import annotations

from tests.unit.fleet.driving_fleet import transcripts

test_rolls = transcripts(
    """
a roll replaces one service at a time with the new one before the old and routers last
  fleet prefill=2
  roll              -> say fleet rolls to config 2; start prefill-2 config 2 for prefill-0
                    -> say prefill-0 is replaced by prefill-2: roll to config 2
  serves prefill-2  -> router-0: (prefill-0) decode-0 prefill-1 prefill-2; say prefill-2 serves; drain prefill-0
  drained prefill-0 -> router-0: decode-0 prefill-1 prefill-2; say prefill-0 has drained
                    -> start prefill-0 config 2 for prefill-1
                    -> say prefill-1 is replaced by prefill-0: roll to config 2
  serves prefill-0  -> router-0: decode-0 (prefill-1) prefill-2 prefill-0; say prefill-0 serves; drain prefill-1
  drained prefill-1 -> router-0: decode-0 prefill-2 prefill-0; say prefill-1 has drained
                    -> start decode-1 config 2 for decode-0; say decode-0 is replaced by decode-1: roll to config 2
  serves decode-1   -> router-0: (decode-0) prefill-2 prefill-0 decode-1; say decode-1 serves; drain decode-0
  drained decode-0  -> router-0: prefill-2 prefill-0 decode-1; say decode-0 has drained
                    -> start router-1 config 2 for router-0; say router-0 is replaced by router-1: roll to config 2
  serves router-1   -> (router-0) router-1: prefill-2 prefill-0 decode-1; say router-1 serves; drain router-0
  configs           -> rolls to 2; router-0 1; router-1 2; prefill-0 2; prefill-2 2; decode-1 2
  drained router-0  -> router-1: prefill-2 prefill-0 decode-1; say router-0 has drained
                    -> say fleet has rolled: every service has config 2
  configs           -> has 2; router-1 2; prefill-0 2; prefill-2 2; decode-1 2

two starts that are too slow at once end the roll once
  fleet
  scale decode=2 -> start decode-1
  roll           -> say fleet rolls to config 2; kill decode-1.4; start decode-1 config 2
  time 0         -> start prefill-1 config 2 for prefill-0; say prefill-0 is replaced by prefill-1: roll to config 2
  placed decode-1
  placed prefill-1
  time 50        -> kill decode-1; kill prefill-1
                 -> say fleet restores config 1: decode-1 did not start: no answer within 50 s (cluster.start_timeout_s)
                -> say decode-1 did not start: no answer within 50 s (cluster.start_timeout_s), starting it again in 1 s
                 -> say fleet has rolled: every service has config 1

the time limits of a service are those of its config
  fleet
  roll drain_s=3 start_timeout_s=7 max_workers=9 -> say fleet rolls to config 2
                    -> start prefill-1 config 2 for prefill-0
                    -> say prefill-0 is replaced by prefill-1: roll to config 2
  placed prefill-1
  deadline          -> in 7 s
  started prefill-1 -> router-0: (prefill-0) decode-0 prefill-1; say prefill-1 serves; drain prefill-0
  scale decode=9 prefill=0 -> router-0: (prefill-0) decode-0 (prefill-1); drain prefill-1 3 s
                    -> start decode-1 config 2; start decode-2 config 2; start decode-3 config 2
                    -> start decode-4 config 2; start decode-5 config 2; start decode-6 config 2
                    -> start decode-7 config 2; start decode-8 config 2
"""
)

test_first_steps_of_a_roll = transcripts(
    """
without room for both the old service drains first
  time 9.9
  time 0.1          -> router-0: (prefill-0) decode-0; drain prefill-0
                    -> say prefill-1 waits for a machine: Ray has not placed it yet
  drained prefill-0 -> router-0: decode-0; say prefill-0 has drained
  serves prefill-1  -> router-0: decode-0 prefill-1; say prefill-1 serves; start decode-1 config 2 for decode-0
                    -> say decode-0 is replaced by decode-1: roll to config 2

without room a failed start gives the slot its old config again
  time 10           -> router-0: (prefill-0) decode-0; drain prefill-0
                    -> say prefill-1 waits for a machine: Ray has not placed it yet
  drained prefill-0 -> router-0: decode-0; say prefill-0 has drained
  placed prefill-1
  fails prefill-1 no such model -> say fleet restores config 1: prefill-1 did not start: no such model
                    -> say prefill-1 did not start: no such model, starting it again in 1 s
                    -> say fleet has rolled: every service has config 1
  time 1            -> start prefill-1
  serves prefill-1  -> router-0: decode-0 prefill-1; say prefill-1 serves
  configs           -> has 1; router-0 1; prefill-1 1; decode-0 1

an operator may stop a roll
  stop_roll -> kill prefill-1; say fleet restores config 1: an operator has stopped the roll
            -> say fleet has rolled: every service has config 1
  configs   -> has 1; router-0 1; prefill-0 1; decode-0 1
  stop_roll -> refused InvalidRequest: roll: no roll that could be stopped

a second config waits for the end of a roll and none comes to a fleet that stops
  roll     -> refused InvalidRequest: config: the fleet rolls already, try again afterwards
  change   -> refused InvalidRequest: config: the fleet rolls already, try again afterwards
  shutdown -> (router-0): prefill-0 decode-0; drain router-0; kill prefill-1
  roll     -> refused InvalidRequest: config: the fleet stops
  change   -> refused InvalidRequest: config: the fleet stops
""",
    setup="""
  fleet
  roll -> say fleet rolls to config 2; start prefill-1 config 2 for prefill-0
       -> say prefill-0 is replaced by prefill-1: roll to config 2
""",
)

test_failures_in_the_second_step_of_a_roll = transcripts(
    """
a rolled service that dies during the roll ends it and starts again with the old config
  died prefill-1 -> router-0: decode-0; kill decode-1; say fleet restores config 1: prefill-1 died: killed
                 -> say prefill-1 died: killed, starting it again in 1 s
                 -> say fleet has rolled: every service has config 1
  time 1         -> start prefill-1

a failure while the old config is restored is a failure like any other
  placed decode-1
  fails decode-1 no such model -> say fleet restores config 1: decode-1 did not start: no such model
                    -> start prefill-0 for prefill-1; say prefill-1 is replaced by prefill-0: roll to config 1
  placed prefill-0
  fails prefill-0 no such model -> say prefill-0 did not start: no such model, starting it again in 1 s
  time 1            -> start prefill-0 for prefill-1
  serves prefill-0  -> router-0: decode-0 (prefill-1) prefill-0; say prefill-0 serves; drain prefill-1
  drained prefill-1 -> router-0: decode-0 prefill-0; say prefill-1 has drained
                    -> say fleet has rolled: every service has config 1
""",
    setup="""
  fleet
  roll              -> say fleet rolls to config 2; start prefill-1 config 2 for prefill-0
                    -> say prefill-0 is replaced by prefill-1: roll to config 2
  serves prefill-1  -> router-0: (prefill-0) decode-0 prefill-1; say prefill-1 serves; drain prefill-0
  drained prefill-0 -> router-0: decode-0 prefill-1; say prefill-0 has drained; start decode-1 config 2 for decode-0
                    -> say decode-0 is replaced by decode-1: roll to config 2
""",
)

test_live_changes = transcripts(
    """
a service that starts meanwhile gets the change when it serves
  begin            -> start prefill-0; start decode-0; start router-0
  placed decode-0
  change           -> say fleet takes config 2: [router] max_queued
  started decode-0 -> configure decode-0 2

later starts have the newest config also after a death before the change arrived
  fleet
  change          -> say fleet takes config 2: [router] max_queued; configure prefill-0 2; configure decode-0 2
                  -> configure router-0 2
  died decode-0   -> router-0: prefill-0; say decode-0 died: killed, starting it again in 1 s
  time 1          -> start decode-0 config 2
  serves decode-0 -> router-0: prefill-0 decode-0; say decode-0 serves
  scale decode=2  -> start decode-1 config 2

of two changes the answer to the newer one counts
  fleet
  change  -> say fleet takes config 2: [router] max_queued; configure prefill-0 2; configure decode-0 2
          -> configure router-0 2
  change  -> say fleet takes config 3: [router] max_queued; configure prefill-0 3; configure decode-0 3
          -> configure router-0 3
  configured decode-0 3
  configured decode-0 2
  configs -> has 3; router-0 1; prefill-0 1; decode-0 3

the time limits of the fleet itself change too
  fleet
  change drain_s=3 -> say fleet takes config 2: [router] max_queued; configure prefill-0 2; configure decode-0 2
                   -> configure router-0 2
  configured decode-0 2
  scale decode=0   -> router-0: prefill-0 (decode-0); drain decode-0 3 s
  change drain_s=3 start_timeout_s=7 -> say fleet takes config 3: [router] max_queued; configure prefill-0 3
                   -> configure router-0 3
  scale decode=1   -> start decode-1 config 3
  placed decode-1
  deadline         -> in 5 s
  drained decode-0 -> router-0: prefill-0; say decode-0 has drained
  deadline         -> in 7 s

a roll may follow a change and restores its config
  fleet
  change    -> say fleet takes config 2: [router] max_queued; configure prefill-0 2; configure decode-0 2
            -> configure router-0 2
  configured prefill-0 2
  configured decode-0 2
  configured router-0 2
  roll      -> say fleet rolls to config 3; start prefill-1 config 3 for prefill-0
            -> say prefill-0 is replaced by prefill-1: roll to config 3
  stop_roll -> kill prefill-1; say fleet restores config 2: an operator has stopped the roll
            -> say fleet has rolled: every service has config 2
  configs   -> has 2; router-0 2; prefill-0 2; decode-0 2
"""
)
