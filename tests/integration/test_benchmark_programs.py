"""The processes that the benchmarks of the data plane and of the gateway measure start, and answer."""

from __future__ import annotations

from benchmarks.dataplane import load
from benchmarks.dataplane.http2_load import Connection, receive_for
from benchmarks.dataplane.load import Counter
from benchmarks.dataplane.processes import cores, running
from benchmarks.dataplane.program import Role

TIMEOUT_S = 60.0
NUM_TOKENS = 7


def test_a_router_and_a_worker_that_sleeps_answer_calls_of_their_own_and_of_a_shared_stream() -> None:
    measured, other = cores()
    with running(Role("worker", other, step_s=0.002), Role("router", measured)) as [worker, router]:
        router.follow([worker])
        alone, shared = Counter(load.tokens_of_response), Counter(load.tokens_of_events)
        alone.keep = shared.keep = True
        connection = Connection(router.address, alone.take)
        connection.call(load.GENERATE, load.generate_request(NUM_TOKENS))
        receive_for([connection], TIMEOUT_S, lambda: bool(connection.ended))
        (together,) = load.start_shared_stream(router.address, 3, NUM_TOKENS, shared)
        receive_for([together], TIMEOUT_S, lambda: bool(together.ended))
        load.close([connection, together])
        assert sum(len(ids) for _, ids in alone.tokens()) == NUM_TOKENS
        assert sum(len(ids) for _, ids in shared.tokens()) == 3 * NUM_TOKENS
        assert worker.step_times()["step_s"] > 0
