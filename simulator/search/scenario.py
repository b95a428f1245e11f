"""Makes a scenario from a seed: a small fleet, its requests, its faults, and in some worlds its orders.

Pools are small, so that requests queue, wait for blocks and are preempted. In some fleets, the two pools have different
block sizes, or prompts are computed slowly. Prompts share prefixes. Some requests are cancelled, have short deadlines,
or exceed every pool. One seed in five is calm: it has no faults, so every request with enough time must finish.
`make_harsh_scenario` adds many faults to a seed, so that rare faults coincide.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.config import RouterConfig, SchedulerConfig, TransferConfig, WorkerConfig
from core.cost.step_cost import StepCost
from core.handoff import Location
from core.kv_layout import KVLayout
from core.lifecycle import ServiceRole
from core.request import Request, SamplingParams
from simulator.search.orders import FleetFaults, draw_fleet_faults
from simulator.shells.worker_spec import WorkerSpec
from simulator.virtual.faults import (
    PROBED_BYTES_PER_S,
    DiskFaults,
    EngineFaults,
    Fault,
    NetworkFaults,
    ReadFaults,
    RouterDeath,
)
from simulator.virtual.memory import VOCAB_SIZE

NUM_REQUESTS = 50
NUM_HARSH_REQUESTS = 90
ARRIVALS_S = 3.0
BLOCK_SIZES = (4, 8)
VLLM_LEASE_S = 5.0  # longer than any stop of a worker
VLLM_STEP_TIMEOUT_S = 1.0
PATIENT_TIMEOUT_S = 60.0
STEP_COST = StepCost(step_s=0.004, sequence_s=0.0002, context_s=0.0, token_s=0.0002, pair_s=0.0)
FLEET_STEP_COST = replace(STEP_COST, step_s=0.02)  # requests outlive a switch
SLOW_STEP_COST = replace(STEP_COST, sequence_s=0.002, token_s=0.002)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    request: Request
    arrives_at: float
    timeout_s: float
    cancel_at: float | None = None
    stop_after: int | None = None  # a stop string matches after this many tokens of the first choice
    oversized: bool = False  # exceeds every pool, so it must be refused
    others: tuple[Request, ...] = ()  # the further choices of the call
    resumes: bool = True  # at the next router, after the death of its router

    @property
    def choices(self) -> tuple[Request, ...]:
        return (self.request, *self.others)

    @property
    def may_time_out(self) -> bool:
        """Whether the deadline may pass. Other requests have enough time in spite of every fault."""
        return self.timeout_s < PATIENT_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    calm: bool
    workers: tuple[WorkerSpec, ...]
    router: RouterConfig
    network: NetworkFaults
    reads: ReadFaults
    requests: tuple[ClientRequest, ...]
    faults: tuple[Fault, ...]
    num_routers: int = 1
    router_deaths: tuple[RouterDeath, ...] = ()
    fleet: FleetFaults | None = None  # None: each worker that ends starts again under its name


def make_scenario(seed: int, num_requests: int = NUM_REQUESTS) -> Scenario:
    return _with_drains(chance_of(f"drains of {seed}"), _without_drains(seed, num_requests))


def make_fleet_scenario(seed: int) -> Scenario:
    """The same with a fleet, in every second world with faults."""
    still = _without_drains(seed, NUM_REQUESTS)
    scenario = _with_drains(chance_of(f"drains of {seed}"), still)
    return _with_fleet(chance_of(f"fleet of {seed}"), scenario, is_roomy=scenario is not still)


def _without_drains(seed: int, num_requests: int) -> Scenario:
    chance = random.Random(seed)
    calm = seed % 5 == 0
    transfer = TransferConfig(
        transport="memory",
        lease_s=chance.choice((0.5, 1.0)),
        connect_timeout_s=0.3,
        read_grace_s=0.2,
        max_reads_in_flight=chance.choice((1, 2, 4)),
        max_blocks_per_read=chance.choice((1, 3, 64)),
        max_read_attempts=2,
        verify_digests=calm or chance.random() < 0.7,
    )
    workers = _workers(chance, calm, transfer)
    accuracy = (0.0, 0.6, 0.95)[seed % 3]
    workers = tuple(replace(w, draft_accuracy=accuracy if w.role is ServiceRole.DECODE else 0.0) for w in workers)
    rounds = chance_of(f"rounding of {seed}").random() < 0.7
    workers = tuple(replace(w, rounding=int(w.worker_id[-1]) % 2 if rounds else 0) for w in workers)
    largest = min(spec.layout.block_size * spec.num_blocks for spec in workers)
    prefixes = [_tokens(chance, chance.randint(8, largest // 3)) for _ in range(4)]
    num_routers = (1, 2, 2, 3)[seed % 4]
    return Scenario(
        seed=seed,
        calm=calm,
        workers=workers,
        router=_router_config(chance, calm),
        network=NetworkFaults(delay_s=chance.choice((0.0002, 0.002))) if calm else _network_faults(chance),
        reads=ReadFaults() if calm else _read_faults(chance, transfer),
        requests=tuple(_request(chance, number, prefixes, largest) for number in range(num_requests)),
        faults=() if calm else (*_faults(chance, workers), *_token_stream_losses(chance, workers)),
        num_routers=num_routers,
        router_deaths=() if calm else _router_deaths(chance, num_routers),
    )


def make_harsh_scenario(seed: int) -> Scenario:
    """More requests for the same pools, and far more faults of the network, reads, cache and steps."""
    scenario = make_scenario(seed, NUM_HARSH_REQUESTS)
    verified = scenario.workers[0].transfer.verify_digests  # without digests, no check detects a corrupt block
    return replace(
        scenario,
        calm=False,
        workers=tuple(replace(spec, step_failure=0.01) for spec in scenario.workers),
        network=replace(scenario.network, slow_pair_share=0.2, loss=0.1, doubling=0.3),
        reads=replace(scenario.reads, slow=0.1, broken=0.05, corrupted=0.1 if verified else 0.0),
    )


def make_vllm_scenario(seed: int) -> Scenario:
    """The same with vLLM inside the workers, whose engines die, hang and fail to load KV."""
    scenario, chance = make_scenario(seed), random.Random(f"engines of {seed}")
    model = scenario.workers[0]
    faults = EngineFaults(chance.choice((0.0, 0.01)), chance.choice((0.0, 0.005)), chance.choice((0.0, 0.1)))

    def with_vllm(spec: WorkerSpec) -> WorkerSpec:
        return replace(
            spec,
            has_vllm=True,
            layout=model.layout,
            num_blocks=model.num_blocks,
            transfer=replace(spec.transfer, lease_s=VLLM_LEASE_S),
            worker=replace(spec.worker, step_timeout_s=VLLM_STEP_TIMEOUT_S),
            engine=EngineFaults() if scenario.calm else faults,
        )

    router = replace(scenario.router, local_prefill=chance.choice(("never", "never", "auto")))
    return replace(scenario, router=router, workers=tuple(map(with_vllm, scenario.workers)))


def make_disk_scenario(seed: int) -> Scenario:
    """The same with a tier below the pool of each worker, and prompts slow enough for a read to pay."""
    return with_disks(chance_of(f"disks of {seed}"), make_fleet_scenario(seed))


def with_disks(chance: random.Random, scenario: Scenario) -> Scenario:
    faulty = (0.0,) if scenario.calm else (0.0, 0.1)
    faults = DiskFaults(
        seconds_per_block=chance.choice((0.0001, 0.001)),
        failed=chance.choice(faulty),
        damaged=chance.choice(faulty),
        hung=chance.choice(faulty),
    )
    num_slots = chance.choice((16, 200))
    workers = tuple(
        replace(spec, disk_slots=num_slots, disk=faults, step_cost=replace(spec.step_cost, token_s=0.001))
        for spec in scenario.workers
    )
    return replace(scenario, workers=workers)


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "plain": make_fleet_scenario,
    "harsh": make_harsh_scenario,
    "vllm": make_vllm_scenario,
    "disk": make_disk_scenario,
}


def _workers(chance: random.Random, calm: bool, transfer: TransferConfig) -> tuple[WorkerSpec, ...]:
    """The decode pool may have another block size. Slow prefill workers make half-pulled prompts compete for blocks."""
    prefill_size = chance.choice(BLOCK_SIZES)
    decode_size = sum(BLOCK_SIZES) - prefill_size if chance.random() < 0.25 else prefill_size
    num_tokens = chance.choice((96, 96, 160, 320))  # of one pool
    has_slow_prefill = chance.random() < 0.33
    step_failure = 0.0 if calm or chance.random() < 0.6 else 0.004
    memory_failure = 0.0 if calm or chance.random() < 0.75 else 0.004
    names = [(ServiceRole.PREFILL, index) for index in range(chance.choice((0, 1, 1, 2, 2, 3)))]
    names += [(ServiceRole.DECODE, index) for index in range(chance.choice((1, 2, 2, 3)))]
    workers = []
    for role, index in names:
        is_slow = has_slow_prefill and role is ServiceRole.PREFILL
        block_size = prefill_size if role is ServiceRole.PREFILL else decode_size
        spec = WorkerSpec(
            worker_id=f"{role.value}-{index}",
            role=role,
            num_blocks=num_tokens // block_size,
            layout=KVLayout("simulated", "float32", 1, 1, block_size, 1),
            scheduler=SchedulerConfig(
                max_batched_tokens=16 if is_slow else chance.choice((16, 32, 64)),
                max_running=chance.choice((4, 8, 16)),
                max_waiting=256 if calm else chance.choice((3, 256)),
            ),
            transfer=transfer,
            worker=WorkerConfig(report_interval_s=0.2, idle_report_interval_s=0.4, max_pulls_waiting=32),
            step_cost=SLOW_STEP_COST if is_slow else STEP_COST,
            step_noise=0.25,
            location=Location("one machine", memory_bytes_per_s=PROBED_BYTES_PER_S),
            probe_bytes=1 << 20,
            has_content=True,
            step_failure=step_failure,
            memory_failure=memory_failure,
        )
        workers.append(spec)
    return tuple(workers)


def _router_config(chance: random.Random, calm: bool) -> RouterConfig:
    return RouterConfig(
        max_queued=1024 if calm else chance.choice((8, 1024)),
        max_in_flight_per_worker=chance.choice((6, 12, 64)),
        max_attempts=chance.choice((2, 3, 4)),
        local_prefill=chance.choice(("never", "auto", "auto")),
        peer_prefixes="auto",
        report_stale_s=0.9,
        worker_lost_s=1.5,
        worker_wait_s=2.0,
    )


def _network_faults(chance: random.Random) -> NetworkFaults:
    return NetworkFaults(
        delay_s=chance.choice((0.0002, 0.002, 0.01)),
        slow_pair_share=chance.choice((0.0, 0.0, 0.2)),
        loss=chance.choice((0.0, 0.02, 0.2)),
        doubling=chance.choice((0.0, 0.05, 0.3)),
    )


def _read_faults(chance: random.Random, transfer: TransferConfig) -> ReadFaults:
    return ReadFaults(
        seconds_per_block=chance.choice((0.0002, 0.004)),
        slow=chance.choice((0.0, 0.05)),
        broken=chance.choice((0.0, 0.05)),
        # Without digests, no check detects a corrupt block.
        corrupted=chance.choice((0.0, 0.02, 0.1)) if transfer.verify_digests else 0.0,
    )


def _request(chance: random.Random, number: int, prefixes: list[list[int]], pool_tokens: int) -> ClientRequest:
    prompt = chance.choice(prefixes) if chance.random() < 0.6 else []
    prompt = prompt[: chance.choice((len(prompt), len(prompt), chance.randint(0, 40)))]
    prompt = prompt + _tokens(chance, chance.choice((1, 3, chance.randint(1, pool_tokens // 4))))
    max_tokens = chance.choice((1, 2, 8, chance.randint(1, 30)))
    oversized = chance.random() < 0.02
    request = Request(
        request_id=f"r{number}",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens + 2 * pool_tokens if oversized else max_tokens,
            seed=chance.randint(0, 99),
            ignore_eos=chance.random() < 0.6,
            stop_token_ids=frozenset({7}) if chance.random() < 0.2 else frozenset(),
            num_logprobs=0 if chance.random() < 0.25 else None,
        ),
        priority=chance.choice((0, 0, 0, -1, 1)),
        cache_salt=chance.choice(("", "", "", "tenant")),
        tenant=("", "a", "b")[number % 3],
    )
    num_others = chance.choice((1, 2, 5)) if chance.random() < 0.1 else 0
    arrives_at = 0.3 + chance.uniform(0.0, ARRIVALS_S)
    client = ClientRequest(
        request, arrives_at, PATIENT_TIMEOUT_S, oversized=oversized, others=other_choices(request, num_others)
    )
    return _with_variations(chance, client)


def other_choices(first: Request, count: int) -> tuple[Request, ...]:
    """Further choices of a call, which differ from the first one only in their seed."""
    return tuple(
        replace(
            first,
            request_id=f"{first.request_id}.{choice}",
            sampling=replace(first.sampling, seed=first.sampling.seed + choice),
        )
        for choice in range(1, count + 1)
    )


def _with_variations(chance: random.Random, client: ClientRequest) -> ClientRequest:
    """Some requests are cancelled, have a short deadline, stop at a stop string, or end with their router."""
    draw = chance.random()
    if draw < 0.10:
        return replace(client, cancel_at=client.arrives_at + chance.expovariate(6.0))
    if draw < 0.20:
        return replace(client, timeout_s=chance.expovariate(4.0))
    if draw < 0.30:
        return replace(client, stop_after=chance.randint(1, 10))
    if draw < 0.40:
        return replace(client, resumes=False)
    return client


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1, VOCAB_SIZE) for _ in range(count)]


def _faults(chance: random.Random, workers: tuple[WorkerSpec, ...]) -> list[Fault]:
    kinds = ("dies", "vanishes", "drains", "stops", "stops", "loses its report stream")
    return [
        Fault(
            kind=chance.choice(kinds),
            worker_id=chance.choice(workers).worker_id,
            at=chance.uniform(0.2, ARRIVALS_S + 1.0),
            duration_s=chance.choice((0.2, 0.8, 1.3, 2.5)),
        )
        for _ in range(chance.choice((0, 2, 3, 5, 8)))
    ]


def chance_of(name: str) -> random.Random:
    """Draws of their own, so that others stay the same."""
    return random.Random(name)


def _with_drains(chance: random.Random, scenario: Scenario) -> Scenario:
    """In most worlds, workers drain and start again. In a calm world another worker of the pool serves meanwhile."""
    by_role = [[spec.worker_id for spec in scenario.workers if spec.role is role] for role in ServiceRole]
    names = [name for pool in by_role if len(pool) > 1 for name in (pool[:1] if scenario.calm else pool)]
    count = chance.choice((0, 3, 5, 8)) if names else 0
    if not count:
        return scenario
    moments = [chance.uniform(0.5, ARRIVALS_S + 0.5) for _ in range(count)]
    drains = [Fault("drains", chance.choice(names), at, chance.choice((0.05, 0.4))) for at in moments]
    roomy = _roomy(chance, scenario)
    return replace(roomy, faults=(*scenario.faults, *drains))


def _roomy(chance: random.Random, scenario: Scenario) -> Scenario:
    """Larger pools, longer outputs, slower steps: something runs when a worker drains, and others have room for it."""
    cost = replace(STEP_COST, step_s=chance.choice((0.004, 0.02)))
    workers = tuple(
        replace(
            spec, num_blocks=3 * spec.num_blocks, step_cost=cost if spec.role is ServiceRole.DECODE else spec.step_cost
        )
        for spec in scenario.workers
    )
    largest = min(spec.layout.block_size * spec.num_blocks for spec in workers)
    requests = tuple(_lengthened(chance, client, largest) for client in scenario.requests)
    return replace(scenario, workers=workers, requests=requests)


def _with_fleet(chance: random.Random, scenario: Scenario, is_roomy: bool) -> Scenario:
    """FleetMachine decides which services run, in which role."""
    if scenario.calm or chance.random() < 0.5:
        return scenario
    if not is_roomy:
        scenario = _roomy(chance, scenario)
    model = scenario.workers[0]  # a worker that switches its role keeps its blocks
    workers = tuple(
        replace(spec, layout=model.layout, num_blocks=model.num_blocks, step_cost=FLEET_STEP_COST)
        for spec in scenario.workers
    )
    return replace(scenario, workers=workers, fleet=draw_fleet_faults(chance, ARRIVALS_S + 1.0))


def _lengthened(chance: random.Random, client: ClientRequest, pool_tokens: int) -> ClientRequest:
    """Half of the requests, with longer outputs: something runs when a worker drains."""
    num_left = pool_tokens - client.request.num_prompt_tokens
    if client.oversized or num_left < 30 or chance.random() < 0.5:
        return client
    max_tokens, ignore_eos = chance.randint(20, min(100, num_left)), chance.random() < 0.8
    first, *others = (
        replace(choice, sampling=replace(choice.sampling, max_tokens=max_tokens, ignore_eos=ignore_eos))
        for choice in client.choices
    )
    return replace(client, request=first, others=tuple(others))


def _token_stream_losses(chance: random.Random, workers: tuple[WorkerSpec, ...]) -> list[Fault]:
    """In one world of three, token streams break."""
    names = [spec.worker_id for spec in workers if spec.role is ServiceRole.DECODE]
    count = chance.choice((1, 2, 5)) if chance.random() < 0.33 else 0
    return [
        Fault("loses its token stream", chance.choice(names), at=chance.uniform(0.4, ARRIVALS_S + 0.5), duration_s=0.0)
        for _ in range(count)
    ]


def _router_deaths(chance: random.Random, num_routers: int) -> tuple[RouterDeath, ...]:
    """In every second world, routers die, also while another one is dead."""
    count = chance.choice((0, 0, 1, num_routers))
    return tuple(
        RouterDeath(chance.randrange(num_routers), chance.uniform(0.5, ARRIVALS_S + 0.5), chance.choice((0.05, 0.4)))
        for _ in range(count)
    )
