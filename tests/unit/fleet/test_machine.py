"""FleetMachine: starts, deaths, sizes, and machines that leave. tests/property/test_fleet.py has its rules."""

from __future__ import annotations

from core.fleet_control import SlotState, SlotStatus
from fleet.law.events import ServiceStarted
from tests.unit.fleet.driving_fleet import D, DrivenFleet, P, R, transcripts

test_life = transcripts(
    """
workers are published as soon as the router serves
  begin           -> start prefill-0; start decode-0; start router-0
  serves prefill-0
  serves router-0 -> router-0: prefill-0
  serves decode-0 -> router-0: prefill-0 decode-0; ready
  notes           -> prefill-0 starts on m-0.local; prefill-0 serves; router-0 starts on m-0.local; router-0 serves
                  -> decode-0 starts on m-0.local; decode-0 serves

the pause doubles up to a limit and is short again after a minute of service
  fleet
  died decode-0   -> router-0: prefill-0; say decode-0 died: killed, starting it again in 1 s
  time 1          -> start decode-0
  placed decode-0
  died decode-0   -> say decode-0 died: killed, starting it again in 2 s
  time 2          -> start decode-0
  serves decode-0 -> router-0: prefill-0 decode-0; say decode-0 serves
  time 59.9
  died decode-0   -> router-0: prefill-0; say decode-0 died: killed, starting it again in 4 s
  time 4          -> start decode-0
  died decode-0   -> say decode-0 died: killed, starting it again in 8 s
  time 8          -> start decode-0
  died decode-0   -> say decode-0 died: killed, starting it again in 16 s
  time 16         -> start decode-0
  died decode-0   -> say decode-0 died: killed, starting it again in 30 s
  time 29.9
  time 0.1        -> start decode-0
  died decode-0   -> say decode-0 died: killed, starting it again in 30 s
  time 30         -> start decode-0
  serves decode-0 -> router-0: prefill-0 decode-0; say decode-0 serves
  time 60.1
  died decode-0   -> router-0: prefill-0; say decode-0 died: killed, starting it again in 1 s

growing starts workers and shrinking drains the newest first
  fleet
  scale prefill=3   -> start prefill-1; start prefill-2
  sizes             -> 3 prefill 1 decode 1 routers
  serves prefill-2  -> router-0: prefill-0 decode-0 prefill-2; say prefill-2 serves
  serves prefill-1  -> router-0: prefill-0 decode-0 prefill-1 prefill-2; say prefill-1 serves
  scale prefill=1   -> router-0: prefill-0 decode-0 (prefill-1) (prefill-2); drain prefill-1; drain prefill-2
  drained prefill-1 -> router-0: prefill-0 decode-0 (prefill-2); say prefill-1 has drained
  notes             -> fleet is scaled: 1 to 3 prefill; prefill-2 starts on m-0.local; prefill-1 starts on m-0.local
                    -> fleet is scaled: 3 to 1 prefill; prefill-1 drains: not wanted any more
                    -> prefill-2 drains: not wanted any more

shrinking removes a slot that waits, then one without a machine, then one that starts, then one that serves
  fleet
  scale decode=4  -> start decode-1; start decode-2; start decode-3
  died decode-1   -> say decode-1 died: killed, starting it again in 1 s
  placed decode-3
  scale decode=3
  scale decode=2  -> kill decode-2
  scale decode=1  -> kill decode-3
  notes           -> fleet is scaled: 1 to 4 decode; decode-3 starts on m-0.local
                  -> fleet is scaled: 4 to 3 decode; decode-1 leaves before it serves (waiting): not wanted any more
                  -> fleet is scaled: 3 to 2 decode; decode-2 leaves before it serves (placing): not wanted any more
                  -> fleet is scaled: 2 to 1 decode; decode-3 leaves before it serves (starting): not wanted any more

shrinking drains the named workers in their order
  fleet decode=4
  scale decode=2 first=decode-1,decode-0 -> router-0: prefill-0 (decode-0) (decode-1) decode-2 decode-3
   -> drain decode-0; drain decode-1

a drain past its time limit ends in a kill
  fleet prefill=2
  scale prefill=1 -> router-0: prefill-0 decode-0 (prefill-1); drain prefill-1
  time 31.9
  time 0.1        -> router-0: prefill-0 decode-0; kill prefill-1
                  -> say prefill-1 did not drain in time and was killed

a size out of range is refused and changes nothing
  fleet
  scale prefill=5 -> refused InvalidRequest: prefill: must be in [0, 4] (cluster.max_workers), is 5
  scale prefill=2 decode=-1 -> refused InvalidRequest: decode: must be in [0, 4] (cluster.max_workers), is -1
  scale routers=0 -> refused InvalidRequest: routers: must be in [1, 4] (cluster.max_workers), is 0
  scale prefill=2 routers=5 -> refused InvalidRequest: routers: must be in [1, 4] (cluster.max_workers), is 5
  sizes           -> 1 prefill 1 decode 1 routers
  time 0

a start that cannot succeed fails the fleet once before it has served
  begin decode=3 -> start prefill-0; start decode-0; start router-0; start decode-1; start decode-2
  placed decode-1
  fails decode-1 no such model -> failed decode-1: no such model
  placed decode-2
  time 49.9      -> say prefill-0 waits for a machine: Ray has not placed it yet
                 -> say decode-0 waits for a machine: Ray has not placed it yet; start decode-1
                 -> say router-0 waits for a machine: Ray has not placed it yet
  time 0.1       -> kill decode-2
                -> say decode-2 did not start: no answer within 50 s (cluster.start_timeout_s), starting it again in 1 s

a start that is too slow fails a fleet that has not served
  begin   -> start prefill-0; start decode-0; start router-0
  placed decode-0
  time 50 -> say prefill-0 waits for a machine: Ray has not placed it yet; kill decode-0
          -> failed decode-0: no answer within 50 s (cluster.start_timeout_s)
          -> say router-0 waits for a machine: Ray has not placed it yet

before the fleet has served a start is attempted three times
  begin         -> start prefill-0; start decode-0; start router-0
  placed decode-0
  fails decode-0 out of memory permanent=0 -> say decode-0 did not start: out of memory, starting it again in 1 s
  time 1        -> start decode-0
  placed decode-0
  fails decode-0 out of memory permanent=0 -> say decode-0 did not start: out of memory, starting it again in 2 s
  time 2        -> start decode-0
  died decode-0 -> failed decode-0: killed

a worker that waits for a machine says why once and is never killed for it
  fleet
  scale decode=2 -> start decode-1
  state decode-1 -> placing: Ray has not placed it yet
  time 9.9
  time 0.1       -> say decode-1 waits for a machine: Ray has not placed it yet
  time 1000000
  placed decode-1
  state decode-1 -> starting
  deadline       -> in 50 s

at shutdown every router drains before any worker
  fleet routers=2
  shutdown          -> (router-0) (router-1): prefill-0 decode-0; drain router-0; drain router-1
  drained router-1  -> (router-0): prefill-0 decode-0
  died router-0     -> drain prefill-0 2 s; drain decode-0 2 s
  drained decode-0
  drained prefill-0 -> stopped
  notes             -> router-0 drains: the fleet stops; router-1 drains: the fleet stops; router-1 has drained
                    -> router-0 has drained; prefill-0 drains: the fleet stops; decode-0 drains: the fleet stops
                    -> decode-0 has drained; prefill-0 has drained

at shutdown no service restarts
  fleet
  died decode-0 -> router-0: prefill-0; say decode-0 died: killed, starting it again in 1 s
  shutdown      -> (router-0): prefill-0; drain router-0
  time 1
  died router-0 -> drain prefill-0 2 s

at shutdown an already draining worker gets the short time limit too
  fleet prefill=2
  scale prefill=1  -> router-0: prefill-0 decode-0 (prefill-1); drain prefill-1
  shutdown         -> (router-0): prefill-0 decode-0 (prefill-1); drain router-0
  drained router-0 -> drain prefill-0 2 s; drain decode-0 2 s
  time 3.9
  time 0.1         -> kill prefill-0; say prefill-0 did not drain in time and was killed; kill prefill-1
                   -> say prefill-1 did not drain in time and was killed; kill decode-0
                   -> say decode-0 did not drain in time and was killed; stopped
  time 0
"""
)

