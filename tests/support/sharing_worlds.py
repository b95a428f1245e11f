"""Simulated worlds in which prompts have long common beginnings, on workers that compute slowly."""

from __future__ import annotations

from dataclasses import replace

from core.lifecycle import ServiceRole
from simulator.search.scenario import SLOW_STEP_COST, Scenario, chance_of, with_disks
from simulator.virtual.faults import DiskFaults, NetworkFaults, ReadFaults

ROLES = {name: ServiceRole(name.split("-")[0]) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
NUM_TOKENS = 480  # of a pool: prefixes leave it
NUM_REQUESTS = 40


def sharing(scenario: Scenario) -> Scenario:
    """Workers read prefixes from each other. Without faults."""
    model = scenario.workers[0]
    workers = tuple(
        replace(
            model,
            worker_id=name,
            role=role,
            num_blocks=NUM_TOKENS // model.layout.block_size,
            scheduler=replace(model.scheduler, max_batched_tokens=32, max_running=16, max_waiting=256),
            transfer=replace(model.transfer, verify_digests=True, lease_s=1.0),
            step_cost=SLOW_STEP_COST,
            step_failure=0.0,
            memory_failure=0.0,
        )
        for name, role in ROLES.items()
    )
    prefixes = [tuple(1 + (place * (step + 3)) % 50 for place in range(120)) for step in range(6)]
    clients = [client for client in scenario.requests if not client.oversized and not client.others][:NUM_REQUESTS]
    requests = []
    for number, client in enumerate(clients):
        prompt = prefixes[number % len(prefixes)][: 40 + 8 * (number % 10)] + client.request.token_ids[-9:]
        sampling = replace(client.request.sampling, max_tokens=8)
        request = replace(client.request, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
        requests.append(replace(client, request=request))
    return replace(
        scenario,
        calm=True,
        workers=workers,
        router=replace(
            scenario.router, local_prefill="auto", peer_prefixes="auto", max_queued=1024, max_in_flight_per_worker=64
        ),
        requests=tuple(requests),
        network=NetworkFaults(delay_s=0.001),
        reads=ReadFaults(),
        faults=(),
        router_deaths=(),
    )


def with_small_pools(scenario: Scenario) -> Scenario:
    """The pools cannot keep the prefixes, and no peer is asked: a prefix comes from a disk."""
    scenario = with_disks(chance_of(f"disks of {scenario.seed}"), sharing(scenario))
    num_blocks = NUM_TOKENS // 2 // scenario.workers[0].layout.block_size
    workers = tuple(
        replace(spec, num_blocks=num_blocks, disk_slots=100, disk=DiskFaults(), step_cost=SLOW_STEP_COST)
        for spec in scenario.workers
    )
    return replace(scenario, workers=workers, router=replace(scenario.router, peer_prefixes="never"))
