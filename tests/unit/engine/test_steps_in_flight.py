"""The contract of submit and collect: two steps in flight, promised tokens, dropped steps, two threads."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig
from core.errors import OutOfDeviceMemory
from core.request import Request
from core.step import SampledToken, ScheduledChunk, SequenceView, StepPlan
from engine.factory import build_runner
from engine.gpu import graphs
from engine.gpu.device_queue import HostQueue
from engine.gpu.runner import GpuRunner
from engine.runner import Runner, StepDropped, StepLimits
from engine.step_queue import Computed, PromisedTokens
from tests.unit.engine.driving import Engine, request
from tests.unit.engine.one_ahead import OneAhead

PROMPT = [(7 * index + 3) % 250 for index in range(45)]
KINDS: dict[str, dict[str, Any]] = {
    "fake": {"model": "fake:tiny"},
    "native": {"model": "random:llama-tiny"},
    "torch": {"model": "random:qwen3-tiny", "kernels": "torch"},
    "int8": {"model": "random:qwen2-tiny", "quantization": "int8"},
    "gpu": {"model": "random:llama-tiny"},
    "gpu, launched ahead": {"model": "random:qwen2-tiny"},
}


@pytest.fixture(params=KINDS, scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    tiny = EngineConfig(dtype="float32", kv_memory_mb=4, num_threads=1)
    config = replace(tiny, device="cpu", **KINDS[request.param])
    built: Runner
    if request.param.startswith("gpu"):
        queue = HostQueue(torch.device("cpu"), launches_ahead=request.param.endswith("ahead"))
        with pytest.MonkeyPatch.context() as patched:
            if (
                queue.launches_ahead
            ):  # on a CPU, the launch of a graph computes it, which a prompt's would do in `submit`
                patched.setattr(graphs, "MAX_ROWS", 0)
            built = GpuRunner(config, limits=StepLimits(8, 512), queue=queue)
    else:
        built = build_runner(config)
    yield built
    built.close()


class Decode:
    """One sequence that is prefilled by the first step and promised in each later step."""

    def __init__(self, wanted: Request, blocks: list[int]) -> None:
        self.name = wanted.request_id
        self.view = SequenceView(self.name, list(wanted.token_ids), wanted.num_prompt_tokens, blocks, wanted.sampling)
        self.tokens: list[SampledToken] = []
        self.num_submitted = 0

    def chunk(self) -> ScheduledChunk:
        """The prompt, or the promised token."""
        start, num_prompt_tokens = self.num_submitted, self.view.num_prompt_tokens
        count = 1 if start else num_prompt_tokens
        self.num_submitted += count
        return ScheduledChunk(self.view, start, count, samples=True, promised=start > 0)

    def take(self, token: SampledToken) -> None:
        self.tokens.append(token)
        self.view.token_ids.append(token.token_id)  # type: ignore[attr-defined]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def submit(runner: Runner, step_id: int, *decodes: Decode) -> None:
    runner.submit(StepPlan(step_id, tuple(decode.chunk() for decode in decodes)))


def collect(runner: Runner, *decodes: Decode) -> None:
    sampled = runner.collect().sampled
    for decode in decodes:
        decode.take(*sampled[decode.name])


def fail(runner: Runner) -> None:
    """The oldest step raises an exception."""
    with patch.object(runner, "_compute", side_effect=MemoryError), pytest.raises(MemoryError):
        runner.collect()


def alone(runner: Runner, wanted: Request) -> list[int]:
    return Engine(runner).generate(wanted)[wanted.request_id]


def test_an_exception_drops_the_step_behind_and_a_later_step_runs(runner: Runner) -> None:
    wanted = request("a", PROMPT)
    submit(runner, 0, Decode(request("b", PROMPT[:20]), [8, 9]))
    submit(runner, 1, Decode(wanted, [4, 1, 7, 2]))
    fail(runner)
    decode = Decode(wanted, [5, 6, 8, 9])
    submit(runner, 2, decode)
    with pytest.raises(StepDropped, match="step 1"):
        runner.collect()
    collect(runner, decode)
    assert decode.token_ids == alone(runner, wanted)[:1]


def test_a_promise_of_a_step_without_output_drops_the_step(runner: Runner) -> None:
    decode = Decode(request("new", PROMPT), [4, 1, 7, 2])
    decode.chunk()  # never submitted
    submit(runner, 1, decode)
    with pytest.raises(StepDropped, match="no token for 'new'"):
        runner.collect()


def test_a_third_step_in_flight_is_an_assertion_error(runner: Runner) -> None:
    decode = Decode(request("a", PROMPT), [4, 1, 7, 2])
    submit(runner, 0, decode)
    submit(runner, 1, decode)
    with pytest.raises(AssertionError, match="2 steps"):
        submit(runner, 2, decode)
    collect(runner, decode)
    collect(runner, decode)


def test_one_thread_submits_while_another_collects(runner: Runner) -> None:
    wanted = request("a", PROMPT, max_tokens=30)
    decode = Decode(wanted, [4, 1, 7, 2, 9])
    room, submitted, seen = threading.Semaphore(2), threading.Semaphore(0), set[int]()

    def collect_all() -> None:
        seen.add(threading.get_ident())
        for _ in range(30):
            assert submitted.acquire(timeout=30)
            collect(runner, decode)
            room.release()

    thread = threading.Thread(target=collect_all, daemon=True)
    thread.start()
    for step_id in range(30):
        assert room.acquire(timeout=30)
        submit(runner, step_id, decode)
        submitted.release()
    thread.join(30)
    assert seen
    assert seen != {threading.get_ident()}
    assert decode.token_ids == alone(runner, wanted)


@pytest.fixture(scope="module")
def expected(runner: Runner) -> dict[str, list[int]]:
    return {wanted.request_id: alone(runner, wanted) for wanted in REQUESTS}


PENALTIES = {"repetition_penalty": 1.8, "frequency_penalty": 0.7}
REQUESTS = [  # every other one is sampled, and the longer ones are penalized
    request(
        str(length),
        PROMPT[:length],
        max_tokens=20 - length // 4,
        temperature=float(index % 2),
        seed=5,
        **(PENALTIES if length > 15 else {}),
    )
    for index, length in enumerate((1, 2, 15, 16, 17, 31, 45))
]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_random_plans_one_step_ahead_give_the_tokens_of_one_sequence_alone(
    runner: Runner, expected: dict[str, list[int]], seed: int
) -> None:
    driver = OneAhead(runner, random.Random(seed))
    assert driver.generate(REQUESTS) == expected
    assert driver.num_promised > 10


def num_threads_started_by(work: Callable[[], object]) -> int:
    """The number of threads that `work` starts from a new thread."""
    started = []

    def watch() -> None:
        before = set(os.listdir("/proc/self/task"))
        work()
        started.append(len(set(os.listdir("/proc/self/task")) - before))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    return started[0]


def test_submit_starts_no_compute_threads(runner: Runner) -> None:
    """The thread that submits is the event loop: its compute threads would take the cores of other workers."""
    view = SequenceView("long", [1] * 1000, 1000, list(range(63)), REQUESTS[0].sampling)
    before = torch.get_num_threads()
    for start, count in ((0, 500), (500, 500)):
        plan = StepPlan(0, (ScheduledChunk(view, start, count, start > 0, False),))
        torch.set_num_threads(3)
        try:
            assert num_threads_started_by(lambda: torch.ones(2000, 64).cos()) > 0, "this could show nothing"
            assert num_threads_started_by(partial(runner.submit, plan)) == 0
        finally:
            torch.set_num_threads(before)
        runner.collect()


def test_a_sequence_that_failed_fails_in_the_step_behind_too_and_its_neighbour_continues(runner: Runner) -> None:
    requests = [request("a", PROMPT), request("b", PROMPT[3:])]
    a, b = Decode(requests[0], [4, 1, 7, 2]), Decode(requests[1], [9, 8, 6, 5])
    error = OutOfDeviceMemory("no memory for b")
    compute = runner._compute  # type: ignore[attr-defined]

    def fail_for_b(inputs: object, promised: PromisedTokens) -> Computed:
        sampled = dict(compute(inputs, promised).sampled)
        del sampled["b"]
        return Computed(sampled, {"b": error})

    with patch.object(runner, "_compute", fail_for_b):
        submit(runner, 0, a, b)
        submit(runner, 1, a, b)
        first = runner.collect()
    a.take(*first.sampled["a"])
    second = runner.collect()
    a.take(*second.sampled["a"])
    assert first.failed == second.failed == {"b": error}
    assert first.sampled.keys() == second.sampled.keys() == {"a"}
    submit(runner, 2, a)
    collect(runner, a)
    assert a.token_ids == alone(runner, requests[0])[:3]
