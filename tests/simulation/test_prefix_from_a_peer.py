"""Worlds in which workers read cached prefixes from each other: sources die, drain, stop, evict and send wrong bytes.

The client gets the tokens that it would get without sources, and no request fails because of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from core.handoff import AbortReason
from core.lifecycle import ServiceRole
from kv_transfer.protocol.events import PullCompleted, PullFailed, PullStats
from simulator.search.scenario import SLOW_STEP_COST, Scenario, make_scenario
from simulator.search.simulation import run_scenario
from simulator.virtual.faults import Fault, NetworkFaults, ReadFaults
from simulator.virtual.world import SimulationError
from worker.prefixes import Prefixes, PrefixPull, PrefixRequested, PullResult

ROLES = {name: ServiceRole(name.split("-")[0]) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
NUM_TOKENS = 480  # of a pool: prefixes leave it
SEEDS = range(4)


def sharing(scenario: Scenario, num_requests: int = 40, *, faults: bool = False) -> Scenario:
    """Prompts with long common beginnings, on workers that compute slowly."""
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
    clients = [client for client in scenario.requests if not client.oversized and not client.others][:num_requests]
    requests = []
    for number, client in enumerate(clients):
        prompt = prefixes[number % len(prefixes)][: 40 + 8 * (number % 10)] + client.request.token_ids[-9:]
        sampling = replace(client.request.sampling, max_tokens=8)
        request = replace(client.request, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
        requests.append(replace(client, request=request))
    kinds = ("dies", "drains", "stops", "vanishes")
    trouble = tuple(Fault(kinds[n % 4], list(ROLES)[n % 3], 0.7 + 0.4 * n, 0.4) for n in range(7)) if faults else ()
    return replace(
        scenario,
        calm=not faults,
        workers=workers,
        router=replace(
            scenario.router, local_prefill="auto", peer_prefixes="auto", max_queued=1024, max_in_flight_per_worker=64
        ),
        requests=tuple(requests),
        network=NetworkFaults(delay_s=0.001, loss=0.05 * faults, doubling=0.05 * faults),
        reads=ReadFaults(slow=0.1, broken=0.1, corrupted=0.05) if faults else ReadFaults(),
        faults=trouble,
        router_deaths=(),
    )


Change = Callable[[Scenario], Scenario]
FAULTY: Change = partial(sharing, faults=True)


def counts_of(change: Change) -> Counter[str]:
    totals: Counter[str] = Counter()
    for seed in SEEDS:
        totals += run_scenario(change(make_scenario(seed))).counts
    return totals


def first_failure(change: Change = FAULTY) -> str:
    """The message of the first seed that fails; empty where none does."""
    for seed in range(12):
        try:
            run_scenario(change(make_scenario(seed)))
        except SimulationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("change", [sharing, FAULTY], ids=["calm", "faulty"])
def test_prefixes_are_read_and_no_request_gets_a_wrong_token(change: Change) -> None:
    counts = counts_of(change)
    assert counts["prefix read"] > (1 if change is FAULTY else 10)
    if change is FAULTY:
        assert counts["prefix not read"] > 0
        assert counts["broken read"] > 0
        assert counts["corrupted block"] > 0
        assert counts["dies"] > 0
        assert counts["drains"] > 0


def test_a_source_that_gives_less_than_promised_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an eviction between the promise and the offer."""
    offer = Prefixes.offer

    def half(self: Prefixes, event: PrefixRequested, num_spare_blocks: int, now: float) -> list[object]:
        token_ids = event.token_ids[: len(event.token_ids) // 2]
        return offer(self, replace(event, token_ids=token_ids), num_spare_blocks, now)  # type: ignore[return-value]

    monkeypatch.setattr(Prefixes, "offer", half)
    assert counts_of(sharing)["prefix read"] > 0


# ---- machines broken on purpose


def _done(pull: PrefixPull) -> PullCompleted:
    stats = PullStats(len(pull.targets), 0, 0, 0, 0.0, 0.0, 0.0)
    return PullCompleted(pull.transfer_id, (), stats)


def test_a_worker_that_uses_the_blocks_of_a_failed_pull_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Prefixes.end

    def and_use(self: Prefixes, result: PullResult, now: float) -> None:
        pull = self.pulls[result.transfer_id]
        has_failed = isinstance(result, PullFailed) and result.reason is not AbortReason.DEADLINE
        end(self, _done(pull) if has_failed and pull.is_awaited else result, now)

    monkeypatch.setattr(Prefixes, "end", and_use)
    assert "is right" in first_failure()


def test_a_worker_that_believes_the_promise_of_its_source_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test_offer, end = Prefixes.offer, Prefixes.end

    def believe(self: Prefixes, result: PullResult, now: float) -> None:
        is_done = isinstance(result, PullCompleted)
        end(self, _done(self.pulls[result.transfer_id]) if is_done else result, now)

    def half(self: Prefixes, event: PrefixRequested, num_spare_blocks: int, now: float) -> list[object]:
        token_ids = event.token_ids[: len(event.token_ids) // 2]
        return test_offer(self, replace(event, token_ids=token_ids), num_spare_blocks, now)  # type: ignore[return-value]

    monkeypatch.setattr(Prefixes, "offer", half)
    monkeypatch.setattr(Prefixes, "end", believe)
    assert "is right" in first_failure(sharing)


def test_a_worker_that_waits_for_a_source_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses the end of a pull."""
    monkeypatch.setattr(Prefixes, "_join", lambda *_: None)
    assert first_failure(sharing) != ""
