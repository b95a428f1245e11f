"""A coarse worker takes the times that the cost model gives, without a step for each token."""

from __future__ import annotations

import pytest

from core.cost.step_cost import StepCost
from core.lifecycle import ServiceRole
from simulator.coarse_worker import CoarseRequest, CoarseSpec, CoarseWorker
from simulator.trace import TraceRequest
from simulator.world import World

COST = StepCost(step_s=0.01, sequence_s=0.001, context_s=0.0, token_s=1e-4, pair_s=0.0)
SPEC = CoarseSpec(
    COST, step_limit_s=0.05, max_step_tokens=1000, pool_tokens=dict.fromkeys(ServiceRole, 10_000)
)  # a step of prompts alone: 0.01 + 0.1 s


class Ends:
    def __init__(self) -> None:
        self.world = World(0, is_checked=False)
        self.prompts: list[tuple[int, float]] = []
        self.streams: list[tuple[int, float]] = []
        self.worker = CoarseWorker("w", ServiceRole.DECODE, self.world, SPEC, self._prompt_done, self._stream_done)

    def _prompt_done(self, _: CoarseWorker, request: CoarseRequest) -> None:
        self.prompts.append((request.number, round(self.world.now, 6)))

    def _stream_done(self, request: CoarseRequest) -> None:
        self.streams.append((request.number, round(self.world.now, 6)))


def request_of(number: int, num_prompt: int, num_output: int = 1) -> CoarseRequest:
    traced = TraceRequest(
        0.0, tuple(range(number * 1000, number * 1000 + -(-num_prompt // 512))), num_prompt, num_output
    )
    return CoarseRequest(traced, number, 0.0, tokens_left=num_output)


def test_prompts_alone_take_full_steps_and_the_shortest_goes_first() -> None:
    ends = Ends()
    ends.worker.add_prompt(request_of(1, 4000))
    ends.worker.add_prompt(request_of(2, 1000))
    ends.world.run_until(10.0)
    assert ends.prompts == [(2, 0.11), (1, 0.55)], "five steps of 1,000 tokens"


def test_streams_share_the_steps() -> None:
    ends = Ends()
    for number, num_output in ((1, 10), (2, 20)):
        ends.worker.add_stream(request_of(number, 100, num_output))
    ends.world.run_until(10.0)
    assert ends.streams == [(1, 0.12), (2, 0.23)], "ten steps of 12 ms, and ten of 11 ms"


def test_with_streams_a_prompt_takes_what_the_step_limit_leaves() -> None:
    ends = Ends()
    ends.worker.add_stream(request_of(1, 100, 100))
    ends.worker.add_prompt(request_of(2, 1000))
    ends.world.run_until(10.0)
    assert ends.prompts == [(2, pytest.approx(0.1 * 50 / 39, abs=1e-5))], "39 of 50 ms of each step"


def test_a_stream_waits_for_room_and_a_prefix_is_computed_once() -> None:
    ends = Ends()
    for number in (1, 2):
        ends.worker.add_stream(request_of(number, 6000, 100))
    ends.world.run_until(10.0)
    assert ends.streams == [(1, 1.1), (2, 2.2)]
    assert ends.worker.cached_tokens(request_of(2, 6000).traced) == 5999
