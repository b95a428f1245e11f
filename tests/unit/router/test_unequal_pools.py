"""A worker is asked only for what its whole pool can hold; requests for larger pools let the others pass."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest, TransferFailed
from core.lifecycle import ServiceRole, WorkerState
from core.request import Request
from router.requests import events
from router.serving.validation import default_limit
from tests.unit.router.driving_router import CONFIG, LAYOUT, NUM_BLOCKS, DrivenRouter, agent, request

SMALL_BLOCKS = 8
SMALL, LARGE = SMALL_BLOCKS * LAYOUT.block_size, NUM_BLOCKS * LAYOUT.block_size  # tokens


def fleet(prefill: dict[str, int], decode: dict[str, int]) -> DrivenRouter:
    """Workers by name, with the blocks of their pools."""
    router = DrivenRouter(CONFIG, (), ())
    for role, pool in ((ServiceRole.PREFILL, prefill), (ServiceRole.DECODE, decode)):
        for name, num_blocks in pool.items():
            router.join_at(agent(name, num_blocks=num_blocks), role)
    return router


def prompt_of(name: str, num_tokens: int, max_tokens: int = 4) -> Request:
    return request(name, range(1, num_tokens + 1), max_tokens)


@pytest.mark.parametrize(("num_over", "workers"), [(0, {"small", "large"}), (1, {"large"})])
def test_a_decode_worker_gets_no_request_that_its_whole_pool_cannot_hold(num_over: int, workers: set[str]) -> None:
    router = fleet({}, {"small": SMALL_BLOCKS, "large": NUM_BLOCKS})
    for number in range(8):  # the last token needs no slot
        router.arrive(prompt_of(f"r{number}", 8, SMALL - 8 + 1 + num_over))
    assert {decode for _, _, decode in router.dispatches()} == workers
    assert len(router.dispatches()) == 8


@pytest.mark.parametrize(("num_over", "workers"), [(0, {"small", "large"}), (1, {"large"})])
def test_a_prefill_worker_gets_no_prompt_that_its_whole_pool_cannot_hold(num_over: int, workers: set[str]) -> None:
    router = fleet({"small": SMALL_BLOCKS, "large": NUM_BLOCKS}, {"d": NUM_BLOCKS})
    for number in range(8):
        router.arrive(prompt_of(f"r{number}", SMALL + num_over, 99))
    assert {prefill for _, prefill, _ in router.dispatches()} == workers
    assert len(router.dispatches()) == 8


def test_the_decode_worker_computes_a_prompt_that_no_prefill_worker_can_hold() -> None:
    router = fleet({"small": SMALL_BLOCKS}, {"d": NUM_BLOCKS})
    router.arrive(prompt_of("r", SMALL + 1))
    assert router.dispatches() == [("r#1", None, "d")]


def test_a_retry_returns_to_the_failed_worker_if_no_other_can_hold_the_request() -> None:
    router = fleet({}, {"small": SMALL_BLOCKS, "large": NUM_BLOCKS})
    router.arrive(prompt_of("r", 8, SMALL))
    router.decode_fails(TransferFailed("the peer is gone"))
    router.pass_time(1.0)
    assert router.dispatches() == [("r#1", None, "large"), ("r#2", None, "large")]


def test_a_request_that_waits_for_a_large_pool_lets_shorter_ones_pass_and_goes_first_when_it_has_room() -> None:
    router = fleet({}, {"small": SMALL_BLOCKS, "large": NUM_BLOCKS})
    router.machine.workers.suspect("large")
    router.arrive(prompt_of("long", 8, SMALL))
    router.arrive(prompt_of("short", 8))
    assert router.dispatches() == [("short#1", None, "small")]
    router.arrive(prompt_of("long too", 8, SMALL))
    router.report("large")
    assert router.dispatches()[1:] == [("long#1", None, "large"), ("long too#1", None, "large")]


def test_a_request_fails_once_no_worker_that_can_hold_it_has_served_for_long_enough() -> None:
    router = fleet({}, {"small": SMALL_BLOCKS, "large": NUM_BLOCKS})
    router.report("large", WorkerState.DRAINING)
    router.arrive(prompt_of("long", 8, SMALL), timeout_s=1000.0)
    router.report("small")
    for _ in range(int(CONFIG.worker_wait_s) + 1):
        router.pass_time(1.0)
        router.report("small")
    failed = router.only(events.Fail)
    assert failed.request_id == "long"
    assert failed.error.retryable
    assert f"no decode worker that holds {SMALL + 8} tokens is serving" in str(failed.error)


def test_a_request_beyond_every_pool_is_refused_with_the_limit() -> None:
    router = fleet({}, {"small": SMALL_BLOCKS, "large": NUM_BLOCKS})
    with pytest.raises(InvalidRequest, match=rf"max_tokens: .*over the context of {LARGE + 1} tokens of the largest"):
        router.arrive(prompt_of("r", 8, LARGE))
    with pytest.raises(InvalidRequest, match=f"prompt: .*over the context of {LARGE + 1} tokens of the largest"):
        router.arrive(prompt_of("r", LARGE + 1))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "limit"),
    [
        (100, 8065),  # the output has almost as much room as in the larger pool
        (7_900, 8065),  # 165 tokens, in the larger pool 292
        (7_950, 8192),  # 115 and 242
        (8_100, 8192),
    ],
)
def test_the_default_length_fits_the_smallest_pool_with_half_the_room_for_output(
    num_prompt_tokens: int, limit: int
) -> None:
    assert default_limit(num_prompt_tokens, 8192, (8_065, 16_129)) == limit


def test_small_workers_do_not_cut_answers_of_large_ones_to_a_tenth() -> None:
    assert default_limit(100, 100_000, (2_001, 50_001, 50_501)) == 50_001
    assert default_limit(100, 8192, ()) == 8192, "no decode worker serves yet"
