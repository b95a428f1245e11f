"""FleetMachine switches the role of a worker: no other service starts or stops, and whatever interrupts the switch, the
fleet gets the sizes that are wanted."""

from __future__ import annotations

from tests.unit.fleet.driving_fleet import transcripts

test_switches = transcripts(
    """
a switch drains then serves in the other role and starts nothing
  state decode-1    -> switching: becomes a prefill worker
  sizes             -> 2 prefill 1 decode 1 routers
  switched decode-1 -> router-0: prefill-0 decode-0 decode-1:prefill; say decode-1 serves as prefill worker
  state decode-1    -> serving
  notes             -> fleet is scaled: 2 to 1 decode, 1 to 2 prefill; decode-1 becomes a prefill worker

a switch that fails ends with a start in the new role
  cannot_switch decode-1 still has work -> router-0: prefill-0 decode-0
                  -> say decode-1 did not switch: still has work, starting it again in 1 s
  state decode-1  -> waiting: did not switch: still has work
  time 1          -> start decode-1
  serves decode-1 -> router-0: prefill-0 decode-0 decode-1:prefill; say decode-1 serves

a switch that takes too long ends with a start in the new role
  time 31.9
  time 0.1        -> router-0: prefill-0 decode-0; kill decode-1
                  -> say decode-1 did not switch: its drain took too long, starting it again in 1 s
  time 1          -> start decode-1
  serves decode-1 -> router-0: prefill-0 decode-0 decode-1:prefill; say decode-1 serves

scaling down the pool that it joins ends the switch and the worker leaves
  scale prefill=1
  state decode-1    -> draining: not wanted any more
  switched decode-1 -> router-0: prefill-0 decode-0; kill decode-1; say decode-1 has drained

a roll waits for the end of a switch
  roll              -> say fleet rolls to config 2
  switched decode-1 -> router-0: prefill-0 decode-0 decode-1:prefill; say decode-1 serves as prefill worker
                    -> start prefill-1 config 2 for prefill-0
                    -> say prefill-0 is replaced by prefill-1: roll to config 2

a shutdown ends a switch in the time of the last drains
  shutdown         -> (router-0): prefill-0 decode-0 (decode-1); drain router-0
  drained router-0 -> drain prefill-0 2 s; drain decode-0 2 s
  state decode-1   -> draining: the fleet stops
  time 3.9
  time 0.1         -> kill prefill-0; say prefill-0 did not drain in time and was killed; kill decode-0
                   -> say decode-0 did not drain in time and was killed; kill decode-1
                   -> say decode-1 did not drain in time and was killed; stopped
""",
    setup="""
  fleet decode=2
  switch decode-1 prefill -> router-0: prefill-0 decode-0 (decode-1); switch decode-1 to prefill
""",
)

test_switches_that_end_or_do_not_begin = transcripts(
    """
a worker on a machine that leaves drains and one of the new role starts elsewhere
  fleet decode=2 decode-1=m-1
  switch decode-1 prefill -> router-0: prefill-0 decode-0 (decode-1); switch decode-1 to prefill
  leaves m-1     -> start prefill-1
  state decode-1 -> draining: m-1.local leaves
  time 31.9      -> say prefill-1 waits for a machine: Ray has not placed it yet
  time 0.1       -> router-0: prefill-0 decode-0; kill decode-1; say decode-1 did not drain in time and was killed

a switch out of place is refused
  fleet
  scale decode=2     -> start decode-1
  switch d-9 prefill -> refused InvalidRequest: slot: 'd-9' is no slot of this fleet, `tandem status` lists them
  switch decode-0 decode -> refused InvalidRequest: role: decode-0 is a decode worker already
  switch router-0 decode -> refused InvalidRequest: role: router-0 is a router and stays one
  switch decode-1 prefill -> refused InvalidRequest: slot: decode-1 does not serve, it is placing

a switch is refused beside a replacement and a roll and a shutdown and above the limit of a pool
  fleet prefill=4
  switch decode-0 prefill -> refused InvalidRequest: prefill: must be in [0, 4] (cluster.max_workers), is 5
  leaves m-0 -> start prefill-4 for prefill-0; say prefill-0 is replaced by prefill-4: m-0.local leaves
             -> start prefill-5 for prefill-1; say prefill-1 is replaced by prefill-5: m-0.local leaves
             -> start prefill-6 for prefill-2; say prefill-2 is replaced by prefill-6: m-0.local leaves
             -> start prefill-7 for prefill-3; say prefill-3 is replaced by prefill-7: m-0.local leaves
             -> start decode-1 for decode-0; say decode-0 is replaced by decode-1: m-0.local leaves
             -> start router-1 for router-0; say router-0 is replaced by router-1: m-0.local leaves
  switch decode-0 prefill -> refused InvalidRequest: slot: decode-0 is being replaced: m-0.local leaves
  roll       -> say fleet rolls to config 2; kill prefill-4.7; start prefill-4 config 2 for prefill-0
  switch prefill-0 decode -> refused InvalidRequest: role: the fleet rolls, switch afterwards
  shutdown   -> (router-0): prefill-0 decode-0 prefill-1 prefill-2 prefill-3; drain router-0; kill prefill-4
             -> kill prefill-5; kill prefill-6; kill prefill-7; kill decode-1; kill router-1
  switch prefill-0 decode -> refused InvalidRequest: role: the fleet stops

the option that keeps workers in their roles is named
  fleet role_option=vllm
  switch decode-0 prefill -> refused InvalidRequest: role: cannot change with vllm: start a worker of that role instead
"""
)