test_machines_that_leave = transcripts(
    """
a worker drains when its replacement serves elsewhere
  leaves m-1 100      -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  state decode-0      -> serving: m-1.local leaves
  serves decode-2 m-2 -> router-0: prefill-0 (decode-0) decode-1 decode-2; say decode-2 serves; drain decode-0
  drained decode-0    -> router-0: prefill-0 decode-1 decode-2; say decode-0 has drained

without room elsewhere a worker drains in the last seconds of its machine
  leaves m-1 100   -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  time 67.9        -> say decode-2 waits for a machine: Ray has not placed it yet
  time 0.1         -> router-0: prefill-0 (decode-0) decode-1; drain decode-0
  state decode-2   -> placing: Ray has not placed it yet
  drained decode-0 -> router-0: prefill-0 decode-1; say decode-0 has drained
  serves decode-2  -> router-0: prefill-0 decode-1 decode-2; say decode-2 serves

a worker drains at once for as long as its machine lives
  leaves m-1 12 -> router-0: prefill-0 (decode-0) decode-1; start decode-2 for decode-0
                -> say decode-0 is replaced by decode-2: m-1.local leaves; drain decode-0 10 s

a worker has no time to drain on a machine that ends at once
  leaves m-1 1 -> router-0: prefill-0 (decode-0) decode-1; start decode-2 for decode-0
               -> say decode-0 is replaced by decode-2: m-1.local leaves; drain decode-0 0 s

without an end of the machine its worker waits as long as a start may take
  leaves m-1 -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  time 49.9  -> say decode-2 waits for a machine: Ray has not placed it yet
  time 0.1   -> router-0: prefill-0 (decode-0) decode-1; drain decode-0

every role of the machine is replaced
  leaves m-0 100 -> start prefill-1 for prefill-0; say prefill-0 is replaced by prefill-1: m-0.local leaves
                 -> start router-1 for router-0; say router-0 is replaced by router-1: m-0.local leaves

a service that starts there starts again elsewhere at once
  scale decode=3 -> start decode-2
  placed decode-2 m-3
  leaves m-3 100 -> kill decode-2.5; start decode-2

a replacement takes the place of a worker that dies before it serves
  leaves m-1 100  -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  died decode-0   -> router-0: prefill-0 decode-1; say decode-0 died: killed, decode-2 takes its place
  serves decode-2 -> router-0: prefill-0 decode-1 decode-2; say decode-2 serves

a pool that shrinks gives up the worker and its replacement
  leaves m-1 100 -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  scale decode=1 -> router-0: prefill-0 (decode-0) decode-1; kill decode-2; drain decode-0

at shutdown the worker drains last and no replacement is left
  leaves m-1 100   -> start decode-2 for decode-0; say decode-0 is replaced by decode-2: m-1.local leaves
  shutdown         -> (router-0): prefill-0 decode-0 decode-1; drain router-0; kill decode-2
  drained router-0 -> drain prefill-0 2 s; drain decode-0 2 s; drain decode-1 2 s
  leaves m-2 5
""",
    setup="fleet decode=2 decode-0=m-1 decode-1=m-2\n",
)


def test_the_status_of_a_fleet_lists_every_slot_with_its_state_and_machine() -> None:
    fleet = DrivenFleet()
    fleet.begin(prefill=2)
    fleet.placed("prefill-1", "m-7")
    fleet.now += 2.0
    fleet.post(ServiceStarted(fleet.members["prefill-1"], "prefill-1.ab", "host:1", "1.2.3"))
    status = fleet.machine.status(fleet.now + 3.0)
    assert status.wanted == {P: 2, D: 1, R: 1}
    assert [slot.name for slot in status.slots] == ["router-0", "prefill-0", "prefill-1", "decode-0"]
    assert status.slots[2] == SlotStatus(
        "prefill-1", P, SlotState.SERVING, 3.0, "", "prefill-1.ab", "m-7.local", "1.2.3", revision=1
    )
