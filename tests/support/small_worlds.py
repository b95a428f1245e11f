"""Simulated worlds without faults: a decode worker drains again and again, or prompts have long common beginnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from core.lifecycle import ServiceRole
from simulator.search.scenario import SLOW_STEP_COST, STEP_COST, ClientRequest, Scenario, chance_of, with_disks
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.faults import DiskFaults, Fault, NetworkFaults, ReadFaults

NUM_TOKENS = 480  # of a pool; prefixes leave it
LONGEST_PROMPT = 60  # where a worker drains
DRAINED = "decode-0"


def _workers(scenario: Scenario, *names: str, batch: int, **changes: Any) -> list[WorkerSpec]:
    model = scenario.workers[0]
    scheduler = replace(model.scheduler, max_batched_tokens=batch, max_running=16, max_waiting=256)
    model = replace(model, num_blocks=NUM_TOKENS // model.layout.block_size, scheduler=scheduler, **changes)
    model = replace(model, step_failure=0.0, memory_failure=0.0)
    return [replace(model, worker_id=name, role=ServiceRole(name.partition("-")[0])) for name in names]


def _calm(
    scenario: Scenario, workers: Iterable[WorkerSpec], requests: Iterable[ClientRequest], **router: Any
) -> Scenario:
    return replace(
        scenario,
        calm=True,
        workers=tuple(workers),
        router=replace(scenario.router, max_queued=1024, max_in_flight_per_worker=64, **router),
        requests=tuple(requests),
        network=NetworkFaults(delay_s=0.001),
        reads=ReadFaults(),
        faults=(),
        router_deaths=(),
    )


def _plain(scenario: Scenario) -> list[ClientRequest]:
    """Requests that some worker can hold, of one choice each."""
    return [client for client in scenario.requests if not client.oversized and not client.others]


def draining(scenario: Scenario, num_requests: int = 50, num_drains: int = 6) -> Scenario:
    """Long requests run. The moves of `DRAINED` have room, and nothing is computed again."""
    names = ("prefill-0", "decode-0", "decode-1", "decode-2")
    workers = _workers(scenario, *names, batch=64, step_cost=replace(STEP_COST, step_s=0.02))
    clients = [one for one in _plain(scenario) if one.request.num_prompt_tokens <= LONGEST_PROMPT][:num_requests]
    sampling = [replace(client.request.sampling, max_tokens=40, ignore_eos=True) for client in clients]
    requests = [
        replace(client, request=replace(client.request, sampling=longer))
        for client, longer in zip(clients, sampling, strict=True)
    ]
    scenario = _calm(scenario, [replace(spec, rounding=int(spec.worker_id[-1]) % 2) for spec in workers], requests)
    return replace(
        scenario, faults=tuple(Fault("drains", DRAINED, 0.6 + 0.6 * number, 0.05) for number in range(num_drains))
    )


def sharing(scenario: Scenario) -> Scenario:
    """Workers compute slowly, and read prefixes from each other."""
    transfer = replace(scenario.workers[0].transfer, verify_digests=True, lease_s=1.0)
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    workers = _workers(scenario, *names, batch=32, step_cost=SLOW_STEP_COST, transfer=transfer)
    prefixes = [tuple(1 + (place * (step + 3)) % 50 for place in range(120)) for step in range(6)]
    requests = []
    for number, client in enumerate(_plain(scenario)[:40]):
        prompt = prefixes[number % len(prefixes)][: 40 + 8 * (number % 10)] + client.request.token_ids[-9:]
        sampling = replace(client.request.sampling, max_tokens=8)
        request = replace(client.request, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
        requests.append(replace(client, request=request))
    return _calm(scenario, workers, requests, local_prefill="auto", peer_prefixes="auto")


def with_small_pools(scenario: Scenario) -> Scenario:
    """The pools cannot keep the prefixes, and no peer is asked: a prefix comes from a disk."""
    scenario = with_disks(chance_of(f"disks of {scenario.seed}"), sharing(scenario))
    num_blocks = NUM_TOKENS // 2 // scenario.workers[0].layout.block_size
    workers = tuple(
        replace(spec, num_blocks=num_blocks, disk_slots=100, disk=DiskFaults(), step_cost=SLOW_STEP_COST)
        for spec in scenario.workers
    )
    return replace(scenario, workers=workers, router=replace(scenario.router, peer_prefixes="never"))
