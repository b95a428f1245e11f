"""The rules of other routers decide as their authors describe, and failed requests never look fast."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.policies.figures import ttft_ms
from benchmarks.policies.rivals import OURS, POLICIES, SGLANG_MAX_DIFFERENCE
from core.config import RouterConfig
from core.cost.step_cost import StepCost
from core.scheduling.worker_load import size_class
from router.routing.policy import Candidate, Option, RoutingQuestion, WorkerView
from simulator.replay_result import ReplayResult, RequestRecord

COST = StepCost(step_s=1e-3, sequence_s=1e-4, context_s=1e-8, token_s=1e-5, pair_s=0.0)
BLOCK = 64


def worker(name: str, **fields: Any) -> WorkerView:
    defaults: dict[str, Any] = {
        "num_sequences": 0, "num_dispatched": 0, "cost": COST, "num_blocks": 1000, "num_free_blocks": 1000,
        "max_step_tokens": 8192,
    }  # fmt: skip
    return WorkerView(name, **(defaults | fields))


def backlog_of(*prompt_s: float) -> tuple[float, ...]:
    classes = [0.0] * (size_class(max(prompt_s)) + 1)
    for seconds in prompt_s:
        classes[size_class(seconds)] += seconds
    return tuple(classes)


def question(
    prefill: list[Option], decode: list[Option] | None = None, num_tokens: int = 1000, alive: bool = True
) -> RoutingQuestion:
    return RoutingQuestion(num_tokens, prefill, decode or [(worker("d"), 0)], alive, BLOCK)


def choice(policy: str, asked: RoutingQuestion) -> Candidate:
    chosen = POLICIES[policy].build(RouterConfig()).choose(asked)
    assert chosen is not None
    return chosen


RIVALS = [name for name in POLICIES if name != OURS.name]


@pytest.mark.parametrize(
    ("queued_tokens", "cached_blocks", "chosen"),
    [
        ((0, 0), (2, 0), "a"),  # 2 blocks in the cache
        ((0, 0), (3, 2), "a"),  # 3 against 2
        ((1280, 0), (3, 2), "b"),  # 20 blocks wait on a, the third block saves one
        ((1280, 1280), (3, 2), "a"),
        ((64 * 4, 0), (8, 2), "a"),  # 4 blocks wait on a, which saves 6
        ((64 * 8, 0), (8, 2), "b"),
    ],
)
def test_dynamo_adds_the_blocks_that_wait_to_those_that_no_cache_has(
    queued_tokens: tuple[int, int], cached_blocks: tuple[int, int], chosen: str
) -> None:
    options = []
    for name, tokens, blocks in zip("ab", queued_tokens, cached_blocks, strict=True):
        prompt_s = COST.prompt_seconds(tokens)
        options.append((worker(name, backlog=backlog_of(prompt_s) if tokens else ()), blocks * BLOCK))
    assert choice("Dynamo", question(options, num_tokens=10 * BLOCK)).prefill_worker == chosen


def test_dynamo_chooses_decode_by_load_alone() -> None:
    decode = [(worker("cached", decode_context=640), 960), (worker("free", num_decoding=9, decode_context=576), 0)]
    assert choice("Dynamo", question([(worker("p"), 0)], decode)).decode_worker == "free"


@pytest.mark.parametrize(
    ("requests", "cached", "chosen"),
    [
        ((10, 9), (400, 0), "a"),  # 40 % matched
        ((10, 9), (300, 0), "b"),  # 30 % is not more than the least match
        ((70, 5), (1000, 0), "b"),  # 65 apart, and more than 1.5 times as many
        ((69, 5), (1000, 0), "a"),  # 64 apart is even
        ((300, 201), (1000, 0), "a"),  # 99 apart, and less than 1.5 times as many
    ],
)
def test_sglang_follows_the_cache_while_the_load_is_even(
    requests: tuple[int, int], cached: tuple[int, int], chosen: str
) -> None:
    assert SGLANG_MAX_DIFFERENCE == 64
    options = [(worker(n, num_sequences=r), c) for n, r, c in zip("ab", requests, cached, strict=True)]
    assert choice("SGLang", question(options)).prefill_worker == chosen


@pytest.mark.parametrize(
    ("requests", "free", "cached", "chosen"),
    [
        ((0, 0), (1000, 1000), (64, 0), "a"),
        ((5, 0), (1000, 1000), (640, 0), "b"),  # 3 x 0.64 of prefix against 2 x 1.0 of queue
        ((5, 0), (1000, 1000), (700, 0), "a"),
        ((0, 0), (0, 1000), (640, 0), "b"),  # ... against 2 x 1.0 of free KV
        ((5, 0, 10), (1000, 1000, 1000), (320, 0, 0), "b"),  # 0.96 + 2 x 0.5 against 2
        ((5, 0, 10), (1000, 1000, 1000), (384, 0, 0), "a"),
    ],
)
def test_llm_d_weighs_prefix_queue_and_free_kv(
    requests: tuple[int, ...], free: tuple[int, ...], cached: tuple[int, ...], chosen: str
) -> None:
    rows = zip("abc"[: len(requests)], requests, free, cached, strict=True)
    options = [(worker(n, num_sequences=r, num_free_blocks=f), c) for n, r, f, c in rows]
    assert choice("llm-d", question(options)).prefill_worker == chosen


def test_mooncake_takes_the_least_predicted_first_token_and_the_least_token_gap() -> None:
    prefill = [(worker("cached", backlog=backlog_of(0.004)), 900), (worker("free"), 0)]
    decode = [(worker("few", num_decoding=3, decode_context=10**6), 1000), (worker("short", num_decoding=9), 0)]
    chosen = choice("Mooncake", question(prefill, decode))
    assert (chosen.prefill_worker, chosen.decode_worker) == ("cached", "short")
    prefill[0] = (worker("cached", backlog=backlog_of(0.02)), 900)
    # The prompt on `cached` has 1 ms of work, and the queue has a longer prompt: the step of that prompt goes first.
    assert choice("Mooncake", question(prefill, decode)).prefill_worker == "free"


@pytest.mark.parametrize("policy", RIVALS)
def test_a_rival_computes_a_prompt_on_decode_only_without_a_prefill_worker(policy: str) -> None:
    busy, decode = worker("p", backlog=(1000.0,), num_sequences=900), [(worker("d0", num_sequences=2), 0)]
    assert choice(policy, question([(busy, 0)], decode)).prefill_worker == "p"
    local = choice(policy, question([], decode, alive=False))
    assert (local.prefill_worker, local.decode_worker) == (None, "d0")


@pytest.mark.parametrize("policy", RIVALS)
def test_a_rival_waits_for_room(policy: str) -> None:
    built = POLICIES[policy].build(RouterConfig())
    assert built.choose(question([])) is None
    assert built.candidates(replace(question([(worker("p"), 0)]), decode=[])) == []


# ---- figures


def result(*ttft_s: float | None, hit_tokens: int = 0) -> ReplayResult:
    records = tuple(
        RequestRecord(f"r{n}", 0.0, 100, 2, seconds, 0.01, 0.01, hit_tokens, error="" if seconds else "late")
        for n, seconds in enumerate(ttft_s)
    )
    return ReplayResult(records, 2.0, 0.05, 1.0, 1.0, 0.5, {}, (), (), (), (), (), (), (), (1,), 1)


def test_a_failed_request_never_got_its_first_token() -> None:
    assert ttft_ms(50)(result(0.1, 0.2, 0.3)) == pytest.approx(200)
    assert ttft_ms(50)(result(0.1, None, None)) == math.inf
