"""The processes that the benchmark of the data plane measures start, and answer."""

from __future__ import annotations

import contextlib

from benchmarks.dataplane import load
from benchmarks.dataplane.counting_clients import Connection, HttpStream, receive_for
from benchmarks.dataplane.load import Counter
from tests.support.ports import kept_port
from tests.support.service_process import MODEL, Role, config_with, cores, running

TIMEOUT_S = 60.0
NUM_TOKENS = 7
STEP_S = 0.05


def test_a_router_and_a_worker_that_sleeps_answer_grpc_and_http_and_note_each_arrival() -> None:
    measured, other = cores()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(kept_port("127.0.0.1"))
        roles = (
            Role("decode", other, step_s=STEP_S),
            Role("router", measured, config=config_with(gateway={"port": port})),
        )
        worker, router = stack.enter_context(running(*roles))
        router.follow([worker])
        counter = Counter(load.tokens_of_response)
        counter.keep = True
        connection = Connection(router.address, counter.take)
        connection.call(load.GENERATE, load.generate_request(NUM_TOKENS))
        receive_for([connection], TIMEOUT_S, lambda: bool(connection.ended))
        load.close([connection])
        assert sum(len(ids) for _, ids in counter.tokens()) == NUM_TOKENS
        times: list[float] = []
        stream = HttpStream(port, MODEL, times=times)
        stream.send(NUM_TOKENS)
        receive_for([stream], TIMEOUT_S, lambda: stream.num_ended > 0)
        load.close([stream])
        assert stream.num_events == len(times) > 0  # a busy router joins tokens to one event
        assert worker.call("step_times")["step_s"] > 0
