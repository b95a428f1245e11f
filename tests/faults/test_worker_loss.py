"""A worker that goes away takes no request with it: another one continues at the next token."""

from __future__ import annotations

import asyncio

import pytest

from core.config import LiveConfig, WorkerConfig
from core.errors import DeviceLost
from core.request import Request, SamplingParams
from core.step import ScheduledChunk
from engine.fake_runner import expected_tokens
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.device_runner import put_pools_on_devices
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.steps import DeviceFaults, Gate, runner_of, slow_down
from tests.support.waiting import until
from worker.service import WorkerService

PROMPT = tuple(range(1, 70))
NUM_OUTPUT = 100  # a second at least, where steps are slowed down to 10 ms


def serving(deployment: Deployment, answer_worker: str) -> WorkerService:
    """The worker service with this id."""
    return next(w for w in deployment.workers if deployment.id_of(w) == answer_worker)


async def busy_worker(pool: list[WorkerService]) -> WorkerService:
    """The one of `pool` that computes a sequence now."""

    def busy() -> list[WorkerService]:
        return [worker for worker in pool if machine_of(worker).core.scheduler.running]

    await until(busy, "a worker is busy")
    return busy()[0]


async def test_a_decode_worker_that_goes_in_mid_stream_is_replaced_at_the_next_token_of_each_choice() -> None:
    """Each choice goes on elsewhere with the draws of its own seed."""
    async with deploy(tiny_config(), num_prefill=1, num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        request = make_request(token_ids=PROMPT, max_tokens=NUM_OUTPUT, temperature=0.75, seed=7, n=4)
        answering = asyncio.create_task(deployment.generate_all(request))
        victim = await busy_worker(deployment.decode)

        def is_mid_answer() -> bool:
            running = machine_of(victim).core.scheduler.running
            return len(running) == 4 and all(5 < len(s.token_ids) - len(PROMPT) < NUM_OUTPUT / 2 for s in running)

        await until(is_mid_answer, "all choices have some of their tokens")
        await victim.stop()
        for choice, answer in enumerate(await answering):
            sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.75, seed=7 + choice, ignore_eos=True)
            wanted = Request("reference", PROMPT, len(PROMPT), sampling)
            runner = runner_of(deployment.prefill[0])
            assert answer.token_ids == expected_tokens(wanted, runner.layout, runner.info.vocab_size)
            assert (answer.finished.seed, answer.finished.attempts) == (7 + choice, 2)
            assert answer.finished.path == inference_pb2.REQUEST_PATH_RECOMPUTED
            assert serving(deployment, answer.finished.decode_worker) is not victim
        deployment.decode.remove(victim)
        await deployment.settle()


