"""Simulated worlds in which a decode worker drains again and again, while long requests run."""

from __future__ import annotations

from dataclasses import replace

from core.lifecycle import ServiceRole
from simulator.search.scenario import STEP_COST, Scenario
from simulator.virtual.faults import Fault, NetworkFaults, ReadFaults

NUM_TOKENS = 480  # of a pool
LONGEST_PROMPT = 60
ROLES = {"prefill-0": ServiceRole.PREFILL, **{f"decode-{number}": ServiceRole.DECODE for number in range(3)}}
DRAINED = "decode-0"


def draining(scenario: Scenario, num_requests: int = 50, num_drains: int = 6) -> Scenario:
    """Without other faults: the moves of `DRAINED` have room, and nothing is computed again."""
    model = scenario.workers[0]
    block_size = model.layout.block_size
    workers = tuple(
        replace(
            model,
            worker_id=name,
            role=role,
            num_blocks=NUM_TOKENS // block_size,
            scheduler=replace(model.scheduler, max_batched_tokens=64, max_running=16, max_waiting=256),
            step_cost=replace(STEP_COST, step_s=0.02),
            rounding=int(name[-1]) % 2,
            step_failure=0.0,
            memory_failure=0.0,
        )
        for name, role in ROLES.items()
    )
    clients = [client for client in scenario.requests if client.request.num_prompt_tokens <= LONGEST_PROMPT]
    clients = [client for client in clients if not client.oversized and not client.others][:num_requests]
    sampling = [replace(client.request.sampling, max_tokens=40, ignore_eos=True) for client in clients]
    requests = tuple(
        replace(client, request=replace(client.request, sampling=longer))
        for client, longer in zip(clients, sampling, strict=True)
    )
    drains = tuple(Fault("drains", DRAINED, 0.6 + 0.6 * number, 0.05) for number in range(num_drains))
    return replace(
        scenario,
        calm=True,
        workers=workers,
        router=replace(scenario.router, max_queued=1024, max_in_flight_per_worker=64),
        requests=requests,
        network=NetworkFaults(delay_s=0.001),
        reads=ReadFaults(),
        faults=drains,
        router_deaths=(),
    )
