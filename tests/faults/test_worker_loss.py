"""A worker that goes away takes no request with it: another one continues at the next token."""

from __future__ import annotations

import asyncio

from core.config import LiveConfig, WorkerConfig
from core.request import Request, SamplingParams
from engine.fake_runner import expected_tokens
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.faults import Stream
from tests.support.steps import Gate, runner_of, slow_down
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