async def test_a_step_that_hangs_fails_its_worker_and_the_request_goes_elsewhere() -> None:
    """Its limit is lowered while it runs."""
    async with deploy(tiny_config(), num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        stream = await Stream(deployment.inference, PROMPT, NUM_OUTPUT).reach(8)
        victim = await busy_worker(deployment.decode)
        gate = Gate(victim)
        gate.close()
        await until(lambda: gate.waiting, "a step hangs")
        victim.set_config(LiveConfig(worker=WorkerConfig(step_timeout_s=2.5)))
        error = await asyncio.wait_for(victim.failed(), 30)
        assert "step_timeout_s" in str(error)
        answer = (await stream.right()).answer
        assert serving(deployment, answer.finished.decode_worker) is not victim
        shell = deployment.router._shell
        lost = deployment.id_of(victim)
        await until(lambda: shell.view.worker(lost) is None, "the router knows it no more")
        gate.open()
        deployment.decode.remove(victim)
        await deployment.settle()


# ---- A device that is lost ends its worker and no request. A device without memory for a sequence ends neither.


def is_known(deployment: Deployment, worker: WorkerService) -> bool:
    return deployment.router._shell.view.worker(deployment.id_of(worker)) is not None


async def a_stream_on_each(deployment: Deployment) -> dict[int, Stream]:
    """Two streams in the middle of their tokens, by id() of their decode worker."""
    streams: dict[int, Stream] = {}
    for seed in (1, 2):
        stream = await Stream(deployment.inference, prompt_of(seed), NUM_OUTPUT).reach(3)
        (busy,) = [w for w in deployment.decode if machine_of(w).core.scheduler.running and id(w) not in streams]
        streams[id(busy)] = stream
    return streams


async def test_a_lost_device_ends_its_worker_and_its_requests_go_on_at_the_next_token() -> None:
    async with deploy(tiny_config(), num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        streams = await a_stream_on_each(deployment)
        victim, other = deployment.decode
        faults = DeviceFaults(victim)
        faults.lost = True
        error = await asyncio.wait_for(victim.failed(), 10)
        assert isinstance(error, DeviceLost)
        assert faults.num_lost == 1, "a lost device gets a second step"
        moved = (await streams[id(victim)].right()).finished
        assert moved is not None
        assert moved.attempts == 2
        assert moved.path == inference_pb2.REQUEST_PATH_RECOMPUTED
        assert moved.decode_worker == deployment.id_of(other)
        bystander = (await streams[id(other)].right()).finished
        assert bystander is not None
        assert bystander.attempts == 1
        await until(lambda: not is_known(deployment, victim), "the router has lost the worker")
        await victim.stop()
        deployment.decode.remove(victim)
        await serves_on(deployment.inference)
        await deployment.settle()


async def test_a_device_that_is_lost_during_a_hand_off_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs no step for a prompt that it cannot pull, so no step would tell it of the loss."""
    put_pools_on_devices(monkeypatch)
    num_lost = 0

    def lose(*_: object) -> tuple[int, ...]:
        nonlocal num_lost
        num_lost += 1
        raise DeviceLost("digests: an illegal memory access was encountered")

    async with deploy(fault_config(transport="nixl", local_prefill="never"), num_decode=2) as deployment:
        victim, other = deployment.decode
        monkeypatch.setattr(runner_of(victim).memory, "digests", lose)
        streams = [Stream(deployment.inference, prompt_of(seed), NUM_OUTPUT) for seed in range(1, 7)]
        for stream in streams:
            finished = (await stream.right()).finished
            assert finished.decode_worker == deployment.id_of(other)
        assert num_lost == 1, "no digest failed, or the agent went on after the loss"
        assert "illegal memory access" in str(await asyncio.wait_for(victim.failed(), 10))
        await until(lambda: not is_known(deployment, victim), "the router has lost the worker")
        await victim.stop()
        deployment.decode.remove(victim)
        await deployment.settle()


async def test_a_sequence_without_memory_goes_on_elsewhere_and_its_neighbours_notice_nothing() -> None:
    async with deploy(tiny_config(), num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.01)
        all_faults = [DeviceFaults(worker) for worker in deployment.decode]
        large = prompt_of(7, num_tokens=100)

        def has_no_memory(chunk: ScheduledChunk) -> bool:
            is_large = chunk.sequence.token_ids[: len(large)] == list(large)
            return is_large and chunk.start > len(large) + 5 and not any(faults.failed for faults in all_faults)

        small = [await Stream(deployment.inference, prompt_of(seed), NUM_OUTPUT).reach(2) for seed in (1, 2, 3, 4)]
        for faults in all_faults:
            faults.out_of_memory = has_no_memory
        stream = Stream(deployment.inference, large, NUM_OUTPUT)
        finished = (await stream.right()).finished
        assert finished.attempts == 2
        assert sorted(len(faults.failed) for faults in all_faults) == [0, 1], "the fault did not happen once"
        failed_on = deployment.decode[0 if all_faults[0].failed else 1]
        assert finished.decode_worker != deployment.id_of(failed_on)
        for neighbour in small:
            end = (await neighbour.right()).finished
            assert end is not None
            assert end.attempts == 1
        assert all(is_known(deployment, worker) for worker in deployment.decode), "the worker ended, too"
        await serves_on(deployment.inference)
        await deployment.settle()
